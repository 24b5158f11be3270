"""How receives succeed, fail and end, and what their calls, their writers and the instance's leader are told of it.

`receiver` shows the states.
"""

from __future__ import annotations

import logging

from torchkv.errors import KVError, PeerLost, ProtocolError
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import Action, Settle, Tell
from torchkv.protocol.counts import Counts
from torchkv.protocol.messages import Outcome, Post, Revoke, Verdict, cause_of
from torchkv.protocol.receiving.leases import Leases
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.receiving.staging_credits import StagingCredits

__all__ = ["ReceiveEndings"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class ReceiveEndings:
    """actions: to which all parts of the receiver append. told_leader: messages that the instance's leader was sent.

    leader_lost: why that leader does not answer; empty while it does.
    """

    def __init__(self, group_map: GroupMap, requests: OpenReceives, leases: Leases, credits: StagingCredits) -> None:
        self.actions: list[Action] = []
        self.counts = Counts()
        self.told_leader = 0
        self.leader_lost = ""
        self._group_map = group_map
        self._requests = requests
        self._leases = leases
        self._credits = credits

    def complete_if_covered(self, req: ReceiverRequest, now: float) -> None:
        """If everything that was sealed is here, the request is complete; it succeeds if this rank alone decides."""
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
        if self.leader_lost:  # nobody will decide
            self.fail(req, PeerLost(f"request {req.request!r}: {self.leader_lost}"), decided=True)
        elif len(self._group_map.siblings) > 1:
            self.tell_leader(Outcome(req.request, req.generation, "", ""))
        else:
            self.succeed(req)

    def is_failed_by_aux(self, req: ReceiverRequest) -> bool:
        """Fails the request if two writers sent unlike aux."""
        if len({writer.aux for writer in req.writers.values() if writer.aux}) < 2:
            return False
        text = f"request {req.request!r}: two writers sent unlike aux bytes; pass aux on one of them only"
        self.fail(req, ProtocolError(text))
        return True

    def succeed(self, req: ReceiverRequest, *, by_loop: int | None = None) -> None:
        """by_loop: the bytes, if the loop has served the request to its end, and told the writers."""
        trace.debug("request %r: verdict: success, generation %d", req.request, req.generation)
        if by_loop is None:
            verdict = Verdict(req.generation)
            self.actions.extend(Tell(rank, verdict) for rank in req.writers)
        self.counts.ended(None)
        work = req.work
        self.end(req)
        self.actions.append(Settle(work, aux=req.aux, nbytes=by_loop or 0, path=req.loop_path if by_loop else "none"))

    def fail(self, req: ReceiverRequest, error: KVError, *, decided: bool = False) -> None:
        """Fails the request. A complete one of an instance is its leader's to decide, and this rank only asks.

        decided: the leader has decided, or nobody will.
        """
        assert req.error is None
        alone = len(self._group_map.siblings) == 1
        cause = cause_of(error)
        if req.complete_at is not None and not decided and not alone:
            if not req.asked:
                req.asked = True
                self.tell_leader(Outcome(req.request, req.generation, *cause))
            return
        error._pages_safe = lambda: req.all_ended
        req.error = error
        self.counts.ended(error)
        trace.debug("request %r: failed, generation %d: %s", req.request, req.generation, error)
        for job in req.scattering:
            job.stopped = True
        if req.reserved is not None and self._requests.flows is not None:
            req.unpacking = self._requests.flows.stop_unpacking(req)
        del self._requests.live[req.request]
        for rank, writer in req.writers.items():
            writer.ring_only = self._credits.is_ring_only(rank, req.generation)
        self._credits.revoke(req.generation)
        self.actions.append(Settle(req.work, error))
        self.actions.extend(Tell(rank, Revoke(req.generation, *cause)) for rank in req.writers)
        if not decided:
            self.tell_leader(Outcome(req.request, req.generation, *cause))
        self.end_if_quiescent(req)
        if req.parts:
            self.fail_parts(req)

    def fail_parts(self, failed: ReceiverRequest) -> None:
        """One part of a request of several layer groups has failed: so do all others."""
        for part in failed.parts:
            if part.live:
                self._requests.take_back(part)
            if part.live and failed.error is not None:
                self.fail(part, type(failed.error)(str(failed.error)))

    def tell_leader(self, message: Post | Outcome) -> None:
        """Tells the leader of this rank's instance, if it has other ranks."""
        if len(self._group_map.siblings) > 1:
            self.told_leader += 1
            self.actions.append(Tell(self._group_map.siblings[0], message))

    def end_if_quiescent(self, req: ReceiverRequest) -> None:
        """Ends the request if it has failed, and nothing can land on its pages any more."""
        if req.error is not None and not req.pending_writers() and not req.scattering and not req.unpacking:
            self.end(req)

    def end(self, req: ReceiverRequest) -> None:
        """The leases end, or those of a part once the others' do."""
        assert req.flow is None
        req.ended = True
        if req.all_ended:  # also the parts that ended before, whose pages are the same caller's
            for part in req.parts or (req,):
                self._leases.free(part)
                part.forget()
        if req.reserved is not None and self._requests.flows is not None:
            self._requests.flows.free_receive(req.reserved)
        self._requests.remove(req)
        if req.cancels:
            self.actions.extend(Settle(work) for work in req.cancels)
            req.cancels = []
