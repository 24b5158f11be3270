"""Requests that are sent by a rank of an engine, whichever engine that is, to whoever grants them."""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from torchkv.errors import KVError, LayoutMismatch, TransferCancelled

if TYPE_CHECKING:
    from torchkv.engine.work import KVWork
    from torchkv.group.arguments import Layers, Origin, Pages, StateSlot
    from torchkv.group.join import KVMember

__all__ = ["MAX_NAME", "Departure", "Departures", "transfer_name"]

log = logging.getLogger(__name__)

MAX_NAME = 1024  # bytes, of a request of torchkv


class Departures:
    """The requests of one rank, by name. Clients choose names: of several requests of one name, the first that asked
    for it has it, and the others wait.
    """

    def __init__(self, kv: KVMember) -> None:
        self.kv = kv
        self._queues: dict[str, list[Departure]] = {}
        self._cancelled: list[Departure] = []  # those that have failed and have their names still

    def __len__(self) -> int:
        """How many requests have a name, or wait for it."""
        self._forget()
        return sum(map(len, self._queues.values()))

    def decline(self, name: str) -> None:
        """No request of this name will be sent: tells whoever waits for it, unless one is being sent."""
        if name not in self._queues:
            self.kv.cancel(name, decline=True)

    # For `Departure`.

    def ask(self, departure: Departure) -> bool:
        """Whether ``departure`` has its name now; if not, it waits for it."""
        self._forget()
        queue = self._queues.setdefault(departure.name, [])
        if departure not in queue:
            queue.append(departure)
        return queue[0] is departure

    def cancel(self, departure: Departure, *, decline: bool) -> KVWork:
        self._cancelled.append(departure)
        return self.kv.cancel(departure.name, decline=decline)

    def _forget(self) -> None:
        self._cancelled = [each for each in self._cancelled if not each.advance()]

    def leave(self, departure: Departure) -> None:
        queue = self._queues[departure.name]
        queue.remove(departure)
        if not queue:
            del self._queues[departure.name]


class Departure:
    """A request whose pages go to whoever grants it.

    Nothing here blocks but `withdraw`, or raises because of a peer: what goes wrong ends the request, and is its
    `error`.

    is_over: whether nothing reads its pages any more. sealed: the work of `finish`.
    """

    def __init__(self, departures: Departures, name: str) -> None:
        self.name = name
        self.error: Exception | None = None
        self.is_over = False
        self.sealed: KVWork | None = None
        self._all = departures
        self._begun = False  # whether torchkv knows of it
        self._cancel: KVWork | None = None

    def has_name(self) -> bool:
        """Whether it may be sent: no earlier request of its name is being sent."""
        return not self.is_over and self._all.ask(self)

    def granted(self) -> int | None:
        """How many tokens the receiver holds; None until it has granted its pages. Begins the request."""
        if self.error is not None or not self.has_name():
            return None
        self._begun = True
        try:
            return self._all.kv.granted(self.name, None)
        except LayoutMismatch:
            return 0  # this rank holds nothing for the receiver, and finishes with nothing
        except KVError as error:
            self.fail(error)
            return None

    def send(
        self, pages: Pages, *, start: int = 0, layers: Layers = None, origin: Origin = "prefix", event: Any = None
    ) -> KVWork | None:
        """Sends pages, as `KVMember.send_pages`; nothing after a failure. Not before it `has_name`."""
        if self.error is not None or not len(pages):
            return None
        self._begun = True
        try:
            return self._all.kv.send_pages(
                self.name, pages, None, layers=layers, start=start, event=event, origin=origin
            )
        except KVError as error:
            self.fail(error)
            return None

    def finish(self, *, aux: bytes = b"", state_slot: StateSlot = None) -> None:
        """Everything was sent, as `KVMember.finish`."""
        if self.error is not None:
            return
        self._begun = True
        try:
            self.sealed = self._all.kv.finish(self.name, None, aux=aux, state_slot=state_slot)
        except KVError as error:
            self.fail(error)

    def advance(self) -> bool:
        """Notes what has ended since. Whether it is over."""
        if self.error is None and self.sealed is not None and self.sealed.is_completed():
            if (error := self.sealed.exception()) is not None:
                self.fail(error)
            else:
                self._end()
        if self._cancel is not None and self._cancel.is_completed():
            self._end()
        return self.is_over

    def fail(self, error: Exception) -> None:
        """Ends it, which lasts until nothing reads its pages any more."""
        if self.error is not None or self.is_over:
            return
        level = logging.INFO if isinstance(error, TransferCancelled) else logging.WARNING
        log.log(level, "request %s was not sent: %s: %s", self.name, type(error).__name__, error)
        self.error = error
        if self.has_name():
            self._cancel = self._all.cancel(self, decline=not self._begun)
        else:  # another request has the name, so nothing of this one was sent
            self._end()

    def withdraw(self) -> None:
        """Its pages are needed for something else: on return nothing reads them, or it has failed. All of it may then
        be sent again, if it was not finished.
        """
        if self.advance() or self.error is not None:
            return
        if self.sealed is not None:
            self.fail(TransferCancelled("its pages are taken away while they may still be read"))
            return
        if not self._begun:
            return
        try:
            self._all.kv.withdraw(self.name).wait()
        except KVError as error:
            self.fail(error)

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._all.leave(self)


def transfer_name(request: str) -> str:
    """The name of the transfer of an engine's ``request``, which a client may have named, at any length: its own, or if
    torchkv does not take that one a hash of it.
    """
    name = request.encode(errors="replace")
    fits = 0 < len(name) <= MAX_NAME and name.decode() == request
    return request if fits else blake2b(name, digest_size=16).hexdigest()
