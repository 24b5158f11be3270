"""The sending side: the lives of (request, destination), from their first verb to the receiver's verdict.

    no life --verb--> WAITING --grant--> BOUND --finish, all flushed--> SEALED --verdict--> ended
                         \\                 \\                              \\
                          +-----------------+--- failure or cancel --------+--> TOMBSTONE --cancel, drained--> ended

A tombstone answers every verb with the error that made it, until the caller cancels. A life whose grant was revoked
before its first verb does not wait long for another one, which comes only if its receiver uses the name again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torchkv.errors import (
    KVError,
    PageOutOfRange,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    error_kind,
    make_error,
)
from torchkv.plan import PairPlan, largest_grant, seal_matches
from torchkv.protocol.actions import Account, Action, BoundGrant, Halt, SendOp, Settle, Start, Tell, Ticket
from torchkv.protocol.coverage import LayerCoverage
from torchkv.protocol.life import (
    Finish,
    Life,
    check_grant,
    check_prefix,
    check_prefixes,
    check_range,
    check_slot,
    extent,
)
from torchkv.protocol.stageclient import StageClient
from torchkv.roster import Roster
from torchkv.wire import MAX_TEXT, Abort, Alive, Attest, Grant, Quiesced, Revoke, Seal, Verdict, unpack_pages

__all__ = ["Sender"]

MAX_QUEUED_OPS = 8192  # per life, before its grant
MAX_QUEUED_PAGES = 1 << 22  # per rank, before their grants
MAX_REMEMBERED = 4096  # of lives that ended before their grant, and of grants that ended before their life


class Sender:
    """All lives of this rank's sends. Not thread-safe: the caller serialises.

    Every method that may change something appends to ``actions``; the driver takes and performs them.
    """

    def __init__(self, roster: Roster, *, timeout: float, grant_timeout: float, stages: StageClient) -> None:
        """stages: what this rank asks of receivers' staging rings."""
        self._roster = roster
        self._stages = stages
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self._lives: dict[tuple[str, int], Life] = {}
        self._by_generation: dict[tuple[int, int], Life] = {}
        self._unbound: dict[tuple[str, int], BoundGrant] = {}  # grants that wait for a life
        self._stillborn: dict[tuple[str, int], tuple[float, KVError]] = {}  # revoked grants without a life: when, why
        self._refusals: dict[tuple[str, int], deque[float]] = {}  # lives cancelled before their grant: until when
        self._tainted: set[tuple[int, int]] = set()  # ended generations that can never be called quiescent
        self._queued_pages = 0
        self.actions: list[Action] = []

    # ---------------------------------------------------------------- the caller's verbs

    def admit(self, request: str, dst: int, start: int, num_pages: int, *, state: bool = False) -> None:
        """Raises unless ``submit`` of such an op would be accepted now. Changes nothing."""
        life = self._lives.get((request, dst))
        if life is None:
            grant = self._unbound.get((request, dst))
        else:
            life.check_open()
            grant = life.grant
        if grant is not None:
            if not state:
                check_range(grant, start, num_pages)
        elif life is not None and len(life.queue) >= MAX_QUEUED_OPS:
            raise ProtocolError(
                f"request {request!r} to rank {dst}: {len(life.queue)} transfers wait for its grant, the limit; "
                f"try again once rank {dst} has posted recv_pages",
                retryable=True,
            )
        if grant is None and self._queued_pages + num_pages > MAX_QUEUED_PAGES:
            raise ProtocolError(
                f"request {request!r} to rank {dst}: {self._queued_pages} pages wait for grants on this rank, "
                f"the limit is {MAX_QUEUED_PAGES}; try again once some receiver has posted",
                retryable=True,
            )

    def begin(self, request: str, dst: int, now: float) -> None:
        """Begins the life, if there is none, and binds it to its grant, if that is here. Raises a tombstone's error."""
        life = self._life(request, dst, now)
        if life.error is not None:
            raise life.error

    def check_prefixes(self, request: str, dsts: Iterable[int]) -> None:
        """One verb towards several receivers means one suffix: the prefixes known so far must be equal."""
        known = {dst: grant.prefix_tokens for dst in dsts if (grant := self._grant_of(request, dst)) is not None}
        check_prefixes(request, known)

    def submit(self, op: SendOp, now: float) -> None:
        """Queues or starts ``op``, which ``admit`` has accepted under the same lock."""
        life = self._life(op.request, op.dst, now)
        life.add_given(op)
        if life.grant is None:
            life.queue.append(op)
            self._queued_pages += op.num_pages
        else:
            if not op.state:
                check_prefix(op, life.grant)
            self._start(life, op, life.grant)

    def state_left(self, request: str, dst: int) -> tuple[int, ...]:
        """Layers whose state this rank holds and has not given."""
        life = self._lives.get((request, dst))
        layout = self._roster.layout(self._roster.rank)
        held = {layer for state in layout.states for layer in layout.state_layers(state.name)}
        return tuple(sorted(held if life is None else held - life.states))

    def check_finish(self, request: str, dst: int, *, state_slot: int | None = None) -> None:
        """Raises unless ``finish`` would be accepted now. Changes nothing. state_slot: what it sends state from."""
        life = self._lives.get((request, dst))
        if life is not None:
            life.check_open()
        grant = self._grant_of(request, dst)
        problem = self._pages_missing(request, dst, life, grant)
        if problem is None and state_slot is None:
            problem = self._state_missing(request, dst, grant)
        if problem is not None:
            raise ProtocolError(f"finish({request!r}) to rank {dst}: {problem}")

    def finish(self, request: str, dst: int, *, aux: bytes, ticket: Ticket, now: float) -> None:
        """Seals the life as soon as all its transfers are flushed. ``check_finish`` has accepted it."""
        life = self._life(request, dst, now)
        life.finish = Finish(ticket, aux)
        self._seal_if_done(life, now)

    def cancel(self, request: str, ticket: Ticket, now: float) -> list[Ticket]:
        """Fails every life of ``request``. Returns ``ticket`` once per life whose end will settle it."""
        pending: list[Ticket] = []
        for key in [key for key in self._unbound if key[0] == request and key not in self._lives]:
            grant = self._unbound.pop(key)
            self._tell_abort(grant, TransferCancelled(f"rank {self._roster.rank} cancelled request {request!r}"))
        for key in [key for key in self._stillborn if key[0] == request]:
            del self._stillborn[key]
        for life in [life for life in self._lives.values() if life.request == request]:
            life.cancels.append(ticket)
            pending.append(ticket)
            if life.grant is None and not life.refused:
                self._refuse_next(life, now)
            if life.error is None:
                error = TransferCancelled(
                    f"request {request!r} to rank {life.dst} was cancelled on rank {self._roster.rank}"
                )
                self._fail(life, error)
            else:
                self._after_drain(life)
        return pending

    def prefix_tokens(self, request: str, dst: int) -> int | None:
        """The prefix the receiver holds, or None while no grant is here. Raises a tombstone's error."""
        life = self._lives.get((request, dst))
        if life is not None and life.error is not None:
            raise life.error
        grant = self._grant_of(request, dst)
        return None if grant is None else grant.prefix_tokens

    # ---------------------------------------------------------------- the driver's reports

    def wants(self, op: SendOp) -> bool:
        """Whether ``op``, once started, should still move: its life has not failed meanwhile."""
        return self._lives[(op.request, op.dst)].error is None

    def attest(self, op: SendOp, layers: tuple[int, ...], *, nbytes: int, path: str) -> None:
        """These layers of ``op`` are visible in the receiver's memory."""
        life = self._lives[(op.request, op.dst)]
        assert life.grant is not None
        self.actions.append(Account(op.ticket, nbytes, path))
        if life.error is None and layers and op.num_pages:
            page_size = life.grant.plan.src_page_size
            lo, hi = op.start * page_size, (op.start + op.num_pages) * page_size
            self._tell(op.dst, Attest(life.grant.generation, list(layers), lo, hi, nbytes, path, op.state))

    def announce(self, op: SendOp) -> None:
        """The last bytes of a finished request are under way: a receiver that knows is awake when the seal comes."""
        life = self._lives[(op.request, op.dst)]
        if life.about_to_seal and life.grant is not None:
            self._tell(op.dst, Alive(life.grant.generation, False))

    def op_finished(self, op: SendOp, error: KVError | None, *, flushed: bool, now: float) -> None:
        """This rank will write nothing more for ``op``: all is attested, or it failed.

        ``flushed`` is False if bytes may still be on their way to the receiver and nobody can tell (its channel
        broke). The receiver is then never told that this rank is quiescent; only this process's end proves it.
        """
        life = self._lives[(op.request, op.dst)]
        del life.running[op]
        life.tainted |= not flushed
        if error is None and life.error is None:
            self.actions.append(Settle(op.ticket))
            self._seal_if_done(life, now)
            return
        self.actions.append(Settle(op.ticket, life.error or error))
        if life.error is None and error is not None:
            self._fail(life, error)
        else:
            self._after_drain(life)

    def on_grant(self, src: int, message: Grant, now: float) -> None:
        """A receiver granted pages to this rank. Raises ``ProtocolError`` if the grant itself is malformed."""
        writers = tuple(message.writers)
        if list(writers) != sorted(set(writers)) or self._roster.rank not in writers:
            raise ProtocolError(f"grant of rank {src} names writers {list(writers)}, unsorted or without this rank")
        for rank in writers:
            if rank not in self._roster.members:
                raise ProtocolError(f"grant of rank {src} names rank {rank}, which is not in this group")
        grant = BoundGrant(
            dst=src,
            generation=message.generation,
            request=message.request,
            prefix_tokens=message.prefix_tokens,
            pages=unpack_pages(message.pages, self._roster.members[src].num_pages),
            plan=self._roster.plan(self._roster.rank, writers, src),
            state_slot=message.state_slot,
        )
        check_slot(grant, self._roster.members[src].num_slots)
        key = (message.request, src)
        self._stillborn.pop(key, None)  # this one takes the place of the one revoked
        life = self._lives.get(key)
        if life is None and self._is_refused(key, now):
            self._tell_abort(
                grant, TransferCancelled(f"rank {self._roster.rank} cancelled request {message.request!r} earlier")
            )
        elif life is not None and life.grant is None and life.error is not None and not life.refused:
            life.refused = True
            self._tell_abort(grant, life.error)
        elif life is not None and life.grant is None and life.error is None:
            if self._is_refused(key, now):
                self._tell_abort(
                    grant, TransferCancelled(f"rank {self._roster.rank} cancelled an earlier {message.request!r}")
                )
            else:
                self._bind(life, grant, now)
        else:
            self._unbound[key] = grant

    def on_revoke(self, src: int, message: Revoke, now: float) -> None:
        """The receiver failed the request: stop, drain, answer."""
        life = self._by_generation.get((src, message.generation))
        if life is None:
            for key in [k for k, g in self._unbound.items() if (g.dst, g.generation) == (src, message.generation)]:
                del self._unbound[key]
                self._bury(key, make_error(message.kind, message.text), now)
            if (src, message.generation) not in self._tainted:
                self._tell(src, Quiesced(message.generation))
            return
        life.revoked = True
        if life.error is None:
            self._fail(life, make_error(message.kind, message.text), tell=False)
        else:
            self._after_drain(life)

    def on_verdict(self, src: int, message: Verdict) -> None:
        """The receiver has everything: the life ends."""
        life = self._by_generation.get((src, message.generation))
        if life is None or life.error is not None or life.sealed_at is None:
            return
        assert life.finish is not None
        self.actions.append(Settle(life.finish.ticket))
        self._end(life)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        life = self._by_generation.get((src, message.generation))
        if life is not None:
            life.heard = now

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: every life towards it fails."""
        for life in [life for life in self._lives.values() if life.dst == rank and life.error is None]:
            self._fail(life, PeerLost(f"request {life.request!r}: {reason}"))

    def peer_dead(self, rank: int) -> None:
        """The process of ``rank`` has ended: its grants are void."""
        for key in [key for key in self._unbound if key[1] == rank]:
            del self._unbound[key]

    def abandon(self, error: KVError) -> None:
        """The group goes away: every life fails. Transfers under way are halted; `farewell` ends the rest."""
        for life in [life for life in self._lives.values() if life.error is None]:
            self._fail(life, type(error)(f"request {life.request!r}: {error}"))

    def farewell(self, error: KVError) -> None:
        """Settles every call that still waits, and tells receivers what this rank can no longer write to."""
        for life in list(self._lives.values()):
            self.actions.extend(Settle(op.ticket, life.error) for op in life.running)
            self.actions.extend(Settle(ticket, error) for ticket in life.cancels)
            life.cancels.clear()
            if life.grant is not None and life.drained and not life.tainted:
                self._tell(life.dst, Quiesced(life.grant.generation))

    def tick(self, now: float) -> bool:
        """Deadlines and signs of life; call a few times a second. Whether a life has failed."""
        failed = False
        for key in [key for key, until in self._refusals.items() if until[-1] <= now]:
            del self._refusals[key]
        for key in [key for key, (born, _) in self._stillborn.items() if now >= born + self._grant_timeout]:
            del self._stillborn[key]
        for life in list(self._lives.values()):
            if life.error is not None:
                continue
            overdue = life.overdue(now, timeout=self._timeout, grant_timeout=self._grant_timeout)
            if overdue is not None:
                self._fail(life, overdue)
                failed = True
            elif any(op.moved for op in life.running):
                for op in life.running:
                    op.moved = False
                assert life.grant is not None
                self._tell(life.dst, Alive(life.grant.generation, False))
        return failed

    # ---------------------------------------------------------------- inside

    def _lives_of(self, request: str, life: Life) -> list[Life]:
        """All lives of ``request``, and ``life`` even if it has ended: they read the same pages."""
        return [life, *(other for other in list(self._lives.values()) if other.request == request)]

    def _grant_of(self, request: str, dst: int) -> BoundGrant | None:
        """The grant that binds this life, or would bind the one that begins now."""
        life = self._lives.get((request, dst))
        return self._unbound.get((request, dst)) if life is None else life.grant

    def _life(self, request: str, dst: int, now: float) -> Life:
        life = self._lives.get((request, dst))
        if life is None:
            _, revoked = self._stillborn.pop((request, dst), (now, None))
            life = self._lives[(request, dst)] = Life(request, dst, now, gone=revoked, refused=revoked is not None)
            if (grant := self._unbound.pop((request, dst), None)) is not None:
                self._bind(life, grant, now)
        return life

    def _bind(self, life: Life, grant: BoundGrant, now: float) -> None:
        life.grant = grant
        life.heard = now
        self._by_generation[(life.dst, grant.generation)] = life
        waiting, life.queue = life.queue, deque()
        problem: KVError | None = None
        for op in waiting:
            self._queued_pages -= op.num_pages
            try:
                check_grant(op, grant)
            except (PageOutOfRange, ProtocolError) as error:
                problem = error
        if problem is None and life.finish is not None:
            text = self._pages_missing(life.request, life.dst, life, grant)
            text = text or self._state_missing(life.request, life.dst, grant)
            problem = None if text is None else ProtocolError(f"finish({life.request!r}) to rank {life.dst}: {text}")
        if problem is not None:
            self.actions.extend(Settle(op.ticket, problem) for op in waiting)
            self._fail(life, problem)
            return
        for op in waiting:
            self._start(life, op, grant)
        self._seal_if_done(life, now)

    def _start(self, life: Life, op: SendOp, grant: BoundGrant) -> None:
        life.running[op] = None
        self.actions.append(Start(op, grant.of_state() if op.state else grant))

    def _state_missing(self, request: str, dst: int, grant: BoundGrant | None) -> str | None:
        """The same for state."""
        state = (self._likely_plan(dst) if grant is None else grant.plan).state
        assert state is not None
        if not state.layers:
            return None
        left = self.state_left(request, dst)
        first = next((layer for layer in state.layers if layer in left), None)
        return None if first is None else f"layer {first}'s state was not sent; give state_slot, or send_state it first"

    def _pages_missing(self, request: str, dst: int, life: Life | None, grant: BoundGrant | None) -> str | None:
        """What is still owed if the request were sealed now, in words; None if nothing, as far as is known."""
        num_pages = 0 if life is None else life.num_pages
        fits = True
        if grant is None:
            if num_pages == 0:
                return None  # legal if the grant turns out to have no pages
            plan = self._likely_plan(dst)
            limit = num_pages * plan.src_page_size
            # Of a sliding window only what any grant asks for: binding one checks again.
            granted = largest_grant(num_pages, plan.src_page_size, plan.dst_page_size)
        else:
            plan = grant.plan
            granted = limit = grant.num_tokens
            if num_pages == 0:
                starts = ((layer, lo // plan.src_page_size) for layer, owed in plan.owed(limit) for lo, _ in owed)
                first = next(starts, None)
                if first is None:
                    return None
                return f"nothing was sent, but layer {first[0]} page {first[1]} is owed; send it first"
            fits = seal_matches(num_pages, plan.src_page_size, len(grant.pages), plan.dst_page_size)
            if fits:
                limit = min(limit, num_pages * plan.src_page_size)
        given = LayerCoverage() if life is None else life.given()
        gap = given.first_gap(plan.owed(granted, limit), unit=plan.src_page_size)
        if gap is not None:
            return f"layer {gap[0]} page {gap[1]} (counted after the prefix) was not sent{extent(life, grant)}"
        if not fits:
            return f"every rank gives all pages after the prefix, also those another one writes{extent(life, grant)}"
        return None

    def _likely_plan(self, dst: int) -> PairPlan:
        """Before the grant names the writers: as if those of this instance were all."""
        return self._roster.plan(self._roster.rank, self._roster.contributing(self._roster.siblings, dst), dst)

    def _seal_if_done(self, life: Life, now: float) -> None:
        if life.error is not None or life.finish is None or life.grant is None or life.sealed_at is not None:
            return
        if life.running or life.queue:
            return
        life.sealed_at = life.heard = now
        self._tell(life.dst, Seal(life.grant.generation, life.num_pages, life.finish.aux))

    def _fail(self, life: Life, error: KVError, *, tell: bool = True) -> None:
        assert life.error is None
        error._pages_safe = lambda: all(other.drained for other in self._lives_of(life.request, life))
        life.error = error
        self._queued_pages -= sum(op.num_pages for op in life.queue)
        self.actions.extend(Settle(op.ticket, error) for op in life.queue)
        life.queue.clear()
        if life.finish is not None:
            self.actions.append(Settle(life.finish.ticket, error))
        self.actions.extend(Halt(op) for op in life.running)
        if tell and life.grant is not None:
            self._tell_abort(life.grant, error)
        self._after_drain(life)

    def _after_drain(self, life: Life) -> None:
        if life.running or life.error is None:
            return
        if life.revoked and life.grant is not None and not life.tainted:
            life.revoked = False
            self._tell(life.dst, Quiesced(life.grant.generation))
        if life.cancels:
            self.actions.extend(Settle(ticket) for ticket in life.cancels)
            life.cancels = []
            self._end(life)

    def _end(self, life: Life) -> None:
        del self._lives[(life.request, life.dst)]
        if life.grant is not None:
            self._stages.forget(life.dst, life.grant.generation)
            del self._by_generation[(life.dst, life.grant.generation)]
            if life.tainted:
                self._tainted.add((life.dst, life.grant.generation))

    def _bury(self, key: tuple[str, int], error: KVError, now: float) -> None:
        """The life meant for this grant is still to come, or never does: nobody but the receiver had heard of it."""
        _make_room(self._stillborn)
        self._stillborn[key] = (now, error)

    def _refuse_next(self, life: Life, now: float) -> None:
        """The grant meant for this life is still to come: it must not bind a later one."""
        _make_room(self._refusals)
        self._refusals.setdefault((life.request, life.dst), deque()).append(now + self._grant_timeout)

    def _is_refused(self, key: tuple[str, int], now: float) -> bool:
        """Whether this grant was meant for a life that was cancelled before it came. Uses up one refusal."""
        waiting = self._refusals.get(key)
        while waiting:
            until = waiting.popleft()
            if not waiting:
                del self._refusals[key]
            if until > now:
                return True
        return False

    def _tell(self, rank: int, message: Attest | Seal | Abort | Quiesced | Alive) -> None:
        self.actions.append(Tell(rank, message))

    def _tell_abort(self, grant: BoundGrant, error: KVError) -> None:
        self._tell(grant.dst, Abort(grant.generation, error_kind(error), str(error)[:MAX_TEXT]))


def _make_room(remembered: dict[tuple[str, int], Any]) -> None:
    """Forgets the oldest, if there are as many as there may be."""
    if len(remembered) >= MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
