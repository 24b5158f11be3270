"""The receiving side: grants, leases, coverage, and revocation up to quiescence.

    LIVE --all writers sealed and covered--> COMPLETE --instance verdict--> succeeded (leases end)
      \\                                        \\
       +--------- failure or cancel -------------+--> REVOKING --every writer quiescent--> ended (leases end)

The call fails at once; its pages stay leased until no write can land on them any more.
"""

from __future__ import annotations

import numpy as np

from torchkv.errors import (
    KVError,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    error_kind,
    make_error,
)
from torchkv.pieces import Piece, PieceLayout, check_piece
from torchkv.plan import PairPlan, seal_matches
from torchkv.protocol.actions import Account, Action, Scatter, Settle, Tell, Ticket
from torchkv.protocol.leases import Leases
from torchkv.protocol.receive import Receive, Writer
from torchkv.protocol.stagekeeper import StageKeeper
from torchkv.roster import Roster
from torchkv.staging import CHUNK_UNIT, SIGNAL_STEP, Signal, Stage, Stream
from torchkv.transport import Int64Array
from torchkv.wire import (
    MAX_TEXT,
    Abort,
    Alive,
    Attest,
    Grant,
    InstanceVerdict,
    Outcome,
    Post,
    Quiesced,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    Verdict,
    Withdraw,
    pack_pages,
)

__all__ = ["Receiver"]

MAX_STREAMED = 1 << 30  # bytes of a layer in one piece, and of a chunk: what kernels count in 32 bits


