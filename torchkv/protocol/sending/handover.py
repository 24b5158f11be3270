"""Sender requests that the resident loop serves: handed over, given ops, and taken back. See `torchkv.protocol.flows`.

Whoever fails or ends a request has to `stop` it first.
"""

from __future__ import annotations

import logging

from torchkv.errors import KVError, TransferTimeout
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import BoundGrant, SendOp, Start, Tell
from torchkv.protocol.flows import RequestFlows
from torchkv.protocol.messages import Alive
from torchkv.protocol.sending.endings import SendEndings
from torchkv.protocol.sending.missing import is_whole, likely_plan
from torchkv.protocol.sending.open_sends import OpenSends
from torchkv.protocol.sending.request import SenderRequest

__all__ = ["Handover"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class Handover:
    """flows: the requests that the loop serves; set by the engine, None without a loop. timeout: in seconds."""

    def __init__(self, group_map: GroupMap, requests: OpenSends, endings: SendEndings, *, timeout: float) -> None:
        self.flows: RequestFlows | None = None
        self._group_map = group_map
        self._requests = requests
        self._endings = endings
        self._actions = endings.actions
        self._timeout = timeout

    @property
    def _flows(self) -> RequestFlows:
        assert self.flows is not None
        return self.flows

    def heed_grants(self) -> None:
        """A request waits for its grant in Python, or a grant is to be refused: the loop tells of each at once."""
        if self.flows is not None:
            self.flows.heed_grants(True)

    def settle(self) -> None:
        """Learns what the loop has been told before a message that has come now."""
        if self.flows is not None:
            self.flows.settle()

    def peer_dead(self, rank: int) -> None:
        """As `settle`. ``rank`` has ended: its loop grants nothing any more."""
        if self.flows is not None:
            self.flows.peer_dead(rank)

    def start(self, req: SenderRequest, op: SendOp, grant: BoundGrant, now: float) -> None:
        """Begins an op of a bound request."""
        if req.fresh:
            req.fresh = False
            if self.flows is not None and self.flows.serves(op):
                self.flows.open_send(req)
        req.running[op] = None
        if req.flow is None:
            op.landed = op.landed or req.landing
            self._actions.append(Start(op, grant.of_state() if op.state else grant))
        elif not self._flows.start(req, op):
            self.take_back(req, now)

    def await_grant(self, req: SenderRequest, op: SendOp, *, begins: bool) -> None:
        """An op waits for the grant: on the loop, if the request begins with it, and the loop can do all of them."""
        if begins and self._flows.serves(op) and not self._is_prefixed(req):
            plan, writers = likely_plan(self._group_map, req.request, req.dst)
            self._flows.await_grant(req, plan, writers)
        if req.flow is None:
            self._flows.heed_grants(True)
        elif not self._flows.start(req, op):
            self.take_back(req, req.begun_at)

    def _is_prefixed(self, req: SenderRequest) -> bool:
        """Whether another receiver of this name holds a prefix."""
        others = self._requests.like(req)
        return any(other.grant is not None and other.grant.prefix_tokens for other in others)

    def finish(self, req: SenderRequest, now: float) -> None:
        """No more ops will come: has the request sealed once the last one has ended."""
        if req.flow is not None and req.grant is None and not is_whole(self._group_map, req):
            self.take_back(req, now)  # binding it, now or later, comes here again
            return
        if req.flow is None or not self._flows.finish(req):
            self.take_back(req, now)
            self._endings.seal_if_done(req, now)
        elif req.grant is not None and not req.running:
            req.sealed_at = req.progress_at = now

    def take_back(self, req: SenderRequest, now: float) -> None:
        """Takes the request back from the resident loop, if it is there, and goes on with it; it may have ``ended``.

        Ops that the loop had not ended begin again: bytes that arrive twice change nothing.
        """
        if req.flow is None:
            return
        sealed = self._flows.take_back_send(req)
        if sealed is None:
            return
        self._endings.counts.taken_back += 1
        trace.debug("request %r to rank %d: taken back from the resident loop", req.request, req.dst)
        if req.grant is None:
            self._flows.heed_grants(True)
            return
        req.sealed_at, req.progress_at = now if sealed else None, now
        self._actions.extend(Start(op, req.grant.of_state() if op.state else req.grant) for op in req.running)
        self._endings.seal_if_done(req, now)

    def stop(self, req: SenderRequest) -> bool:
        """Takes the request back, if it is on the resident loop, to fail it. False if it has ended meanwhile."""
        if req.flow is not None and self._flows.take_back_send(req) is not None:
            # Nobody works on the others, so they are as good as never begun.
            landing = {op: None for op in req.running if op.landed is not None}
            rest = [op for op in req.running if op.landed is None]
            self._requests.queued_pages += sum(op.num_pages for op in rest)
            req.queue.extend(rest)
            req.running.clear()
            req.running.update(landing)
            assert req.grant is not None or not landing
            self._actions.extend(Start(op, req.grant) for op in landing if req.grant is not None)
        return not req.ended

    def fail(self, req: SenderRequest, error: KVError) -> bool:
        """Stops the request and fails it. False if it has ended meanwhile."""
        if stopped := self.stop(req):
            self._endings.fail(req, error)
        return stopped

    def stalled(self, req: SenderRequest, now: float) -> KVError | None:
        """The error of a request whose ops have made no progress on the loop for too long; else tells the receiver."""
        moved, gated = self._flows.moved(req), self._flows.gated(req)
        if moved != req.moved[0]:
            assert req.grant is not None
            self._actions.append(Tell(req.dst, Alive(req.grant.generation, False)))
        if (moved, gated) != (req.moved[0], req.gated):  # who waits for an event waits for the caller
            req.moved, req.gated = (moved, now), gated
        if now - req.moved[1] <= self._timeout:
            return None
        return TransferTimeout(
            f"request {req.request!r} to {req.receiver}: {len(req.running)} transfers made no progress for "
            f"{self._timeout:g} s (Options.timeout); cancel({req.request!r}) and retry, or raise the limit"
        )
