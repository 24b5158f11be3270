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

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import (
    KVError,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    error_kind,
    make_error,
)
from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.layout.pair_plan import PairPlan, seal_matches
from torchkv.layout.pieces import Piece, PieceLayout, check_piece
from torchkv.layout.stage_format import CHUNK_UNIT, SIGNAL_STEP, ChunkFifo, Signal
from torchkv.protocol.actions import Account, Action, Scatter, Settle, Tell, Work
from torchkv.protocol.counts import SEVERAL, Counts
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
    Revoke,
    Seal,
    StageAsk,
    Staged,
    Verdict,
    Withdraw,
    pack_pages,
)
from torchkv.protocol.receiving.leases import Leases, Wanted
from torchkv.protocol.receiving.request import ReceiverRequest, Writer
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["Receiver"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`

MAX_FIFO_BYTES = 1 << 30  # bytes of one layer in a piece, and of one chunk: kernels count both in 32 bits


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
        self.flows: RequestFlows | None = None  # the requests that the resident loop serves; set by the engine
        self._group_map = group_map
        self._credits = credits
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self._told_leader = 0  # messages
        self._leader_lost = ""  # why the leader of this rank's instance does not answer; empty while it does
        self._next_generation = 1
        self._requests: dict[int, ReceiverRequest] = {}  # by generation: live, complete and revoking
        self._live: dict[str, ReceiverRequest] = {}  # by name: live and complete
        self._named: dict[str, dict[int, ReceiverRequest]] = {}  # all, by name and generation
        self.leases = Leases(num_pages=group_map.me.num_pages, num_slots=group_map.me.num_slots, pools=pools)
        self.actions: list[Action] = []
        self.counts = Counts()

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
        if self.flows is not None:
            plans = {rank: writer.plan for rank, writer in writers.items()}
            req.flow = req.reserved = self.flows.reserve(len(pages), plans)
        trace.debug("request %r: granted to ranks %s, generation %d", request, tuple(writers), self._next_generation)
        self._next_generation += 1
        self._requests[req.generation] = self._live[request] = req
        self._named.setdefault(request, {})[req.generation] = req
        self.leases.take(req)
        if req.flow is not None:
            self._flows.open_receive(req, self._told_leader)
        by_loop = self._grant(req)
        if not by_loop or not self._flows.posts:
            self._tell_post(req)
        self.actions.extend(Tell(rank, Exempt(request)) for rank in self._group_map.of(request).exempt(src))
        if not writers:  # of a layer group of which this rank holds nothing: it is complete, but others may not be
            self._complete_if_covered(req, now)
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
            self._fail_parts(failed)  # while the others were not posted yet
        return posted

    def _checked_writers(
        self, request: str, src: tuple[int, ...], prefix_tokens: int, absent_tokens: int
    ) -> dict[int, Writer]:
        """The contributing writers among ``src``. Raises ``ProtocolError`` if `post` must not be called."""
        if request in self._live:
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
        alone = len(self._named[req.request]) == 1 and not req.absent_tokens  # which no record tells
        if req.flow is not None and alone and self._flows.grant(req):
            return True
        self._tell_grant(req, req.writers)
        return False

    def _tell_post(self, req: ReceiverRequest) -> None:
        page_size = self._group_map.layout(self._group_map.rank).page_size
        self._tell_leader(Post(req.request, req.generation, req.prefix_tokens, req.num_tokens, page_size, req.flow))

    def _tell_grant(self, req: ReceiverRequest, ranks: Iterable[int]) -> None:
        pages, writers = pack_pages(req.pages), list(self._group_map.own_numbers(req.writers))
        slot, absent = req.state_slot, req.absent_tokens
        message = Grant(req.request, req.generation, req.prefix_tokens, pages, writers, slot, req.flow, absent)
        self.actions.extend(Tell(rank, message) for rank in ranks)

    def decline(self, request: str, writers: Iterable[int]) -> None:
        """Grants nothing to the next request of this name: tells its writers, and the other ranks of this instance.

        Raises ``ProtocolError`` if it was granted.
        """
        if request in self._live:
            raise ProtocolError(f"refuse({request!r}): recv_pages was called for it; cancel it instead")
        error = TransferCancelled(f"request {request!r} was refused by its receiver, {self._me}")
        refused = Refused(request, error_kind(error), str(error)[:MAX_TEXT])
        self.actions.extend(Tell(rank, refused) for rank in writers)
        self.refuse(request, error)

    def refuse(self, request: str, error: KVError) -> None:
        """Tells the instance that ``recv_pages`` was refused on this rank, so that the other ranks fail now."""
        if request not in self._live:
            self._tell_leader(Outcome(request, 0, error_kind(error), str(error)[:MAX_TEXT]))

    def cancel(self, request: str, work: Work) -> list[Work]:
        """Fails the live request of this name.

        Returns ``work`` once for each generation of the name whose pages are still leased; the end of each completes
        one part of it.
        """
        pending: list[Work] = []
        for req in list(self._named.get(request, {}).values()):
            self._take_back(req)
            if req.ended:
                continue
            req.cancels.append(work)
            pending.append(work)
            if req.error is None:
                where = f"its receiver, {self._me}"
                self._fail(req, TransferCancelled(f"request {request!r} was cancelled on {where}"))
            else:
                self._end_if_quiescent(req)
        return pending

    @property
    def requests(self) -> list[ReceiverRequest]:
        """All that have not ended, for reports."""
        return list(self._requests.values())

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
        found = self._writer(src, generation)
        return None if found is None else found[1]

    def on_attest(self, src: int, message: Attest, now: float) -> None:
        found = self._writer(src, message.generation)
        if found is None:
            return
        req, writer = found
        writer.cover(message.layers, message.lo, min(message.hi, req.num_tokens), state=message.state)
        self.actions.append(Account(req.work, message.nbytes, message.path))
        self.counts.moved(src, message.path, message.nbytes)
        req.progress_at = now
        self._complete_if_covered(req, now)

    def on_seal(self, src: int, message: Seal, now: float) -> None:
        found = self._writer(src, message.generation)
        if found is None:
            return
        req, writer = found
        req.progress_at = now
        plan = writer.plan
        # A sealed writer has flushed everything and writes no more: the seal proves that it is quiescent.
        writer.sealed, writer.aux, writer.quiescent = message.num_pages, message.aux, True
        self._credits.mark_quiescent(src, req.generation, now)
        if problem := self._bad_seal(req, src, message, plan):
            self._fail(req, ProtocolError(problem))
            return
        if not self._is_failed_by_aux(req):
            self._complete_if_covered(req, now)

    def received(self, req: ReceiverRequest, nbytes: int, now: float) -> None:
        """The loop has seen everything arrive, and has told the writers. Their aux is known already."""
        for rank in req.writers:
            self._credits.mark_quiescent(rank, req.generation, now)
        self._count_loop(req, nbytes)
        self._succeed(req, by_loop=nbytes)

    def _count_loop(self, req: ReceiverRequest, nbytes: int) -> None:
        """Counts what has arrived through the loop, which does not tell the shares of several writers."""
        self.counts.moved(next(iter(req.writers)) if len(req.writers) == 1 else SEVERAL, "direct", nbytes)

    def taken_back(
        self, req: ReceiverRequest, nbytes: int, now: float, *, untold: Iterable[int] = (), unposted: bool = False
    ) -> None:
        """The request is no longer on the loop; what has arrived, and the seals, have been added to its writers.

        untold: writers that do not know of their grant yet. unposted: whether the instance's leader does not.
        """
        self._tell_grant(req, untold)
        if unposted:
            self._tell_post(req)
        trace.debug("request %r: taken back from the resident loop, generation %d", req.request, req.generation)
        self.actions.append(Account(req.work, nbytes, "direct" if nbytes else "none"))
        self.counts.taken_back += 1
        self._count_loop(req, nbytes)
        if nbytes:
            req.progress_at = now
        for rank, writer in req.writers.items():
            if writer.sealed is not None:
                req.progress_at = now
                self._credits.mark_quiescent(rank, req.generation, now)
        if not self._is_failed_by_aux(req):
            self._complete_if_covered(req, now)

    def on_abort(self, src: int, message: Abort) -> None:
        found = self._writer(src, message.generation)
        if found is not None:
            self._fail(found[0], make_error(message.kind, message.text))

    def on_quiesced(self, src: int, message: Quiesced, now: float) -> None:
        req = self._requests.get(message.generation)
        if req is not None and req.error is None:
            return
        # The request may have ended already, if this writer used the ring only: its stages are still quarantined.
        self._credits.mark_quiescent(src, message.generation, now)
        if req is None or src not in req.writers:
            return
        req.writers[src].quiescent = True
        self._end_if_quiescent(req)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        req = self._requests.get(message.generation)
        if req is not None and req.error is None and src in req.writers:
            req.progress_at = now

    def on_instance_verdict(self, src: int, message: InstanceVerdict) -> None:
        req = self._requests.get(message.generation)
        if req is None or src != self._group_map.siblings[0]:
            return
        self._take_back(req)
        if not req.live:
            return
        if message.kind:
            self._fail(req, make_error(message.kind, message.text), decided=True)
        elif req.complete_at is not None:
            self._succeed(req)

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: requests that still need something from it fail. reason: for the message."""
        leader = self._group_map.siblings[0] if self._group_map.siblings else None
        if rank == leader:
            self._leader_lost = reason
        for req in [req for req in self._requests.values() if req.error is None]:
            writer = req.writers.get(rank)
            self._take_back(req)
            if not req.live:
                continue
            undecided = rank == leader and rank != self._group_map.rank
            if undecided or (writer is not None and writer.sealed is None):
                self._fail(req, PeerLost(f"request {req.request!r}: {reason}"), decided=undecided)

    def peer_found(self, rank: int) -> None:
        """``rank`` answers again."""
        if self._group_map.siblings and rank == self._group_map.siblings[0]:
            self._leader_lost = ""

    def peer_dead(self, rank: int, now: float) -> None:
        """The process of ``rank`` has ended and nothing that it wrote can land here any more: it is quiescent."""
        self._credits.peer_dead(rank, now)
        for req in list(self._requests.values()):
            if rank in req.writers and req.error is not None:
                req.writers[rank].quiescent = True
                self._end_if_quiescent(req)

    def is_done_with(self, rank: int) -> bool:
        """Whether no request names ``rank`` as a writer, and it owns no stage."""
        return all(rank not in req.writers for req in self._requests.values()) and rank not in self._credits.writers()

    def writers(self) -> set[int]:
        """The writers of all requests."""
        return {rank for req in self._requests.values() for rank in req.writers}

    def fail_all(self, error: KVError) -> None:
        """Fails every request and completes every pending call, because the group is destroyed."""
        for req in list(self._requests.values()):
            self._take_back(req)
            if req.live:
                self._fail(req, type(error)(f"request {req.request!r}: {error}"), decided=req.complete_at is not None)
            self.actions.extend(Settle(work, error) for work in req.cancels)
            req.cancels = []

    def tick(self, now: float) -> None:
        """Fails requests whose deadline has passed, and tells sealed writers of the others that they are alive.

        To be called a few times a second.
        """
        for generation, req in self._requests.items():
            if self._credits.has_pending(generation):
                # A wait for a stage has a deadline of its own, in StagingCredits, and its denial says more than
                # "no progress".
                req.progress_at = now
            if req.flow is not None and (arrived := self._flows.arrived(req)) != req.arrived:
                req.arrived, req.progress_at = arrived, now
        self._credits.tick(now)
        for req in [req for req in self._requests.values() if req.error is None]:
            deadline, text = self._deadline(req)
            if now >= deadline:
                self._take_back(req)
                if not req.live or now < self._deadline(req)[0]:
                    continue
                waiting = [rank for rank, writer in req.writers.items() if writer.sealed is None]
                whom = f"writer {self._group_map.names(waiting)}" if waiting else self._missing(req)
                error = TransferTimeout(
                    f"request {req.request!r}: {text}, waiting for {whom}; its pages stay leased until all "
                    f"writers are quiescent (see error.pages_safe and quarantined()); retry, or raise the limit"
                )
                self._fail(req, error)
            elif now >= req.alive_told_at + self._timeout / 4:
                req.alive_told_at = now
                alive = Alive(req.generation, True)
                # Which of its writers have sealed only the loop knows; the others do not mind.
                to = [rank for rank, w in req.writers.items() if w.sealed is not None or req.flow is not None]
                self.actions.extend(Tell(rank, alive) for rank in to)

    # ---------------------------------------------------------------- the staging ring

    def on_stage_ask(self, src: int, message: StageAsk, now: float) -> None:
        """Raises ``ProtocolError`` for an ask that breaks the protocol."""
        found = self._writer(src, message.generation)
        if found is not None and not found[1].quiescent:
            self._credits.ask(src, message, now)
            found[0].progress_at = now

    def on_withdraw(self, src: int, message: Withdraw) -> None:
        # Of a failed request the pages may be free already, because the writer promised to use the ring only. Then
        # the withdrawal is never confirmed, and the writer does not write to pages.
        if self._writer(src, message.generation) is not None:
            self._credits.withdraw(src, message)

    def on_staged(self, src: int, message: Staged, now: float) -> None:
        """A stage is written, or a FIFO: asks for it to be unpacked, or takes it back if it is unused."""
        owner = src, message.generation, message.serial
        found = self._writer(src, message.generation)
        if found is None or (taken := self._take_stage(owner, fifo=message.chunk != 0)) is None:
            return
        (req, writer), (stage, signal) = found, taken
        req.progress_at = now
        if message.num_pages == 0:
            self._credits.release(*owner, now, written=signal is None)
            return
        piece = Piece(tuple(message.layers), message.start, message.num_pages)
        plan, pages, num_tokens = writer.plan, req.pages, req.num_tokens
        if message.state:
            assert plan.state is not None
            plan, pages, num_tokens = plan.state, np.array([req.state_slot or 0], dtype=np.int64), 1
        try:
            layout = check_piece(plan, piece, limit_tokens=num_tokens, checksum=message.checked)
            fifo = _fifo_of(message, stage, layout, most=self._group_map.me.channels)
        except ProtocolError as error:
            self._credits.release(*owner, now, written=signal is None)
            self._fail(req, ProtocolError(f"request {req.request!r}: {self._group_map.name(src)} wrote {error}"))
            return
        job = Scatter(
            request=req.request,
            src=src,
            generation=req.generation,
            serial=message.serial,
            stage=stage,
            piece=piece,
            layout=layout,
            plan=plan,
            pages=pages,
            num_tokens=num_tokens,
            checked=message.checked,
            state=message.state,
            signal=signal,
            fifo=fifo,
            written=signal is None,
        )
        req.scattering.add(job)
        self.actions.append(job)

    def _take_stage(self, owner: tuple[int, int, int], *, fifo: bool) -> tuple[Stage, Signal | None] | None:
        """The stage of (writer, generation, serial), and its signal if it is a FIFO; None if not granted as such."""
        if fifo:
            return self._credits.mark_fifo(*owner)
        stage = self._credits.mark_written(*owner)
        return None if stage is None else (stage, None)

    def scattered(self, job: Scatter, error: KVError | None, now: float) -> None:
        """``job`` has ended and writes no more: the bytes are in the pages, or it failed, or it was stopped."""
        req = self._requests[job.generation]
        req.scattering.discard(job)
        self._credits.release(job.src, job.generation, job.serial, now, written=job.written)
        if req.error is not None:
            self._end_if_quiescent(req)
            return
        if error is not None:
            self._fail(req, error)
            return
        page_size = job.plan.src_page_size
        lo, hi = job.piece.start * page_size, (job.piece.start + job.piece.num_pages) * page_size
        req.writers[job.src].cover(job.piece.layers, lo, min(hi, req.num_tokens), state=job.state)
        self.actions.append(Account(req.work, job.layout.payload, "staged"))
        self.counts.moved(job.src, "staged", job.layout.payload)
        req.progress_at = now
        self._complete_if_covered(req, now)

    # ---------------------------------------------------------------- inside

    def _writer(self, src: int, generation: int) -> tuple[ReceiverRequest, Writer] | None:
        """The request of this generation and its writer ``src``; None unless it is live and ``src`` writes to it."""
        req = self._requests.get(generation)
        if req is None or src not in req.writers:
            return None
        self._take_back(req)
        if req.error is not None or self._requests.get(generation) is not req:
            return None
        return req, req.writers[src]

    @property
    def _flows(self) -> RequestFlows:
        assert self.flows is not None
        return self.flows

    def _take_back(self, req: ReceiverRequest) -> None:
        """Takes the request back from the resident loop, if it is there. It may have ended meanwhile, or failed."""
        if req.flow is not None:
            self._flows.take_back_receive(req)

    def _bad_seal(self, req: ReceiverRequest, src: int, seal: Seal, plan: PairPlan) -> str | None:
        """Why the seal does not match the grant, or None if it does."""
        granted = len(req.pages)
        if seal.num_pages == 0:
            owes = any(owed for _, owed in plan.owed(req.num_tokens))
        else:
            owes = not seal_matches(seal.num_pages, plan.src_page_size, granted, plan.dst_page_size)
        if not owes:
            return None
        return (
            f"request {req.request!r}: {self._group_map.name(src)} sealed {seal.num_pages} pages of "
            f"{plan.src_page_size} tokens, "
            f"but {granted} pages of {plan.dst_page_size} tokens are granted behind a prefix of "
            f"{req.prefix_tokens} tokens; send exactly the pages after the prefix"
        )

    def _complete_if_covered(self, req: ReceiverRequest, now: float) -> None:
        if req.complete_at is not None:
            return
        for writer in req.writers.values():
            if writer.sealed is None:
                return
        # Also if everything is here already: bytes that were sent twice must not be unpacked into pages that are free.
        if req.scattering:
            return
        for writer in req.writers.values():
            if writer.missing(None, req.num_tokens):
                return
        req.complete_at = now
        trace.debug("request %r: covered, generation %d", req.request, req.generation)
        if self._leader_lost:  # nobody will decide
            self._fail(req, PeerLost(f"request {req.request!r}: {self._leader_lost}"), decided=True)
        elif len(self._group_map.siblings) > 1:
            self._tell_leader(Outcome(req.request, req.generation, "", ""))
        else:
            self._succeed(req)

    def _is_failed_by_aux(self, req: ReceiverRequest) -> bool:
        """Fails the request if two writers sent unlike aux."""
        if len({writer.aux for writer in req.writers.values() if writer.aux}) < 2:
            return False
        text = f"request {req.request!r}: two writers sent unlike aux bytes; pass aux on one of them only"
        self._fail(req, ProtocolError(text))
        return True

    def _succeed(self, req: ReceiverRequest, *, by_loop: int | None = None) -> None:
        """by_loop: the bytes, if the loop has served the request to its end, and told the writers."""
        trace.debug("request %r: verdict: success, generation %d", req.request, req.generation)
        if by_loop is None:
            verdict = Verdict(req.generation)
            self.actions.extend(Tell(rank, verdict) for rank in req.writers)
        self.counts.ended(None)
        self._end(req)
        self.actions.append(Settle(req.work, aux=req.aux, nbytes=by_loop or 0, path="direct" if by_loop else "none"))

    def _fail(self, req: ReceiverRequest, error: KVError, *, decided: bool = False) -> None:
        """Fails the request. A complete one of an instance is its leader's to decide, and this rank only asks.

        decided: the leader has decided, or nobody will.
        """
        assert req.error is None
        alone = len(self._group_map.siblings) == 1
        kind, text = error_kind(error), str(error)[:MAX_TEXT]
        if req.complete_at is not None and not decided and not alone:
            if not req.asked:
                req.asked = True
                self._tell_leader(Outcome(req.request, req.generation, kind, text))
            return
        error._pages_safe = lambda: req.all_ended
        req.error = error
        self.counts.ended(error)
        trace.debug("request %r: failed, generation %d: %s", req.request, req.generation, error)
        for job in req.scattering:
            job.stopped = True
        del self._live[req.request]
        for rank, writer in req.writers.items():
            writer.ring_only = self._credits.is_ring_only(rank, req.generation)
        self._credits.revoke(req.generation)
        self.actions.append(Settle(req.work, error))
        self.actions.extend(Tell(rank, Revoke(req.generation, kind, text)) for rank in req.writers)
        if not decided:
            self._tell_leader(Outcome(req.request, req.generation, kind, text))
        self._end_if_quiescent(req)
        if req.parts:
            self._fail_parts(req)

    def _fail_parts(self, failed: ReceiverRequest) -> None:
        """One part of a request of several layer groups has failed: so do all others."""
        for part in failed.parts:
            if part.live:
                self._take_back(part)
            if part.live and failed.error is not None:
                self._fail(part, type(failed.error)(str(failed.error)))

    def _tell_leader(self, message: Post | Outcome) -> None:
        """Tells the leader of this rank's instance, if it has other ranks."""
        if len(self._group_map.siblings) > 1:
            self._told_leader += 1
            self.actions.append(Tell(self._group_map.siblings[0], message))

    def _end_if_quiescent(self, req: ReceiverRequest) -> None:
        if req.error is not None and not req.pending_writers() and not req.scattering:
            self._end(req)

    def _end(self, req: ReceiverRequest) -> None:
        assert req.flow is None
        req.ended = True
        if not req.parts:
            self.leases.free(req)
        elif req.all_ended:  # also the parts that ended before, whose pages are the same caller's
            for part in req.parts:
                self.leases.free(part)
        if req.reserved is not None and self.flows is not None:
            self.flows.free_receive(req.reserved)
        del self._requests[req.generation]
        named = self._named[req.request]
        del named[req.generation]
        if not named:
            del self._named[req.request]
        if self._live.get(req.request) is req:
            del self._live[req.request]
        for work in req.cancels:
            self.actions.append(Settle(work))
        req.cancels = []

    @property
    def _me(self) -> str:
        return self._group_map.name(self._group_map.rank)

    def _missing(self, req: ReceiverRequest) -> str:
        """Names what has not arrived, for the message of a request whose writers have all sealed."""
        for rank, writer in req.writers.items():
            if missing := writer.missing(None, req.num_tokens):
                return f"{missing} from {self._group_map.name(rank)}"
        return f"{len(req.scattering)} stages to be unpacked"

    def _deadline(self, req: ReceiverRequest) -> tuple[float, str]:
        """When ``req`` fails unless something happens, and the words for the error."""
        if req.complete_at is not None:
            # Only the leader times out complete ranks: one of them must not fail while it declares success.
            return float("inf"), ""
        if req.total is not None:
            return req.begun_at + req.total, f"not complete within recv_pages(timeout={req.total:g})"
        progress_at = req.progress_at
        if req.parts:  # a layer group may be sent after the others
            moved = [part.progress_at for part in req.parts if part.progress_at is not None]
            progress_at = max(moved, default=None)
        if progress_at is None:
            text = f"no byte and no seal within {self._grant_timeout:g} s (Options.grant_timeout)"
            return req.begun_at + self._grant_timeout, text
        return progress_at + self._timeout, f"no progress for {self._timeout:g} s (Options.timeout)"


def _fifo_of(message: Staged, stage: Stage, layout: PieceLayout, *, most: int) -> ChunkFifo | None:
    """The FIFO that the piece passes through, or None if the stage holds it whole.

    most: FIFO channels that this rank serves, each by one block of a kernel. Raises ``ProtocolError`` for a piece that
    is larger than its stage, and for a FIFO that does not fit.
    """
    if not message.chunk:
        if layout.nbytes > stage.nbytes:
            raise ProtocolError(f"a piece of {layout.nbytes} bytes into a stage of {stage.nbytes}")
        return None
    fifo = ChunkFifo(message.chunk, message.channels)
    if message.checked:
        raise ProtocolError(f"{fifo} with checksums")
    if fifo.chunk % CHUNK_UNIT or not 1 <= fifo.channels <= most or fifo.nbytes > stage.nbytes:
        raise ProtocolError(f"{fifo} through a stage of {stage.nbytes} bytes, where at most {most} channels are served")
    if fifo.chunk > MAX_FIFO_BYTES or any(each.layer_nbytes > MAX_FIFO_BYTES for each in layout.sections):
        raise ProtocolError(f"{fifo} for layers of more than {MAX_FIFO_BYTES} bytes")
    if sum(len(each.layers) * fifo.chunks(each.layer_nbytes) for each in layout.sections) >= SIGNAL_STEP:
        raise ProtocolError(f"{fifo} for {layout.nbytes} bytes, more than a signal can count")
    return fifo
