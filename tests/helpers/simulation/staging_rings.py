"""Staging of simulated ranks: packing takes its time, and nothing may land in a ring where no stage is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torchkv_loopback import World

from torchkv.engine import Engine
from torchkv.errors import KVError
from torchkv.packer import Early, Packer, Staging
from torchkv.protocol.actions import Scatter
from torchkv.staging import Stage

__all__ = ["LaggingPacker", "RingShadow", "lagging", "raise_signal"]


class LaggingPacker(Packer):
    """Packs on the host, but as a GPU would: each job runs, and is known to be over, some virtual time later.

    It runs whether anybody still waits for it or not, unless the ``node`` whose job it is has died. Signals are words
    in the receiver's memory, as on a GPU.
    """

    signals = True
    slowness = 1.0  # beside the delays of messages

    def __init__(self, packer: Packer, world: World, node: int) -> None:
        self._packer = packer
        self._world = world
        self._node = node

    def gather(self, *args: Any, checksum: bool, early: Early | None = None, **_: Any) -> Iterator[int]:
        return self._late(self._packer.gather(*args, checksum=checksum), early)

    def scatter(self, job: Scatter) -> Iterator[int]:
        if job.signal is not None:
            assert self._packer._receiving is not None
            word = _word(self._packer._receiving.signal_ptr(job.signal))
            while word.value < job.signal.value:
                if job.stopped:
                    word.value = job.signal.value + 1
                yield 0
            if word.value != job.signal.value:
                return
            job.written = True
        yield from self._late(self._packer.scatter(job))

    def prepare(self, *args: Any, **settings: Any) -> None:
        self._packer.prepare(*args, **settings)

    def _late(self, steps: Iterator[int], early: Early | None = None) -> Iterator[int]:
        over: list[KVError | None] = []

        def work() -> None:
            error: KVError | None = None
            try:
                while self._world.alive(self._node) and next(steps, None) is not None:
                    pass
                if early is not None and self._world.alive(self._node):
                    raise_signal(early)
            except KVError as raised:
                error = raised
            self._world.schedule(self._world.delay(), lambda: over.append(error))

        self._world.schedule(self.slowness * self._world.delay(), work)
        while not over:
            yield 0
        if over[0] is not None:
            raise over[0]
        yield 1


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def raise_signal(early: Early) -> None:
    _word(early.address).value = early.value


def lagging(staging: Staging, world: World, node: int) -> Staging:
    return Staging(LaggingPacker(staging.packer, world, node), staging.sending, staging.receiving)


class RingShadow:
    """One rank's receiving ring. Bytes of no stage hold a pattern that only the test writes, anew after each stage."""

    def __init__(self, engine: Engine, generator: np.random.Generator) -> None:
        assert engine.staging is not None
        assert engine.staging.receiving is not None
        self.problems: list[str] = []
        self.stages_seen = 0
        self._rank = engine.roster.rank
        self._ring = engine.keeper.ring
        self._memory: npt.NDArray[np.uint8] = engine.staging.receiving.tensor.numpy()
        self._generator = generator
        self._live: tuple[Stage, ...] = ()
        self._refill(0, len(self._memory))
        self._expected = self._memory.copy()

    def observe(self) -> None:
        """After each step of the rank, before anything else can land."""
        if self._ring.stages == self._live:
            return
        self.check()
        before, self._live = set(self._live), self._ring.stages
        self.stages_seen += len(set(self._live) - before)
        for stage in before - set(self._live):
            self._refill(stage.offset, stage.end)
            self._expected[stage.offset : stage.end] = self._memory[stage.offset : stage.end]

    def check(self) -> None:
        wrong = self._memory != self._expected
        for stage in self._live:
            wrong[stage.offset : stage.end] = False
        if wrong.any():
            at = int(np.argmax(wrong))
            self.problems.append(f"rank {self._rank}: byte {at} of its staging ring is free, but written to")
            self._expected[:] = np.where(wrong, self._memory, self._expected)

    def _refill(self, lo: int, hi: int) -> None:
        self._memory[lo:hi] = self._generator.integers(0, 256, hi - lo, dtype=np.uint8)
