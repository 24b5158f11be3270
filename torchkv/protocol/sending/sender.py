"""The sending side of requests: from the first verb towards a receiver to its verdict.

A *sender request* is what this rank sends to one receiver under one request name:

    first verb --> WAITING --Grant--> BOUND --finish, all flushed: Seal sent--> SEALED --Verdict--> ended
                      |                 |                                         |
                      +-----------------+---------- failure or cancel ------------+
                                                          |
                                                          v
                                                      TOMBSTONE --cancel, and drained--> ended

* **Waiting.** Verbs queue until the receiver's `Grant` comes. A grant that comes first waits for the first verb.
* **Bound.** A grant binds one request. Ops run, and each attests what it has flushed. Nothing is written without a
  grant.
* **Sealed.** After the last flush the writer seals: it has sent everything, and writes no more.
* **Tombstone.** A failed request stays, and answers every verb with its error, until the caller cancels: hooks that
  still fire must not begin a new request of the same name by mistake.
* **Revoke, Quiesced.** When the receiver revokes the grant, running ops are halted. This rank is *drained* when none of
  them is left, and then answers `Quiesced`: nothing that it wrote under this generation can land any more. If a channel
  broke in the middle of a put, it can never say so (``undrainable``).

Invariant: an op runs only under the grant of its own request, and `Seal` and `Quiesced` are sent only when none runs.

Grants and requests of one name meet in the order in which both sides made them; what never met is remembered for a
while (`unmet`):

* a request that was cancelled before its grant came refuses that grant when it comes, and the request that waits in its
  place then fails with it;
* a grant that was revoked before the first verb was meant for the next request of its name: its first verb raises the
  receiver's error, and it is a tombstone. Only another grant, if it comes first, makes good.

A request may be sent to *anybody* (`unmet.ANYBODY`): it waits until some rank grants it, and then becomes one request
to each rank of that rank's instance which this rank owes anything. If it owes none of them anything, no grant comes,
and one of them says so (`Exempt`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torchkv.errors import (
    KVError,
    PageOutOfRange,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    error_kind,
    make_error,
)
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan, largest_grant, seal_matches
from torchkv.protocol.actions import Account, Action, BoundGrant, Halt, SendOp, Settle, Split, Start, Tell, Work
from torchkv.protocol.counts import Counts
from torchkv.protocol.coverage import LayerCoverage
from torchkv.protocol.flows import RequestFlows
from torchkv.protocol.messages import (
    MAX_TEXT,
    Abort,
    Alive,
    Attest,
    Exempt,
    Grant,
    Quiesced,
    Refused,
    Revoke,
    Seal,
    Verdict,
    unpack_pages,
)
from torchkv.protocol.sending.request import (
    Finish,
    SenderRequest,
    behind,
    check_grant,
    check_prefix,
    check_prefixes,
    check_range,
    check_slot,
    drop_held,
    extent,
    receiver_name,
)
from torchkv.protocol.sending.staging_requester import StagingRequester
from torchkv.protocol.sending.unmet import ANYBODY, Key, Unmet

__all__ = ["Sender"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`

MAX_QUEUED_OPS = 8192  # ops of one request that wait for its grant
MAX_REQUESTS = 1 << 14  # to one receiver, which may have hung: as many as it may grant before their first verb
MAX_QUEUED_PAGES = 1 << 22  # pages of all ops of this rank that wait for grants


class Sender:
    """All requests that this rank sends. Not thread-safe: the caller holds a lock.

    Every method that may change something appends to ``actions``; the engine takes and performs them.
    """

    def __init__(
        self, group_map: GroupMap, *, timeout: float, grant_timeout: float, requester: StagingRequester
    ) -> None:
        """timeout, grant_timeout: of Options, in seconds. requester: asks for stages of receivers' staging rings."""
        self.flows: RequestFlows | None = None  # the requests that the resident loop serves; set by the engine
        self.lost: Mapping[int, str] = {}  # why ranks do not answer; the engine's, kept by it
        self._group_map = group_map
        self._requester = requester
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self._requests: dict[tuple[str, int], SenderRequest] = {}  # by name and receiver
        # The same by name, then by receiver: what happens to one name must not look at every peer.
        self._named: dict[str, dict[int, SenderRequest]] = {}
        self._open: Counter[int] = Counter()  # how many of these, by receiver
        self._by_generation: dict[tuple[int, int], SenderRequest] = {}  # by receiver and generation: bound ones
        self._unmet = Unmet(grant_timeout)
        # Of requests to anybody whose grant has come, or which are exempt from sending: the ranks that they go to.
        self._addressed: dict[str, tuple[int, ...]] = {}
        # Of ended requests, by receiver and generation: this rank can never say `Quiesced` for them.
        self._undrainable: set[tuple[int, int]] = set()
        self._queued_pages = 0
        self.actions: list[Action] = []
        self.counts = Counts()

    # ---------------------------------------------------------------- verbs of this rank's user

    def receivers(self, request: str, now: float, *, last: bool = False) -> tuple[int, ...]:
        """Where a request to anybody goes: the ranks that it was found to go to, or `ANYBODY` until it is known.

        last: the caller asks for the last time.
        """
        found = self._addressed.get(request)
        if found is None and (request, ANYBODY) not in self._requests:
            found = self._find(request, now)
        if last and found == ():
            del self._addressed[request]
        return (ANYBODY,) if found is None else found

    def admit(
        self,
        request: str,
        dst: int,
        start: int,
        num_pages: int,
        *,
        state: bool = False,
        from_prompt: bool = False,
    ) -> None:
        """Raises unless `submit` of such an op would be accepted now. Changes nothing, but see `_meet_revocation`.

        Raises the error of a tombstone, ``ProtocolError`` after ``finish`` or (retryable) when too much waits for
        grants, ``PageOutOfRange`` for pages outside a grant that has come.
        """
        req = self._requests.get((request, dst))
        if req is None:
            self._meet_revocation(request, dst)
            self._check_room(request, dst)
            grant = self._unmet.grant((request, dst))
        else:
            req.check_open()
            grant = req.grant
        if grant is not None:
            if from_prompt or (grant.absent_tokens and not state):
                start, num_pages, _ = behind(grant, start, num_pages, from_prompt=from_prompt)
            if not state:
                check_range(grant, start, num_pages, self._group_map.name)
        elif req is not None and len(req.queue) >= MAX_QUEUED_OPS:
            raise ProtocolError(
                f"request {request!r} to {req.receiver}: {len(req.queue)} transfers wait for its grant, the limit; "
                f"try again once that has posted recv_pages",
                retryable=True,
            )
        if grant is None and self._queued_pages + num_pages > MAX_QUEUED_PAGES:
            raise ProtocolError(
                f"request {request!r}: {self._queued_pages} pages wait for grants on this rank, "
                f"the limit is {MAX_QUEUED_PAGES}; try again once some receiver has posted",
                retryable=True,
            )

    def _check_room(self, request: str, dst: int) -> None:
        """Raises unless one more request to ``dst`` may begin."""
        if self._open[dst] >= MAX_REQUESTS:
            raise ProtocolError(
                f"request {request!r} to {self.named(dst)}: {MAX_REQUESTS} requests to it have not ended, the limit; "
                f"try again once some have, or cancel those that have failed",
                retryable=True,
            )

    @property
    def requests(self) -> list[SenderRequest]:
        """All that have not ended, for reports."""
        return list(self._requests.values())

    @property
    def queued_pages(self) -> int:
        """Pages that wait for grants."""
        return self._queued_pages

    def is_on_loop(self, request: str, dst: int) -> bool:
        """Whether the resident loop serves the request, so that a verb need not know what the loop has done."""
        req = self._requests.get((request, dst))
        return req is not None and req.flow is not None

    def served(self, request: str, dst: int) -> SenderRequest | None:
        """The request, if the resident loop serves it under its grant, and it takes more verbs: see `send_more`."""
        req = self._requests.get((request, dst))
        if req is None or req.flow is None or req.grant is None or req.finish is not None:
            return None
        return req

    def send_more(self, req: SenderRequest, op: SendOp) -> bool:
        """`admit` and `submit` of an op of pages after the prefix, in a request that `served` has returned.

        The critical path of a verb. Whether the loop does the op; else the request has been taken back from it. Raises
        ``PageOutOfRange``.
        """
        assert req.grant is not None
        check_range(req.grant, op.start, op.num_pages, self._group_map.name)
        req.add_sent(op)
        self._start(req, op, req.grant, req.begun_at)
        return req.flow is not None

    def begin(self, request: str, dst: int, now: float) -> None:
        """Begins a request, unless there is one, and binds its grant if that has come. Raises a tombstone's error."""
        self._meet_revocation(request, dst)
        req = self._request(request, dst, now)
        if req.error is not None:
            raise req.error
        if dst == ANYBODY and self.flows is not None:
            self.flows.heed_grants(True)

    def check_prefixes(self, request: str, dsts: Iterable[int]) -> None:
        """Raises ``ProtocolError`` if the prefixes of these receivers, as far as grants have come, are not equal."""
        known = {dst: grant.held_tokens for dst in dsts if (grant := self._grant_of(request, dst)) is not None}
        check_prefixes(request, known)

    def submit(self, op: SendOp, now: float) -> None:
        """Queues or starts ``op``, which `admit` has accepted under the same lock."""
        key = op.request, op.dst
        begun = key in self._requests
        req = self._request(op.request, op.dst, now)
        if req.grant is not None:
            drop_held(op, req.grant)
        req.add_sent(op)
        if req.grant is None:
            req.queue.append(op)
            self._queued_pages += op.num_pages
            if self.flows is not None:
                self._await_grant(req, op, begun=begun)
        else:
            if not op.state:
                check_prefix(op, req.grant)
            self._start(req, op, req.grant, now)

    def state_left(self, request: str, dst: int) -> tuple[int, ...]:
        """Layers (global ids, ascending) whose state this rank holds and has not sent to ``dst``."""
        req = self._requests.get((request, dst))
        layout = self._group_map.of(request).layout(self._group_map.rank)
        held = {layer for state in layout.states for layer in layout.state_layers(state.name)}
        return tuple(sorted(held if req is None else held - req.states))

    def check_finish(self, request: str, dst: int, *, state_slot: int | None = None) -> None:
        """Raises ``ProtocolError`` unless `finish` would be accepted now, or a tombstone's error. Changes nothing.

        state_slot: the slot from which ``finish`` is about to send the state that was not sent; None: none.
        """
        self._meet_revocation(request, dst)
        req = self._requests.get((request, dst))
        if req is None:
            self._check_room(request, dst)
        else:
            req.check_open()
        grant = self._grant_of(request, dst)
        problem = self._pages_missing(request, dst, req, grant)
        if problem is None and state_slot is None:
            problem = self._state_missing(request, dst, grant)
        if problem is not None:
            raise ProtocolError(f"finish({request!r}) to {self.named(dst)}: {problem}")

    def finish(self, request: str, dst: int, *, aux: bytes, work: Work, now: float) -> None:
        """Seals the request as soon as all its transfers are flushed. `check_finish` has accepted it.

        work: completed by the receiver's verdict, or with the error.
        """
        req = self._request(request, dst, now)
        req.finish = Finish(work, aux)
        self._finish(req, now)

    def cancel(self, request: str, work: Work, now: float) -> list[Work]:
        """Fails the requests of this name towards all receivers, and ends each when it has drained.

        Returns ``work`` once for each of them; the end of each completes one part of it.
        """
        pending: list[Work] = []
        if self._addressed.get(request) == ():
            del self._addressed[request]
        reqs = self._requests_named(request)
        for req in reqs:
            key = request, req.dst
            if req.ended or not self._stop(req):
                continue
            req.cancels.append(work)
            pending.append(work)
            if req.waits:
                self._unmet.refuse(key, now)
            if req.error is None:
                error = TransferCancelled(
                    f"request {request!r} to {req.receiver} was cancelled on {self.named(self._group_map.rank)}"
                )
                self._fail(req, error)
            else:
                self._after_drain(req)
        self._forget_unmet(request, {req.dst for req in reqs})
        return pending

    def _forget_unmet(self, request: str, begun: set[int]) -> None:
        """A cancelled name: refuses grants of it that no request has taken. begun: to these there are requests."""
        for grant in self._unmet.named(request):
            if grant.dst not in begun:
                self._unmet.take((request, grant.dst))
                text = f"{self.named(self._group_map.rank)} cancelled request {request!r}"
                self._tell_abort(grant, TransferCancelled(text))
        for dst in self._unmet.revoked(request):
            if dst not in begun:
                self._unmet.take_revocation((request, dst))

    def withdraw(self, request: str, work: Work, now: float) -> list[Work]:
        """As if no verb of the requests of this name had been called: stops their ops. The requests go on.

        Returns ``work`` once for each op that has not ended; the end of each completes one part of it. Raises
        ``ProtocolError`` if one of the requests is finished.
        """
        reqs = [req for req in self._requests_named(request) if req.error is None]
        for req in reqs:
            if req.finish is not None:
                raise ProtocolError(f"withdraw({request!r}): it is finished towards {req.receiver}; cancel it instead")
        pending: list[Work] = []
        for req in reqs:
            if not self._stop(req):
                continue
            self._queued_pages -= sum(op.num_pages for op in req.queue)
            for op in req.queue:
                self.actions += [Settle(op.work, _withdrawn(req)), Settle(work)]
                pending.append(work)
            req.queue.clear()
            req.forget_sent()
            req.states.clear()
            for op in req.running:
                if op.withdrawn is None:
                    op.withdrawn = work
                    pending.append(work)
                    self.actions.append(Halt(op))
            if req.grant is None and self.flows is not None:
                self.flows.heed_grants(True)
        return pending

    def decline(self, request: str, now: float) -> None:
        """This rank will not begin the next request of this name: refuses its grant. Nothing if it has begun."""
        if request in self._named or request in self._addressed or self._unmet.take_exemption(request) is not None:
            return
        if self._unmet.take_revocation((request, ANYBODY)) is not None:
            return
        if grants := self._unmet.named(request):
            grant = self._unmet.take((request, grants[0].dst))
            assert grant is not None
            error = TransferCancelled(f"{self.named(self._group_map.rank)} cancelled request {request!r}")
            self._tell_abort(grant, error)
            self._refuse_others(request, grant.dst, error, now)
            return
        self._unmet.refuse((request, ANYBODY), now)
        if self.flows is not None:
            self.flows.heed_grants(True)

    def prefix_tokens(self, request: str, dst: int) -> int | None:
        """The prefix that the receiver holds, in tokens; None until its grant has come. Raises a tombstone's error."""
        req = self._requests.get((request, dst))
        if req is not None and req.error is not None:
            raise req.error
        grant = self._grant_of(request, dst)
        return None if grant is None else grant.held_tokens

    # ---------------------------------------------------------------- reports of the engine

    def wants(self, op: SendOp) -> bool:
        """Whether the started ``op`` should still move bytes: neither has its request failed, nor is it withdrawn."""
        return op.withdrawn is None and self._requests[(op.request, op.dst)].error is None

    def attest(self, op: SendOp, layers: tuple[int, ...], *, nbytes: int, path: str) -> None:
        """These layers of ``op`` are flushed: they are visible in the receiver's memory."""
        req = self._requests[(op.request, op.dst)]
        assert req.grant is not None
        self.actions.append(Account(op.work, nbytes, path))
        self.counts.moved(op.dst, path, nbytes)
        if req.error is None and layers and op.num_pages:
            page_size = req.grant.plan.src_page_size
            lo, hi = op.start * page_size, (op.start + op.num_pages) * page_size
            self._tell(op.dst, Attest(req.grant.generation, list(layers), lo, hi, nbytes, path, op.state))

    def announce(self, op: SendOp) -> None:
        """The last bytes of a finished request are under way: wakes the receiver, so that it is awake for the seal."""
        req = self._requests[(op.request, op.dst)]
        if req.about_to_seal and req.grant is not None:
            self._tell(op.dst, Alive(req.grant.generation, False))

    def op_finished(self, op: SendOp, error: KVError | None, *, flushed: bool, now: float) -> None:
        """This rank writes nothing more for ``op``: all of it is attested, or it failed with ``error``.

        flushed: False if its channel broke, so that bytes may still be on their way to the receiver. Then the receiver
        is never told that this rank is quiescent; only the end of this process proves it.
        """
        req = self._requests[(op.request, op.dst)]
        del req.running[op]
        req.undrainable |= not flushed
        stopped = op.withdrawn is not None and flushed and error is not None
        goes_on = req.error is None and (error is None or stopped)
        outcome = (_withdrawn(req) if stopped else None) if goes_on else req.error or error
        self.actions.append(Settle(op.work, outcome))
        if op.withdrawn is not None:  # after the op's own work: who has waited for the withdrawal may look at that
            self.actions.append(Settle(op.withdrawn))
        if goes_on:
            self._seal_if_done(req, now)
        elif req.error is None and error is not None:
            self._fail(req, error)
        else:
            self._after_drain(req)

    def copied(self, req: SenderRequest, op: SendOp, nbytes: int, now: float) -> None:
        """The loop has copied and announced all of ``op``."""
        trace.debug("request %r to rank %d: layers %s copied, %d bytes", req.request, req.dst, op.layers, nbytes)
        del req.running[op]
        self.actions.append(Settle(op.work, nbytes=nbytes, path="direct" if nbytes else "none"))
        self.counts.moved(op.dst, "direct", nbytes)
        if req.finish is not None and not req.running:
            req.sealed_at = req.progress_at = now

    def succeeded(self, req: SenderRequest) -> None:
        """The request has succeeded at its receiver, as a message or the loop says: ends it here."""
        assert req.finish is not None
        trace.debug("request %r to rank %d: verdict: success", req.request, req.dst)
        self.actions.append(Settle(req.finish.work, first=req.begun_at))
        self.counts.ended(None)
        self._end(req)

    def on_grant(self, src: int, message: Grant, now: float) -> None:
        """A receiver granted pages to this rank: binds the request that waits for it, keeps it, or refuses it.

        Raises ``ProtocolError`` if the grant is malformed.
        """
        writers = tuple(message.writers)
        if list(writers) != sorted(set(writers)) or self._group_map.rank not in writers:
            raise ProtocolError(
                f"grant of {self.named(src)} names writers {list(writers)}, unsorted or without this rank"
            )
        for rank in writers:
            if rank not in self._group_map.info:
                raise ProtocolError(f"grant of {self.named(src)} names rank {rank}, which is not in this group")
        if message.absent_tokens > message.prefix_tokens:
            raise ProtocolError(f"grant of {self.named(src)} names {message.absent_tokens} absent tokens of its prefix")
        grant = BoundGrant(
            dst=src,
            generation=message.generation,
            request=message.request,
            prefix_tokens=message.prefix_tokens,
            pages=unpack_pages(message.pages, self._group_map.info[src].num_pages),
            plan=self._group_map.of(message.request).plan(self._group_map.rank, writers, src),
            state_slot=message.state_slot,
            flow=message.flow,
            absent_tokens=message.absent_tokens,
        )
        check_slot(grant, self._group_map.info[src].num_slots, self._group_map.name)
        key = (message.request, src)
        self._unmet.take_revocation(key)  # the receiver has posted again: the next request meets this grant
        req = self._meant(key, now)
        waits = req is not None and req.waits
        refusal = self._take_refusal(key, now) if req is None or req.grant is None else None
        if refusal is not None:
            self._tell_abort(grant, refusal)
            if req is not None and waits and req.error is None:
                # Whether the grant was meant for this request or for the earlier one only the receiver knows. If it
                # went on waiting, callers who then try again on both sides would miss each other every time.
                req.grant_spent = True
                self._fail(req, refusal)
        elif req is not None and waits and req.error is not None:
            req.grant_spent = True
            self._tell_abort(grant, req.error)
            if req.dst == ANYBODY:
                self._refuse_others(message.request, src, req.error, now)
        elif req is not None and waits and req.dst != ANYBODY:
            self._bind(req, grant, now)
        elif self._unmet.has_room(grant):
            self._unmet.keep(grant)
            if req is not None and waits:
                self._find(message.request, now)
        else:
            self._tell_abort(grant, _too_many(message.request))

    def on_refused(self, src: int, message: Refused, now: float) -> None:
        """The receiver grants nothing to the next request of this name: fails the one that waits, or that comes."""
        if self.flows is not None:
            self.flows.settle()  # grants of earlier requests of this name have been told before
        key, error = (message.request, src), make_error(message.kind, message.text)
        req = self._meant(key, now)
        declined = (req is None or req.grant is None) and self._take_refusal(key, now) is not None
        if req is not None and req.waits:
            req.grant_spent = True
            if req.error is None:
                self._fail(req, error)
        elif not declined and (req is None or req.dst != ANYBODY):
            # Else both sides have given up the same request, or another rank of the instance has said so before.
            self._unmet.refused(key, error, now)

    def on_exempt(self, src: int, message: Exempt, now: float) -> None:
        """An instance has granted a request, and needs nothing of this rank. Raises ``ProtocolError`` if it does."""
        if self._instance(message.request, src):
            raise ProtocolError(
                f"{self.named(src)} exempts this rank from request {message.request!r}, but is owed bytes"
            )
        req = self._requests.get((message.request, ANYBODY))
        if req is not None and req.waits and req.error is None:
            self._address(message.request, src, now)
        elif req is not None and req.waits:
            req.grant_spent = True
        elif not self._unmet.take_refusal((message.request, ANYBODY), now):
            self._unmet.exempt(message.request, src, now)

    def on_revoke(self, src: int, message: Revoke, now: float) -> None:
        """The receiver failed the request: fails it here too, and answers `Quiesced` once it has drained."""
        if self.flows is not None:
            self.flows.settle()  # the grant has been told before: it must not bind a request after this
        req = self._by_generation.get((src, message.generation))
        if req is None:
            self._unmet.revoke(src, message.generation, make_error(message.kind, message.text), now)
            if (src, message.generation) not in self._undrainable:
                self._tell(src, Quiesced(message.generation))
            return
        if not self._stop(req):
            self._tell(src, Quiesced(message.generation))
            return
        req.revoked = True
        if req.error is None:
            self._fail(req, make_error(message.kind, message.text), tell=False)
        else:
            self._after_drain(req)

    def on_verdict(self, src: int, message: Verdict) -> None:
        """The request succeeded at the receiver: ends it here."""
        req = self._by_generation.get((src, message.generation))
        if req is not None:
            self._take_back(req, req.progress_at)
        if req is None or req.ended or req.error is not None or req.sealed_at is None:
            return
        self.succeeded(req)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        req = self._by_generation.get((src, message.generation))
        if req is not None:
            req.progress_at = now

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: fails every request towards it. reason: for the message."""
        for req in [req for req in self._requests.values() if req.dst == rank and req.error is None]:
            if self._stop(req):
                self._fail(req, PeerLost(f"request {req.request!r}: {reason}"))

    def peer_dead(self, rank: int) -> None:
        """The process of ``rank`` has ended: forgets its grants."""
        if self.flows is not None:
            self.flows.settle()
        self._unmet.forget(rank)

    def is_drained(self, rank: int) -> bool:
        """Whether nothing that this rank writes to ``rank`` is under way."""
        return all(req.dst != rank or req.drained for req in self._requests.values())

    def has_landed(self, rank: int) -> bool:
        """Whether all that this rank has written to ``rank`` is known to have landed there."""
        broken = any(dst == rank for dst, _ in self._undrainable)
        return not broken and all(
            req.dst != rank or (req.drained and not req.undrainable) for req in self._requests.values()
        )

    def is_done_with(self, rank: int) -> bool:
        """Whether nothing of this rank is under way to ``rank``, and no call waits for that."""
        return all(
            req.dst != rank or (req.error is not None and req.drained and not req.cancels)
            for req in self._requests.values()
        )

    def addressees(self) -> set[int]:
        """The receivers of all requests, as far as they are known."""
        return {req.dst for req in self._requests.values()}

    def forget(self, rank: int) -> None:
        """Forgets all that was between this rank and ``rank``, with which it `is_done_with`."""
        for key in [key for key in self._requests if key[1] == rank]:
            self._end(self._requests[key])
        self._undrainable = {pair for pair in self._undrainable if pair[0] != rank}
        self._unmet.forget(rank)

    def fail_all(self, error: KVError) -> None:
        """Fails every request, because the group is destroyed. Running ops are halted; `end_all` completes the rest."""
        for req in [req for req in self._requests.values() if req.error is None]:
            if self._stop(req):
                self._fail(req, type(error)(f"request {req.request!r}: {error}"))

    def end_all(self, error: KVError) -> None:
        """Completes every call that still waits, after `fail_all`, and sends `Quiesced` for every drained request.

        Also for grants that no request took: nobody else will tell their receivers that nothing was written.
        """
        if self.flows is not None:
            self.flows.settle()
        for req in list(self._requests.values()):
            self.actions.extend(Settle(op.work, req.error) for op in req.running)
            self.actions.extend(Settle(op.withdrawn, error) for op in req.running if op.withdrawn is not None)
            self.actions.extend(Settle(work, error) for work in req.cancels)
            req.cancels.clear()
            if req.grant is not None and req.drained and not req.undrainable:
                self._tell(req.dst, Quiesced(req.grant.generation))
        for grant in self._unmet.grants():
            self._unmet.take((grant.request, grant.dst))
            self._tell_abort(
                grant, type(error)(f"request {grant.request!r}: {error} on {self.named(self._group_map.rank)}")
            )
            self._tell(grant.dst, Quiesced(grant.generation))

    def tick(self, now: float) -> bool:
        """Fails requests whose deadline has passed, and tells receivers of progress. Whether a request has failed.

        To be called a few times a second.
        """
        failed = False
        if self.flows is not None:
            waiting = (req.grant is None and req.flow is None and req.error is None for req in self._requests.values())
            self.flows.heed_grants(self._unmet.refusing or any(waiting))
        self._unmet.expire(now)
        for req in list(self._requests.values()):
            if req.error is not None:
                continue
            if req.dst == ANYBODY and self._find(req.request, now) is not None:
                continue
            overdue = req.overdue(now, timeout=self._timeout, grant_timeout=self._grant_timeout)
            if overdue is None and req.flow is not None and req.running:
                overdue = self._stalled(req, now)
            if overdue is not None:
                if self._stop(req):
                    self._fail(req, overdue)
                    failed = True
            elif any(op.moved for op in req.running):
                for op in req.running:
                    op.moved = False
                assert req.grant is not None
                self._tell(req.dst, Alive(req.grant.generation, False))
        return failed

    # ---------------------------------------------------------------- inside

    def _requests_named(self, request: str) -> list[SenderRequest]:
        """All requests of this name, by receiver, that to anybody last."""
        named = self._named.get(request, {})
        return sorted(named.values(), key=lambda req: (req.dst == ANYBODY, req.dst))

    def _requests_of(self, request: str, req: SenderRequest) -> list[SenderRequest]:
        """All requests of this name, and ``req`` even if it has ended: they may read the same source pages."""
        return [req, *(other for dst, other in self._named.get(request, {}).items() if dst != ANYBODY)]

    def _meet_revocation(self, request: str, dst: int) -> None:
        """Raises the error for which the grant of the request that is about to begin was revoked, if it was.

        The request then is a tombstone: it has met its grant, so that the next grant is for the next request.
        """
        key = request, dst
        if key in self._requests:
            return
        if dst != ANYBODY and (request, ANYBODY) in self._requests:
            raise ProtocolError(
                f"request {request!r} to {self.named(dst)}: this rank sends it to whoever grants it, and no rank has "
                f"yet; pass dst=None in all verbs of one request, or name its receiver in all"
            )
        if (revocation := self._unmet.take_revocation(key)) is None:
            return
        revoked_at, error = revocation
        req = SenderRequest(request, dst, self.named(dst), revoked_at, grant_spent=True)
        self._add(req)
        self._fail(req, error)
        raise error

    def _meant(self, key: Key, now: float) -> SenderRequest | None:
        """The request that a grant with this name and of this receiver is meant for, taken back if it has none yet."""
        req = self._requests.get(key)
        if req is not None and req.grant is None:  # it may wait on the loop, which may bind it meanwhile
            self._take_back(req, now)
            req = self._requests.get(key)
        return self._requests.get((key[0], ANYBODY)) if req is None else req

    def _take_refusal(self, key: Key, now: float) -> KVError | None:
        """Why the grant that has come is refused, if it was meant for a request that had been cancelled.

        Uses up one refusal.
        """
        request, src = key
        error = TransferCancelled(f"{self.named(self._group_map.rank)} cancelled an earlier request {request!r}")
        if self._unmet.take_refusal(key, now):
            return error
        if self._unmet.take_refusal((request, ANYBODY), now):
            self._refuse_others(request, src, error, now)
            return error
        return None

    def _instance(self, request: str, rank: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s instance to which this rank owes anything for this request."""
        return self._group_map.of(request).owed(self._group_map.siblings_of(rank))

    def _refuse_others(self, request: str, src: int, error: KVError, now: float) -> None:
        """Refuses what the other ranks of ``src``'s instance grant, or have granted, as the grant of ``src`` is."""
        for rank in self._instance(request, src):
            if rank == src:
                continue
            if (grant := self._unmet.take((request, rank))) is not None:
                self._tell_abort(grant, error)
            else:
                self._unmet.refuse((request, rank), now)

    def _find(self, request: str, now: float) -> tuple[int, ...] | None:
        """The ranks that a request to anybody goes to, if it has been granted. None if nobody has, that is not busy.

        An instance is busy while an earlier request of this name to one of its ranks has not ended.
        """
        for grant in self._unmet.named(request):
            ranks = self._instance(request, grant.dst)
            if not any((request, rank) in self._requests for rank in ranks):
                return self._address(request, grant.dst, now)
        source = self._unmet.take_exemption(request)
        return None if source is None else self._address(request, source, now)

    def _address(self, request: str, src: int, now: float) -> tuple[int, ...]:
        """The request to anybody goes to the instance of ``src``, which has granted it: to these ranks."""
        ranks = self._instance(request, src)
        trace.debug("request %r: granted by rank %d, so it goes to ranks %s", request, src, ranks)
        reqs = [SenderRequest(request, rank, self.named(rank), now) for rank in ranks]
        waiting = self._requests.get((request, ANYBODY))
        if waiting is not None:
            self._remove(waiting)
        for req in reqs:
            self._add(req)
        if ranks or waiting is None or waiting.finish is None:
            self._addressed[request] = ranks
        if waiting is not None:
            waiting.ended = True
            self._hand_on(waiting, reqs)
        for req in reqs:
            if (revocation := self._unmet.take_revocation((request, req.dst))) is not None:
                req.grant_spent = True
                self._fail(req, revocation[1])
                continue
            grant = self._unmet.take((request, req.dst))
            if req.dst in self.lost:  # `peer_lost` has been called already
                error = PeerLost(f"request {request!r}: {self.lost[req.dst]}")
                if grant is not None:
                    req.grant_spent = True
                    self._tell_abort(grant, error)
                self._fail(req, error)
            elif grant is not None:
                self._bind(req, grant, now)
            elif self.flows is not None:
                self.flows.heed_grants(True)
        return ranks

    def _hand_on(self, waiting: SenderRequest, reqs: list[SenderRequest]) -> None:
        """What waited for anybody now waits for each of these."""
        for op in waiting.queue:
            self._queued_pages += (len(reqs) - 1) * op.num_pages
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
            self.actions.append(Split(work, parts - 1))
        elif not parts:
            self.actions.append(Settle(work))

    def _grant_of(self, request: str, dst: int) -> BoundGrant | None:
        """The grant of this request; if there is no request, the grant that one would bind if it began now."""
        req = self._requests.get((request, dst))
        return self._unmet.grant((request, dst)) if req is None else req.grant

    def _request(self, request: str, dst: int, now: float) -> SenderRequest:
        """The request of this name and receiver; begins one, and binds its grant if that has come."""
        req = self._requests.get((request, dst))
        if req is None:
            req = SenderRequest(request, dst, self.named(dst), now)
            self._add(req)
            if (grant := self._unmet.take((request, dst))) is not None:
                self._bind(req, grant, now)
        return req

    def _bind(self, req: SenderRequest, grant: BoundGrant, now: float) -> None:
        """Starts what waited for the grant, or fails the request if that does not fit the grant."""
        if grant.prefix_tokens and self.flows is not None:
            # The loop binds behind no prefix. What it has bound is known after this, and is compared below.
            for other in self._requests_of(req.request, req):
                if other.grant is None:
                    self._take_back(other, now)
        req.grant = grant
        req.progress_at = now
        self._by_generation[(req.dst, grant.generation)] = req
        self.counts.grants.add(now - req.begun_at)
        trace.debug("request %r to rank %d: bound to its grant, generation %d", req.request, req.dst, grant.generation)
        waiting, req.queue = req.queue, deque()
        problem: KVError | None = None
        req.forget_sent()  # what was counted from the prompt is counted from the prefix now
        for op in waiting:
            self._queued_pages -= op.num_pages
            drop_held(op, grant)
            req.add_sent(op)
            try:
                check_grant(op, grant, self._group_map.name)
            except KVError as error:
                problem = error
        if problem is None and req.finish is not None:
            text = self._pages_missing(req.request, req.dst, req, grant)
            text = text or self._state_missing(req.request, req.dst, grant)
            problem = None if text is None else ProtocolError(f"finish({req.request!r}) to {req.receiver}: {text}")
        if problem is not None:
            self.actions.extend(Settle(op.work, problem) for op in waiting)
            self._fail(req, problem)
            return
        req.fresh = True
        for op in waiting:
            self._start(req, op, grant, now)
        if req.finish is not None:
            self._finish(req, now)

    def _start(self, req: SenderRequest, op: SendOp, grant: BoundGrant, now: float) -> None:
        if req.fresh:
            req.fresh = False
            if self.flows is not None and self.flows.serves(op):
                self.flows.open_send(req)
        req.running[op] = None
        if req.flow is None:
            self.actions.append(Start(op, grant.of_state() if op.state else grant))
        elif not self._flows.start(req, op):
            self._take_back(req, now)

    # ---------------------------------------------------------------- the resident loop

    def _await_grant(self, req: SenderRequest, op: SendOp, *, begun: bool) -> None:
        """An op waits for the grant: on the loop, if its request began with an op, and the loop can do all of them."""
        begun |= req.dst == ANYBODY or self._unmet.refuses((req.request, ANYBODY))
        begun |= self._unmet.refuses((req.request, req.dst)) or not self._flows.serves(op)
        if not begun and not self._prefixed(req):
            group_map = self._group_map.of(req.request)
            writers = group_map.contributing(group_map.siblings, req.dst)
            self._flows.await_grant(req, group_map.plan(group_map.rank, writers, req.dst), writers)
        if req.flow is None:
            self._flows.heed_grants(True)
        elif not self._flows.start(req, op):
            self._take_back(req, req.begun_at)

    def _prefixed(self, req: SenderRequest) -> bool:
        """Whether another receiver of this name holds a prefix."""
        others = self._requests_of(req.request, req)
        return any(other.grant is not None and other.grant.prefix_tokens for other in others)

    def bound(self, req: SenderRequest, grant: BoundGrant, started: Mapping[SendOp, int], now: float) -> None:
        """The loop has bound a request that waited there, and begins the ops that it had been given (``started``).

        There may be one that it cannot do. Then the request is about to be taken back.
        """
        req.grant = grant
        req.progress_at = now
        self._by_generation[(req.dst, grant.generation)] = req
        self._unmet.take_revocation((req.request, req.dst))
        trace.debug("request %r to rank %d: bound on the loop, generation %d", req.request, req.dst, grant.generation)
        waited, req.queue = req.queue, deque()
        for op in waited:
            req.running[op] = started.get(op)
            self._queued_pages -= op.num_pages
            op.prefixes[grant.dst] = grant.prefix_tokens
        if req.finish is not None and not req.running:
            req.sealed_at = now

    def outside(self, req: SenderRequest, op: SendOp) -> None:
        """An op names pages outside the grant, which only the loop knew when the verb was called: the request fails."""
        assert req.grant is not None
        try:
            check_grant(op, req.grant, self._group_map.name)
        except PageOutOfRange as error:
            if self._stop(req):
                self._fail(req, error)

    def take_back_from_loop(self, now: float, *, dst: int | None = None) -> None:
        """The loop can copy no more, or not to the rank ``dst``: goes on with its requests without it."""
        for req in [req for req in self._requests.values() if req.flow is not None and dst in (None, req.dst)]:
            self._take_back(req, now)

    @property
    def _flows(self) -> RequestFlows:
        assert self.flows is not None
        return self.flows

    def _finish(self, req: SenderRequest, now: float) -> None:
        """No more ops will come: has the request sealed once the last one has ended."""
        if req.flow is not None and req.grant is None and not self._is_whole(req):
            self._take_back(req, now)  # binding it, now or later, comes here again
            return
        if req.flow is None or not self._flows.finish(req):
            self._take_back(req, now)
            self._seal_if_done(req, now)
        elif req.grant is not None and not req.running:
            req.sealed_at = req.progress_at = now

    def _take_back(self, req: SenderRequest, now: float) -> None:
        """Takes the request back from the resident loop, if it is there, and goes on with it; it may have ``ended``.

        Ops that the loop had not ended begin again: bytes that arrive twice change nothing.
        """
        if req.flow is None:
            return
        sealed = self._flows.take_back_send(req)
        if sealed is None:
            return
        self.counts.taken_back += 1
        trace.debug("request %r to rank %d: taken back from the resident loop", req.request, req.dst)
        if req.grant is None:
            self._flows.heed_grants(True)
            return
        req.sealed_at, req.progress_at = now if sealed else None, now
        self.actions.extend(Start(op, req.grant.of_state() if op.state else req.grant) for op in req.running)
        self._seal_if_done(req, now)

    def _stop(self, req: SenderRequest) -> bool:
        """Takes the request back, if it is on the resident loop, to fail it. False if it has ended meanwhile."""
        if req.flow is not None and self._flows.take_back_send(req) is not None:
            # Nobody works on the others, so they are as good as never begun.
            landing = {op: None for op in req.running if op.landed is not None}
            rest = [op for op in req.running if op.landed is None]
            self._queued_pages += sum(op.num_pages for op in rest)
            req.queue.extend(rest)
            req.running.clear()
            req.running.update(landing)
            assert req.grant is not None or not landing
            self.actions.extend(Start(op, req.grant) for op in landing if req.grant is not None)
        return not req.ended

    def _is_whole(self, req: SenderRequest) -> bool:
        """Whether every page up to the highest one was sent of every layer: then a grant of as many pages misses none.

        Of a request that waits for its grant. Windows may allow less: then Python looks again once the grant is there.
        """
        plan = self._likely_plan(req.request, req.dst)
        if not req.num_pages:
            return False
        if req.sent_all_of(plan.layers):
            return True
        pages = [(0, req.num_pages * plan.src_page_size)]
        return req.sent().first_gap([(plan.layers, pages)], unit=plan.src_page_size) is None

    def _stalled(self, req: SenderRequest, now: float) -> KVError | None:
        """The error of a request whose ops have made no progress on the loop for too long; else tells the receiver."""
        moved, gated = self._flows.moved(req), self._flows.gated(req)
        if moved != req.moved[0]:
            assert req.grant is not None
            self._tell(req.dst, Alive(req.grant.generation, False))
        if (moved, gated) != (req.moved[0], req.gated):  # who waits for an event waits for the caller
            req.moved, req.gated = (moved, now), gated
        if now - req.moved[1] <= self._timeout:
            return None
        return TransferTimeout(
            f"request {req.request!r} to {req.receiver}: {len(req.running)} transfers made no progress for "
            f"{self._timeout:g} s (Options.timeout); cancel({req.request!r}) and retry, or raise the limit"
        )

    def named(self, rank: int) -> str:
        """A member, or `ANYBODY`, in messages."""
        return receiver_name(rank, self._group_map.name)

    def _state_missing(self, request: str, dst: int, grant: BoundGrant | None) -> str | None:
        """Names the first layer whose state is owed and was not sent; None if there is none, as far as is known."""
        if dst == ANYBODY:
            return None
        state = (self._likely_plan(request, dst) if grant is None else grant.plan).state
        assert state is not None
        if not state.layers:
            return None
        left = self.state_left(request, dst)
        first = next((layer for layer in state.layers if layer in left), None)
        return None if first is None else f"layer {first}'s state was not sent; give state_slot, or send_state it first"

    def _pages_missing(self, request: str, dst: int, req: SenderRequest | None, grant: BoundGrant | None) -> str | None:
        """Names the first layer and page that are owed and were not sent; None if there is none, as far as is known.

        Before the grant comes, a guess: `_bind` checks again.
        """
        num_pages = 0 if req is None else req.num_pages
        fits = True
        if grant is None:
            if dst == ANYBODY or num_pages == 0 or (req is not None and any(op.from_prompt for op in req.queue)):
                return None  # legal if the grant has no pages, or not those that were not sent
            plan = self._likely_plan(request, dst)
            if self._group_map.parts and all(segment.stripe.window for segment in plan.segments):
                return None  # the receiver may hold, and need, less than its windows show
            limit = num_pages * plan.src_page_size
            # The largest grant that these pages may match. In layers with a sliding window it owes the fewest pages, so
            # what it owes every grant owes.
            granted = largest_grant(num_pages, plan.src_page_size, plan.dst_page_size)
        else:
            plan = grant.plan
            granted = limit = grant.num_tokens
            if num_pages == 0:
                first = LayerCoverage().first_gap(plan.owed(limit), unit=plan.src_page_size)
                if first is None:
                    return None
                return f"nothing was sent, but layer {first[0]} page {first[1]} is owed; send it first"
            fits = seal_matches(num_pages, plan.src_page_size, len(grant.pages), plan.dst_page_size)
            if fits:
                limit = min(limit, num_pages * plan.src_page_size)
        if fits and req is not None and req.sent_all_of(plan.layers):
            return None
        sent = LayerCoverage() if req is None else req.sent()
        gap = sent.first_gap(plan.owed(granted, limit), unit=plan.src_page_size)
        if gap is not None:
            return f"layer {gap[0]} page {gap[1]} (counted after the prefix) was not sent{extent(req, grant)}"
        if not fits:
            return f"every writer sends all pages after the prefix, also those another one writes{extent(req, grant)}"
        return None

    def _likely_plan(self, request: str, dst: int) -> PairPlan:
        """The plan towards ``dst`` before its grant names the writers: as if they were all ranks of this instance."""
        group_map = self._group_map.of(request)
        return group_map.plan(group_map.rank, group_map.contributing(group_map.siblings, dst), dst)

    def _seal_if_done(self, req: SenderRequest, now: float) -> None:
        if req.error is not None or req.finish is None or req.grant is None or req.sealed_at is not None:
            return
        if req.running or req.queue or req.flow is not None:
            return
        req.sealed_at = req.progress_at = now
        trace.debug("request %r to rank %d: sealed, %d pages", req.request, req.dst, req.num_pages)
        self._tell(req.dst, Seal(req.grant.generation, req.num_pages, req.finish.aux))

    def _fail(self, req: SenderRequest, error: KVError, *, tell: bool = True) -> None:
        assert req.error is None
        error._pages_safe = lambda: all(other.drained for other in self._requests_of(req.request, req))
        req.error = error
        self.counts.ended(error)
        trace.debug("request %r to rank %d: failed: %s", req.request, req.dst, error)
        self._queued_pages -= sum(op.num_pages for op in req.queue)
        self.actions.extend(Settle(op.work, error) for op in req.queue)
        req.queue.clear()
        if req.finish is not None:
            self.actions.append(Settle(req.finish.work, error))
        self.actions.extend(Halt(op) for op in req.running)
        if tell and req.grant is not None:
            self._tell_abort(req.grant, error)
        self._after_drain(req)

    def _after_drain(self, req: SenderRequest) -> None:
        if req.running or req.error is None:
            return
        if req.revoked and req.grant is not None and not req.undrainable:
            req.revoked = False
            self._tell(req.dst, Quiesced(req.grant.generation))
        if req.cancels:
            self.actions.extend(Settle(work) for work in req.cancels)
            req.cancels = []
            self._end(req)

    def _add(self, req: SenderRequest) -> None:
        self._requests[req.request, req.dst] = req
        self._named.setdefault(req.request, {})[req.dst] = req
        self._open[req.dst] += 1

    def _remove(self, req: SenderRequest) -> None:
        del self._requests[req.request, req.dst]
        named = self._named[req.request]
        del named[req.dst]
        if not named:
            del self._named[req.request]
        self._open[req.dst] -= 1
        if not self._open[req.dst]:
            del self._open[req.dst]

    def _end(self, req: SenderRequest) -> None:
        req.ended = True
        self._remove(req)
        addressed = self._addressed.get(req.request, ())
        if addressed and not any((req.request, rank) in self._requests for rank in addressed):
            del self._addressed[req.request]
        if req.grant is not None:
            self._requester.forget(req.dst, req.grant.generation)
            del self._by_generation[(req.dst, req.grant.generation)]
            if req.undrainable:
                self._undrainable.add((req.dst, req.grant.generation))

    def _tell(self, rank: int, message: Attest | Seal | Abort | Quiesced | Alive) -> None:
        self.actions.append(Tell(rank, message))

    def _tell_abort(self, grant: BoundGrant, error: KVError) -> None:
        self._tell(grant.dst, Abort(grant.generation, error_kind(error), str(error)[:MAX_TEXT]))


def _too_many(request: str) -> ProtocolError:
    return ProtocolError(
        f"request {request!r}: too many grants of this receiver wait for their first verb at the sender", retryable=True
    )


def _withdrawn(req: SenderRequest) -> TransferCancelled:
    return TransferCancelled(
        f"request {req.request!r} to {req.receiver}: what was sent has been withdrawn; send it again"
    )
