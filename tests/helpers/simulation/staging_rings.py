"""Staging of simulated ranks: packing takes virtual time, and nothing may land in a ring outside its stages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchkv_loopback import World

from torchkv.engine.engine import Engine
from torchkv.errors import KVError
from torchkv.layout.stage_format import MAX_CHANNELS, SLOTS, MemorySpan
from torchkv.protocol.actions import Scatter
from torchkv.protocol.receiving import stages
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.staging import transfer as staged_transfer
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.memory import StageMemory
from torchkv.staging.packer import FifoStage, GatherJob, Packer, Staging

__all__ = ["SIGNALS", "FifoEnd", "LaggingPacker", "RingShadow", "lagging", "small_fifos"]


# In the simulation's small units: FIFOs whose stages hold less than most pieces do.
CHANNELS, CHUNK, LEAST_FIFO_VERB = 2, 8, 64
SIGNALS = 3  # fewer than the stages of a ring, so that some stages are no FIFOs


@contextmanager
def small_fifos() -> Iterator[None]:
    """Lets verbs of the simulation pass through FIFOs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (staged_transfer, stages):
            patch.setattr(module, "CHUNK_UNIT", CHUNK)
        patch.setattr(staged_transfer, "LARGEST_CHUNK", CHUNK)
        patch.setattr(staged_transfer, "LEAST_FIFO_VERB", LEAST_FIFO_VERB)
        yield


class LaggingPacker(Packer):
    """Packs on the host, but as late as a GPU would: each job runs, and is reported to have ended, some time later.

    A job that has begun runs even if it is no longer waited for, unless its ``node`` has died. Through a FIFO, launches
    move what they can, and are repeated as on a GPU; its progress words are in the receiver's memory.
    """

    fifo_channels = CHANNELS
    slowness = 1.0  # a factor, beside the delays of messages

    def __init__(self, packer: Packer, world: World, node: int) -> None:
        self._packer = packer
        self._world = world
        self._node = node
        self.gathers = {"plain": 0, "fifo": 0}

    def gather(self, job: GatherJob) -> Iterator[int]:
        self.gathers["plain" if job.fifo_stage is None else "fifo"] += 1
        if job.fifo_stage is None:
            return self._late(self._packer.gather(job))
        packed = torch.zeros(job.layout.nbytes, dtype=torch.uint8)
        steps = self._packer.gather(replace(job, stage=MemorySpan.of(packed), fifo_stage=None))
        end = FifoEnd(job.fifo_stage, job.stage, packed, sending=True)

        def launch() -> bool:
            for _ in steps:
                pass
            return end.launch()

        return self._in_launches(job, end, launch)

    def scatter(self, job: Scatter) -> Iterator[int]:
        if job.fifo is None:
            yield from self._late(self._packer.scatter(job))
            return
        ring = self._packer._receiving
        assert ring is not None
        assert job.signal is not None
        packed = torch.zeros(job.layout.nbytes, dtype=torch.uint8)
        whole = replace(job, stage=Stage(0, len(packed), job.stage.owner), signal=None, fifo=None)
        steps = HostPacker(self._packer._local, StageMemory(packed, 0)).scatter(whole)
        fifo_stage = FifoStage(ring.signal_ptr(job.signal), job.signal.value, job.fifo)
        end = FifoEnd(fifo_stage, ring.span(job.stage), packed, sending=False)

        def launch() -> bool:
            moved = end.launch()
            if end.finished:
                for _ in steps:
                    pass
            return moved

        yield from self._in_launches(job, end, launch)
        job.written = end.finished

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

    def _in_launches(self, job: GatherJob | Scatter, end: FifoEnd, launch: Callable[[], bool]) -> Iterator[int]:
        pause, over = 0.0, [True]

        def work() -> None:
            moved = self._world.alive(self._node) and launch()
            self._world.schedule(self._world.delay(), lambda: over.append(moved))

        while not (end.finished or job.stopped):
            pause = 0.0 if over.pop() else min(max(2 * pause, 0.01), 0.1)
            self._world.schedule(pause + self.slowness * self._world.delay(), work)
            while not over:
                yield 0
        yield 1


class FifoEnd:
    """One side of a FIFO, as the kernels of `torchkv.kernels.launch.FifoArgs` are.

    stage: the memory of the slots. packed: the whole piece, read on the sender and written on the receiver.
    """

    def __init__(self, fifo_stage: FifoStage, stage: MemorySpan, packed: torch.Tensor, *, sending: bool) -> None:
        self.sending = sending
        self._words, self._base, self._fifo = fifo_stage
        self._stage = stage
        self._packed = packed
        self._done = [0] * self._fifo.channels
        chunks = self._fifo.chunks(len(packed))
        self._total = [len(range(channel, chunks, self._fifo.channels)) for channel in range(self._fifo.channels)]

    @property
    def finished(self) -> bool:
        return self._done == self._total

    def launch(self) -> bool:
        """Moves all chunks that can be moved. Returns whether there were any."""
        before = list(self._done)
        for channel, total in enumerate(self._total):
            while self._done[channel] < total and self.ready(channel, self._done[channel]):
                self._move(channel, self._done[channel])
                self._done[channel] += 1
                self._word(channel, sent=self.sending).value = self._base + self._done[channel]
        return self._done != before

    def ready(self, channel: int, turn: int) -> bool:
        """Whether the other side has come as far as this chunk needs."""
        need = turn + 1 - SLOTS if self.sending else turn + 1
        return need <= 0 or self._word(channel, sent=not self.sending).value >= self._base + need

    def _move(self, channel: int, turn: int) -> None:
        chunk, channels = self._fifo
        first = (turn * channels + channel) * chunk
        slot = self._stage.part((turn % SLOTS * channels + channel) * chunk, chunk).ptr
        piece = self._packed.data_ptr() + first
        source, target = (piece, slot) if self.sending else (slot, piece)
        ctypes.memmove(target, source, min(chunk, len(self._packed) - first))

    def _word(self, channel: int, *, sent: bool) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._words + 8 * (channel if sent else MAX_CHANNELS + channel))


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
