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

* **Grant.** `Posts.post` leases the pages to a new *generation* of the request and grants them to its writers.
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
from collections.abc import Iterable
from typing import Final

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, TransferTimeout, fresh
from torchkv.layout.group_map import GroupMap
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.protocol.actions import Account, Settle, Tell, Work
from torchkv.protocol.counts import SEVERAL
from torchkv.protocol.flows import RequestFlows
from torchkv.protocol.messages import (
    Abort,
    Alive,
    Attest,
    InstanceVerdict,
    Quiesced,
    Seal,
    Verdict,
    error_of,
)
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.leases import Leases
from torchkv.protocol.receiving.open_receives import OpenReceives
from torchkv.protocol.receiving.posts import Posts
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
        self.requests = OpenReceives()
        self.leases = Leases(num_pages=group_map.me.num_pages, num_slots=group_map.me.num_slots, pools=pools)
        self._endings = ReceiveEndings(group_map, self.requests, self.leases, credits)
        self.actions: Final = self._endings.actions  # the parts append to the very same list
        self.counts = self._endings.counts
        self.stages = Stages(group_map, self.requests, self._endings, credits)
        self.posts = Posts(group_map, self.requests, self.leases, self._endings)

    # ---------------------------------------------------------------- calls of this rank's user

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
                where = f"its receiver, {self._group_map.name(self._group_map.rank)}"
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
            raise fresh(req.error)
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
        part = message.layers, message.lo, min(message.hi, req.num_tokens)
        nbytes = 0 if message.again and writer.has(*part, state=message.state) else message.nbytes
        writer.cover(*part, state=message.state)
        self.actions.append(Account(req.work, nbytes, message.path))
        self.counts.moved(src, message.path, nbytes)
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
        name = self._group_map.name(src)
        if problem := req.bad_seal(writer, name):
            self._endings.fail(req, ProtocolError(problem))
            return
        if self._endings.is_failed_by_aux(req):
            return
        self._endings.complete_if_covered(req, now)
        if message.again and (lost := writer.missing(None, req.num_tokens)):
            self._endings.fail(
                req, PeerLost(f"request {req.request!r}: the connection to {name} broke, and {lost}, is lost; retry")
            )

    def received(self, req: ReceiverRequest, nbytes: int, now: float) -> None:
        """The loop has seen everything arrive, and has told the writers. Their aux is known already."""
        for rank in req.writers:
            self._credits.mark_quiescent(rank, req.generation, now)
        self._count_loop(req, nbytes)
        self._endings.succeed(req, by_loop=nbytes)

    def tell_verdicts(self, rank: int, generations: Iterable[int]) -> None:
        """The loop has ended these requests, but its word for ``rank`` may have been lost. Told twice is told once."""
        self.actions.extend(Tell(rank, Verdict(generation)) for generation in generations)

    def _count_loop(self, req: ReceiverRequest, nbytes: int) -> None:
        """Counts what has arrived through the loop, which does not tell the shares of several writers."""
        self.counts.moved(next(iter(req.writers)) if len(req.writers) == 1 else SEVERAL, req.loop_path, nbytes)

    def taken_back(
        self, req: ReceiverRequest, nbytes: int, now: float, *, untold: Iterable[int] = (), unposted: bool = False
    ) -> None:
        """The request is no longer on the loop; what has arrived, and the seals, have been added to its writers.

        untold: writers that do not know of their grant, or may not. unposted: whether the instance's leader does not.
        """
        self.posts.tell_grant(req, untold, told_as=req.reserved)
        if unposted:
            self.posts.tell_post(req)
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
            self._endings.fail(found[0], error_of(message))

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
            self._endings.fail(req, error_of(message), decided=True)
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
