"""The flight recorder: the last operations of a rank, in a ring of fixed size. A verb pays less than a microsecond.

An operation is a call of a verb. It is recorded when the verb returns, and once more when its work completes, as far as
Python sees that: of a request on the resident loop, when somebody asks.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torchkv.errors import KVError, TransferCancelled
from torchkv.observe.dump_format import Entry
from torchkv.observe.histogram import BOUNDS, Histogram

__all__ = ["PHASES", "FlightRecorder", "Operation", "size_of"]

# What the duration of a verb's work is called among the latencies.
PHASES: Mapping[str, str] = {
    "recv_pages": "receive",  # from the grant to the verdict
    "finish": "verdict",  # from the seal to the verdict
    "cancel": "cancel",
    "withdraw": "cancel",
    **dict.fromkeys(("send_layer", "send_slice", "send_pages", "staged_put", "send_state"), "send"),
}
MAX_TEXT = 500  # characters of an error that are kept
MAX_LISTED = 8  # layers or peers that are listed one by one
LONG_WAIT = 1.0  # seconds: a shorter `wait` that times out may be a poll, and is no failure

# One call of a verb, as a list, because an object takes twice as long to make: the recorder, a number that grows, the
# verb, the request, peers and layers as the caller named them, pages, when it began and ended as `time.perf_counter`
# tells it (0.0: pending), bytes, paths, and the error's text.
Operation: TypeAlias = list[Any]
_NUMBER, _VERB, _REQUEST, _PEERS, _LAYERS, _COUNT, _BEGAN, _ENDED, _BYTES, _PATHS, _ERROR = range(1, 12)
_NO_PATHS: frozenset[str] = frozenset()


class FlightRecorder:
    """The last ``size`` operations of one rank.

    on_failure: told why, when an operation fails other than by being cancelled, or is waited for in vain. Any thread
    calls it, also under the engine's lock. phases: durations of all operations that have succeeded, by `PHASES`; read
    it under the engine's lock.
    """

    def __init__(self, size: int) -> None:
        self.on_failure: Callable[[str], None] | None = None
        self.phases = {phase: Histogram() for phase in sorted(set(PHASES.values()))}
        self._of_verb = {verb: self.phases[phase] for verb, phase in PHASES.items()}
        self._ring: list[Operation | None] = [None] * size
        self._size = size
        self._next = itertools.count().__next__

    def begin(self, verb: str, request: str, peers: Any, layers: Any, count: int, began: float) -> Operation:
        """An operation that goes on. peers, layers: as the caller named them. count: of pages. Any thread."""
        if type(layers) is not int and layers is not None:
            layers = _kept(layers)
        if type(peers) is not str and type(peers) is not int:
            peers = _kept(peers)
        number = self._next()
        operation = [self, number, verb, request, peers, layers, count, began, 0.0, 0, _NO_PATHS, ""]
        self._ring[number % self._size] = operation
        return operation

    def refused(self, verb: str, request: Any, peers: Any, layers: Any, count: int, error: KVError) -> None:
        """A verb has raised ``error``. No failure of a transfer: the caller knows."""
        now = time.perf_counter()
        operation = self.begin(verb, str(request)[:MAX_TEXT], peers, layers, count, now)
        operation[_ENDED], operation[_ERROR] = now, _text(error)

    def settle(
        self, operation: Operation, ended: float, nbytes: int, paths: frozenset[str], error: KVError | None
    ) -> None:
        """It has ended. Under the engine's lock. What comes after the first call is ignored."""
        if operation[_ENDED]:
            return
        operation[_ENDED], operation[_BYTES], operation[_PATHS] = ended, nbytes, paths
        if error is None:
            histogram = self._of_verb[operation[_VERB]]
            seconds = ended - operation[_BEGAN]
            histogram.counts[bisect_left(BOUNDS, seconds)] += 1  # as `Histogram.add`, without the call
            histogram.total += seconds
        else:
            self.failed(operation, error)

    def failed(self, operation: Operation, error: KVError) -> None:
        """It has ended with ``error``. Any thread."""
        operation[_ENDED] = operation[_ENDED] or time.perf_counter()
        operation[_ERROR] = _text(error)
        if not isinstance(error, TransferCancelled):
            self._tell_failure(f"{operation[_VERB]}({operation[_REQUEST]!r}) failed: {operation[_ERROR]}")

    def returned(self, operation: Operation) -> None:
        """A verb without a work has returned. Any thread."""
        operation[_ENDED] = time.perf_counter()

    def waited(self, operation: Operation, seconds: float) -> None:
        """The caller has waited so long for it, in vain. Any thread."""
        if seconds >= LONG_WAIT:
            text = f"{operation[_VERB]}({operation[_REQUEST]!r}): not complete after wait({seconds:g} s)"
            self._tell_failure(text)

    def _tell_failure(self, reason: str) -> None:
        if self.on_failure is not None:
            self.on_failure(reason)

    def entries(self) -> list[Entry]:
        """The operations, oldest first, as a dump has them. Any thread."""
        kept = [operation for operation in list(self._ring) if operation is not None]
        offset = time.time_ns() - time.perf_counter_ns()
        return [_entry(operation, offset) for operation in sorted(kept, key=lambda each: int(each[_NUMBER]))]


def size_of(pages: Any) -> int:
    """How many pages a verb was given, over all layer groups; 0 for what has no length."""
    try:
        return sum(len(each) for each in pages.values()) if isinstance(pages, Mapping) else len(pages)
    except TypeError:
        return 0


def _kept(value: Any) -> Any:
    """A copy of what the caller may change; not all of a long list."""
    if value is None:
        return None
    try:
        if len(value) <= MAX_LISTED:
            return tuple(value)
        return f"{value[0]} to {value[-1]}, {len(value)} in all"
    except TypeError:
        return repr(value)[:MAX_TEXT]


def _text(error: KVError) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]


def _listed(value: Any) -> str:
    """What `FlightRecorder.begin` has kept, in words."""
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return "" if value is None else str(value)


def _entry(operation: Operation, offset: int) -> Entry:
    began, ended, error = operation[_BEGAN], operation[_ENDED], operation[_ERROR]
    return Entry(
        record_id=operation[_NUMBER],
        profiling_name=f"torchkv:{operation[_VERB]}",
        request=operation[_REQUEST],
        peers=_listed(operation[_PEERS]),
        layers=_listed(operation[_LAYERS]),
        num_pages=operation[_COUNT],
        time_created_ns=int(began * 1e9) + offset,
        time_discovered_completed_ns=int(ended * 1e9) + offset if ended else None,
        duration_ms=(ended - began) * 1e3 if ended else None,
        state="scheduled" if not ended else "failed" if error else "completed",
        retired=bool(ended),
        nbytes=operation[_BYTES],
        path="+".join(sorted(operation[_PATHS] - {"none"})) or "none",
        error=error,
    )
