"""Measured points: real processes of this machine, over the public API, that do what the simulated ranks do.

In rounds: all ranks begin together, and every byte is checked after each round, outside of what is measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.processes import run_ranks
from torchkv.bench.scale.profile import Profile
from torchkv.bench.scale.workload import Shape, Workload
from torchkv.cache import KVCache
from torchkv.group.process_group import KVProcessGroup, current_group

__all__ = ["Measured", "measure"]

FLIGHT = 8  # requests at once, of each instance
DEADLINE = 300.0
_POISON = -21589  # 0xABAB


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """apart: each process took itself for a host of its own, so that Python and the network served the requests; else
    resident loops did. seconds: of the rounds. cpu: seconds of all processes, whatever their threads did; protocol,
    verbs: those of these that the functions took which simulated ranks run, too. messages: told, by kind.
    """

    ranks: int
    apart: bool
    workload: str
    requests: int
    seconds: float
    cpu: float
    protocol: float
    verbs: float
    messages: dict[str, int]
    wrong: int

    @property
    def throughput(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_per_request(self) -> float:
        return self.cpu / self.requests

    @property
    def protocol_per_request(self) -> float:
        """What a simulated request takes, measured in real processes: seconds of CPU."""
        return (self.protocol + self.verbs) / self.requests

    @property
    def messages_per_request(self) -> float:
        return sum(self.messages.values()) / self.requests


@dataclass(eq=False, slots=True)
class _Tally:
    """What one rank reports. `during` adds a round."""

    profile: Profile = field(default_factory=Profile)
    seconds: float = 0.0
    cpu: float = 0.0
    wrong: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)

    def during(self, run: Callable[[], None], *, counts: bool) -> None:
        """All ranks begin together, and nobody goes on before all are done. counts: not while everything warms up."""
        dist.barrier()
        wall, used = time.monotonic(), time.process_time()
        parts, told = Counter(self.profile.nanoseconds), Counter(self.profile.told)
        run()
        if counts:
            self.seconds += time.monotonic() - wall
            self.cpu += time.process_time() - used
            self.parts += self.profile.nanoseconds - parts
            self.told += self.profile.told - told
        dist.barrier()

    def report(self) -> tuple[float, float, int, dict[str, int], dict[str, int]]:
        return self.seconds, self.cpu, self.wrong, dict(self.parts), dict(self.told)


def measure(shape: Shape, workload: Workload, *, requests: int, apart: bool) -> Measured:
    """So many requests at least, after a round that does not count. Raises ``KVError``."""
    rounds = 1 + -(-requests // (FLIGHT * len(shape.prefills)))
    ranks = [_prefill] * (shape.ranks // 2) + [_decode] * (shape.ranks // 2)
    found = run_ranks(ranks, shape, workload, rounds, apart=apart, deadline=DEADLINE)
    return Measured(
        ranks=shape.ranks,
        apart=apart,
        workload=workload.name,
        requests=(rounds - 1) * FLIGHT * len(shape.prefills),
        seconds=max(seconds for seconds, *_ in found),
        cpu=sum(cpu for _, cpu, *_ in found),
        protocol=sum(parts.get("protocol", 0) / 1e9 for *_, parts, _ in found),
        verbs=sum(parts.get("verbs", 0) / 1e9 for *_, parts, _ in found),
        messages=dict(sorted(sum((Counter(told) for *_, told in found), Counter[str]()).items())),
        wrong=sum(wrong for _, _, wrong, *_ in found),
    )


def _requests(shape: Shape, round_number: int) -> Iterator[tuple[str, int, int, int]]:
    """Of one round, in one order for all: the name, the instances that prefill and decode, and its slot there."""
    slots = [0] * len(shape.decodes)
    for number in range(FLIGHT):
        for prefill in range(len(shape.prefills)):
            decode = (prefill + number) % len(shape.decodes)
            yield f"round {round_number}, {prefill}, {number}", prefill, decode, slots[decode]
            slots[decode] += 1


class _Side:
    """One rank: its cache, with the pages of each slot, and its place in the shape."""

    def __init__(self, shape: Shape, workload: Workload, instances: list[tuple[int, ...]], kind: str) -> None:
        self.kv: KVProcessGroup = current_group(None)
        rank = self.kv.rank()
        self.workload = workload
        self.instance = next(number for number, ranks in enumerate(instances) if rank in ranks)
        members = instances[self.instance]
        self.layout = workload.layout(members.index(rank), len(members))
        slots = FLIGHT * len(shape.prefills)
        self.cache = KVCache.empty(self.layout, slots * workload.pages, device="cpu")
        self.ids = np.random.default_rng(rank).permutation(slots * workload.pages).reshape(slots, workload.pages)
        self.kv.register(self.cache, instance=f"{kind}{self.instance}")

    def content(self, prefill: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the cache, and what the pages of one request from this instance hold in it."""
        heads = self.layout.heads
        for name in ("k", "v"):
            for layer, tensor in enumerate(self.cache[name]):
                assert tensor is not None
                words = tensor.view(torch.int16)
                _, _, tokens, dim = words.shape
                shape = self.workload.pages, self.workload.num_kv_heads, tokens, dim
                dice = np.random.default_rng((prefill, ord(name), layer))
                whole = torch.from_numpy(dice.integers(-(1 << 14), 1 << 14, shape, dtype=np.int16))
                yield words, whole[:, heads.start : heads.stop]


def _prefill(shape: Shape, workload: Workload, rounds: int) -> object:
    side, tally = _Side(shape, workload, shape.prefills, "prefill"), _Tally()
    pages = side.ids[0]
    for words, content in side.content(side.instance):
        words[torch.from_numpy(pages)] = content

    def run(number: int) -> None:
        works = []
        for name, prefill, decode, _ in _requests(shape, number):
            if prefill == side.instance:
                with tally.profile.verbs():
                    for layers in workload.layer_groups():
                        side.kv.send_slice(name, layers, pages, f"decode{decode}")
                    works.append(side.kv.finish(name, f"decode{decode}"))
        for work in works:
            work.wait()

    for number in range(rounds):
        tally.during(partial(run, number), counts=number > 0)
    return tally.report()


def _decode(shape: Shape, workload: Workload, rounds: int) -> object:
    side, tally = _Side(shape, workload, shape.decodes, "decode"), _Tally()

    def mine(number: int) -> list[tuple[str, int, int]]:
        return [(name, p, slot) for name, p, d, slot in _requests(shape, number) if d == side.instance]

    def run(number: int) -> None:
        works = []
        for name, prefill, slot in mine(number):
            with tally.profile.verbs():
                works.append(side.kv.recv_pages(name, side.ids[slot], f"prefill{prefill}"))
        for work in works:
            work.wait()

    for number in range(rounds):
        for words, _ in side.content(0):
            words.fill_(_POISON)
        tally.during(partial(run, number), counts=number > 0)
        for _, prefill, slot in mine(number):
            pages = torch.from_numpy(side.ids[slot])
            tally.wrong += sum(2 * int((words[pages] != content).sum()) for words, content in side.content(prefill))
    return tally.report()
