"""Requests that are received by a rank of an engine, whichever engine that is."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torchkv.errors import KVError, TransferCancelled

if TYPE_CHECKING:
    from torchkv.engine.work import KVWork
    from torchkv.group.arguments import Pages, StateSlot
    from torchkv.group.join import KVMember

__all__ = ["Arrival"]

log = logging.getLogger(__name__)


class Arrival:
    """A request whose pages come from another instance, which may have to be connected first.

    Nothing here blocks, or raises because of a peer: what goes wrong ends the request, and is its `error`.

    connecting: as `KVMember.connect` returns it. work: what `grant` began.
    """

    def __init__(self, kv: KVMember, request: str, connecting: Future[str]) -> None:
        self.request = request
        self.work: KVWork | None = None
        self._kv = kv
        self._connecting = connecting
        self._error: BaseException | None = None  # before anything was granted

    @classmethod
    def at(cls, kv: KVMember, request: str, address: str, *, instance: str | None = None) -> Arrival:
        """One that comes from ``address``. instance: who must be there; None: anybody."""
        try:
            return cls(kv, request, kv.connect(address, instance=instance))
        except KVError as error:
            return cls.failed(kv, request, error)

    @classmethod
    def failed(cls, kv: KVMember, request: str, error: KVError) -> Arrival:
        """One of which it is known at once that it cannot be received."""
        nowhere: Future[str] = Future()
        nowhere.set_exception(error)
        return cls(kv, request, nowhere)

    def is_connected(self) -> bool:
        """Whether `grant` may be called: it has not been, and who sends is known."""
        if self.work is not None or self._error is not None or not self._connecting.done():
            return False
        self._error = self._connecting.exception()
        return self._error is None

    def grant(self, pages: Pages, *, prefix_tokens: int = 0, state_slot: StateSlot = None) -> None:
        """Grants pages, as `KVMember.recv_pages`."""
        try:
            self.work = self._kv.recv_pages(
                self.request, pages, self._connecting.result(), prefix_tokens=prefix_tokens, state_slot=state_slot
            )
        except KVError as error:
            self._error = error

    def cancel(self) -> None:
        """Ends it. Who sends is told: now, or as soon as that one is known."""
        if self.work is not None:
            self._kv.cancel(self.request)
        elif self._error is None:
            self._error = TransferCancelled(f"request {self.request!r} was cancelled before it was granted")
            self._connecting.add_done_callback(self._refuse)

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""
        return self._error if self.work is None else self.work.exception()

    @property
    def pages_safe(self) -> bool:
        """Whether nothing can be written to its pages: they are not granted, or no longer."""
        if self.work is None:
            return True
        error = self.work.exception()
        return self.work.is_completed() and (error is None or error.pages_safe)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not, and its pages are safe."""
        self.is_connected()  # notes a failure to connect
        return self.pages_safe and (self.work is not None or self._error is not None)

    def _refuse(self, connecting: Future[str]) -> None:
        if connecting.cancelled() or connecting.exception() is not None:
            return  # nobody to tell
        try:
            self._kv.refuse(self.request, connecting.result())
        except KVError as error:
            log.warning("request %s was not refused: %s: %s", self.request, type(error).__name__, error)
