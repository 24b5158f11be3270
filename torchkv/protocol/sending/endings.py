"""How sender requests are sealed, fail, drain and end, and what their calls and their receivers are told of it."""

from __future__ import annotations

import logging

from torchkv.errors import KVError
from torchkv.protocol.actions import Action, BoundGrant, Halt, Settle, Tell
from torchkv.protocol.counts import Counts
from torchkv.protocol.messages import Abort, Attest, Quiesced, Seal, cause_of
from torchkv.protocol.sending.open_sends import OpenSends
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.staging_requester import StagingRequester

__all__ = ["SendEndings"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`


class SendEndings:
    """actions: to which all parts of the sender append. The resident loop serves none of these requests any more."""

    def __init__(self, requests: OpenSends, requester: StagingRequester) -> None:
        self._requests = requests
        self._requester = requester
        self.actions: list[Action] = []
        self.counts = Counts()

    def seal_if_done(self, req: SenderRequest, now: float) -> None:
        """Seals the request if it is finished, and all its transfers are flushed."""
        if req.error is not None or req.finish is None or req.grant is None or req.sealed_at is not None:
            return
        if req.running or req.queue or req.flow is not None:
            return
        req.sealed_at = req.progress_at = now
        trace.debug("request %r to rank %d: sealed, %d pages", req.request, req.dst, req.num_pages)
        self._tell_seal(req, req.grant)

    def _tell_seal(self, req: SenderRequest, grant: BoundGrant, *, again: bool = False) -> None:
        assert req.finish is not None
        self.tell(req.dst, Seal(grant.generation, req.num_pages, req.finish.aux, again))

    def tell_again(self, req: SenderRequest, grant: BoundGrant, *, in_doubt: bool) -> None:
        """Records of the loop may have been lost on their way to the receiver. Told twice is told once.

        Not of what was staged: until the receiver has unpacked it, it has not arrived, and only its record has it
        unpacked. in_doubt: whether such a record may be among them.
        """
        for message in req.told:
            self.tell(req.dst, message)
        if req.sealed_at is not None:
            self._tell_seal(req, grant, again=in_doubt)

    def succeed(self, req: SenderRequest) -> None:
        """The request has succeeded at its receiver."""
        assert req.finish is not None
        trace.debug("request %r to rank %d: verdict: success", req.request, req.dst)
        self.actions.append(Settle(req.finish.work, first=req.begun_at))
        self.counts.ended(None)
        self.end(req)

    def fail(self, req: SenderRequest, error: KVError, *, tell: bool = True) -> None:
        """The request becomes a tombstone. tell: the receiver, if it has granted."""
        assert req.error is None
        error._pages_safe = lambda: all(other.drained for other in self._requests.like(req))
        req.error = error
        self.counts.ended(error)
        trace.debug("request %r to rank %d: failed: %s", req.request, req.dst, error)
        self._requests.queued_pages -= sum(op.num_pages for op in req.queue)
        self.actions.extend(Settle(op.work, error) for op in req.queue)
        req.queue.clear()
        if req.finish is not None:
            self.actions.append(Settle(req.finish.work, error))
        self.actions.extend(Halt(op) for op in req.running)
        if tell and req.grant is not None:
            self.abort(req.grant, error)
        self.after_drain(req)

    def after_drain(self, req: SenderRequest) -> None:
        """If the request has failed and drained: answers the receiver that has revoked it, and ends it if cancelled."""
        if req.running or req.error is None:
            return
        if req.revoked and req.grant is not None and not req.undrainable:
            req.revoked = False
            self.tell(req.dst, Quiesced(req.grant.generation))
        if req.cancels:
            self.actions.extend(Settle(work) for work in req.cancels)
            req.cancels = []
            self.end(req)

    def end(self, req: SenderRequest) -> None:
        """Nothing is left of the request."""
        self._requests.end(req)
        if req.error is not None and req.error.pages_safe:
            req.error._pages_safe = None  # which knows the request: both are freed without a garbage collector
        if req.grant is not None:
            self._requester.forget(req.dst, req.grant.generation)

    def abort(self, grant: BoundGrant, error: KVError) -> None:
        """Tells the receiver that nothing, or nothing more, is sent under its grant."""
        self.tell(grant.dst, Abort(grant.generation, *cause_of(error)))

    def tell(self, rank: int, message: Attest | Seal | Abort | Quiesced) -> None:
        self.actions.append(Tell(rank, message))
