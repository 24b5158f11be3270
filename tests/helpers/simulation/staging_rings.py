"""Staging of simulated ranks: packing takes virtual time, and nothing may land in a ring outside its stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torchkv_loopback import World

from torchkv.engine.engine import Engine
from torchkv.errors import KVError
from torchkv.protocol.actions import Scatter
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging.packer import GatherJob, Packer, Staging

__all__ = ["LaggingPacker", "RingShadow", "lagging"]


class LaggingPacker(Packer):
    """Packs on the host, but as late as a GPU would: each job runs, and is reported to have ended, some time later.

    A job that has begun runs even if it is no longer waited for, unless its ``node`` has died.
    """

    slowness = 1.0  # a factor, beside the delays of messages

    def __init__(self, packer: Packer, world: World, node: int) -> None:
        self._packer = packer
        self._world = world
        self._node = node
        self.gathers = 0

    def gather(self, job: GatherJob) -> Iterator[int]:
        self.gathers += 1
        return self._late(self._packer.gather(job))

    def scatter(self, job: Scatter) -> Iterator[int]:
        return self._late(self._packer.scatter(job))

    def prepare(self, *args: Any, **settings: Any) -> None:
        self._packer.prepare(*args, **settings)

    def _late(self, steps: Iterator[int]) -> Iterator[int]:
        over: list[KVError | None] = []

        def work() -> None:
            error: KVError | None = None
            try:
                while self._world.alive(self._node) and next(steps, None) is not None:
                    pass
            except KVError as raised:
                error = raised
            self._world.schedule(self._world.delay(), lambda: over.append(error))

        self._world.schedule(self.slowness * self._world.delay(), work)
        while not over:
            yield 0
        if over[0] is not None:
            raise over[0]
        yield 1


def lagging(staging: Staging, world: World, node: int) -> Staging:
    return Staging(LaggingPacker(staging.packer, world, node), staging.sending, staging.receiving)


class RingShadow:
    """Watches one rank's ring: bytes outside stages hold a pattern that nothing but this class may change."""

    def __init__(self, engine: Engine, generator: np.random.Generator) -> None:
        assert engine.staging is not None
        assert engine.staging.receiving is not None
        self.problems: list[str] = []
        self.stages_seen = 0
        self._rank = engine.group_map.rank
        self._ring = engine.credits.ring
        self._memory: npt.NDArray[np.uint8] = engine.staging.receiving.tensor.numpy()
        self._generator = generator
        self._live: tuple[Stage, ...] = ()
        self._refill(0, len(self._memory))
        self._expected = self._memory.copy()

    def observe(self) -> None:
        """To be called after each step of the rank, before anything else can land."""
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
