"""All requests that this rank receives and whose leases have not ended: by generation, by name, by writer."""

from __future__ import annotations

from collections.abc import Iterator

from torchkv.protocol.flows import RequestFlows
from torchkv.protocol.receiving.request import ReceiverRequest, Writer

__all__ = ["OpenReceives"]


class OpenReceives:
    """One rank's. Not thread-safe.

    by_generation: live, complete and revoking ones. live: by name, live and complete ones. flows: those that the
    resident loop serves; set by the engine.
    """

    def __init__(self) -> None:
        self.flows: RequestFlows | None = None
        self.by_generation: dict[int, ReceiverRequest] = {}
        self.live: dict[str, ReceiverRequest] = {}
        self._named: dict[str, dict[int, ReceiverRequest]] = {}  # all, by name and generation

    def __iter__(self) -> Iterator[ReceiverRequest]:
        """Those of now, whatever is done to them meanwhile."""
        return iter(list(self.by_generation.values()))

    def named(self, request: str) -> list[ReceiverRequest]:
        """Those of one name, the earliest first."""
        return list(self._named.get(request, {}).values())

    def knows(self, request: str) -> bool:
        """Whether there is any of this name."""
        return request in self._named

    def add(self, req: ReceiverRequest) -> None:
        self.by_generation[req.generation] = self.live[req.request] = req
        self._named.setdefault(req.request, {})[req.generation] = req

    def remove(self, req: ReceiverRequest) -> None:
        del self.by_generation[req.generation]
        named = self._named[req.request]
        del named[req.generation]
        if not named:
            del self._named[req.request]
        if self.live.get(req.request) is req:
            del self.live[req.request]

    def take_back(self, req: ReceiverRequest) -> None:
        """Takes the request back from the resident loop, if it is there. It may have ended meanwhile, or failed."""
        if req.flow is not None:
            assert self.flows is not None
            self.flows.take_back_receive(req)

    def writer(self, src: int, generation: int) -> tuple[ReceiverRequest, Writer] | None:
        """The request of this generation, which Python serves from now on, and its writer ``src``.

        None unless it is live and ``src`` writes to it.
        """
        req = self.by_generation.get(generation)
        if req is None or src not in req.writers:
            return None
        self.take_back(req)
        if req.error is not None or self.by_generation.get(generation) is not req:
            return None
        return req, req.writers[src]

    def writers(self) -> set[int]:
        """Of all requests."""
        return {rank for req in self.by_generation.values() for rank in req.writers}
