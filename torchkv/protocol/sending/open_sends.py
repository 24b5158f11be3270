"""All requests that this rank sends and that have not ended: by name, by receiver, by generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchkv.errors import ProtocolError
from torchkv.protocol.actions import ANYBODY, BoundGrant, Key
from torchkv.protocol.sending.request import SenderRequest, receiver_name

__all__ = ["OpenSends"]

MAX_QUEUED_OPS = 8192  # ops of one request that wait for its grant
MAX_REQUESTS = 1 << 14  # to one receiver, which may have hung: as many as it may grant before their first verb
MAX_QUEUED_PAGES = 1 << 22  # pages of all ops of this rank that wait for grants


class OpenSends:
    """One rank's. Not thread-safe. name: what messages call a rank, see `GroupMap.name`."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self.by_key: dict[Key, SenderRequest] = {}
        # The same by name, then by receiver: what happens to one name must not look at every peer.
        self._named: dict[str, dict[int, SenderRequest]] = {}
        self._count: dict[int, int] = {}  # how many of these, by receiver, if any
        self.by_generation: dict[tuple[int, int], SenderRequest] = {}  # by receiver and generation: bound ones
        # Of requests to anybody whose grant has come, or which are exempt from sending: the ranks that they go to.
        self.addressed: dict[str, tuple[int, ...]] = {}
        # Of ended requests, by receiver and generation: this rank can never say `Quiesced` for them.
        self.undrainable: set[tuple[int, int]] = set()
        self.queued_pages = 0  # that wait for grants

    def __iter__(self) -> Iterator[SenderRequest]:
        """Those of now, whatever is done to them meanwhile."""
        return iter(list(self.by_key.values()))

    def named(self, request: str) -> list[SenderRequest]:
        """Those of this name, by receiver, that to anybody last."""
        named = self._named.get(request, {})
        return sorted(named.values(), key=lambda req: (req.dst == ANYBODY, req.dst))

    def like(self, req: SenderRequest) -> list[SenderRequest]:
        """Those of the name of ``req``, and itself even if it has ended: they may read the same source pages."""
        return [req, *(other for dst, other in self._named.get(req.request, {}).items() if dst != ANYBODY)]

    def begin(self, request: str, dst: int, now: float) -> SenderRequest:
        """A new one."""
        req = SenderRequest(request, dst, receiver_name(dst, self._name), now)
        self.by_key[request, dst] = req
        self._named.setdefault(request, {})[dst] = req
        self._count[dst] = self._count.get(dst, 0) + 1
        return req

    def bind(self, req: SenderRequest, grant: BoundGrant, now: float) -> None:
        """The request has met its grant."""
        req.grant = grant
        req.progress_at = now
        self.by_generation[(req.dst, grant.generation)] = req

    def end(self, req: SenderRequest) -> None:
        """The request has ended."""
        req.ended = True
        del self.by_key[req.request, req.dst]
        named = self._named[req.request]
        del named[req.dst]
        if not named:
            del self._named[req.request]
        if left := self._count.pop(req.dst) - 1:
            self._count[req.dst] = left
        addressed = self.addressed.get(req.request, ())
        if addressed and not any((req.request, rank) in self.by_key for rank in addressed):
            del self.addressed[req.request]
        if req.grant is not None:
            del self.by_generation[(req.dst, req.grant.generation)]
            if req.undrainable:
                self.undrainable.add((req.dst, req.grant.generation))

    # ---------------------------------------------------------------- limits

    def has_room(self, dst: int) -> bool:
        """Whether one more request to ``dst`` may begin."""
        return self._count.get(dst, 0) < MAX_REQUESTS

    def check_room(self, request: str, dst: int) -> None:
        """Raises unless one more request to ``dst`` may begin."""
        if not self.has_room(dst):
            raise ProtocolError(
                f"request {request!r} to {receiver_name(dst, self._name)}: {MAX_REQUESTS} requests to it have not "
                f"ended, the limit; try again once some have, or cancel those that have failed",
                retryable=True,
            )

    def check_queue(self, request: str, req: SenderRequest | None, num_pages: int) -> None:
        """Raises unless one more op may wait for the grant of the request, which has begun if it is ``req``."""
        if req is not None and len(req.queue) >= MAX_QUEUED_OPS:
            raise ProtocolError(
                f"request {request!r} to {req.receiver}: {len(req.queue)} transfers wait for its grant, the limit; "
                f"try again once that has posted recv_pages",
                retryable=True,
            )
        if self.queued_pages + num_pages > MAX_QUEUED_PAGES:
            raise ProtocolError(
                f"request {request!r}: {self.queued_pages} pages wait for grants on this rank, "
                f"the limit is {MAX_QUEUED_PAGES}; try again once some receiver has posted",
                retryable=True,
            )

    # ---------------------------------------------------------------- what is under way to one receiver

    def is_drained(self, rank: int) -> bool:
        """Whether nothing that this rank writes to ``rank`` is under way."""
        return all(req.dst != rank or req.drained for req in self.by_key.values())

    def has_landed(self, rank: int) -> bool:
        """Whether all that this rank has written to ``rank`` is known to have landed there."""
        broken = any(dst == rank for dst, _ in self.undrainable)
        return not broken and all(
            req.dst != rank or (req.drained and not req.undrainable) for req in self.by_key.values()
        )

    def is_done_with(self, rank: int) -> bool:
        """Whether nothing of this rank is under way to ``rank``, and no call waits for that."""
        return all(
            req.dst != rank or (req.error is not None and req.drained and not req.cancels)
            for req in self.by_key.values()
        )

    def receivers(self) -> set[int]:
        """Of all requests, as far as they are known."""
        return {req.dst for req in self.by_key.values()}
