"""Lets rivals take turns in one case: a round is one request by each of them, in a new order, with new bytes and pages.

Each rival has processes of its own, because libraries that bring a UCX each must not meet in one process. All stay for
the whole case, and those that are not on turn wait for a message.
What a machine does to one round it does to all rivals alike, as far as it lasts; so ratios are taken within rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from torchkv.bench.machine import CoresOfOthers
from torchkv.bench.processes import Processes, serving_ranks
from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.catalogue import RIVALS
from torchkv.bench.rivals.results import CaseResult, RivalResult
from torchkv.bench.rivals.side import Rival, Side
from torchkv.errors import KVError

__all__ = ["Turn", "run_case", "serve", "turn"]

WARM = 1  # rounds that do not count: they connect, map memory and fault it in


@dataclass(frozen=True, slots=True)
class Turn:
    """What one process says of one request. began, ended: of ``move``, by the host's monotonic clock, in seconds.

    ended is None if the move has ended without this side. wrong: bytes.
    """

    began: float
    ended: float | None
    wrong: int
    way: str


def serve(name: str, case: Case, nbytes: int) -> Callable[[int], Turn]:
    """In each process of the rival ``name``."""
    side = RIVALS[name].make(case, nbytes, dist.get_rank())
    return lambda number: turn(side, number)


def turn(side: Side, number: int) -> Turn:
    """One request, on all ranks together."""
    side.prepare(number)
    dist.barrier()
    began = time.perf_counter()
    side.move()
    ended = time.perf_counter()
    dist.barrier()
    return Turn(began, ended if side.counts else None, side.wrong(), side.way())


def run_case(case: Case, names: Sequence[str], *, nbytes: int, repeats: int) -> CaseResult:
    """Rounds of the rivals ``names`` until ``repeats`` have counted. nbytes: about what a request moves.

    A rival that fails is left out from then on, with its error as the reason. Raises ``KVError`` if torchkv fails.
    """
    others = CoresOfOthers()
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(_Contender(RIVALS[name], case, nbytes)) for name in names}
        for number in range(WARM + repeats):
            for index in np.random.default_rng(number).permutation(len(names)):
                contenders[names[index]].turn(number, counts=number >= WARM)
    found = {name: contender.result() for name, contender in contenders.items()}
    return CaseResult(name=case.name, nbytes=case.payload(nbytes), others=others(), rivals=found)


class _Contender:
    """One rival's processes, and what they have measured."""

    def __init__(self, rival: Rival, case: Case, nbytes: int) -> None:
        self._rival = rival
        self._arguments = (rival.name, case, nbytes)
        self._environment: Mapping[str, str] = rival.environment(case)
        self._apart = case.tcp
        self._stack = ExitStack()
        self._processes: Processes | None = None
        self._seconds: list[float] = []
        self._wrong = 0
        self._way = ""
        self._failed: str | None = None

    def __enter__(self) -> _Contender:
        ranks = serving_ranks(
            (serve,) * self._rival.ranks,
            *self._arguments,
            environment=self._environment,
            backend=self._rival.backend,
            apart=self._apart,
        )
        try:
            self._processes = self._stack.enter_context(ranks)
        except KVError as error:
            self._fail(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self, number: int, *, counts: bool) -> None:
        if self._processes is None:
            return
        try:
            turns: list[Turn] = self._processes.ask(number)
        except KVError as error:
            self._fail(error)
            return
        if counts:
            self._seconds.append(max(t.ended for t in turns if t.ended is not None) - turns[0].began)
        self._wrong += sum(t.wrong for t in turns)
        self._way = turns[0].way

    def result(self) -> RivalResult:
        if self._failed is not None:
            return RivalResult(wrong=self._wrong, failed=self._failed)
        return RivalResult(seconds=self._seconds, wrong=self._wrong, way=self._way)

    def _fail(self, error: KVError) -> None:
        """Ends the rival's processes, so that they do not disturb the others."""
        if self._rival.name == "torchkv":
            raise error
        self._failed = str(error).strip().splitlines()[-1]
        self._processes = None
        self._stack.close()
