"""The operations of a channel, puts and flushes: each is a `Completion` that the channel advances step by step.

What is on a stream runs to its end. So an operation is done when the mark behind the last thing it enqueued is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, TransferCancelled
from torchkv.transport.batch_check import Spans
from torchkv_nvshmem import pump
from torchkv_nvshmem.gpu import Mark, Stream
from torchkv_nvshmem.runtime import Runtime

__all__ = ["FlushOperation", "Operation", "PutOperation"]

# What one put may have on the stream: enough to keep the link busy, little enough to end soon after a cancel.
_WINDOW_SPANS = 4096
_WINDOW_NBYTES = 256 << 20


class _Part(NamedTuple):
    """What was enqueued between two marks."""

    spans: int
    nbytes: int


class Operation(ABC):
    """Base of all operations. `step` advances it. Once it is `posted`, the channel's next operation begins."""

    def __init__(self, name: str, runtime: Runtime, stream: Stream) -> None:
        self.name = name
        self.done = False
        self.error: KVError | None = None
        self._runtime = runtime
        self._stream = stream
        self._stopped_by: KVError | None = None
        self._unmarked: _Part | None = None  # enqueued, but no mark could be enqueued behind it yet
        self._marks: deque[tuple[Mark, _Part]] = deque()

    @property
    @abstractmethod
    def posted(self) -> bool:
        """Whether nothing more of it will be enqueued: all of it was, or it was stopped."""

    @property
    def failed(self) -> bool:
        """Whether it ended with an error other than its caller's cancel."""
        return self.error is not None and not isinstance(self.error, TransferCancelled)

    def cancel(self) -> None:
        if not self.posted:
            self.stop(TransferCancelled(f"{self.name} was cancelled before all of it was posted"))

    def stop(self, reason: KVError) -> None:
        """Enqueues nothing more; ends with ``reason`` once the stream has passed what was enqueued."""
        if not self.done and self._stopped_by is None:
            self._stopped_by = reason

    def step(self, budget_ns: int) -> bool:
        """Enqueues for at most ``budget_ns`` and reads the marks. True if anything moved."""
        if self.done:
            return False
        moved = False
        while self._marks and self._marks[0][0].done:
            self._marks.popleft()[0].release()
            moved = True
        if self._unmarked is None and not self.posted:
            self._unmarked = self._post(budget_ns)
            moved = moved or self._unmarked is not None
        self._mark()
        if self.posted and not self._marks and self._unmarked is None:
            self.error = self._stopped_by
            self.done = moved = True
        return moved

    def _mark(self) -> None:
        if self._unmarked is None:
            return
        try:
            self._marks.append((self._stream.mark(), self._unmarked))
            self._unmarked = None
        except KVError as error:
            if not error.retryable:  # the device has failed: nothing on its streams runs any more
                self.stop(error)
                self._unmarked = None

    @abstractmethod
    def _post(self, budget_ns: int) -> _Part | None:
        """Enqueues the next part, which it returns; None if the window is full."""


class PutOperation(Operation):
    def __init__(self, name: str, runtime: Runtime, stream: Stream, *, pe: int, spans: Spans) -> None:
        super().__init__(name, runtime, stream)
        self._pe = pe
        self._spans = spans
        self._state: Int64Array = np.zeros(pump.STATE_WORDS, dtype=np.int64)

    @property
    def posted(self) -> bool:
        return self._stopped_by is not None or bool(self._state[pump.CURSOR] == len(self._spans.length))

    def uses_local(self, region: int) -> bool:
        """Whether this unfinished put reads from local region ``region``."""
        return not self.done and bool(np.any(self._spans.local_region == region))

    def _post(self, budget_ns: int) -> _Part | None:
        count = _WINDOW_SPANS - sum(part.spans for _, part in self._marks)
        nbytes = _WINDOW_NBYTES - sum(part.nbytes for _, part in self._marks)
        if count <= 0 or nbytes <= 0:
            return None
        spans, before = self._spans, int(self._state[pump.CURSOR])
        with self._runtime.lock:
            posted = pump.post(
                self._runtime.library.functions, self._pe, self._stream.handle, spans.source, spans.target,
                spans.length, self._state, count, nbytes, budget_ns,
            )  # fmt: skip
        return _Part(int(self._state[pump.CURSOR]) - before, posted)


class FlushOperation(Operation):
    """Done when all earlier puts of the channel are complete at the peer."""

    def __init__(self, name: str, runtime: Runtime, stream: Stream) -> None:
        super().__init__(name, runtime, stream)
        self._begun = False

    @property
    def posted(self) -> bool:
        return self._begun or self._stopped_by is not None

    def _post(self, budget_ns: int) -> _Part | None:
        self._begun = True
        with self._runtime.lock:
            self._runtime.library.quiet(self._stream.handle)
        return _Part(0, 0)
