"""The calls by which this rank's user receives: pages are leased to a request, and granted to its writers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, ProtocolError, TransferCancelled
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import Tell, Work
from torchkv.protocol.messages import Exempt, Grant, Outcome, Post, Refused, cause_of, pack_pages
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.leases import Leases, Wanted
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.request import ReceiverRequest, Writer

__all__ = ["Posts"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Posts:
    """One rank's. Not thread-safe."""

    def __init__(self, group_map: GroupMap, requests: OpenReceives, leases: Leases, endings: ReceiveEndings) -> None:
        self._group_map = group_map
        self._requests = requests
        self._leases = leases
        self._endings = endings
        self._actions = endings.actions
        self._next_generation = 1

    def post(
        self,
        request: str,
        pages: Int64Array,
        src: tuple[int, ...],
        *,
        prefix_tokens: int,
        state_slot: int | None = None,
        total: float | None,
        work: Work,
        now: float,
    ) -> ReceiverRequest:
        """Leases ``pages`` and grants them to the contributing writers among ``src``.

        pages: page ids of this rank, in order of position after the prefix. total: one deadline for everything, in
        seconds, or None. work: completed when the request succeeds or fails. Raises ``ProtocolError`` if the name is in
        use or the prefix does not fit a writer's pages, ``PageOutOfRange`` if a page or the slot cannot be leased; then
        nothing is leased or sent.
        """
        writers = self._checked_writers(request, src, prefix_tokens, 0)
        self._leases.check(pages, state_slot, f"recv_pages({request!r}) on rank {self._group_map.rank}")
        req = ReceiverRequest(
            request=request,
            generation=self._next_generation,
            pages=pages,
            prefix_tokens=prefix_tokens,
            num_tokens=len(pages) * self._page_size,
            writers=writers,
            work=work,
            begun_at=now,
            total=total,
            state_slot=state_slot,
        )
        self._begin(req, src, now)
        return req

    @property
    def _page_size(self) -> int:
        return self._group_map.layout(self._group_map.rank).page_size

    def _begin(self, req: ReceiverRequest, src: tuple[int, ...], now: float) -> None:
        """Leases and grants the pages of a request of the next generation, of which everything has been checked."""
        flows, writers, sole = self._requests.flows, req.writers, self._sole_writer(req)
        if flows is not None and sole is None:
            plans = {rank: writer.plan for rank, writer in writers.items()}
            req.flow = req.reserved = flows.reserve(len(req.pages), plans)
        if trace.isEnabledFor(logging.DEBUG):
            trace.debug("request %r: granted to ranks %s, generation %d", req.request, tuple(writers), req.generation)
        self._next_generation += 1
        self._requests.add(req)
        self._leases.take(req)
        if flows is not None and sole is not None:
            told = flows.post(req, sole, req.request.encode(), self._endings.told_leader)
        else:
            if flows is not None and req.flow is not None:
                flows.open_receive(req, self._endings.told_leader)
            told = self._grant(req) and flows is not None and flows.posts
        if len(self._group_map.siblings) > 1 and not told:
            self.tell_post(req)
        for rank in self._group_map.of(req.request).exempt(src):
            self._actions.append(Tell(rank, Exempt(req.request)))
        if not writers:  # of a layer group of which this rank holds nothing: it is complete, but others may not be
            self._endings.complete_if_covered(req, now)

    def _sole_writer(self, req: ReceiverRequest) -> Any:
        """The writer of a request that the loop can begin and grant in one go, as in `post_plain`; None otherwise."""
        flows = self._requests.flows
        if flows is None or len(req.writers) != 1 or req.absent_tokens or self._requests.knows(req.request):
            return None
        ((rank, writer),) = req.writers.items()
        return flows.sole_writer(rank, writer.plan, len(req.pages), req.request.encode())

    def post_plain(
        self,
        request: str,
        given: Int64Array,
        pages: Int64Array,
        src: tuple[int, ...],
        prefix_tokens: int,
        state_slot: int | None,
        work: Work,
        now: float,
    ) -> ReceiverRequest | None:
        """`post` by the resident loop, if one rank of ``src`` holds all that is owed: for a verb's critical path.

        given: the page ids as the caller gave them, which are checked as they are copied to ``pages``. None, and
        nothing is done, if anything speaks against it or needs more thought.
        """
        group_map, requests, flows = self._group_map, self._requests, self._requests.flows
        me = group_map.rank
        if flows is None or requests.knows(request) or src[0] not in group_map.info:
            return None
        if group_map.gap(src, me) is not None or len(ranks := group_map.contributing(src, me)) != 1:
            return None
        if len(src) > 1 and group_map.exempt(src):
            return None
        writer = ranks[0]
        try:
            name = request.encode()
        except UnicodeEncodeError:
            return None
        plan = group_map.plan(writer, ranks, me)
        if prefix_tokens and prefix_tokens % plan.src_page_size:
            return None
        sole = flows.sole_writer(writer, plan, len(pages), name)
        if sole is None or not self._leases.try_take(given, pages, state_slot, self._next_generation):
            return None
        req = ReceiverRequest(
            request=request,
            generation=self._next_generation,
            pages=pages,
            prefix_tokens=prefix_tokens,
            num_tokens=len(pages) * plan.dst_page_size,
            writers={writer: Writer(plan)},
            work=work,
            begun_at=now,
            total=None,
            state_slot=state_slot,
        )
        self._next_generation += 1
        self._leases.hold(req)
        requests.add(req)
        told = flows.post(req, sole, name, self._endings.told_leader)
        if not told and len(group_map.siblings) > 1:
            self.tell_post(req)
        return req

    def post_parts(
        self,
        request: str,
        parts: Mapping[str, Wanted],
        src: tuple[int, ...],
        *,
        prefix_tokens: int,
        absent_tokens: Mapping[str, int],
        total: float | None,
        work: Work,
        now: float,
    ) -> list[ReceiverRequest]:
        """As `post`, for a request of several layer groups: of each part, by its name, what it leases.

        absent_tokens: by layer group. work: completed by all parts, one part of it by each. As soon as one fails, all
        others do.
        """
        absent = {name: absent_tokens.get(wanted.group or "", 0) for name, wanted in parts.items()}
        writers = {name: self._checked_writers(name, src, prefix_tokens + absent[name], absent[name]) for name in parts}
        self._leases.check_together(list(parts.values()), f"recv_pages({request!r}) on rank {self._group_map.rank}")
        posted: list[ReceiverRequest] = []
        for name, (pages, slot, group) in parts.items():
            req = ReceiverRequest(
                request=name,
                generation=self._next_generation,
                pages=pages,
                prefix_tokens=prefix_tokens + absent[name],
                num_tokens=len(pages) * self._page_size,
                writers=writers[name],
                work=work,
                begun_at=now,
                total=total,
                state_slot=slot,
                group=group,
                absent_tokens=absent[name],
                parts=posted,
            )
            self._begin(req, src, now)
            posted.append(req)
        if (failed := next((part for part in posted if part.error is not None), None)) is not None:
            self._endings.fail_parts(failed)  # while the others were not posted yet
        return posted

    def _checked_writers(
        self, request: str, src: tuple[int, ...], prefix_tokens: int, absent_tokens: int
    ) -> dict[int, Writer]:
        """The contributing writers among ``src``. Raises ``ProtocolError`` if `post` must not be called."""
        if request in self._requests.live:
            raise ProtocolError(
                f"recv_pages({request!r}): this request is being received already on rank {self._group_map.rank}; "
                f"wait for it or cancel({request!r}) first"
            )
        group_map = self._group_map.of(request)
        names = group_map.contributing(src, group_map.rank)
        writers: dict[int, Writer] = {}
        for rank in names:
            plan = group_map.plan(rank, names, group_map.rank)
            if prefix_tokens % plan.src_page_size:
                what = f"{absent_tokens} tokens of absent pages" if absent_tokens else f"prefix_tokens={prefix_tokens}"
                raise ProtocolError(
                    f"recv_pages({request!r}): {what} is not a multiple of the page size "
                    f"{plan.src_page_size} of writer {group_map.name(rank)}; round it down to one"
                )
            writers[rank] = Writer(plan)
        return writers

    def _grant(self, req: ReceiverRequest) -> bool:
        """Tells the writers of their grant. Grants of one name must come in their order: it decides which one is meant.

        Those by messages are in order, and so are those by the loop. After an earlier request of this name has ended,
        its writers know its grant; until then this one goes the way on which that is followed by its end. Returns
        whether the loop tells.
        """
        alone = len(self._requests.named(req.request)) == 1 and not req.absent_tokens  # which no record tells
        flows = self._requests.flows
        if req.flow is not None and alone and flows is not None and flows.grant(req):
            return True
        self.tell_grant(req, req.writers)
        return False

    def tell_post(self, req: ReceiverRequest) -> None:
        """Tells the leader of the instance of a request."""
        post = Post(req.request, req.generation, req.prefix_tokens, req.num_tokens, self._page_size, req.flow)
        self._endings.tell_leader(post)

    def tell_grant(self, req: ReceiverRequest, ranks: Iterable[int], *, told_as: int | None = None) -> None:
        """Tells writers of a grant in a message. told_as: the flow in which the loop may have told it."""
        pages, writers = pack_pages(req.pages), list(self._group_map.own_numbers(tuple(req.writers)))
        slot, absent = req.state_slot, req.absent_tokens
        message = Grant(req.request, req.generation, req.prefix_tokens, pages, writers, slot, req.flow, absent, told_as)
        self._actions.extend(Tell(rank, message) for rank in ranks)

    def decline(self, request: str, writers: Iterable[int]) -> None:
        """Grants nothing to the next request of this name: tells its writers, and the other ranks of this instance.

        Raises ``ProtocolError`` if it was granted.
        """
        if request in self._requests.live:
            raise ProtocolError(f"refuse({request!r}): recv_pages was called for it; cancel it instead")
        error = TransferCancelled(
            f"request {request!r} was refused by its receiver, {self._group_map.name(self._group_map.rank)}"
        )
        refused = Refused(request, *cause_of(error))
        self._actions.extend(Tell(rank, refused) for rank in writers)
        self.refuse(request, error)

    def refuse(self, request: str, error: KVError) -> None:
        """Tells the instance that ``recv_pages`` was refused on this rank, so that the other ranks fail now."""
        if request not in self._requests.live:
            self._endings.tell_leader(Outcome(request, 0, *cause_of(error)))
