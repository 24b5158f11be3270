"""How grants and requests of one name meet: in the order in which both sides made them.

What never met is remembered for a while (`unmet`):

* a request that was cancelled before its grant came refuses that grant when it comes, and the request that waits in its
  place then fails with it;
* a grant that was revoked before the first verb was meant for the next request of its name: its first verb raises the
  receiver's error, and it is a tombstone. Only another grant, if it comes first, makes good.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, fresh
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import ANYBODY, BoundGrant, Key, SendOp, Settle
from torchkv.protocol.messages import Exempt, Refused, error_of
from torchkv.protocol.sending.anybody import Anybody
from torchkv.protocol.sending.endings import SendEndings
from torchkv.protocol.sending.grant_checks import check_grant, drop_held
from torchkv.protocol.sending.handover import Handover
from torchkv.protocol.sending.missing import first_missing
from torchkv.protocol.sending.open_sends import OpenSends
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.unmet import Unmet

__all__ = ["Grants"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Grants:
    """lost: why ranks do not answer; the engine's, kept by it. lifetime: of what is remembered, in seconds."""

    def __init__(
        self, group_map: GroupMap, requests: OpenSends, endings: SendEndings, handover: Handover, *, lifetime: float
    ) -> None:
        self.lost: Mapping[int, str] = {}
        self.unmet = Unmet(lifetime)
        self._group_map = group_map
        self._requests = requests
        self._endings = endings
        self._handover = handover
        self._anybody = Anybody(group_map, requests, self.unmet, endings)

    # ---------------------------------------------------------------- requests of this rank's user

    def of(self, request: str, dst: int) -> BoundGrant | None:
        """The grant of this request; if there is no request, the grant that one would bind if it began now."""
        req = self._requests.by_key.get((request, dst))
        return self.unmet.grant((request, dst)) if req is None else req.grant

    def request(self, request: str, dst: int, now: float) -> SenderRequest:
        """The request of this name and receiver; begins one, and binds its grant if that has come."""
        req = self._requests.by_key.get((request, dst))
        if req is None:
            req = self._requests.begin(request, dst, now)
            if (grant := self.unmet.take((request, dst))) is not None:
                self._bind(req, grant, now)
        return req

    def awaits(self, request: str, dst: int) -> bool:
        """Whether a request that begins now would bind the next grant that Python is told of, and nothing else."""
        unmet = self.unmet
        return not unmet.refusing and unmet.grant((request, dst)) is None and self._may_begin(request, dst)

    def addresses(self, request: str, source: int) -> tuple[int, ...]:
        """The ranks that a request to anybody would go to, if it began now with the grants that Python is told of next.

        source: the first rank to grant it. () if Python has been told of any, or knows where the request goes. Whether
        it `awaits` each of these grants is asked by who binds them.
        """
        if self.unmet.named(request) or self.unmet.revoked(request) or self.unmet.is_exempt(request):
            return ()
        return () if request in self._requests.addressed else self._anybody.owed(request, source)

    def waiting(self, request: str, dst: int) -> BoundGrant | None:
        """The grant that a request would bind which began now, if no pages of its prefix are absent.

        None also if anything stands against that request: then `check_revocation` and `OpenSends.check_room` say what.
        """
        grant = self.unmet.grant((request, dst))
        if grant is None or grant.absent_tokens:
            return None
        return grant if self._may_begin(request, dst) else None

    def expects(self, req: SenderRequest) -> bool:
        """As `awaits`, of a request that has begun and waits for its grant: of one of which no verb was called yet."""
        key = req.request, req.dst
        idle = req.flow is None and not req.queue and req.finish is None
        return idle and not self.unmet.refusing and self.unmet.grant(key) is None and not self.unmet.is_revoked(key)

    def _may_begin(self, request: str, dst: int) -> bool:
        """Whether nothing but a missing grant stands against a request that begins now."""
        key, requests = (request, dst), self._requests
        if key in requests.by_key or (request, ANYBODY) in requests.by_key:
            return False
        return not self.unmet.is_revoked(key) and requests.has_room(dst)

    def begin(self, grant: BoundGrant, now: float) -> SenderRequest:
        """Begins the request that binds a grant of `waiting`, or one of `awaits`. As `request`, for what is plain.

        `leave_loop` is to be called, too, once it is known what the request has on the loop.
        """
        req = self._requests.begin(grant.request, grant.dst, now)
        self.unmet.take((grant.request, grant.dst))
        self._requests.bind(req, grant, now)
        self._endings.counts.grants.add(0.0)
        return req

    def bind_expected(self, req: SenderRequest, grant: BoundGrant, now: float) -> None:
        """As `begin`, of a request that `expects` this grant."""
        self._requests.bind(req, grant, now)
        self._endings.counts.grants.add(now - req.begun_at)

    def check_revocation(self, request: str, dst: int) -> None:
        """Raises the error for which the grant of the request that is about to begin was revoked, if it was.

        The request then is a tombstone: it has met its grant, so that the next grant is for the next request.
        """
        key = request, dst
        if key in self._requests.by_key:
            return
        if dst != ANYBODY and (request, ANYBODY) in self._requests.by_key:
            raise ProtocolError(
                f"request {request!r} to {self._group_map.name(dst)}: this rank sends it to whoever grants it, and no "
                f"rank has yet; pass dst=None in all verbs of one request, or name its receiver in all"
            )
        if (revocation := self.unmet.take_revocation(key)) is None:
            return
        revoked_at, error = revocation
        req = self._requests.begin(request, dst, revoked_at)
        req.grant_spent = True
        self._endings.fail(req, error)
        raise fresh(error)

    def receivers(self, request: str, now: float) -> tuple[int, ...] | None:
        """The ranks that a request to anybody goes to, if it has been granted. None if nobody has, that is not busy."""
        source = self._anybody.source(request)
        return None if source is None else self._address(request, source, now)

    def refuses(self, key: Key) -> bool:
        """Whether a grant may come that was meant for a cancelled request, and not for this one."""
        return self.unmet.refuses((key[0], ANYBODY)) or self.unmet.refuses(key)

    def decline(self, request: str, now: float) -> None:
        """This rank will not begin the next request of this name: refuses its grant. Nothing if it has begun."""
        begun = self._requests.named(request) or request in self._requests.addressed
        if begun or self.unmet.take_exemption(request) is not None:
            return
        if self.unmet.take_revocation((request, ANYBODY)) is not None:
            return
        if grants := self.unmet.named(request):
            grant = self.unmet.take((request, grants[0].dst))
            assert grant is not None
            error = TransferCancelled(f"{self._me} cancelled request {request!r}")
            self._endings.abort(grant, error)
            self._anybody.refuse_others(request, grant.dst, error, now)
            return
        self.unmet.refuse((request, ANYBODY), now)
        self._handover.heed_grants()

    def cancelled(self, request: str, begun: set[int]) -> None:
        """A cancelled name: refuses grants of it that no request has taken. begun: to these there are requests."""
        for grant in self.unmet.named(request):
            if grant.dst not in begun:
                self.unmet.take((request, grant.dst))
                self._endings.abort(grant, TransferCancelled(f"{self._me} cancelled request {request!r}"))
        for dst in self.unmet.revoked(request):
            if dst not in begun:
                self.unmet.take_revocation((request, dst))

    # ---------------------------------------------------------------- what receivers tell

    def meet(self, grant: BoundGrant, now: float) -> None:
        """A grant has come: binds the request that waits for it, keeps it, or refuses it."""
        key = grant.request, grant.dst
        self.unmet.take_revocation(key)  # the receiver has posted again: the next request meets this grant
        req = self._meant(key, now)
        waits = req is not None and req.waits
        refusal = self._take_refusal(key, now) if req is None or req.grant is None else None
        if refusal is not None:
            self._endings.abort(grant, refusal)
            if req is not None and waits and req.error is None:
                # Whether the grant was meant for this request or for the earlier one only the receiver knows. If it
                # went on waiting, callers who then try again on both sides would miss each other every time.
                req.grant_spent = True
                self._endings.fail(req, refusal)
        elif req is not None and waits and req.error is not None:
            req.grant_spent = True
            self._endings.abort(grant, req.error)
            if req.dst == ANYBODY:
                self._anybody.refuse_others(grant.request, grant.dst, req.error, now)
        elif req is not None and waits and req.dst != ANYBODY:
            self._bind(req, grant, now)
        elif self.unmet.has_room(grant):
            self.unmet.keep(grant)
            if req is not None and waits:
                self.receivers(grant.request, now)
        else:
            self._endings.abort(grant, _too_many(grant.request))

    def on_refused(self, src: int, message: Refused, now: float) -> None:
        """The receiver grants nothing to the next request of this name: fails the one that waits, or that comes."""
        self._handover.settle()  # grants of earlier requests of this name have been told before
        key, error = (message.request, src), error_of(message)
        req = self._meant(key, now)
        declined = (req is None or req.grant is None) and self._take_refusal(key, now) is not None
        if req is not None and req.waits:
            req.grant_spent = True
            if req.error is None:
                self._endings.fail(req, error)
        elif not declined and (req is None or req.dst != ANYBODY):
            # Else both sides have given up the same request, or another rank of the instance has said so before.
            self.unmet.refused(key, error, now)

    def on_exempt(self, src: int, message: Exempt, now: float) -> None:
        """An instance has granted a request, and needs nothing of this rank. Raises ``ProtocolError`` if it does."""
        if self._anybody.owed(message.request, src):
            raise ProtocolError(
                f"{self._group_map.name(src)} exempts this rank from request {message.request!r}, but is owed bytes"
            )
        req = self._requests.by_key.get((message.request, ANYBODY))
        if req is not None and req.waits and req.error is None:
            self._address(message.request, src, now)
        elif req is not None and req.waits:
            req.grant_spent = True
        elif not self.unmet.take_refusal((message.request, ANYBODY), now):
            self.unmet.exempt(message.request, src, now)

    # ---------------------------------------------------------------- inside

    @property
    def _me(self) -> str:
        return self._group_map.name(self._group_map.rank)

    def _meant(self, key: Key, now: float) -> SenderRequest | None:
        """The request that a grant with this name and of this receiver is meant for, taken back if it has none yet."""
        req = self._requests.by_key.get(key)
        if req is not None and req.grant is None:  # it may wait on the loop, which may bind it meanwhile
            self._handover.take_back(req, now)
            req = self._requests.by_key.get(key)
        return self._requests.by_key.get((key[0], ANYBODY)) if req is None else req

    def _take_refusal(self, key: Key, now: float) -> KVError | None:
        """Why the grant that has come is refused, if it was meant for a request that had been cancelled.

        Uses up one refusal.
        """
        if not self.unmet.refusing:
            return None
        request, src = key
        error = TransferCancelled(f"{self._me} cancelled request {request!r} before it was granted")
        if self.unmet.take_refusal(key, now):
            return error
        if self.unmet.take_refusal((request, ANYBODY), now):
            self._anybody.refuse_others(request, src, error, now)
            return error
        return None

    def _address(self, request: str, source: int, now: float) -> tuple[int, ...]:
        """The request to anybody goes to the instance of ``source``: to these ranks. They may have granted already."""
        reqs = self._anybody.address(request, source, now)
        for req in reqs:
            if (revocation := self.unmet.take_revocation((request, req.dst))) is not None:
                req.grant_spent = True
                self._endings.fail(req, revocation[1])
                continue
            grant = self.unmet.take((request, req.dst))
            if req.dst in self.lost:  # `peer_lost` has been called already
                error = PeerLost(f"request {request!r}: {self.lost[req.dst]}")
                if grant is not None:
                    req.grant_spent = True
                    self._endings.abort(grant, error)
                self._endings.fail(req, error)
            elif grant is not None:
                self._bind(req, grant, now)
            else:
                self._handover.heed_grants()
        return tuple(req.dst for req in reqs)

    def _bind(self, req: SenderRequest, grant: BoundGrant, now: float) -> None:
        """Starts what waited for the grant, or fails the request if that does not fit the grant."""
        self.leave_loop(req, grant, now)
        self._requests.bind(req, grant, now)
        self._endings.counts.grants.add(now - req.begun_at)
        trace.debug("request %r to rank %d: bound to its grant, generation %d", req.request, req.dst, grant.generation)
        waiting, req.queue = req.queue, deque()
        problem = self._refit(req, waiting, grant)
        if problem is not None:
            self._endings.actions.extend(Settle(op.work, problem) for op in waiting)
            self._endings.fail(req, problem)
            return
        req.fresh = True
        for op in waiting:
            self._handover.start(req, op, grant, now)
        if req.finish is not None:
            self._handover.finish(req, now)

    def leave_loop(self, req: SenderRequest, grant: BoundGrant, now: float) -> None:
        """Takes requests back that wait on the loop, if this grant to one of their name is behind a prefix.

        For the loop binds behind none, and compares none. What it has bound is known after this.
        """
        if grant.prefix_tokens and self._handover.flows is not None:
            for other in self._requests.like(req):
                if other.grant is None:
                    self._handover.take_back(other, now)

    def _refit(self, req: SenderRequest, waiting: deque[SendOp], grant: BoundGrant) -> KVError | None:
        """Counts what waited from the prefix of the grant. Why it does not fit the grant, or None if it does."""
        problem: KVError | None = None
        req.forget_sent()
        for op in waiting:
            self._requests.queued_pages -= op.num_pages
            drop_held(op, grant)
            req.add_sent(op)
            try:
                check_grant(op, grant, self._group_map.name)
            except KVError as error:
                problem = error
        if problem is None and req.finish is not None:
            text = first_missing(self._group_map, req.request, req.dst, req, grant)
            problem = None if text is None else ProtocolError(f"finish({req.request!r}) to {req.receiver}: {text}")
        return problem


def _too_many(request: str) -> ProtocolError:
    return ProtocolError(
        f"request {request!r}: too many grants of this receiver wait for their first verb at the sender", retryable=True
    )