class Receiver:
    """All receives of this rank. Not thread-safe: the caller serialises. See `Sender` for ``actions``."""

    def __init__(self, roster: Roster, *, timeout: float, grant_timeout: float, keeper: StageKeeper) -> None:
        """keeper: of this rank's staging ring."""
        self._roster = roster
        self._keeper = keeper
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self._next_generation = 1
        self._receives: dict[int, Receive] = {}  # by generation: live and revoking
        self._live: dict[str, Receive] = {}
        self.leases = Leases(num_pages=roster.me.num_pages, num_slots=roster.me.num_slots)
        self.actions: list[Action] = []

    # ---------------------------------------------------------------- the caller's calls

    def post(
        self,
        request: str,
        pages: Int64Array,
        src: tuple[int, ...],
        *,
        prefix_tokens: int,
        state_slot: int | None = None,
        total: float | None,
        ticket: Ticket,
        now: float,
    ) -> Receive:
        """Grants ``pages`` to the contributing writers among ``src``. Raises with nothing leased or sent."""
        if request in self._live:
            raise ProtocolError(
                f"recv_pages({request!r}): this request is being received already on rank {self._roster.rank}; "
                f"wait for it or cancel({request!r}) first"
            )
        page_size = self._roster.layout(self._roster.rank).page_size
        self.leases.check(pages, state_slot, f"recv_pages({request!r}) on rank {self._roster.rank}")
        names = self._roster.contributing(src, self._roster.rank)
        writers: dict[int, Writer] = {}
        for rank in names:
            plan = self._roster.plan(rank, names, self._roster.rank)
            if prefix_tokens % plan.src_page_size:
                raise ProtocolError(
                    f"recv_pages({request!r}): prefix_tokens={prefix_tokens} is not a multiple of the page size "
                    f"{plan.src_page_size} of writer rank {rank}; round it down to one"
                )
            writers[rank] = Writer(plan)
        receive = Receive(
            request=request,
            generation=self._next_generation,
            pages=pages,
            prefix_tokens=prefix_tokens,
            num_tokens=len(pages) * page_size,
            writers=writers,
            ticket=ticket,
            born=now,
            total=total,
            state_slot=state_slot,
        )
        self._next_generation += 1
        self._receives[receive.generation] = self._live[request] = receive
        self.leases.take(receive)
        grant = Grant(request, receive.generation, prefix_tokens, pack_pages(pages), list(names), state_slot)
        for rank in names:
            self.actions.append(Tell(rank, grant))
        if len(self._roster.siblings) > 1:
            post = Post(request, receive.generation, prefix_tokens, receive.num_tokens, page_size)
            self.actions.append(Tell(self._roster.siblings[0], post))
        return receive

    def refuse(self, request: str, error: KVError) -> None:
        """``recv_pages`` was refused on this rank: the other ranks of the instance need not wait for it."""
        if request not in self._live and len(self._roster.siblings) > 1:
            outcome = Outcome(request, 0, error_kind(error), str(error)[:MAX_TEXT])
            self.actions.append(Tell(self._roster.siblings[0], outcome))

    def cancel(self, request: str, ticket: Ticket) -> list[Ticket]:
        """Fails the live receive of ``request``. Returns ``ticket`` once per receive whose end will settle it."""
        pending: list[Ticket] = []
        for receive in [receive for receive in self._receives.values() if receive.request == request]:
            receive.cancels.append(ticket)
            pending.append(ticket)
            if receive.error is None:
                where = f"its receiver, rank {self._roster.rank}"
                self._fail(receive, TransferCancelled(f"request {request!r} was cancelled on {where}"))
            else:
                self._end_if_quiescent(receive)
        return pending

    def layer_done(self, receive: Receive, layer: int) -> bool:
        """Whether every byte of ``layer`` is here. Raises the receive's error."""
        if receive.error is not None:
            raise receive.error
        return receive.ended or all(
            writer.missing((layer,), receive.num_tokens) is None for writer in receive.writers.values()
        )

    # ---------------------------------------------------------------- what peers say

    def on_attest(self, src: int, message: Attest, now: float) -> None:
        found = self._writer(src, message.generation)
        if found is None:
            return
        receive, writer = found
        writer.cover(message.layers, message.lo, min(message.hi, receive.num_tokens), state=message.state)
        self.actions.append(Account(receive.ticket, message.nbytes, message.path))
        receive.heard = now
        self._complete_if_covered(receive, now)

    def on_seal(self, src: int, message: Seal, now: float) -> None:
        found = self._writer(src, message.generation)
        if found is None:
            return
        receive, writer = found
        receive.heard = now
        plan = writer.plan
        # A sealed writer has flushed everything and writes no more, so its word is also its quiescence.
        writer.sealed, writer.aux, writer.quiescent = message.num_pages, message.aux, True
        self._keeper.quiescent(src, receive.generation, now)
        if problem := self._bad_seal(receive, src, message, plan):
            self._fail(receive, ProtocolError(problem))
            return
        if message.aux and len({w.aux for w in receive.writers.values() if w.aux}) > 1:
            error = f"request {receive.request!r}: two writers sent unlike aux bytes; let one of them send it"
            self._fail(receive, ProtocolError(error))
            return
        self._complete_if_covered(receive, now)

    def on_abort(self, src: int, message: Abort) -> None:
        found = self._writer(src, message.generation)
        if found is not None:
            self._fail(found[0], make_error(message.kind, message.text))

    def on_quiesced(self, src: int, message: Quiesced, now: float) -> None:
        receive = self._receives.get(message.generation)
        if receive is not None and receive.error is None:
            return
        self._keeper.quiescent(src, message.generation, now)  # also where the pages are free already
        if receive is None or src not in receive.writers:
            return
        receive.writers[src].quiescent = True
        self._end_if_quiescent(receive)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        found = self._writer(src, message.generation)
        if found is not None:
            found[0].heard = now

    def on_instance_verdict(self, src: int, message: InstanceVerdict) -> None:
        receive = self._receives.get(message.generation)
        if receive is None or receive.error is not None or src != self._roster.siblings[0]:
            return
        if message.kind:
            self._fail(receive, make_error(message.kind, message.text), tell_instance=False)
        elif receive.complete_at is not None:
            self._succeed(receive)

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: receives that still need something from it fail."""
        leader = self._roster.siblings[0] if self._roster.siblings else None
        for receive in [receive for receive in self._receives.values() if receive.error is None]:
            writer = receive.writers.get(rank)
            if (writer is not None and writer.sealed is None) or (rank == leader and rank != self._roster.rank):
                self._fail(receive, PeerLost(f"request {receive.request!r}: {reason}"))

    def peer_dead(self, rank: int, now: float) -> None:
        """The process of ``rank`` has ended and nothing that it wrote can land here any more."""
        self._keeper.gone(rank, now)
        for receive in list(self._receives.values()):
            if rank in receive.writers and receive.error is not None:
                receive.writers[rank].quiescent = True
                self._end_if_quiescent(receive)

    def abandon(self, error: KVError) -> None:
        """The group goes away: every pending call ends now."""
        for receive in list(self._receives.values()):
            if receive.error is None:
                self._fail(receive, type(error)(f"request {receive.request!r}: {error}"))
            self.actions.extend(Settle(ticket, error) for ticket in receive.cancels)
            receive.cancels = []

    def tick(self, now: float) -> None:
        """Deadlines and signs of life; call a few times a second."""
        for generation, receive in self._receives.items():
            if self._keeper.waiting(generation):
                receive.heard = now  # the ring keeps that time, and its denial says more than a deadline would
        self._keeper.tick(now)
        for receive in [receive for receive in self._receives.values() if receive.error is None]:
            deadline, text = self._deadline(receive)
            if now >= deadline:
                waiting = [rank for rank, writer in receive.writers.items() if writer.sealed is None]
                whom = f"writer ranks {waiting}" if waiting else self._missing(receive)
                error = TransferTimeout(
                    f"request {receive.request!r}: {text}, waiting for {whom}; its pages stay leased until all "
                    f"writers are quiescent (see error.pages_safe and quarantined()); retry, or raise the limit"
                )
                self._fail(receive, error)
            elif now >= receive.told_alive + self._timeout / 4:
                receive.told_alive = now
                alive = Alive(receive.generation, True)
                self.actions.extend(Tell(rank, alive) for rank, w in receive.writers.items() if w.sealed is not None)

    # ---------------------------------------------------------------- the staging ring

    def on_stage_ask(self, src: int, message: StageAsk, now: float) -> None:
        """Raises ``ProtocolError`` for what no honest writer asks."""
        found = self._writer(src, message.generation)
        if found is not None and not found[1].quiescent:
            self._keeper.ask(src, message, now)
            found[0].heard = now

    def on_withdraw(self, src: int, message: Withdraw) -> None:
        # A failed receive may have given its pages back on the strength of that promise: then it is kept to it.
        if self._writer(src, message.generation) is not None:
            self._keeper.withdraw(src, message)

    def on_staged(self, src: int, message: Staged, now: float) -> None:
        """A stage is written, or about to be: has it unpacked, or takes it back."""
        owner = src, message.generation, message.serial
        found = self._writer(src, message.generation)
        if found is None or (taken := self._take_stage(owner, early=message.early)) is None:
            return
        (receive, writer), (stage, signal) = found, taken
        receive.heard = now
        if message.num_pages == 0:
            self._keeper.release(*owner, now, written=signal is None)
            return
        piece = Piece(tuple(message.layers), message.start, message.num_pages)
        plan, pages, num_tokens = writer.plan, receive.pages, receive.num_tokens
        if message.state:
            assert plan.state is not None
            plan, pages, num_tokens = plan.state, np.array([receive.state_slot or 0], dtype=np.int64), 1
        try:
            layout = check_piece(plan, piece, limit_tokens=num_tokens, checksum=message.checked)
            stream = _stream_of(message, stage, layout, most=self._roster.me.channels)
        except ProtocolError as error:
            self._keeper.release(*owner, now, written=signal is None)
            self._fail(receive, ProtocolError(f"request {receive.request!r}: rank {src} wrote {error}"))
            return
        job = Scatter(
            request=receive.request,
            src=src,
            generation=receive.generation,
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
            stream=stream,
            written=signal is None,
        )
        receive.scattering.add(job)
        self.actions.append(job)

    def _take_stage(self, owner: tuple[int, int, int], *, early: bool) -> tuple[Stage, Signal | None] | None:
        if early:
            return self._keeper.promise(*owner)
        stage = self._keeper.fill(*owner)
        return None if stage is None else (stage, None)

    def scattered(self, job: Scatter, error: KVError | None, now: float) -> None:
        """Nothing of ``job`` writes any more: its bytes are in the pages, or it failed, or it was not wanted."""
        receive = self._receives[job.generation]
        receive.scattering.discard(job)
        self._keeper.release(job.src, job.generation, job.serial, now, written=job.written)
        if receive.error is not None:
            self._end_if_quiescent(receive)
            return
        if error is not None:
            self._fail(receive, error)
            return
        page_size = job.plan.src_page_size
        lo, hi = job.piece.start * page_size, (job.piece.start + job.piece.num_pages) * page_size
        receive.writers[job.src].cover(job.piece.layers, lo, min(hi, receive.num_tokens), state=job.state)
        self.actions.append(Account(receive.ticket, job.layout.payload, "staged"))
        receive.heard = now
        self._complete_if_covered(receive, now)

    # ---------------------------------------------------------------- inside

    def _writer(self, src: int, generation: int) -> tuple[Receive, Writer] | None:
        """The live receive that ``src`` writes to, or None: late and foreign messages change nothing."""
        receive = self._receives.get(generation)
        if receive is None or receive.error is not None or src not in receive.writers:
            return None
        return receive, receive.writers[src]

    def _bad_seal(self, receive: Receive, src: int, seal: Seal, plan: PairPlan) -> str | None:
        granted = len(receive.pages)
        if seal.num_pages == 0:
            owes = any(owed for _, owed in plan.owed(receive.num_tokens))
        else:
            owes = not seal_matches(seal.num_pages, plan.src_page_size, granted, plan.dst_page_size)
        if not owes:
            return None
        return (
            f"request {receive.request!r}: rank {src} sealed {seal.num_pages} pages of {plan.src_page_size} tokens, "
            f"but {granted} pages of {plan.dst_page_size} tokens are granted behind a prefix of "
            f"{receive.prefix_tokens} tokens; send exactly the pages after the prefix"
        )

    def _complete_if_covered(self, receive: Receive, now: float) -> None:
        if receive.complete_at is not None:
            return
        for writer in receive.writers.values():
            if writer.sealed is None:
                return
        if receive.scattering:  # also of bytes that came twice: they must not land on pages that have been given back
            return
        for writer in receive.writers.values():
            if writer.missing(None, receive.num_tokens):
                return
        receive.complete_at = now
        if len(self._roster.siblings) > 1:
            outcome = Outcome(receive.request, receive.generation, "", "")
            self.actions.append(Tell(self._roster.siblings[0], outcome))
        else:
            self._succeed(receive)

    def _succeed(self, receive: Receive) -> None:
        verdict = Verdict(receive.generation)
        for rank in receive.writers:
            self.actions.append(Tell(rank, verdict))
        self._end(receive)
        self.actions.append(Settle(receive.ticket, aux=receive.aux))

    def _fail(self, receive: Receive, error: KVError, *, tell_instance: bool = True) -> None:
        assert receive.error is None
        error._pages_safe = lambda: receive.ended
        receive.error = error
        for job in receive.scattering:
            job.stopped = True
        del self._live[receive.request]
        for rank, writer in receive.writers.items():
            writer.confined = self._keeper.promised(rank, receive.generation)
        self._keeper.revoke(receive.generation)
        kind, text = error_kind(error), str(error)[:MAX_TEXT]
        self.actions.append(Settle(receive.ticket, error))
        self.actions.extend(Tell(rank, Revoke(receive.generation, kind, text)) for rank in receive.writers)
        if tell_instance and len(self._roster.siblings) > 1:
            outcome = Outcome(receive.request, receive.generation, kind, text)
            self.actions.append(Tell(self._roster.siblings[0], outcome))
        self._end_if_quiescent(receive)

    def _end_if_quiescent(self, receive: Receive) -> None:
        if receive.error is not None and not receive.pending_writers() and not receive.scattering:
            self._end(receive)

    def _end(self, receive: Receive) -> None:
        receive.ended = True
        self.leases.free(receive)
        del self._receives[receive.generation]
        if self._live.get(receive.request) is receive:
            del self._live[receive.request]
        for ticket in receive.cancels:
            self.actions.append(Settle(ticket))
        receive.cancels = []

    def _missing(self, receive: Receive) -> str:
        """What has not arrived though every writer has sealed, in words."""
        for rank, writer in receive.writers.items():
            if what := writer.missing(None, receive.num_tokens):
                return f"{what} from rank {rank}"
        return f"{len(receive.scattering)} stages to be unpacked"

    def _deadline(self, receive: Receive) -> tuple[float, str]:
        if receive.complete_at is not None:
            return float("inf"), ""  # the leader of the instance keeps the time, one for all
        if receive.total is not None:
            return receive.born + receive.total, f"not complete within recv_pages(timeout={receive.total:g})"
        if receive.heard is None:
            text = f"no byte and no seal within {self._grant_timeout:g} s (Options.grant_timeout)"
            return receive.born + self._grant_timeout, text
        return receive.heard + self._timeout, f"no progress for {self._timeout:g} s (Options.timeout)"


def _stream_of(message: Staged, stage: Stage, layout: PieceLayout, *, most: int) -> Stream | None:
    """How the piece passes through its stage, if it does. Raises ``ProtocolError`` if it cannot, or does not fit.

    most: channels that this rank serves, each a block of its GPU's kernels.
    """
    if not message.chunk:
        if layout.nbytes > stage.nbytes:
            raise ProtocolError(f"a stage of {stage.nbytes} bytes said to hold {layout.nbytes}")
        return None
    stream = Stream(message.chunk, message.channels)
    if not message.early or message.checked:
        raise ProtocolError(f"{stream} through a stage without its signal, or with checksums")
    if stream.chunk % CHUNK_UNIT or not 1 <= stream.channels <= most or stream.nbytes > stage.nbytes:
        raise ProtocolError(
            f"{stream} through a stage of {stage.nbytes} bytes, where at most {most} channels are served"
        )
    if stream.chunk > MAX_STREAMED or any(each.layer_nbytes > MAX_STREAMED for each in layout.segments):
        raise ProtocolError(f"{stream} for layers of more than {MAX_STREAMED} bytes")
    if sum(len(each.layers) * stream.chunks(each.layer_nbytes) for each in layout.segments) >= SIGNAL_STEP:
        raise ProtocolError(f"{stream} for {layout.nbytes} bytes, more than a signal can count")
    return stream
