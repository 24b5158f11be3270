"""Waits for one layer of a `recv_pages` request: on the calling thread, or on a CUDA stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from torchkv.errors import KVError, ProtocolError, TransferTimeout

if TYPE_CHECKING:
    from torchkv.cuda.sync_words import HostReleasedWait
    from torchkv.protocol.receiving.request import ReceiverRequest

__all__ = ["LayerStreamWaits", "LayerWait"]


class LayerWait:
    """Waits for one layer of one request.

    changed: notified when a layer arrives or a request fails. Its lock guards ``is_done`` and ``stream_waits``.
    is_done: whether all bytes of the layer have arrived; raises the request's error. closed: the reason why verbs are
    refused, or an empty string while the group is open.
    """

    def __init__(
        self,
        req: ReceiverRequest,
        layer: int,
        *,
        changed: threading.Condition,
        is_done: Callable[[], bool],
        closed: Callable[[], str],
        stream_waits: LayerStreamWaits,
    ) -> None:
        self._req, self._layer = req, layer
        self._changed = changed
        self._is_done = is_done
        self._closed = closed
        self._stream_waits = stream_waits

    def wait(self, limit: float | None) -> None:
        """Blocks until the layer has arrived, for ``limit`` seconds at most; None: until it arrives or fails.

        Raises the request's error, ``TransferTimeout``, and ``ProtocolError`` if the group is destroyed.
        """
        request = self._req.request
        deadline = None if limit is None else time.monotonic() + min(limit, threading.TIMEOUT_MAX)
        with self._changed:
            while not self._is_done():
                if reason := self._closed():
                    raise ProtocolError(f"request {request!r}, layer {self._layer}: {reason}")
                left = None if deadline is None else deadline - time.monotonic()
                if not self._changed.wait(left) and left is not None:
                    raise TransferTimeout(
                        f"request {request!r}: layer {self._layer} is not complete after {limit:g} s; the request "
                        f"goes on",
                        pages_safe=lambda: self._req.all_ended,
                    )

    def release_stream(self, stream_wait: HostReleasedWait) -> None:
        """Releases the stream once the layer has arrived or the request has failed; at once if it has already."""
        with self._changed:
            self._stream_waits.add(self, stream_wait)

    def over(self) -> bool:
        """Whether the layer has arrived or the request has failed. Under the lock of ``changed``."""
        with suppress(KVError):
            return self._is_done()
        return True


class LayerStreamWaits:
    """CUDA streams that wait for layers. Under the engine's lock."""

    def __init__(self) -> None:
        self._pending: list[tuple[LayerWait, HostReleasedWait]] = []

    def add(self, wait: LayerWait, stream_wait: HostReleasedWait) -> None:
        self._pending.append((wait, stream_wait))
        self.release()

    def release(self) -> None:
        """Releases the streams whose layer has arrived or whose request has failed."""
        if not self._pending:
            return
        left = []
        for wait, stream_wait in self._pending:
            if wait.over():
                stream_wait.open()
            else:
                left.append((wait, stream_wait))
        self._pending = left
