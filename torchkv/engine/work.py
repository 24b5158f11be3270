"""The handle of a pending call."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchkv.errors import KVError, ProtocolError, TransferTimeout

if TYPE_CHECKING:
    from torchkv.flags import Flags, Hold
    from torchkv.layerwait import LayerWait

__all__ = ["KVWork"]

# Guards the making and resolving of futures and latches, of all works: both are rare and brief.
_futures = threading.Lock()


class KVWork(dist.Work):
    """A `torch.distributed.Work` for KV transfers; completes exactly once, successfully or with a `KVError`.

    bytes: KV bytes moved so far.
    path: ``runs``, ``slices``, ``staged``, ``direct``, ``none`` (nothing had to move) or ``mixed``.
    seconds: from the call to completion (so far, while pending).
    aux: for receives, the bytes that the sender attached to ``finish``; empty before completion.
    """

    # Where every work begins, kept by the class: setting them one by one costs the caller of a verb a microsecond.
    bytes: int = 0
    aux: builtins.bytes = b""
    _parts = 0
    _reading = 0  # parts that still read the source pages
    _layer: Callable[[int], LayerWait] | None = None  # of receives
    _ended: float | None = None
    _paths: frozenset[str] = frozenset()
    _error: KVError | None = None
    # Whether the request's pages may be reused, for a wait that runs out; receives put their own here.
    _pages_safe: Callable[[], bool] | None = None
    _future: torch.futures.Future[Any] | None = None
    _is_done = False
    # Held until completion, and made by the first who waits for that: most works are never waited for one by one.
    _latch: threading.Lock | None = None
    _source_latch: threading.Lock | None = None  # the same, of the source pages
    _flags: Flags | None = None  # of the GPU that the cache lies on
    _holds: tuple[Hold, ...] = ()  # streams that wait for this work

    def __init__(self, what: str, *, flags: Flags | None = None) -> None:
        dist.Work.__init__(self)  # super() takes half a microsecond more
        self._what = what
        self._began = time.perf_counter()
        if flags is not None:
            self._flags = flags

    # ------------------------------------------------------------------ torch.distributed.Work

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until completion; True on success.

        ``timeout``: a timedelta, or seconds; zero means the operation's own deadline. Raises the error with which
        the operation failed, or ``TransferTimeout`` when ``timeout`` runs out, which leaves the request alive.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not self._wait_done(limit):
            raise TransferTimeout(
                f"{self._what}: not complete after wait({limit:g} s); the request goes on",
                pages_safe=self._pages_safe or self._ended_safely,
            )
        if self._error is not None:
            # Without the traceback of earlier waits, which would grow with each of them.
            raise self._error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> KVError | None:
        """The error with which the operation failed; None if it succeeded or is still under way."""
        return self._error if self._is_done else None

    def result(self) -> list[torch.Tensor]:
        """KV transfers have no result tensors."""
        return []

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with this work, with its error if it fails."""
        with _futures:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._is_done:
                    self._resolve(self._future)
            return self._future

    # ------------------------------------------------------------------ more than c10d has

    @property
    def path(self) -> str:
        paths = self._paths - {"none"}
        return "none" if not paths else next(iter(paths)) if len(paths) == 1 else "mixed"

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    def wait_source(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until the source pages may be overwritten. Like ``wait``, which it may precede: with staging, it does.

        Raises as ``wait`` does; once the pages have been read, it no longer matters here what becomes of the rest.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        with _futures:
            if not self._reading and (self._parts or self._is_done):
                return True
            if self._source_latch is None and not self._is_done and self._reading:
                self._source_latch = threading.Lock()
                self._source_latch.acquire()
            latch = self._source_latch
        if latch is not None and _await(latch, limit) and not self._reading:
            return True
        return self.wait(timeout)

    def wait_stream(self, stream: torch.cuda.Stream | None = None, *, layer: int | None = None) -> None:
        """Orders what is enqueued on ``stream`` from now on after this work; never raises for a failed one.

        stream: default, the current one. layer: for receives, only after that layer (a global id). A failed request
        releases the stream too: check ``exception()`` before using results. What the transfer depends on must not load
        kernels or free memory meanwhile, in this process: CUDA waits for all streams then. On host memory the calling
        thread is the stream, so this blocks it. Raises ``ProtocolError`` while the stream is being captured (a replay
        would wait for this work, not for the one of its own step), and as `wait_layer` does.
        """
        wait = None if layer is None else self._layer_wait(layer)
        if self._flags is None:
            if wait is None:
                self._wait_done(0)
            else:
                with suppress(KVError):
                    wait.wait(None)
            return
        if self._is_done:
            return
        hold = self._flags.hold(torch.cuda.current_stream() if stream is None else stream)
        if wait is not None:
            wait.hold(hold)
            return
        with _futures:
            if not self._is_done:
                self._holds += (hold,)
                return
        hold.open()

    def wait_layer(self, layer: int, timeout: timedelta | float = timedelta(0)) -> bool:
        """For receives: blocks until every byte of ``layer`` (a global id) is in its pages.

        Raises as ``wait`` does, and ``ProtocolError`` for a layer this rank does not hold or a send's work.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        self._layer_wait(layer).wait(limit if limit > 0 else None)
        return True

    def _layer_wait(self, layer: int) -> LayerWait:
        if self._layer is None:
            raise ProtocolError(f"{self._what}: single layers are waited for by receives; wait for the whole work")
        return self._layer(layer)

    # ------------------------------------------------------------------ for the engine

    def _ended_safely(self) -> bool:
        return self._is_done and (self._error is None or self._error.pages_safe)

    def _expect(self, parts: int) -> None:
        """How many parts must settle; with none, the work is complete. Called once, before any can settle."""
        self._parts = self._reading = parts
        if parts == 0:
            self._complete()

    def _release_source(self) -> None:
        """One part has read the last of the source pages."""
        with _futures:
            self._reading -= 1
            if self._reading == 0 and self._source_latch is not None and not self._is_done:
                self._source_latch.release()

    def _account(self, nbytes: int, path: str) -> None:
        self.bytes += nbytes
        self._paths |= {path}

    def _settle(self, error: KVError | None, aux: builtins.bytes = b"") -> bool:
        """One part is over. The first error decides; completion waits for all parts. True if it was the last.

        The engine then calls `_announce`, which may run callbacks, without holding any lock.
        """
        assert self._parts > 0
        self._error = self._error or error
        self._parts -= 1
        if self._parts == 0:
            self.aux = aux
            self._complete()
        return self._is_done

    def _complete(self) -> None:
        with _futures:
            self._ended = time.perf_counter()
            self._is_done = True
            if self._latch is not None:
                self._latch.release()
            if self._source_latch is not None and self._reading:
                self._source_latch.release()
            for hold in self._holds:
                hold.open()
            self._holds = ()

    def _announce(self) -> None:
        """Resolves the future, if somebody has asked for it. Its callbacks may call any verb."""
        with _futures:
            future = self._future
        if future is not None and not future.done():
            self._resolve(future)

    def _wait_done(self, limit: float) -> bool:
        """Blocks until completion, or for ``limit`` seconds if that is positive. Whether it is complete."""
        with _futures:
            if self._is_done:
                return True
            if self._latch is None:
                self._latch = threading.Lock()
                self._latch.acquire()
            latch = self._latch
        _await(latch, limit)
        return self._is_done

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result([])
        else:
            future.set_exception(self._error)


def _await(latch: threading.Lock, limit: float) -> bool:
    """Whether the latch was released, within ``limit`` seconds if that is positive."""
    released = latch.acquire(timeout=min(limit, threading.TIMEOUT_MAX) if limit > 0 else -1)
    if released:
        latch.release()  # for the next waiter
    return released
