"""The resident loop's memory, and the threads that run it."""

from __future__ import annotations

import atexit
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core import steering
from torchkv.core.device import LoopDevice
from torchkv.core.journal import OPERATION_WORDS
from torchkv.core.loop import copying, loop
from torchkv.core.loop.codes import FUTEX_CALL
from torchkv.core.loop.limits import (
    GRANTED_IDS,
    LINE,
    MAILBOX_RECORDS,
    MAX_COPIERS,
    MAX_FLOWS,
    MAX_PEERS,
    MESSAGE_NBYTES,
    RECORD_NBYTES,
)
from torchkv.core.loop.state.world import WORLD, World, word_at
from torchkv.core.thread import end_turn, run, take_turn
from torchkv.errors import TransportUnavailable
from torchkv.host import spin_wait
from torchkv.host.jit import libc_functions

__all__ = ["CHUNK", "PART", "TURN", "Runner"]

TURN = 1 << 20  # bytes
CHUNK = 128 << 10  # bytes: ten microseconds or so
PART = MESSAGE_NBYTES - RECORD_NBYTES  # bytes

_SPIN = word_at("spin") // 8
_FUNCTIONS = libc_functions("syscall", "sched_yield", "clock_gettime", "write", "memcmp")


class Runner:
    """See `torchkv.core.core.Core`.

    turn, window, part, copiers, chunk: see `World`. recorded: operations that its journal keeps. memory: an array of
    one `World`.
    address: where it lies. words: all of it, as int64. granted_ids: of sends that the loop has bound.
    operations: the journal's ring.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: LoopDevice | None = None,
        turn: int = TURN,
        window: int = MAILBOX_RECORDS,
        part: int = PART,
        copiers: int = 0,
        chunk: int = CHUNK,
        recorded: int = 0,
    ) -> None:
        if rank >= MAX_PEERS:
            raise TransportUnavailable(f"rank {rank}: the resident loop serves ranks below {MAX_PEERS}")
        if platform.machine() not in FUTEX_CALL:
            raise TransportUnavailable(f"the resident loop knows no futex on {platform.machine()}")
        self.memory = _on_a_line(WORLD)
        self.address: int = self.memory.ctypes.data
        # Python reads words faster than fields of records, and faster in a memoryview than in an array.
        self.words = self.memory.view(np.int64).reshape(-1).data
        self.granted_ids: Int64Array = np.zeros((MAX_FLOWS, GRANTED_IDS), dtype=np.int64)  # touched as used
        self.world = cast(World, self.memory[0])
        assert copiers <= MAX_COPIERS
        self.world["address"], self.world["rank"] = self.address, rank
        self.world["turn"], self.world["copiers"], self.world["chunk"] = turn, copiers, chunk
        self.world["driver_fd"], self.world["futex"], self.world["one"] = -1, FUTEX_CALL[platform.machine()], 1
        self.world["spin"], self.world["window"], self.world["part"] = spin_wait.SPIN, window, part
        self.world["functions"][:] = _FUNCTIONS
        self.world["granted_ids"] = self.granted_ids.ctypes.data
        self.operations: Int64Array = np.zeros((recorded, OPERATION_WORDS), dtype=np.int64)
        self.world["operations"], self.world["recorded"] = self.operations.ctypes.data, recorded
        self._device = device
        self._turn = turn
        if device is not None:
            device.describe(self.world)
        self._driver_word: Int64Array | None = None
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._held: Int64Array = np.zeros(1, dtype=np.int64)  # 1 while a caller has the loop stand still
        self._held_at = self._held.ctypes.data

    @property
    def running(self) -> bool:
        """Whether the loop has a thread."""
        return bool(self._threads)

    def start(self, driver_fd: int, driver_word: Int64Array) -> None:
        """Starts the loop's thread, and its copiers. They never take the GIL, and end with `stop`.

        driver_fd, driver_word: an eventfd and a word that wake Python's own thread (see `torchkv.engine.progress`).
        """
        self._driver_word = driver_word
        self.world["driver_fd"], self.world["driver_word"] = driver_fd, driver_word.ctypes.data
        self._threads = [threading.Thread(target=self._run, name="torchkv-loop", daemon=True)]
        for number in range(int(self.world["copiers"])):
            copier = partial(copying.run_copier, self.world, number)
            self._threads.append(threading.Thread(target=copier, name=f"torchkv-copier-{number}", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        spin_wait.wake_on_time()
        if self._device is not None:
            self._device.activate()
        run(cast(Any, self.memory))

    def stop(self) -> None:
        """Ends the threads. Idempotent. In a forked child there are none."""
        atexit.unregister(self.stop)
        threads, self._threads = self._threads, []
        if threads and os.getpid() == self._pid:
            steering.stop(self.address)
            threads[0].join()
            steering.wait_left(self.address)
            steering.wake_copiers(self.address)
            for copier in threads[1:]:
                copier.join()

    def told(self, *, op: bool = False) -> None:
        """To be called after each command: where callers may run the loop, nobody has woken it. op: it starts an op."""
        if not self.words[_SPIN] and take_turn(self.address, int(op)):
            try:
                self.step()
            finally:
                end_turn(self.address, self._turn)

    def step(self) -> bool:
        """One turn, for a loop without a thread. Whether there was anything to do."""
        return bool(loop.step(cast(Any, self.memory)))

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The loop stands still inside: no byte moves, and no record is taken, unless the caller does it."""
        if self._held[0]:
            yield
            return
        try:
            steering.hold(self.address, self._held_at)
            yield
        finally:
            if self._held[0]:  # also where a signal's handler has raised as soon as it did
                steering.let_go(self.address, self._held_at)

    @contextmanager
    def standing_still_within(self, seconds: float) -> Iterator[bool]:
        """As `standing_still`, unless the loop hangs, and does not stand still within so long: then False."""
        if self._held[0]:
            yield True
            return
        try:
            yield bool(steering.try_hold(self.address, self._held_at, int(seconds * 1e9)))
        finally:
            if self._held[0]:
                steering.let_go(self.address, self._held_at)


def _on_a_line(dtype: np.dtype[np.void]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """An array of one record, zero, that begins with a cache line."""
    memory = np.zeros(dtype.itemsize + LINE, dtype=np.uint8)
    skipped = -memory.ctypes.data % LINE
    return memory[skipped : skipped + dtype.itemsize].view(dtype)
