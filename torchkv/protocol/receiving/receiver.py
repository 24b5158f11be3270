"""The receiving side of requests: when one succeeds, when it fails, and when its pages may be used again.

    post: pages leased, Grant sent
       |
       v
      LIVE --every writer sealed, all that they owe is here--> COMPLETE --instance verdict--> succeeded, leases end
       |                                                          |
       +------------------ failure or cancel ---------------------+
                                  |
                                  v
                    REVOKING: work failed, Revoke sent --nothing can land any more--> ended, leases end

* **Grant.** `Receiver.post` leases the pages to a new *generation* of the request and grants them to its writers.
* **Attest, seal.** Writers attest what is visible here, and seal when they have sent everything. Stages of the staging
  ring count as arrived when they have been unpacked. The request is complete when what arrived covers what was sealed.
* **Verdict.** A request succeeds on all ranks of its instance or on none: a complete rank waits for the instance's
  leader (`instance`), and whatever fails there it only reports, because the leader may have decided already. Without
  other ranks, complete is succeeded. Then the writers are told (`Verdict`). If the leader is lost, a complete rank
  fails; whether the others have succeeded it cannot know.
* **Revoke.** Whatever fails the request, its work fails at once and every writer is told to stop. A one-sided write
  cannot be called back, so the pages stay leased, in *quarantine*, until every writer is *quiescent* or cannot reach
  them, and until this rank's own unpacking has ended. `request` shows what proves quiescence.

Invariant: a page is leased from before its grant is sent until no write under that grant can land on it any more. No
timeout ends a lease; it only fails the request.

Messages carry generations. One that comes late, again, or from a rank that is no writer of that generation, finds no
live request and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, TransferTimeout, error_kind, make_error
from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.protocol.actions import Account, Settle, Tell, Work
from torchkv.protocol.counts import SEVERAL
from torchkv.protocol.flows import RequestFlows
from torchkv.protocol.messages import (
    MAX_TEXT,
    Abort,
    Alive,
    Attest,
    Exempt,
    Grant,
    InstanceVerdict,
    Outcome,
    Post,
    Quiesced,
    Refused,
    Seal,
    pack_pages,
)
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.leases import Leases, Wanted
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.request import ReceiverRequest, Writer
from torchkv.protocol.receiving.stages import Stages
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["Receiver"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Receiver:
    """All requests that this rank receives. Not thread-safe: the caller holds a lock.

    Every method that may change something appends to ``actions``; the engine takes and performs them.
    """

    def __init__(
        self,
        group_map: GroupMap,
        *,
        timeout: float,
        grant_timeout: float,
        credits: StagingCredits,
        pools: Pools = UNGROUPED,
    ) -> None:
        """timeout, grant_timeout: of Options, in seconds. credits: who may write where in this rank's staging ring.

        pools: of this rank's pages and slots.
        """
        self._group_map = group_map
        self._credits = credits
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self._next_generation = 1
        self.requests = OpenReceives()
        self.leases = Leases(num_pages=group_map.me.num_pages, num_slots=group_map.me.num_slots, pools=pools)
        self._endings = ReceiveEndings(group_map, self.requests, self.leases, credits)
        self.actions: Final = self._endings.actions  # the parts append to the very same list
        self.counts = self._endings.counts
        self.stages = Stages(group_map, self.requests, self._endings, credits)

    # ---------------------------------------------------------------- calls of this rank's user

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
        group: str | None = None,
        absent_tokens: int = 0,
        parts: Sequence[ReceiverRequest] = (),
    ) -> ReceiverRequest:
        """Leases ``pages`` and grants them to the contributing writers among ``src``.

        pages: page ids of this rank, in order of position after the prefix. total: one deadline for everything, in
        seconds, or None. work: completed when the request succeeds or fails. group, absent_tokens, parts: see
        `ReceiverRequest`. Raises ``ProtocolError`` if the name is in use or the prefix does not fit a writer's pages,
        ``PageOutOfRange`` if a page or the slot cannot be leased; then nothing is leased or sent.
        """
        page_size = self._group_map.layout(self._group_map.rank).page_size
        writers = self._checked_writers(request, src, prefix_tokens, absent_tokens)
        self.leases.check(pages, state_slot, f"recv_pages({request!r}) on rank {self._group_map.rank}", group=group)
        req = ReceiverRequest(
            request=request,
            generation=self._next_generation,
            pages=pages,
            prefix_tokens=prefix_tokens,
            num_tokens=len(pages) * page_size,
            writers=writers,
            work=work,
            begun_at=now,
            total=total,
            state_slot=state_slot,
            group=group,
            absent_tokens=absent_tokens,
            parts=parts,
        )
        flows = self.requests.flows
        if flows is not None:
            plans = {rank: writer.plan for rank, writer in writers.items()}
            req.flow = req.reserved = flows.reserve(len(pages), plans)
        if trace.isEnabledFor(logging.DEBUG):
            trace.debug("request %r: granted to ranks %s, generation %d", request, tuple(writers), req.generation)
        self._next_generation += 1
        self.requests.add(req)
        self.leases.take(req)
        if flows is not None and req.flow is not None:
            flows.open_receive(req, self._endings.told_leader)
        granted = self._grant(req)
        if len(self._group_map.siblings) > 1 and not (granted and flows is not None and flows.posts):
            self._tell_post(req)
        for rank in self._group_map.of(request).exempt(src):
            self.actions.append(Tell(rank, Exempt(request)))
        if not writers:  # of a layer group of which this rank holds nothing: it is complete, but others may not be
            self._endings.complete_if_covered(req, now)
        return req

    def post_plain(
        self,
        request: str,
        given: Int64Array,
        pages: Int64Array,
        src: int,
        prefix_tokens: int,
        work: Work,
        now: float,
    ) -> ReceiverRequest | None:
        """`post` of pages from one writer, by the resident loop: for a verb's critical path.

        given: the page ids as the caller gave them, which are checked as they are copied to ``pages``. None, and
        nothing is done, if anything speaks against it or needs more thought.
        """
        group_map, requests, flows = self._group_map, self.requests, self.requests.flows
        ranks, me = (src,), group_map.rank
        if flows is None or requests.knows(request) or src not in group_map.info:
            return None
        if group_map.gap(ranks, me) is not None or group_map.contributing(ranks, me) != ranks:
            return None
        try:
            name = request.encode()
        except UnicodeEncodeError:
            return None
        plan = group_map.plan(src, ranks, me)
        if prefix_tokens and prefix_tokens % plan.src_page_size:
            return None
        sole = flows.sole_writer(src, plan, len(pages), name)
        if sole is None or not self.leases.try_take(given, pages, self._next_generation):
            return None
        req = ReceiverRequest(
            request=request,
            generation=self._next_generation,
            pages=pages,
            prefix_tokens=prefix_tokens,
            num_tokens=len(pages) * plan.dst_page_size,
            writers={src: Writer(plan)},
            work=work,
            begun_at=now,
            total=None,
        )
        self._next_generation += 1
        self.leases.hold(req)
        requests.add(req)
        flows.post(req, sole, name)
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
        for name, (_, _, group) in parts.items():
            absent = absent_tokens.get(group or "", 0)
            self._checked_writers(name, src, prefix_tokens + absent, absent)
        operation = f"recv_pages({request!r}) on rank {self._group_map.rank}"
        self.leases.check_together(list(parts.values()), operation)
        posted: list[ReceiverRequest] = []
        for name, (pages, slot, group) in parts.items():
            absent = absent_tokens.get(group or "", 0)
            posted.append(
                self.post(
                    name,
                    pages,
                    src,
                    prefix_tokens=prefix_tokens + absent,
                    state_slot=slot,
                    total=total,
                    work=work,
                    now=now,
                    group=group,
                    absent_tokens=absent,
                    parts=posted,
                )
            )
        if (failed := next((part for part in posted if part.error is not None), None)) is not None:
            self._endings.fail_parts(failed)  # while the others were not posted yet
        return posted

    def _checked_writers(
        self, request: str, src: tuple[int, ...], prefix_tokens: int, absent_tokens: int
    ) -> dict[int, Writer]:
        """The contributing writers among ``src``. Raises ``ProtocolError`` if `post` must not be called."""
        if request in self.requests.live:
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
        alone = len(self.requests.named(req.request)) == 1 and not req.absent_tokens  # which no record tells
        if req.flow is not None and alone and self._flows.grant(req):
            return True
        self._tell_grant(req, req.writers)
        return False

    def _tell_post(self, req: ReceiverRequest) -> None:
        page_size = self._group_map.layout(self._group_map.rank).page_size
        post = Post(req.request, req.generation, req.prefix_tokens, req.num_tokens, page_size, req.flow)
        self._endings.tell_leader(post)

    def _tell_grant(self, req: ReceiverRequest, ranks: Iterable[int], *, told_as: int | None = None) -> None:
        pages, writers = pack_pages(req.pages), list(self._group_map.own_numbers(tuple(req.writers)))
        slot, absent = req.state_slot, req.absent_tokens
        message = Grant(req.request, req.generation, req.prefix_tokens, pages, writers, slot, req.flow, absent, told_as)
        self.actions.extend(Tell(rank, message) for rank in ranks)

    def decline(self, request: str, writers: Iterable[int]) -> None:
        """Grants nothing to the next request of this name: tells its writers, and the other ranks of this instance.

        Raises ``ProtocolError`` if it was granted.
        """
        if request in self.requests.live:
            raise ProtocolError(f"refuse({request!r}): recv_pages was called for it; cancel it instead")
        error = TransferCancelled(f"request {request!r} was refused by its receiver, {self._me}")
        refused = Refused(request, error_kind(error), str(error)[:MAX_TEXT])
        self.actions.extend(Tell(rank, refused) for rank in writers)
        self.refuse(request, error)

    def refuse(self, request: str, error: KVError) -> None:
        """Tells the instance that ``recv_pages`` was refused on this rank, so that the other ranks fail now."""
        if request not in self.requests.live:
            self._endings.tell_leader(Outcome(request, 0, error_kind(error), str(error)[:MAX_TEXT]))

    def cancel(self, request: str, work: Work) -> list[Work]:
        """Fails the live request of this name.

        Returns ``work`` once for each generation of the name whose pages are still leased; the end of each completes
        one part of it.
        """
        pending: list[Work] = []
        for req in self.requests.named(request):
            self.requests.take_back(req)
            if req.ended:
                continue
            req.cancels.append(work)
            pending.append(work)
            if req.error is None:
                where = f"its receiver, {self._me}"
                self._endings.fail(req, TransferCancelled(f"request {request!r} was cancelled on {where}"))
            else:
                self._endings.end_if_quiescent(req)
        return pending

    def layer_done(self, req: ReceiverRequest, layer: int) -> bool:
        """Whether every byte of ``layer`` (a global id) is here, of all parts. Raises the request's error."""
        if not req.parts:
            return self._layer_done(req, layer)
        return all(self._layer_done(part, layer) for part in req.parts)

    def _layer_done(self, req: ReceiverRequest, layer: int) -> bool:
        if req.flow is not None:
            self._flows.look(req)
        if req.error is not None:
            raise req.error
        return req.ended or all(writer.missing((layer,), req.num_tokens) is None for writer in req.writers.values())

    # ---------------------------------------------------------------- messages, deaths and time

    def writer(self, src: int, generation: int) -> Writer | None:
        """The writer ``src`` of the live request of this generation, which Python serves from now on; None if none."""
        found = self.requests.writer(src, generation)
        return None if found is None else found[1]

    def on_attest(self, src: int, message: Attest, now: float) -> None:
        found = self.requests.writer(src, message.generation)
        if found is None:
            return
        req, writer = found
        writer.cover(message.layers, message.lo, min(message.hi, req.num_tokens), state=message.state)
        self.actions.append(Account(req.work, message.nbytes, message.path))
        self.counts.moved(src, message.path, message.nbytes)
        req.progress_at = now
        self._endings.complete_if_covered(req, now)

    def on_seal(self, src: int, message: Seal, now: float) -> None:
        found = self.requests.writer(src, message.generation)
        if found is None:
            return
        req, writer = found
        req.progress_at = now
        # A sealed writer has flushed everything and writes no more: the seal proves that it is quiescent.
        writer.sealed, writer.aux, writer.quiescent = message.num_pages, message.aux, True
        self._credits.mark_quiescent(src, req.generation, now)
        if problem := req.bad_seal(writer, self._group_map.name(src)):
            self._endings.fail(req, ProtocolError(problem))
            return
        if not self._endings.is_failed_by_aux(req):
            self._endings.complete_if_covered(req, now)

    def received(self, req: ReceiverRequest, nbytes: int, now: float) -> None:
        """The loop has seen everything arrive, and has told the writers. Their aux is known already."""
        for rank in req.writers:
            self._credits.mark_quiescent(rank, req.generation, now)
        self._count_loop(req, nbytes)
        self._endings.succeed(req, by_loop=nbytes)

    def _count_loop(self, req: ReceiverRequest, nbytes: int) -> None:
        """Counts what has arrived through the loop, which does not tell the shares of several writers."""
        self.counts.moved(next(iter(req.writers)) if len(req.writers) == 1 else SEVERAL, req.loop_path, nbytes)

    def taken_back(
        self, req: ReceiverRequest, nbytes: int, now: float, *, untold: Iterable[int] = (), unposted: bool = False
    ) -> None:
        """The request is no longer on the loop; what has arrived, and the seals, have been added to its writers.

        untold: writers that do not know of their grant, or may not. unposted: whether the instance's leader does not.
        """
        self._tell_grant(req, untold, told_as=req.reserved)
        if unposted:
            self._tell_post(req)
        trace.debug("request %r: taken back from the resident loop, generation %d", req.request, req.generation)
        self.actions.append(Account(req.work, nbytes, req.loop_path if nbytes else "none"))
        self.counts.taken_back += 1
        self._count_loop(req, nbytes)
        if nbytes:
            req.progress_at = now
        for rank, writer in req.writers.items():
            if writer.sealed is not None:
                req.progress_at = now
                self._credits.mark_quiescent(rank, req.generation, now)
        if not self._endings.is_failed_by_aux(req):
            self._endings.complete_if_covered(req, now)

    def on_abort(self, src: int, message: Abort) -> None:
        found = self.requests.writer(src, message.generation)
        if found is not None:
            self._endings.fail(found[0], make_error(message.kind, message.text))

    def on_quiesced(self, src: int, message: Quiesced, now: float) -> None:
        req = self.requests.by_generation.get(message.generation)
        if req is not None and req.error is None:
            return
        # The request may have ended already, if this writer used the ring only: its stages are still quarantined.
        self._credits.mark_quiescent(src, message.generation, now)
        if req is None or src not in req.writers:
            return
        req.writers[src].quiescent = True
        self._endings.end_if_quiescent(req)

    def promised(self, src: int, req: ReceiverRequest) -> None:
        """The resident loop of a writer has promised to write to the staging ring only."""
        if req.live and not req.writers[src].quiescent:
            self._credits.promised(src, req.generation)

    def landed(self, req: ReceiverRequest) -> None:
        """The resident loop unpacks no more into the pages of a request that has failed."""
        req.unpacking = False
        self._endings.end_if_quiescent(req)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        req = self.requests.by_generation.get(message.generation)
        if req is not None and req.error is None and src in req.writers:
            req.progress_at = now

    def on_instance_verdict(self, src: int, message: InstanceVerdict) -> None:
        req = self.requests.by_generation.get(message.generation)
        if req is None or src != self._group_map.siblings[0]:
            return
        self.requests.take_back(req)
        if not req.live:
            return
        if message.kind:
            self._endings.fail(req, make_error(message.kind, message.text), decided=True)
        elif req.complete_at is not None:
            self._endings.succeed(req)

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: requests that still need something from it fail. reason: for the message."""
        leader = self._group_map.siblings[0] if self._group_map.siblings else None
        if rank == leader:
            self._endings.leader_lost = reason
        for req in [req for req in self.requests if req.error is None]:
            writer = req.writers.get(rank)
            self.requests.take_back(req)
            if not req.live:
                continue
            undecided = rank == leader and rank != self._group_map.rank
            if undecided or (writer is not None and writer.sealed is None):
                self._endings.fail(req, PeerLost(f"request {req.request!r}: {reason}"), decided=undecided)

    def peer_found(self, rank: int) -> None:
        """``rank`` answers again."""
        if self._group_map.siblings and rank == self._group_map.siblings[0]:
            self._endings.leader_lost = ""

    def peer_dead(self, rank: int, now: float) -> None:
        """The process of ``rank`` has ended and nothing that it wrote can land here any more: it is quiescent."""
        self._credits.peer_dead(rank, now)
        for req in self.requests:
            if rank in req.writers and req.error is not None:
                req.writers[rank].quiescent = True
                self._endings.end_if_quiescent(req)

    def is_done_with(self, rank: int) -> bool:
        """Whether no request names ``rank`` as a writer, and it owns no stage."""
        return rank not in self.requests.writers() and rank not in self._credits.writers()

    def fail_all(self, error: KVError) -> None:
        """Fails every request and completes every pending call, because the group is destroyed."""
        for req in self.requests:
            self.requests.take_back(req)
            if req.live:
                mine = type(error)(f"request {req.request!r}: {error}")
                self._endings.fail(req, mine, decided=req.complete_at is not None)
            self.actions.extend(Settle(work, error) for work in req.cancels)
            req.cancels = []

    def tick(self, now: float) -> None:
        """Fails requests whose deadline has passed, and tells sealed writers of the others that they are alive.

        To be called a few times a second.
        """
        for generation, req in self.requests.by_generation.items():
            if self._credits.has_pending(generation):
                # A wait for a stage has a deadline of its own, in StagingCredits, and its denial says more than
                # "no progress".
                req.progress_at = now
            if req.flow is not None and (arrived := self._flows.arrived(req)) != req.arrived:
                req.arrived, req.progress_at = arrived, now
        self._credits.tick(now)
        for req in [req for req in self.requests if req.error is None]:
            deadline, text = req.deadline(timeout=self._timeout, grant_timeout=self._grant_timeout)
            if now >= deadline:
                self.requests.take_back(req)
                if not req.live or now < req.deadline(timeout=self._timeout, grant_timeout=self._grant_timeout)[0]:
                    continue
                waiting = [rank for rank, writer in req.writers.items() if writer.sealed is None]
                names = self._group_map
                whom = f"writer {names.names(waiting)}" if waiting else req.first_missing(names.name)
                error = TransferTimeout(
                    f"request {req.request!r}: {text}, waiting for {whom}; its pages stay leased until all "
                    f"writers are quiescent (see error.pages_safe and quarantined()); retry, or raise the limit"
                )
                self._endings.fail(req, error)
            elif now >= req.alive_told_at + self._timeout / 4:
                req.alive_told_at = now
                alive = Alive(req.generation, True)
                # Which of its writers have sealed only the loop knows; the others do not mind.
                to = [rank for rank, w in req.writers.items() if w.sealed is not None or req.flow is not None]
                self.actions.extend(Tell(rank, alive) for rank in to)

    # ---------------------------------------------------------------- inside

    @property
    def _flows(self) -> RequestFlows:
        assert self.requests.flows is not None
        return self.requests.flows

    @property
    def _me(self) -> str:
        return self._group_map.name(self._group_map.rank)
