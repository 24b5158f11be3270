"""Events of the verbs' own, which gate a transfer when the caller gives none: a microsecond each on his thread.

PyTorch's events cost five times as much there: each is made anew, and the current stream is found by way of an object.
These come from a pool, as plain handles of the driver. One goes back when the last reference to it is dropped, which
is when no transfer needs what it recorded; so whatever becomes of a transfer, none is lost, and none is recorded again
under a transfer that still asks it.
"""

from __future__ import annotations

import functools
import itertools
from typing import TypeAlias

import torch

from torchkv import cudadriver

__all__ = ["EventPool", "RecordedEvent", "StreamEvent", "event_pool", "is_capturing", "wait_on_stream"]

_GROWTH = 256  # several requests' layers; a verb that finds the pool empty pays for so many at once

_numbers = itertools.count()

_NOT_READY = 600
# What recording says where another device's context, or none yet, is current on the calling thread.
_WRONG_CONTEXT = (201, 400)


class RecordedEvent:
    """What a stream had been given up to one moment.

    handle: the driver's, a ``CUevent``. stream: whose, as a handle. number: larger than that of all before.
    """

    __slots__ = ("_pool", "handle", "number", "stream")

    def __init__(self, pool: EventPool, handle: int, stream: int, number: int) -> None:
        self._pool = pool
        self.handle = handle
        self.stream = stream
        self.number = number

    def query(self) -> bool:
        """Whether all of it has run. Lets go of the GIL. Raises ``TransportUnavailable`` if the GPU has failed."""
        code = cudadriver.library().cuEventQuery(self.handle)
        if code == _NOT_READY:
            return False
        cudadriver.check_code(code, "asking an event")
        return True

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes what is enqueued on ``stream`` from now on wait, on any GPU. The event is not needed for that later."""
        code = cudadriver.library().cuStreamWaitEvent(stream.cuda_stream, self.handle, 0)
        cudadriver.check_code(code, "letting a stream wait for an event")

    def __del__(self) -> None:
        self._pool.give_back(self.handle)


# What a stream can be made to wait for.
StreamEvent: TypeAlias = torch.cuda.Event | RecordedEvent


def wait_on_stream(event: StreamEvent, stream: torch.cuda.Stream) -> None:
    """Makes what is enqueued on ``stream`` from now on wait for ``event``."""
    if isinstance(event, RecordedEvent):
        event.wait_on(stream)
    else:
        stream.wait_event(event)


class EventPool:
    """The events of ``cuda:index``. Thread-safe: a list's ``pop`` and ``append`` are atomic."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._free: list[int] = []
        self._free.append(self._grow())

    def record(self, *, keep_gil: bool = True) -> RecordedEvent:
        """An event behind everything that the calling thread's current stream of this GPU has been given.

        keep_gil: other threads stand still meanwhile, which is faster by what it takes to get the GIL back.
        Raises ``TransportUnavailable`` if the GPU has failed. The stream must not be under capture.
        """
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._grow()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        event = RecordedEvent(self, handle, stream, next(_numbers))
        record = (cudadriver.library_with_gil() if keep_gil else cudadriver.library()).cuEventRecord
        code = record(handle, stream)
        if code in _WRONG_CONTEXT:
            # The default stream has no handle of its own: it is that of whichever device is current.
            with cudadriver.context(self._index):
                code = record(handle, stream)
        cudadriver.check_code(code, f"recording an event on cuda:{self._index}")
        return event

    def give_back(self, handle: int) -> None:
        """Nobody asks what this event has recorded any more."""
        self._free.append(handle)

    def _grow(self) -> int:
        """Makes more; returns one of them."""
        made = []
        with cudadriver.context(self._index) as cuda:
            flags = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            for _ in range(_GROWTH):
                made.append(int(cudadriver.check(cuda.cuEventCreate(flags), f"making an event on cuda:{self._index}")))
        self._free += made[1:]
        return made[0]


@functools.cache
def event_pool(index: int) -> EventPool:
    """The pool of ``cuda:index``, of this process. Raises ``TransportUnavailable`` if there is no such GPU."""
    return EventPool(index)


def is_capturing(index: int) -> bool:
    """Whether the calling thread's current stream of ``cuda:index`` is being captured into a CUDA graph."""
    return cudadriver.is_capturing(torch._C._cuda_getCurrentRawStream(index))
