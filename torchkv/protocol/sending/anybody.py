"""Requests to *anybody*: to whoever grants them.

Such a request waits until some rank grants it, and then becomes one request to each rank of that rank's instance which
this rank owes anything. If it owes none of them anything, no grant comes, and one of them says so (`Exempt`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torchkv.errors import KVError
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import ANYBODY, Settle, Split, Work
from torchkv.protocol.sending.endings import SendEndings
from torchkv.protocol.sending.open_sends import OpenSends
from torchkv.protocol.sending.request import Finish, SenderRequest
from torchkv.protocol.sending.unmet import Unmet

__all__ = ["Anybody"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Anybody:
    """One rank's."""

    def __init__(self, group_map: GroupMap, requests: OpenSends, unmet: Unmet, endings: SendEndings) -> None:
        self._group_map = group_map
        self._requests = requests
        self._unmet = unmet
        self._endings = endings

    def owed(self, request: str, rank: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s instance to which this rank owes anything for this request."""
        return self._group_map.of(request).owed(self._group_map.siblings_of(rank))

    def source(self, request: str) -> int | None:
        """Who has granted the request, or said that this rank is exempt. None if nobody has, that is not busy.

        An instance is busy while an earlier request of this name to one of its ranks has not ended. What an exempt rank
        was told is forgotten.
        """
        for grant in self._unmet.named(request):
            if not any((request, rank) in self._requests.by_key for rank in self.owed(request, grant.dst)):
                return grant.dst
        return self._unmet.take_exemption(request)

    def address(self, request: str, source: int, now: float) -> list[SenderRequest]:
        """The request goes to the instance of ``source``: one request to each of its ranks that is owed anything."""
        ranks = self.owed(request, source)
        trace.debug("request %r: granted by rank %d, so it goes to ranks %s", request, source, ranks)
        waiting = self._requests.by_key.get((request, ANYBODY))
        if waiting is not None:
            self._requests.end(waiting)
        reqs = [self._requests.begin(request, rank, now) for rank in ranks]
        if ranks or waiting is None or waiting.finish is None:
            self._requests.addressed[request] = ranks
        if waiting is not None:
            self._hand_on(waiting, reqs)
        return reqs

    def _hand_on(self, waiting: SenderRequest, reqs: list[SenderRequest]) -> None:
        """What waited for anybody now waits for each of these."""
        for op in waiting.queue:
            self._requests.queued_pages += (len(reqs) - 1) * op.num_pages
            self._split(op.work, len(reqs))
            for req in reqs:
                part = replace(op, dst=req.dst)
                req.add_sent(part)
                req.queue.append(part)
        if waiting.finish is not None:
            self._split(waiting.finish.work, len(reqs))
            for req in reqs:
                req.finish = Finish(waiting.finish.work, waiting.finish.aux)

    def _split(self, work: Work, parts: int) -> None:
        """One part of ``work`` becomes so many."""
        if parts > 1:
            self._endings.actions.append(Split(work, parts - 1))
        elif not parts:
            self._endings.actions.append(Settle(work))

    def refuse_others(self, request: str, src: int, error: KVError, now: float) -> None:
        """Refuses what the other ranks of ``src``'s instance grant, or have granted, as the grant of ``src`` is."""
        for rank in self.owed(request, src):
            if rank == src:
                continue
            if (grant := self._unmet.take((request, rank))) is not None:
                self._endings.abort(grant, error)
            else:
                self._unmet.refuse((request, rank), now)
