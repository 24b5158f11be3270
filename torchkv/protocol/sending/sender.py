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

`grants` says which grant a request is bound to; `anybody`, what becomes of a request that names no receiver.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from torchkv.errors import KVError, PageOutOfRange, PeerLost, ProtocolError, TransferCancelled, fresh
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import seal_matches
from torchkv.protocol.actions import ANYBODY, Account, BoundGrant, Halt, SendOp, Settle, SettleCopied, Tell, Work
from torchkv.protocol.messages import Alive, Attest, Grant, Quiesced, Revoke, Verdict, error_of
from torchkv.protocol.sending.endings import SendEndings
from torchkv.protocol.sending.grant_checks import (
    behind,
    bound_grant,
    check_grant,
    check_prefix,
    check_prefixes,
    check_range,
    drop_held,
)
from torchkv.protocol.sending.grants import Grants
from torchkv.protocol.sending.handover import Handover
from torchkv.protocol.sending.missing import first_missing, state_left
from torchkv.protocol.sending.open_sends import OpenSends
from torchkv.protocol.sending.request import Finish, SenderRequest, receiver_name
from torchkv.protocol.sending.staging_requester import StagingRequester

__all__ = ["Sender"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Sender:
    """All requests that this rank sends. Not thread-safe: the caller holds a lock.

    Every method that may change something appends to ``actions``; the engine takes and performs them.
    """

    def __init__(
        self, group_map: GroupMap, *, timeout: float, grant_timeout: float, requester: StagingRequester
    ) -> None:
        """timeout, grant_timeout: of Options, in seconds. requester: asks for stages of receivers' staging rings."""
        self._group_map = group_map
        self._timeout = timeout
        self._grant_timeout = grant_timeout
        self.requests = OpenSends(group_map.name)
        self._endings = SendEndings(self.requests, requester)
        self.actions: Final = self._endings.actions  # the parts append to the very same list
        self.counts = self._endings.counts
        self.handover = Handover(group_map, self.requests, self._endings, timeout=timeout)
        self.grants = Grants(group_map, self.requests, self._endings, self.handover, lifetime=grant_timeout)

    # ---------------------------------------------------------------- verbs of this rank's user

    def receivers(self, request: str, now: float, *, last: bool = False) -> tuple[int, ...]:
        """Where a request to anybody goes: the ranks that it was found to go to, or `ANYBODY` until it is known.

        last: the caller asks for the last time.
        """
        found = self.requests.addressed.get(request)
        if found is None and (request, ANYBODY) not in self.requests.by_key:
            found = self.grants.receivers(request, now)
        if last and found == ():
            del self.requests.addressed[request]
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
        """Raises unless `submit` of such an op would be accepted now.

        Changes nothing, but see `Grants.check_revocation`. Raises the error of a tombstone, ``ProtocolError`` after
        ``finish`` or (retryable) when too much waits for grants, ``PageOutOfRange`` for pages outside a grant that has
        come.
        """
        req = self.requests.by_key.get((request, dst))
        if req is None:
            self.grants.check_revocation(request, dst)
            self.requests.check_room(request, dst)
            grant = self.grants.unmet.grant((request, dst))
        else:
            req.check_open()
            grant = req.grant
        if grant is None:
            self.requests.check_queue(request, req, num_pages)
            return
        if from_prompt or (grant.absent_tokens and not state):
            start, num_pages, _ = behind(grant, start, num_pages, from_prompt=from_prompt)
        if not state:
            check_range(grant, start, num_pages, self._group_map.name)

    def is_on_loop(self, request: str, dst: int) -> bool:
        """Whether the resident loop serves the request, so that a verb need not know what the loop has done.

        That of a finished request it may have ended, so that the verb is of the next one of its name.
        """
        req = self.requests.by_key.get((request, dst))
        return req is not None and req.flow is not None and req.finish is None

    def begin(self, request: str, dst: int, now: float) -> None:
        """Begins a request, unless there is one, and binds its grant if that has come. Raises a tombstone's error."""
        self.grants.check_revocation(request, dst)
        req = self.grants.request(request, dst, now)
        if req.error is not None:
            raise fresh(req.error)
        if dst == ANYBODY:
            self.handover.heed_grants()

    def check_prefixes(self, request: str, dsts: Iterable[int]) -> None:
        """Raises ``ProtocolError`` if the prefixes of these receivers, as far as grants have come, are not equal."""
        known = {dst: grant.held_tokens for dst in dsts if (grant := self.grants.of(request, dst)) is not None}
        check_prefixes(request, known)

    def submit(self, op: SendOp, now: float) -> None:
        """Queues or starts ``op``, which `admit` has accepted under the same lock."""
        key = op.request, op.dst
        begins = key not in self.requests.by_key and op.dst != ANYBODY
        req = self.grants.request(op.request, op.dst, now)
        if req.grant is not None:
            drop_held(op, req.grant)
        req.add_sent(op)
        if req.grant is None:
            req.queue.append(op)
            self.requests.queued_pages += op.num_pages
            if self.handover.flows is not None:
                self.handover.await_grant(req, op, begins=begins and not self.grants.refuses(key))
        else:
            if not op.state:
                check_prefix(op, req.grant)
            self.handover.start(req, op, req.grant, now)

    def state_left(self, request: str, dst: int) -> tuple[int, ...]:
        """Layers (global ids, ascending) whose state this rank holds and has not sent to ``dst``."""
        return state_left(self._group_map, request, self.requests.by_key.get((request, dst)))

    def check_finish(self, request: str, dst: int, *, state_slot: int | None = None) -> None:
        """Raises ``ProtocolError`` unless `finish` would be accepted now, or a tombstone's error. Changes nothing.

        state_slot: the slot from which ``finish`` is about to send the state that was not sent; None: none.
        """
        self.grants.check_revocation(request, dst)
        req = self.requests.by_key.get((request, dst))
        if req is None:
            self.requests.check_room(request, dst)
        else:
            req.check_open()
        grant = self.grants.of(request, dst)
        problem = first_missing(self._group_map, request, dst, req, grant, state=state_slot is None)
        if problem is not None:
            raise ProtocolError(f"finish({request!r}) to {self.named(dst)}: {problem}")

    def finish(self, request: str, dst: int, *, aux: bytes, work: Work, now: float) -> None:
        """Seals the request as soon as all its transfers are flushed. `check_finish` has accepted it.

        work: completed by the receiver's verdict, or with the error.
        """
        req = self.grants.request(request, dst, now)
        req.finish = Finish(work, aux)
        self.handover.finish(req, now)

    def may_finish_whole(self, req: SenderRequest, aux: bytes, states: tuple[int, ...]) -> bool:
        """Whether `finish_whole` may be called: verbs of all pages have sent all that is owed, and the loop serves it.

        states: layers whose state is about to be sent. Where it may not, `check_finish` says what is missing, if
        anything is.
        """
        grant, flows = req.grant, self.handover.flows
        if req.flow is None or grant is None or req.finish is not None or flows is None:
            return False
        plan = grant.plan
        if plan.state is not None and not req.states.union(states).issuperset(plan.state.layers):
            return False
        fits = seal_matches(req.num_pages, plan.src_page_size, len(grant.pages), plan.dst_page_size)
        return fits and req.sent_all_of(plan.layers) and flows.may_finish(aux)

    def finish_whole(self, req: SenderRequest, aux: bytes, work: Work, now: float) -> None:
        """As `finish`, if `may_finish_whole`: for a verb's critical path."""
        flows = self.handover.flows
        assert flows is not None
        req.finish = Finish(work, aux)
        flows.finish(req)
        if not req.running:
            req.sealed_at = req.progress_at = now

    def cancel(self, request: str, work: Work, now: float) -> list[Work]:
        """Fails the requests of this name towards all receivers, and ends each when it has drained.

        Returns ``work`` once for each of them; the end of each completes one part of it.
        """
        pending: list[Work] = []
        if self.requests.addressed.get(request) == ():
            del self.requests.addressed[request]
        reqs = self.requests.named(request)
        for req in reqs:
            if req.ended or not self.handover.stop(req):
                continue
            req.cancels.append(work)
            pending.append(work)
            if req.waits:
                self.grants.unmet.refuse((request, req.dst), now)
            if req.error is None:
                me = self.named(self._group_map.rank)
                self._endings.fail(
                    req, TransferCancelled(f"request {request!r} to {req.receiver} was cancelled on {me}")
                )
            else:
                self._endings.after_drain(req)
        self.grants.cancelled(request, {req.dst for req in reqs})
        return pending

    def withdraw(self, request: str, work: Work) -> list[Work]:
        """As if no verb of the requests of this name had been called: stops their ops. The requests go on.

        Returns ``work`` once for each op that has not ended; the end of each completes one part of it. Raises
        ``ProtocolError`` if one of the requests is finished.
        """
        reqs = [req for req in self.requests.named(request) if req.error is None]
        for req in reqs:
            if req.finish is not None:
                raise ProtocolError(f"withdraw({request!r}): it is finished towards {req.receiver}; cancel it instead")
        pending: list[Work] = []
        for req in reqs:
            if not self.handover.stop(req):
                continue
            self.requests.queued_pages -= sum(op.num_pages for op in req.queue)
            for op in req.queue:
                self.actions.extend((Settle(op.work, _withdrawn(req)), Settle(work)))
                pending.append(work)
            req.queue.clear()
            req.forget_sent()
            req.states.clear()
            for op in req.running:
                if op.withdrawn is None:
                    op.withdrawn = work
                    pending.append(work)
                    self.actions.append(Halt(op))
            if req.grant is None:
                self.handover.heed_grants()
        return pending

    def prefix_tokens(self, request: str, dst: int) -> int | None:
        """The prefix that the receiver holds, in tokens; None until its grant has come. Raises a tombstone's error."""
        req = self.requests.by_key.get((request, dst))
        if req is not None and req.error is not None:
            raise fresh(req.error)
        grant = self.grants.of(request, dst)
        return None if grant is None else grant.held_tokens

    # ---------------------------------------------------------------- reports of the engine

    def wants(self, op: SendOp) -> bool:
        """Whether the started ``op`` should still move bytes: neither has its request failed, nor is it withdrawn."""
        return op.withdrawn is None and self.requests.by_key[(op.request, op.dst)].error is None

    def attest(self, op: SendOp, layers: tuple[int, ...], *, nbytes: int, path: str) -> None:
        """These layers of ``op`` are flushed: they are visible in the receiver's memory."""
        req = self.requests.by_key[(op.request, op.dst)]
        assert req.grant is not None
        self.actions.append(Account(op.work, nbytes, path))
        self.counts.moved(op.dst, path, nbytes)
        if req.error is None and layers and op.num_pages:
            self.actions.append(Tell(op.dst, _attest(op, req.grant, layers, nbytes, path)))

    def announce(self, op: SendOp) -> None:
        """The last bytes of a finished request are under way: wakes the receiver, so that it is awake for the seal."""
        req = self.requests.by_key[(op.request, op.dst)]
        if req.about_to_seal and req.grant is not None:
            self.actions.append(Tell(op.dst, Alive(req.grant.generation, False)))

    def op_finished(self, op: SendOp, error: KVError | None, *, flushed: bool, now: float) -> None:
        """This rank writes nothing more for ``op``: all of it is attested, or it failed with ``error``.

        flushed: False if its channel broke, so that bytes may still be on their way to the receiver. Then the receiver
        is never told that this rank is quiescent; only the end of this process proves it.
        """
        req = self.requests.by_key[(op.request, op.dst)]
        del req.running[op]
        req.undrainable |= not flushed
        stopped = op.withdrawn is not None and flushed and error is not None
        goes_on = req.error is None and (error is None or stopped)
        outcome = (_withdrawn(req) if stopped else None) if goes_on else req.error or error
        self.actions.append(Settle(op.work, outcome))
        if op.withdrawn is not None:  # after the op's own work: who has waited for the withdrawal may look at that
            self.actions.append(Settle(op.withdrawn))
        if goes_on:
            self._endings.seal_if_done(req, now)
        elif req.error is None and error is not None:
            self._endings.fail(req, error)
        else:
            self._endings.after_drain(req)

    def copied(self, req: SenderRequest, ops: list[SendOp], nbytes: list[int], path: str, now: float) -> None:
        """The loop has copied and announced all of these ops. nbytes: of each. path: of all."""
        if trace.isEnabledFor(logging.DEBUG):
            for op, moved in zip(ops, nbytes, strict=True):
                trace.debug("request %r to rank %d: layers %s copied, %d bytes", req.request, req.dst, op.layers, moved)
        for op in ops:
            del req.running[op]
        if req.loop_may_lose and path != "staged" and req.grant is not None:
            told = zip(ops, nbytes, strict=True)
            req.told += [_attest(op, req.grant, op.layers, moved, path, again=True) for op, moved in told]
        self.actions.append(SettleCopied([op.work for op in ops], nbytes, path))
        self.counts.moved(req.dst, path, sum(nbytes))
        if req.finish is not None and not req.running:
            req.sealed_at = req.progress_at = now

    def bound(self, req: SenderRequest, grant: BoundGrant, started: Mapping[SendOp, int], now: float) -> None:
        """The loop has bound a request that waited there, and begins the ops that it had been given (``started``).

        There may be one that it cannot do. Then the request is about to be taken back.
        """
        self.requests.bind(req, grant, now)
        self.grants.unmet.take_revocation((req.request, req.dst))
        trace.debug("request %r to rank %d: bound on the loop, generation %d", req.request, req.dst, grant.generation)
        waited, req.queue = req.queue, deque()
        for op in waited:
            req.running[op] = started.get(op)
            self.requests.queued_pages -= op.num_pages
            op.prefixes[grant.dst] = grant.prefix_tokens
        if req.finish is not None and not req.running:
            req.sealed_at = now

    def outside(self, req: SenderRequest, op: SendOp) -> None:
        """An op names pages outside the grant, which only the loop knew when the verb was called: the request fails."""
        assert req.grant is not None
        try:
            check_grant(op, req.grant, self._group_map.name)
        except PageOutOfRange as error:
            self.handover.fail(req, error)

    def succeeded(self, req: SenderRequest) -> None:
        """The request has succeeded at its receiver."""
        self._endings.succeed(req)

    def take_back_from_loop(self, now: float) -> None:
        """The loop can copy no more: goes on with its requests without it."""
        for req in self.requests:
            self.handover.take_back(req, now)

    def connection_broke(self, dst: int, now: float) -> None:
        """The loop's connection to ``dst`` has broken: goes on without it, and tells again what may have been lost."""
        for req in self.requests:
            if req.dst == dst:
                by_loop = req.flow is not None
                self.handover.take_back(req, now)
                if req.error is not None or req.ended or req.grant is None:
                    continue
                # Nobody here will know whether what was staged was unpacked. Its receiver does, once it is sealed.
                lost = req.in_doubt() if by_loop else None
                if lost is not None and req.sealed_at is None:
                    self.handover.fail(req, PeerLost(f"request {req.request!r}: {lost}"))
                else:
                    self._endings.tell_again(req, req.grant, in_doubt=lost is not None)

    # ---------------------------------------------------------------- messages, deaths and time

    def on_grant(self, src: int, message: Grant, now: float) -> None:
        """A receiver granted pages to this rank. Raises ``ProtocolError`` if the grant is malformed."""
        self.grants.meet(bound_grant(self._group_map, src, message), now)

    def on_revoke(self, src: int, message: Revoke, now: float) -> None:
        """The receiver failed the request: fails it here too, and answers `Quiesced` once it has drained."""
        self.handover.settle()  # the grant has been told before: it must not bind a request after this
        key = src, message.generation
        req = self.requests.by_generation.get(key)
        if req is None:
            self.grants.unmet.revoke(src, message.generation, error_of(message), now)
            if key not in self.requests.undrainable:
                self._endings.tell(src, Quiesced(message.generation))
            return
        if not self.handover.stop(req):
            self._endings.tell(src, Quiesced(message.generation))
            return
        req.revoked = True
        if req.error is None:
            self._endings.fail(req, error_of(message), tell=False)
        else:
            self._endings.after_drain(req)

    def on_verdict(self, src: int, message: Verdict) -> None:
        """The request succeeded at the receiver: ends it here."""
        req = self.requests.by_generation.get((src, message.generation))
        if req is not None:
            self.handover.take_back(req, req.progress_at)
        if req is None or req.ended or req.error is not None or req.sealed_at is None:
            return
        self._endings.succeed(req)

    def on_alive(self, src: int, message: Alive, now: float) -> None:
        req = self.requests.by_generation.get((src, message.generation))
        if req is not None:
            req.progress_at = now

    def peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` does not answer: fails every request towards it. reason: for the message."""
        for req in self.requests:
            if req.dst == rank and req.error is None:
                self.handover.fail(req, PeerLost(f"request {req.request!r}: {reason}"))

    def peer_dead(self, rank: int) -> None:
        """The process of ``rank`` has ended: forgets its grants."""
        self.handover.peer_dead(rank)
        self.grants.unmet.forget(rank)

    def forget(self, rank: int) -> None:
        """Forgets all that was between this rank and ``rank``, with which it is done (`OpenSends.is_done_with`)."""
        for req in self.requests:
            if req.dst == rank:
                self._endings.end(req)
        self.requests.undrainable = {pair for pair in self.requests.undrainable if pair[0] != rank}
        self.grants.unmet.forget(rank)

    def fail_all(self, error: KVError) -> None:
        """Fails every request, because the group is destroyed. Running ops are halted; `end_all` completes the rest."""
        for req in self.requests:
            if req.error is None:
                self.handover.fail(req, type(error)(f"request {req.request!r}: {error}"))

    def end_all(self, error: KVError) -> None:
        """Completes every call that still waits, after `fail_all`, and sends `Quiesced` for every drained request.

        Also for grants that no request took: nobody else will tell their receivers that nothing was written.
        """
        self.handover.settle()
        for req in self.requests:
            self.actions.extend(Settle(op.work, req.error) for op in req.running)
            self.actions.extend(Settle(op.withdrawn, error) for op in req.running if op.withdrawn is not None)
            self.actions.extend(Settle(work, error) for work in req.cancels)
            req.cancels.clear()
            if req.grant is not None and req.drained and not req.undrainable:
                self._endings.tell(req.dst, Quiesced(req.grant.generation))
        for grant in self.grants.unmet.grants():
            self.grants.unmet.take((grant.request, grant.dst))
            where = f"{error} on {self.named(self._group_map.rank)}"
            self._endings.abort(grant, type(error)(f"request {grant.request!r}: {where}"))
            self._endings.tell(grant.dst, Quiesced(grant.generation))

    @property
    def _awaits_grants(self) -> bool:
        """Whether a request waits for its grant in Python, or one that has failed, or was cancelled, refuses it."""
        return self.grants.unmet.refusing or any(req.waits and req.flow is None for req in self.requests)

    def tick(self, now: float) -> bool:
        """Fails requests whose deadline has passed, and tells receivers of progress. Whether a request has failed.

        To be called a few times a second.
        """
        failed = False
        if self.handover.flows is not None:
            self.handover.flows.heed_grants(self._awaits_grants)
        self.grants.unmet.expire(now)
        for req in self.requests:
            if req.error is not None:
                continue
            if req.dst == ANYBODY and self.grants.receivers(req.request, now) is not None:
                continue
            overdue = req.overdue(now, timeout=self._timeout, grant_timeout=self._grant_timeout)
            if overdue is None and req.flow is not None and req.running:
                overdue = self.handover.stalled(req, now)
            if overdue is not None:
                failed |= self.handover.fail(req, overdue)
            elif any(op.moved for op in req.running):
                for op in req.running:
                    op.moved = False
                assert req.grant is not None
                self.actions.append(Tell(req.dst, Alive(req.grant.generation, False)))
        return failed

    def named(self, rank: int) -> str:
        """A member, or `ANYBODY`, in messages."""
        return receiver_name(rank, self._group_map.name)


def _attest(
    op: SendOp, grant: BoundGrant, layers: Iterable[int], nbytes: int, path: str, *, again: bool = False
) -> Attest:
    size = grant.plan.src_page_size
    end = op.start + op.num_pages
    return Attest(grant.generation, list(layers), op.start * size, end * size, nbytes, path, op.state, again)


def _withdrawn(req: SenderRequest) -> TransferCancelled:
    return TransferCancelled(
        f"request {req.request!r} to {req.receiver}: what was sent has been withdrawn; send it again"
    )
