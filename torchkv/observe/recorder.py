"""The flight recorder: the last operations of a rank, in a ring of fixed size.

An operation is a call of a verb. It is recorded when the verb returns, and once more when its work completes. What the
resident loop serves it records by itself (`torchkv.core.journal`): here is all else, and what has failed.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from torchkv.errors import KVError, TransferCancelled
from torchkv.observe.dump_format import Entry
from torchkv.observe.histogram import Histogram

__all__ = ["PHASES", "FlightRecorder", "entry_of", "kept", "size_of"]

# What the time from a verb to the end of its work is called among the latencies, where it has a name.
PHASES: Mapping[str, str] = {
    "recv_pages": "receive",  # from the grant to the verdict
    "finish": "verdict",  # from the seal to the verdict
    "cancel": "cancel",
    "withdraw": "cancel",
}
MAX_TEXT = 500  # characters of an error that are kept
MAX_LISTED = 8  # layers or peers that are listed one by one
LONG_WAIT = 1.0  # seconds: a shorter `wait` that times out may be a poll, and is no failure

_NO_PATHS: frozenset[str] = frozenset()


class FlightRecorder:
    """The last ``size`` operations of one rank, each with a number that grows.

    on_failure: told why, when an operation fails other than by being cancelled, or is waited for in vain. Any thread
    calls it, also under the engine's lock. phases: durations of all requests and cancels that have succeeded; read it
    under the engine's lock.
    """

    def __init__(self, size: int) -> None:
        self.on_failure: Callable[[str], None] | None = None
        self.phases = {phase: Histogram() for phase in sorted({*PHASES.values(), "send"})}
        self._size = size
        self._next = itertools.count().__next__
        # A column for each field, written in turn. An object for each operation would be in nobody's cache by the time
        # it is freed, 4,096 operations later, which costs a verb more than all else here.
        self._numbers = array("q", [-1]) * size
        self._verbs: list[str] = [""] * size
        self._requests: list[str] = [""] * size
        self._peers: list[Any] = [None] * size
        self._layers: list[Any] = [None] * size
        self._pages = array("q", [0]) * size
        self._began = array("d", [0.0]) * size  # as `time.perf_counter` tells it
        self._ended = array("d", [0.0]) * size  # 0.0: it goes on, and the columns below have no meaning
        self._nbytes = array("q", [0]) * size
        self._results: list[frozenset[str] | str] = [_NO_PATHS] * size  # paths, or the error's text

    def begin(self, verb: str, request: str, peers: Any, layers: Any, num_pages: int, began: float) -> int:
        """An operation that goes on; its number. Any thread. peers, layers: as the caller named them."""
        if type(layers) is not int and layers is not None:
            layers = kept(layers)
        if type(peers) is not str and type(peers) is not int:
            peers = kept(peers)
        number = self._next()
        at = number % self._size
        self._numbers[at] = number
        self._verbs[at] = verb
        self._requests[at] = request
        self._peers[at] = peers
        self._layers[at] = layers
        self._pages[at] = num_pages
        self._began[at] = began
        self._ended[at] = 0.0
        return number

    def settle(self, number: int, ended: float, nbytes: int, paths: frozenset[str]) -> None:
        """It has succeeded. Any thread."""
        at = number % self._size
        if self._numbers[at] == number:
            self._nbytes[at] = nbytes
            self._results[at] = paths
            self._ended[at] = ended

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a request that has succeeded. Under the engine's lock."""
        self.phases[phase].add(seconds)

    def failed(self, number: int, operation: str, error: KVError) -> None:
        """It has ended with ``error``. Any thread. operation: what it is in words, should it have left the ring."""
        text = self._end(number, error)
        if not isinstance(error, TransferCancelled):
            self._tell_failure(f"{operation} failed: {text}")

    def refused(self, verb: str, request: Any, peers: Any, layers: Any, num_pages: int, error: KVError) -> None:
        """A verb has raised ``error``. No failure of a transfer: the caller knows."""
        self._end(self.begin(verb, str(request)[:MAX_TEXT], peers, layers, num_pages, time.perf_counter()), error)

    def returned(self, number: int) -> None:
        """A verb without a work has returned. Any thread."""
        self._end(number, None)

    def waited(self, operation: str, seconds: float) -> None:
        """The caller has waited so long for an operation, in vain. Any thread."""
        if seconds >= LONG_WAIT:
            self._tell_failure(f"{operation}: not complete after wait({seconds:g} s)")

    def _end(self, number: int, error: KVError | None) -> str:
        """It has ended now. Returns the error's text."""
        text = "" if error is None else f"{type(error).__name__}: {error}"[:MAX_TEXT]
        at = number % self._size
        if self._numbers[at] == number and not self._ended[at]:
            self._nbytes[at], self._results[at] = 0, text or _NO_PATHS
            self._ended[at] = time.perf_counter()
        return text

    def _tell_failure(self, reason: str) -> None:
        if self.on_failure is not None:
            self.on_failure(reason)

    def entries(self) -> list[Entry]:
        """The operations, oldest first, as a dump has them. Any thread."""
        offset = time.time_ns() - time.perf_counter_ns()
        numbers = sorted(number for number in self._numbers.tolist() if number >= 0)
        found = (self._entry(number, offset) for number in numbers)
        return [entry for entry in found if entry is not None]

    def _entry(self, number: int, offset: int) -> Entry | None:
        """None if a newer operation has taken its place meanwhile."""
        at = number % self._size
        began, ended = self._began[at], self._ended[at]
        result = self._results[at] if ended else _NO_PATHS
        paths, error = (_NO_PATHS, result) if isinstance(result, str) else (result, "")
        entry = entry_of(
            2 * number + 1,
            self._verbs[at],
            self._requests[at],
            self._peers[at],
            self._layers[at],
            self._pages[at],
            int(began * 1e9) + offset,
            int(ended * 1e9) + offset if ended else None,
            nbytes=self._nbytes[at] if ended else 0,
            path="+".join(sorted(paths - {"none"})) or "none",
            error=error,
        )
        return entry if self._numbers[at] == number else None


def entry_of(
    record_id: int,
    verb: str,
    request: str,
    peers: Any,
    layers: Any,
    num_pages: int,
    began: int,
    ended: int | None = None,
    *,
    nbytes: int = 0,
    path: str = "none",
    error: str = "",
) -> Entry:
    """An operation as a dump has it. peers, layers: as `kept`. began, ended: in nanoseconds since 1970."""
    return Entry(
        record_id=record_id,
        profiling_name=f"torchkv:{verb}",
        request=request,
        peers=_listed(peers),
        layers=_listed(layers),
        num_pages=num_pages,
        time_created_ns=began,
        time_discovered_completed_ns=ended,
        duration_ms=None if ended is None else (ended - began) / 1e6,
        state="scheduled" if ended is None else "failed" if error else "completed",
        retired=ended is not None,
        nbytes=nbytes,
        path=path,
        error=error,
    )


def size_of(pages: Any) -> int:
    """How many pages a verb was given, over all layer groups; 0 for what has no length."""
    try:
        return sum(len(each) for each in pages.values()) if isinstance(pages, Mapping) else len(pages)
    except TypeError:
        return 0


def kept(value: Any) -> Any:
    """A copy of what the caller may change; not all of a long list."""
    if value is None:
        return None
    try:
        if len(value) <= MAX_LISTED:
            return tuple(value)
        return f"{value[0]} to {value[-1]}, {len(value)} in all"
    except TypeError:
        return repr(value)[:MAX_TEXT]


def _listed(value: Any) -> str:
    """What `FlightRecorder.begin` has kept, in words."""
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return "" if value is None else str(value)
