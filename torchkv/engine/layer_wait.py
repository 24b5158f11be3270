"""Waiting for one layer of a receive: on the calling thread, or on a CUDA stream."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from torchkv.errors import KVError, ProtocolError, TransferTimeout

if TYPE_CHECKING:
    from torchkv.engine import Engine
    from torchkv.flags import Hold
    from torchkv.protocol.receive import Receive

__all__ = ["HeldLayers", "LayerWait", "layer_wait"]


def layer_wait(engine: ref[Engine], receive: Receive, layer: int) -> LayerWait:
    """For a work that its caller keeps, and which must not keep the group. Raises ``ProtocolError`` if that is gone."""
    alive = engine()
    if alive is None:
        raise ProtocolError(f"request {receive.request!r}, layer {layer!r}: the group was destroyed")
    return LayerWait(alive, receive, layer)


class LayerWait:
    """One layer of one receive. Raises ``ProtocolError`` if this rank does not hold it."""

    def __init__(self, engine: Engine, receive: Receive, layer: int) -> None:
        layout = engine.roster.me.layout
        assert layout is not None  # else it could not receive
        if layer not in layout.layers:
            raise ProtocolError(f"request {receive.request!r}: this rank does not hold layer {layer!r}")
        self._engine, self._receive, self._layer = engine, receive, layer

    def wait(self, limit: float | None) -> None:
        """Blocks until the layer is here. Raises the request's error, ``TransferTimeout`` after ``limit`` seconds."""
        engine, request = self._engine, self._receive.request
        deadline = None if limit is None else time.monotonic() + min(limit, threading.TIMEOUT_MAX)
        with engine.changed:
            while not self._done():
                if engine.closed:
                    raise ProtocolError(f"request {request!r}, layer {self._layer}: {engine.closed}")
                left = None if deadline is None else deadline - time.monotonic()
                if not engine.changed.wait(left) and left is not None:
                    raise TransferTimeout(
                        f"request {request!r}: layer {self._layer} is not complete after {limit:g} s; it goes on",
                        pages_safe=lambda: self._receive.ended,
                    )

    def hold(self, hold: Hold) -> None:
        """Opens ``hold`` when the layer is here or the request has failed; at once if that is so now."""
        with self._engine.lock:
            self._engine.held_layers.add(self, hold)

    def over(self) -> bool:
        """Whether the layer is here, or the request has failed. Under the engine's lock."""
        with suppress(KVError):
            return self._done()
        return True

    def _done(self) -> bool:
        return self._engine.receiver.layer_done(self._receive, self._layer)


class HeldLayers:
    """Streams that wait for layers. Under the engine's lock."""

    def __init__(self) -> None:
        self._holds: list[tuple[LayerWait, Hold]] = []

    def add(self, wait: LayerWait, hold: Hold) -> None:
        self._holds.append((wait, hold))
        self.open()

    def open(self) -> None:
        """Lets those go on that have nothing to wait for any more."""
        left = []
        for wait, hold in self._holds:
            if wait.over():
                hold.open()
            else:
                left.append((wait, hold))
        self._holds = left
