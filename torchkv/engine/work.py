"""KVWork: the handle that every verb returns."""

from __future__ import annotations

import builtins
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchkv.errors import KVError, ProtocolError, TransferTimeout, fresh
from torchkv.observe.recorder import PHASES

if TYPE_CHECKING:
    from weakref import ref

    from torchkv.cuda.sync_words import HostReleasedWait, SyncWords
    from torchkv.engine.layer_wait import LayerWait
    from torchkv.engine.loop_progress import LoopProgress
    from torchkv.observe.recorder import FlightRecorder
    from torchkv.protocol.receiving.request import ReceiverRequest
    from torchkv.protocol.sending.request import SenderRequest

__all__ = ["KVWork", "drivers", "settle_copied"]

_AT_ONCE = 1e-9  # seconds
_DIRECT = frozenset({"direct"})
# Guards the creation and completion of futures, latches and stream waits of all works: both are rare and brief.
_completing = threading.Lock()
_forks = 0  # how often this process's ancestors have forked it


# Threads that complete works, and so must not wait for one: the progress threads, by their identifiers.
drivers: set[int] = set()


def _after_fork_in_child() -> None:
    global _completing, _forks
    drivers.clear()
    _completing = threading.Lock()  # another thread of the parent may have held it
    _forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class KVWork(dist.Work):
    """A `torch.distributed.Work` of a KV verb. Completes exactly once, successfully or with a `KVError`.

    bytes: KV bytes moved so far, as they lie in the receiver's pages.
    path: ``runs``, ``slices``, ``staged``, ``direct``, ``mixed`` (several of them) or ``none`` (no bytes moved).
    seconds: from the call to the completion, or until now while pending.
    aux: of ``recv_pages``, the bytes that the sender passed to ``finish``; empty until completion.
    """

    # What each verb sets lies in slots, and all else in the dict, which then is not made before the work completes; its
    # defaults are those of the class. Both because a caller waits for ``__init__``.
    __slots__ = (
        "__dict__",
        "_began",
        "_forks",
        "_in_journal",
        "_loop",
        "_operation",
        "_parts",
        "_reading",
        "_sync_words",
    )
    _bytes = 0
    _aux: builtins.bytes = b""  # of a part that has settled
    _layer: Callable[[int], LayerWait] | None = None  # of recv_pages: the wait for a global layer id
    _ended: float | None = None
    _paths: frozenset[str] = frozenset()
    _error: KVError | None = None
    # Of recv_pages: whether the request's pages may be reused; for the error of a wait that times out.
    _pages_safe: Callable[[], bool] | None = None
    _future: torch.futures.Future[Any] | None = None
    _is_done = False
    # Whether the resident loop has ended the work's requests, and this has been asked before Python acted upon that.
    # Then it has succeeded; what it has moved is known once it is done.
    _has_succeeded = False
    # Locks that are held until the work has completed, or its source has been read. Made by the first thread that
    # waits: most works are never waited for one by one.
    _latch: threading.Lock | None = None
    _source_latch: threading.Lock | None = None
    _limit = 0.0  # seconds; the operation's own deadline for ``wait``, if it ends by no other
    _verdict = False  # whether the end of a request completes it: of recv_pages and finish
    # The requests that complete it, if the loop may end them: of finish, and of recv_pages.
    _sends: Sequence[SenderRequest] = ()
    _receives: Sequence[ReceiverRequest] = ()
    _stream_waits: tuple[HostReleasedWait, ...] = ()  # streams that wait for this work
    _awaited = False  # whether there has been any of these: else `_release` has nothing to do
    _recorder: FlightRecorder | None = None  # that this work is an operation of
    _number = -1  # of the operation
    _phase: str | None = (
        None  # what the time until the end is called among the latencies; None: nothing, or not any more
    )
    _first: float | None = None  # of finish: when the request's first verb was called

    def __init__(
        self,
        operation: str,
        sync_words: SyncWords | None = None,
        loop: ref[LoopProgress] | None = None,
        parts: int = 0,
        /,
    ) -> None:
        """By position alone, because Python takes a third of a microsecond to pass names to a class of pybind11.

        sync_words: of the GPU that the cache lies on. loop: given if a resident loop may complete the work. parts: how
        many parts must settle, one for each destination, if that is known already; else `_expect` tells.
        """
        dist.Work.__init__(self)  # half a microsecond faster than super()
        self._operation = operation
        self._sync_words = sync_words
        self._loop = loop
        self._parts = parts  # that have not settled
        self._reading = parts  # that still read the source pages
        self._in_journal = False  # whether the resident loop records this work's operation
        self._forks = _forks
        self._began = time.perf_counter()

    # ------------------------------------------------------------------ torch.distributed.Work

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until the operation has completed. Returns True.

        timeout: a timedelta, or seconds; zero stands for the operation's own deadline, which of ``cancel`` is
        ``Options.timeout``; less than zero for a deadline that has passed. Raises the error with which the operation
        failed, and ``TransferTimeout`` when ``timeout`` runs out: the request then goes on. Raises ``ProtocolError`` in
        a callback of a future, on which nobody could complete the work.
        """
        limit = _seconds(timeout)
        limit = limit or self._limit
        if not self._wait_done(limit):
            loop = None if self._loop is None else self._loop()
            recorder = self._recorder if loop is None else loop.recorder
            if recorder is not None:
                recorder.waited(self._operation, limit)
            raise TransferTimeout(
                f"{self._operation}: not complete after wait({limit:g} s); it goes on, so wait again",
                pages_safe=self._pages_safe or self._ended_safely,
            )
        if self._error is not None:
            raise fresh(self._error)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has succeeded or failed."""
        if not self._has_ended and self._loop is not None and (loop := self._loop()) is not None:
            self._look(loop)
        return self._has_ended

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> KVError | None:
        """The error with which the operation failed; None if it succeeded or is pending."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """An empty list: KV transfers have no result tensors."""
        return []

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with this work: with an empty list, or with the work's error."""
        self._await_events()
        with _completing:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._is_done:
                    self._resolve(self._future)
            return self._future

    # ------------------------------------------------------------------ more than c10d has

    @property
    def bytes(self) -> int:
        """KV bytes moved so far; see the class."""
        self._take_in()
        return self._bytes

    @property
    def aux(self) -> builtins.bytes:
        """What the sender passed to ``finish``; see the class."""
        self._take_in()
        return self._aux if self._is_done else b""

    @property
    def path(self) -> str:
        """The path that the bytes took; see the class."""
        self._take_in()
        paths = self._paths - {"none"}
        return "none" if not paths else next(iter(paths)) if len(paths) == 1 else "mixed"

    @property
    def seconds(self) -> float:
        """Seconds from the call to the completion; see the class."""
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    def wait_source(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until the source pages may be overwritten. Returns True.

        This may be before the work completes: staged transfers have read the pages once they have packed them. Takes
        and raises what `wait` does. If the transfer fails after the pages have been read, nothing is raised here.
        """
        limit = _seconds(timeout)
        self._check_caller()
        self._await_events()
        with _completing:
            if not self._reading and (self._parts or self._is_done):
                return True
            if self._source_latch is None and not self._is_done and self._reading:
                self._source_latch = threading.Lock()
                self._source_latch.acquire()
                self._awaited = True
            latch = self._source_latch
        if latch is not None and _await(latch, limit) and not self._reading:
            return True
        return self.wait(timeout)

    def wait_stream(self, stream: torch.cuda.Stream | None = None, *, layer: int | None = None) -> None:
        """Makes ``stream`` wait for this work: whatever is enqueued on it from now on runs after the work completed.

        stream: None stands for the current stream. layer: of ``recv_pages``, wait for this layer (a global id) only.
        Never raises the error of a failed work: a failure releases the stream too, so check ``exception()`` before
        using results. Whatever the transfer depends on must not load kernels or free GPU memory in this process until
        the stream is released: CUDA waits for all streams then. For a cache in host memory, blocks the calling thread.

        Raises ``ProtocolError`` while the stream is being captured (each replay would wait for this work, instead of
        the work of its own step), and as `wait_layer` does.
        """
        wait = None if layer is None else self._layer_wait(layer)
        if self._sync_words is None:
            if wait is None:
                self._wait_done(0)
            else:
                with suppress(KVError):
                    wait.wait(None)
            return
        self._await_events()
        if self._is_done:
            return
        stream_wait = self._sync_words.hold(torch.cuda.current_stream() if stream is None else stream)
        if wait is not None:
            wait.release_stream(stream_wait)
            return
        with _completing:
            if not self._is_done:
                self._stream_waits += (stream_wait,)
                self._awaited = True
                return
        stream_wait.open()

    def wait_layer(self, layer: int, timeout: timedelta | float = timedelta(0)) -> bool:
        """Of ``recv_pages``: blocks until every byte of ``layer`` (a global id) is in its pages. Returns True.

        Takes and raises what `wait` does. Also raises ``ProtocolError`` for a layer that this rank does not hold, and
        for the work of another verb.
        """
        limit = _seconds(timeout)
        self._layer_wait(layer).wait(limit if limit > 0 else None)
        return True

    def _layer_wait(self, layer: int) -> LayerWait:
        self._check_caller()
        self._await_events()
        if self._layer is None:
            raise ProtocolError(f"{self._operation}: only works of recv_pages have layers; wait for the whole work")
        return self._layer(layer)

    def _check_caller(self) -> None:
        """Raises ``ProtocolError`` where the work would never complete: in a forked child, and in a callback."""
        if self._has_ended:
            return
        if threading.get_ident() in drivers:
            raise ProtocolError(
                f"{self._operation}: a callback of a future cannot wait for it, because callbacks run on the thread "
                f"that completes works; wait on another thread, or chain another callback"
            )
        if self._forks != _forks:
            raise ProtocolError(
                f"{self._operation}: called by the parent of this forked process; only the parent can wait for it"
            )

    # ------------------------------------------------------------------ for the engine

    @property
    def _has_ended(self) -> bool:
        return self._is_done or self._has_succeeded

    def _look(self, loop: LoopProgress) -> None:
        """Looks whether the resident loop has completed this work."""
        if not self._verdict:
            loop.poll()
        elif loop.have_succeeded(self._sends, self._receives):
            self._ended = time.perf_counter()
            self._has_succeeded = True

    def _take_in(self) -> None:
        """After this, all is known of a work that has ended, or whose request has. Not in a forked child."""
        if self._is_done or self._loop is None or self._forks != _forks:
            return
        if (loop := self._loop()) is not None:
            loop.take_in()

    def _ended_safely(self) -> bool:
        return self._has_ended and (self._error is None or self._error.pages_safe)

    def _await_events(self) -> None:
        """Somebody waits for this work in another way than by `wait`, so Python's thread has to follow the loop."""
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.make_eager()
            loop.poll()

    def _expect(self, parts: int) -> None:
        """Sets the number of parts that must settle. Without any, the work is complete. Called once, before any."""
        self._parts = self._reading = parts
        if parts == 0:
            self._complete()

    def _split(self, more: int) -> None:
        """So many parts more must settle, because one goes to several receivers."""
        with _completing:
            self._parts += more
            self._reading += more

    def _release_source(self) -> None:
        """One part has read all of its source pages."""
        with _completing:
            self._reading -= 1
            if self._reading == 0 and self._source_latch is not None and not self._is_done:
                self._source_latch.release()

    def _account(self, nbytes: int, path: str) -> None:
        self._bytes += nbytes
        self._paths |= {path}

    def _settle(self, error: KVError | None, aux: builtins.bytes = b"") -> bool:
        """One part has ended. The work completes with the last part, and fails with the first error of any part.

        True if the work is complete. The engine then wakes those that wait for the resident loop, and calls `_announce`
        without holding a lock.
        """
        assert self._parts > 0
        self._error = self._error or error
        self._parts -= 1
        if aux:
            self._aux = aux
        if self._parts == 0:
            self._complete()
        return self._is_done

    def _complete(self) -> None:
        with _completing:
            if not self._has_succeeded:
                self._ended = time.perf_counter()
            self._is_done = True
            self._sends = self._receives = ()  # the work may outlive them
            if self._awaited:
                self._release()
        if self._recorder is not None:
            self._record_end()

    def _release(self) -> None:
        """Lets go whoever waits for the work in another way than by asking. Under `_completing`."""
        if self._latch is not None:
            self._latch.release()
        if self._source_latch is not None and self._reading:
            self._source_latch.release()
        for stream_wait in self._stream_waits:
            stream_wait.open()
        self._stream_waits = ()

    def _record_end(self) -> None:
        assert self._recorder is not None
        assert self._ended is not None
        if self._error is None and self._phase is None:  # of a verb that sends: one of many
            self._recorder.settle(self._number, self._ended, self._bytes, self._paths)
        else:
            self._record()

    def _record_with(
        self, recorder: FlightRecorder, verb: str, request: str, peers: Any, layers: Any, num_pages: int
    ) -> None:
        """Begins the operation of this work, and ends it if the work is complete. Under the engine's lock."""
        self._number = recorder.begin(verb, request, peers, layers, num_pages, self._began)
        self._recorder, self._phase = recorder, PHASES.get(verb)
        if self._is_done:
            self._record()

    def _record(self) -> None:
        """Tells the flight recorder how this work has ended. Under the engine's lock. Idempotent."""
        recorder, ended = self._recorder, self._ended
        assert recorder is not None
        assert ended is not None
        phase, self._phase = self._phase, None
        first, self._first = self._first, None
        if self._error is not None:
            recorder.failed(self._number, self._operation, self._error)
            return
        recorder.settle(self._number, ended, self._bytes, self._paths)
        if phase is not None:
            recorder.took(phase, ended - self._began)
        if first is not None:
            recorder.took("send", ended - first)

    def _announce(self) -> None:
        """Completes the future, if there is one. This runs its callbacks, which may call any verb."""
        with _completing:
            future = self._future
        if future is not None and not future.done():
            self._resolve(future)

    def _wait_done(self, limit: float) -> bool:
        """Blocks until completion, for ``limit`` seconds at most if that is positive. Whether the work is complete."""
        self._check_caller()
        if self._loop is not None:
            return self._wait_loop(limit)
        with _completing:
            if self._is_done:
                return True
            if self._latch is None:
                self._latch = threading.Lock()
                self._latch.acquire()
                self._awaited = True
            latch = self._latch
        _await(latch, limit)
        return self._is_done

    def _wait_loop(self, limit: float) -> bool:
        """As `_wait_done`, for a work that the resident loop may complete."""
        assert self._loop is not None
        deadline = time.monotonic() + (limit if limit > 0 else threading.TIMEOUT_MAX)
        while not self._has_ended and (loop := self._loop()) is not None:
            seen = loop.news  # read first: what comes after it ends the sleep
            self._look(loop)
            left = deadline - time.monotonic()
            if self._has_ended or left <= 0:
                break
            loop.wait(seen, left, listens=not self._verdict)
        return self._has_ended

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result([])
        else:
            future.set_exception(self._error)


def settle_copied(works: Sequence[KVWork], nbytes: Sequence[int], path: str) -> list[KVWork]:
    """As `KVWork._account` and `KVWork._settle` of one part of each, on one path: quick for many works.

    Returns those that are complete.
    """
    completed: list[KVWork] = []
    paths = _DIRECT if path == "direct" else frozenset({path})
    with _completing:
        ended = time.perf_counter()
        for work, moved in zip(works, nbytes, strict=True):
            assert work._parts > 0
            if moved:
                work._bytes += moved
                work._paths = work._paths | paths if work._paths else paths
            work._parts -= 1
            if not work._parts:
                work._ended = ended
                work._is_done = True
                if work._awaited:
                    work._release()
                completed.append(work)
    for work in completed:
        if work._recorder is not None:
            work._record_end()
    return completed


def _seconds(timeout: timedelta | float) -> float:
    """``timeout`` in seconds; 0 stands for no limit.

    Less than 0, as what is left until a deadline that has passed, becomes the least time that there is; so does NaN.
    """
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return limit if limit >= 0 else _AT_ONCE


def _await(latch: threading.Lock, limit: float) -> bool:
    """Waits for the latch's release, for ``limit`` seconds at most if that is positive. Whether it was released."""
    released = latch.acquire(timeout=min(limit, threading.TIMEOUT_MAX) if limit > 0 else -1)
    if released:
        latch.release()  # for the next waiter
    return released
