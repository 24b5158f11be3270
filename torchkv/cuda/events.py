"""Pooled CUDA events, recorded by verbs whose caller passes no event: a microsecond each on the caller's thread.

PyTorch's events cost five times as much there: each is made anew, and finding the current stream goes through an
object. These are plain driver handles from a pool. An event returns to the pool when the last reference to its
`RecordedEvent` is dropped. So none is lost however a transfer ends, and none is recorded again while a transfer still
queries it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal, TypeAlias

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cuda import driver
from torchkv.host.atomics import load
from torchkv.host.jit import at_register, c_function, compiled_with_gil, libc_functions

__all__ = ["EventPool", "RecordedEvent", "StreamEvent", "event_pool", "is_capturing", "wait_on_stream"]

_GROWTH = 256  # enough for the layers of several requests; a verb that finds the pool empty makes so many at once

_numbers = itertools.count()

_NOT_READY = 600
# Results of cuEventRecord where the calling thread's current context is another device's, or none.
_WRONG_CONTEXT = (201, 400)


class RecordedEvent:
    """An event behind everything that was enqueued on one stream when it was recorded.

    handle: the driver's ``CUevent``. stream: handle of the stream. number: larger than that of all events recorded
    before.
    """

    __slots__ = ("_pool", "handle", "number", "stream")

    def __init__(self, pool: EventPool, handle: int, stream: int, number: int) -> None:
        self._pool = pool
        self.handle = handle
        self.stream = stream
        self.number = number

    def query(self) -> bool:
        """Whether the event has happened. Releases the GIL. Raises ``TransportUnavailable`` if the GPU has failed."""
        code = driver.library().cuEventQuery(self.handle)
        if code == _NOT_READY:
            return False
        driver.check_code(code, "querying an event")
        return True

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes everything enqueued on ``stream``, of any GPU, from now on wait for the event.

        The event may be dropped as soon as this returns.
        """
        code = driver.library().cuStreamWaitEvent(stream.cuda_stream, self.handle, 0)
        driver.check_code(code, "making a stream wait for an event")

    def __del__(self) -> None:
        self._pool.give_back(self.handle)


# Events that a stream can be made to wait for.
StreamEvent: TypeAlias = torch.cuda.Event | RecordedEvent


def wait_on_stream(event: StreamEvent, stream: torch.cuda.Stream) -> None:
    """Makes everything enqueued on ``stream`` from now on wait for ``event``."""
    if isinstance(event, RecordedEvent):
        event.wait_on(stream)
    else:
        stream.wait_event(event)


_call_capturing = c_function(2, 32)
_call_query = c_function(1, 32)
_call_record = c_function(2, 32)
_CAPTURED, _IDLE = -1, -2


@compiled_with_gil
def _record(capturing: int, query: int, record: int, captured: int, event: int, stream: int) -> int:
    """Records an event, unless the stream is under capture, or has nothing left to do. 0, or why not.

    capturing, query, record: addresses of the driver's functions. captured: of a word for the answer of the first.
    """
    code: int = _call_capturing(capturing, stream, captured)
    if code != 0:
        return code
    if load(captured) != 0:
        return _CAPTURED
    code = _call_query(query, stream)
    if code == 0:
        return _IDLE
    return code if code != _NOT_READY else _call_record(record, event, stream)


@at_register
def warm_up() -> None:
    """Compiles the function, or loads it from disk. It calls anything that ignores its arguments."""
    nothing = int(libc_functions("sched_yield")[0])
    _record(nothing, nothing, nothing, np.zeros(1, dtype=np.int64).ctypes.data, 0, 0)


class EventPool:
    """The events of ``cuda:index``. Thread-safe: a list's ``pop`` and ``append`` are atomic."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._free: list[int] = []
        self._free.append(self._grow())
        self._captured: Int64Array = np.zeros(1, dtype=np.int64)  # whether the stream is under capture

    def record(self, *, keep_gil: bool = True) -> RecordedEvent:
        """Records an event behind everything enqueued on the calling thread's current stream of this GPU.

        keep_gil: the driver is called without releasing the GIL, which saves the time to get it back. Raises
        ``TransportUnavailable`` if the GPU has failed. The stream must not be under capture.
        """
        handle = self._take()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        event = RecordedEvent(self, handle, stream, next(_numbers))
        record = (driver.library_with_gil() if keep_gil else driver.library()).cuEventRecord
        code = record(handle, stream)
        if code in _WRONG_CONTEXT:
            # The default stream's handle, 0, means that of the device whose context is current.
            with driver.context(self._index):
                code = record(handle, stream)
        driver.check_code(code, f"recording an event on cuda:{self._index}")
        return event

    @functools.cached_property
    def _try_gate(self) -> tuple[int, int, int, int]:
        """The first arguments of `_record`."""
        names = "cuStreamIsCapturing", "cuStreamQuery", "cuEventRecord"
        capturing, query, record = map(driver.address, names)
        return capturing, query, record, self._captured.ctypes.data

    def try_gate(self) -> RecordedEvent | Literal[False] | None:
        """As `record` with the GIL, in a third of the time. None, without an event, if all of that has happened.

        False if the stream is under capture, or it fails. Only where this GPU is current on the calling thread.
        """
        number = next(_numbers)  # first: an event with a larger number must have been recorded later
        handle = self._take()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        code = _record(*self._try_gate, handle, stream)
        if code == 0:
            return RecordedEvent(self, handle, stream, number)
        self._free.append(handle)
        return None if code == _IDLE else False

    def _take(self) -> int:
        """An event of the pool, which grows where it is empty."""
        try:
            return self._free.pop()
        except IndexError:
            return self._grow()

    def give_back(self, handle: int) -> None:
        """Returns an event to the pool. Called when its `RecordedEvent` is dropped."""
        self._free.append(handle)

    def _grow(self) -> int:
        """Makes `_GROWTH` events; returns one of them, and puts the others into the pool."""
        made = []
        with driver.context(self._index) as cuda:
            flags = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            for _ in range(_GROWTH):
                made.append(int(driver.check(cuda.cuEventCreate(flags), f"making an event on cuda:{self._index}")))
        self._free += made[1:]
        return made[0]


@functools.cache
def event_pool(index: int) -> EventPool:
    """This process's pool of ``cuda:index``. Raises ``TransportUnavailable`` if there is no such GPU."""
    return EventPool(index)


def is_capturing(index: int) -> bool:
    """Whether the calling thread's current stream of ``cuda:index`` is being captured into a CUDA graph."""
    return driver.is_capturing(torch._C._cuda_getCurrentRawStream(index))
