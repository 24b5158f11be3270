"""Hands requests over to the resident loop, and takes them back. What the loop has done since: see `notices`.

A request is on the loop from its first verb on, if its bytes can be copied straight into the receiver's pages and state
slot: both ranks are on this host, and these are mapped. This host's processor copies what lies in its memory, and no op
of that waits for an event; kernels copy what lies on a GPU, after CUDA events. Pages that are not mapped the loop puts
through the network. If their runs are short, or packing them costs less than puts, it stages them, once the receiver
has granted a standing stage. Everything else, and everything that goes wrong, is Python's: see
`torchkv.protocol.flows`.

All methods are called under the engine's lock, but for those that say otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torchkv.core.loop.codes import ALONE, NOBODY
from torchkv.core.loop.limits import MAX_AUX, MAX_FLOWS, MAX_GRANTED, MAX_NAME, MAX_WRITERS
from torchkv.core.receives import ReceiveState
from torchkv.engine.resident.bound_grants import as_bits
from torchkv.engine.resident.journal import Journal
from torchkv.engine.resident.notices import Notices, OnLoop, path_of
from torchkv.engine.resident.plain_receives import PlainReceives, SoleWriter, owed
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.engine.resident.routes import Routes
from torchkv.engine.resident.standing_stages import StandingStages
from torchkv.engine.weak_callback import weakly
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.actions import SendOp
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import name_hashes
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender
from torchkv.transfer.loop_kernels import Kernels
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.engine.source_pages import SourcePages
    from torchkv.observe.recorder import FlightRecorder

__all__ = ["Flows"]


class Flows:
    """One rank's requests on the resident loop, and the rounds of the instance that it leads.

    connections: those that have been made, by rank. local: this rank's pages. kernels: of pages on a GPU. direct:
    False where no peer is expected to write straight into these pages, so that the loop cannot serve receives. puts:
    False where pages that are not mapped are not to be put by the loop. stages: what makes its standing stages, for
    its routes; None where it stages nothing. recorder: goes on with the loop's journal.
    """

    def __init__(
        self,
        core: Core,
        *,
        group_map: GroupMap,
        sender: Sender,
        receiver: Receiver,
        leader: InstanceLeader,
        local: LocalPages,
        connections: Mapping[int, PeerConnection],
        kernels: Kernels | None = None,
        direct: bool = True,
        puts: bool = True,
        stages: Callable[[Routes], StandingStages] | None = None,
        clock: Callable[[], float],
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.core = core
        self._direct = direct
        self._group_map = group_map
        self._sender = sender
        self._receiver = receiver
        self._leader = leader
        self._local = local
        self._connections = connections
        self._now = clock
        self.routes = Routes(
            core,
            local=local,
            connections=connections,
            kernels=kernels,
            puts=puts,
            sends_to=weakly(self._sends_to),
            size=lambda rank: (group_map.info[rank].num_pages, group_map.info[rank].num_slots),
        )
        self._stages = None if stages is None else stages(self.routes)
        self.routes.stages = self._stages
        held = OnLoop()
        self._sends, self._lanes, self._waiting, self._ops = held.sends, held.lanes, held.waiting, held.ops
        self._receives, self._rounds, self._dead = held.receives, held.rounds, held.dead
        self._unpacking = held.unpacking
        self.journal = Journal(core, recorder, sends=self._sends, receives=self._receives, ops=self._ops)
        self.plain = PlainSends(
            core,
            held,
            group_map=group_map,
            routes=self.routes,
            journal=self.journal,
            connections=connections,
            num_pages=local.num_pages,
        )
        self.plain_receives = PlainReceives(core, held, group_map=group_map, routes=self.routes, journal=self.journal)
        self.notices = Notices(
            core,
            held,
            group_map=group_map,
            sender=sender,
            receiver=receiver,
            leader=leader,
            path=weakly(self.routes.path),
            connections=connections,
            journal=self.journal,
            leave=weakly(self._leave),
            clock=clock,
        )

    # ------------------------------------------------------------------ sends

    def serves(self, op: SendOp) -> bool:
        path = op.source_pages.path
        if path == "staged" and (self._stages is None or not self._stages.uses(op.dst)):
            return False
        return path in (None, "direct", "staged")

    def await_grant(self, req: SenderRequest, plan: PairPlan, writers: tuple[int, ...]) -> None:
        route = self.routes.to(req.dst, plan)
        if route is None or not self.core.peers.hears(req.dst):  # then the grant comes in a message
            return
        flow = self.core.sends.wait_for_grant(
            route.way,
            hashes=name_hashes(req.request),
            writers=as_bits(writers),
            serial=self.journal.next_serial(),
            begun=int(req.begun_at * 1e9),
        )
        if flow is not None:
            self.plain.opened(req, flow, route)
            self._waiting[flow] = plan, []

    def heed_grants(self, heeds: bool) -> None:
        self.core.heed_grants(heeds)

    def takes_grant(self, rank: int, flow: int, generation: int) -> bool:
        with self._standing_still():
            return self.core.peers.takes_grant(rank, flow, generation)

    def settle(self) -> None:
        with self._standing_still():
            pass

    def peer_dead(self, rank: int) -> None:
        self.settle()
        self._dead.add(rank)

    def open_send(self, req: SenderRequest) -> None:
        grant = req.grant
        assert grant is not None
        route = None if grant.flow is None else self.routes.to(req.dst, grant.plan)
        if grant.flow is None or route is None or (route.way.has_kernels and len(grant.pages) > MAX_GRANTED):
            return
        self.plain.open(req, grant, route)

    def start(self, req: SenderRequest, op: SendOp) -> bool:
        assert req.flow is not None
        source: SourcePages = op.source_pages
        plan = self._waiting[req.flow][0] if req.grant is None else req.grant.plan
        route = self.routes.to(req.dst, plan)
        gate = self.routes.gate(source.event)
        if gate is None or route is None or not self.serves(op):
            return False
        forced = source.path == "staged"
        if (forced and not req.loop_stages) or (not forced and req.loop_promised):
            return False
        pages = source.pages
        if not isinstance(pages, np.ndarray) or (route.way.has_kernels and len(pages) > MAX_GRANTED):
            return False
        verb = self.journal.verb_of(op.work, op.verb)
        req.loop_staged |= forced
        req.loop_promised |= forced and not req.loop_wrote
        req.loop_wrote |= not forced
        staged = 0 if not forced else 2 if req.loop_promised else 1
        index = self.core.sends.start_op(
            req.flow, route.positions_of(op), pages, op.start, gate, verb, of_state=op.state, staged=staged
        )
        if index is None:
            return False
        op.work._in_journal |= verb != 0
        self._ops[index] = req, op
        if req.grant is None:
            self._waiting[req.flow][1].append(index)
        else:
            req.running[op] = index
        return True

    def may_finish(self, aux: bytes) -> bool:
        return len(aux) <= MAX_AUX

    def finish(self, req: SenderRequest) -> bool:
        assert req.flow is not None
        assert req.finish is not None
        if not self.may_finish(req.finish.aux):
            return False
        verb = self.journal.verb_of(req.finish.work, "finish")
        self.core.sends.finish(req.flow, req.num_pages, req.finish.aux, verb)
        req.finish.work._in_journal |= verb != 0
        return True

    def has_sent(self, req: SenderRequest) -> bool:
        """Whether a request has succeeded, which the state machines do not know yet. Any thread, without the lock."""
        flow = req.flow
        # In this order: it is another request's flow only after it was no longer this one's.
        return flow is not None and self.core.sends.has_sent(flow) and req.flow == flow

    def has_received(self, req: ReceiverRequest) -> bool:
        """As `has_sent`. False where other groups lease pages of the same memory: they ask the state machines."""
        flow = req.flow
        if flow is None or self._receiver.leases.others is not None:
            return False
        return self.core.receives.has_received(flow) and req.flow == flow

    def moved(self, req: SenderRequest) -> int:
        assert req.flow is not None
        return self.core.sends.moved(req.flow)

    def gated(self, req: SenderRequest) -> int:
        assert req.flow is not None
        return self.core.sends.gated(req.flow)

    def take_back_send(self, req: SenderRequest) -> bool | None:
        with self._standing_still():
            if req.flow is None:
                return None
            left = [index for index in req.running.values() if index is not None]
            left += self._waiting.pop(req.flow, (None, []))[1]
            lane = self._lanes.pop(req.flow, None)
            if self.core.sends.promised(req.flow) and req.grant is not None and self._stages is not None:
                self._stages.promised(req.dst, req.grant.generation)
            if (req.loop_staged or req.loop_path == "staged") and self.core.sends.moved(req.flow):
                req.landing = self._landing(req)
            for index in left:
                op = self._ops[index][1]
                op.landed = req.landing
                staged = path_of(req, op) == "staged"
                if lane is not None and not staged:
                    if posted := self.core.sends.put(index):
                        op.landed = _both(req.landing, partial(self.core.peers.has_arrived, req.dst, lane, posted))
                elif self.core.device is not None and (posted := self.core.sends.flying(index)):
                    # Kernels that pack come first: they read the pages, and write, also where the connection is broken.
                    op.landed = _both(partial(self.core.device.landed, posted), req.landing)
            self.journal.hand_over_ops(req, left)
            sealed = self.core.sends.take_back(req.flow, left)
            self.journal.end_send(req)
        for index in left:
            del self._ops[index]
        req.running = dict.fromkeys(req.running)
        del self._sends[req.flow]
        req.flow = None
        return sealed

    def _landing(self, req: SenderRequest) -> Callable[[], bool] | None:
        """Whether all that was staged to the receiver until now has arrived, and was unpacked if it still may be."""
        assert self._stages is not None
        peers, rank, lane = self.core.peers, req.dst, self._stages.lane_to(req.dst)
        piece, position = peers.staged(rank)

        def has_landed() -> bool:
            if piece and not peers.has_piece(rank, lane, piece):
                return False
            # What goes on may be written again, with other bytes, which older ones must not follow.
            return req.error is not None or not position or peers.has_come_back(rank, lane, position)

        return has_landed if piece or position else None

    def take_stages(self) -> None:
        """Makes ready the standing stages that receivers have granted. Driver's thread."""
        if self._stages is not None:
            self._stages.take()

    def offer_stage(self, rank: int) -> None:
        """``rank`` stages by Python."""
        if self._stages is not None:
            self._stages.offer(rank)

    def disconnect(self, rank: int) -> None:
        """The process of ``rank`` has ended, and its requests were taken back: unmaps what it shared with the loop."""
        self.routes.forget(rank)
        self.plain.forget(rank)
        self.plain_receives.forget(rank)
        if self._stages is not None:
            self._stages.forget(rank)
        self.core.peers.disconnect(rank)
        self._dead.discard(rank)

    def _sends_to(self, rank: int) -> bool:
        return any(req.dst == rank for req in self._sends.values())

    # ------------------------------------------------------------------ receives

    def reserve(self, num_pages: int, plans: Mapping[int, PairPlan]) -> int | None:
        if not self._direct or not 0 < len(plans) <= MAX_WRITERS:
            return None
        if not num_pages and not any(plan.owes_state for plan in plans.values()):
            return None
        if not self.routes.takes(plans):
            return None
        if self.core.device is not None and num_pages > MAX_GRANTED and self.routes.unpacked(plans):
            return None
        return self.core.receives.reserve()

    def open_receive(self, req: ReceiverRequest, told: int) -> None:
        assert req.flow is not None
        self._receives[req.flow] = req
        rank, writer = next(iter(req.writers.items()))
        req.loop_path = self.routes.path(rank, writer.plan)
        staged = self.routes.unpacked({rank: writer.plan for rank, writer in req.writers.items()})
        self.core.receives.open(
            req.flow,
            generation=req.generation,
            num_tokens=req.num_tokens,
            page_size=writer.plan.dst_page_size,
            leader=self._decider(),
            told=told,
            writers=[(rank, *owed(w.plan), w.plan.src_page_size) for rank, w in req.writers.items()],
            network=any(lane.is_driven for rank in req.writers if (lane := self.core.peers.lane(rank)) is not None),
            staged=staged,
            pages=req.pages,
        )

    def sole_writer(self, rank: int, plan: PairPlan, num_pages: int, name: bytes) -> SoleWriter | None:
        return self.plain_receives.sole_writer(rank, plan, num_pages, name) if self._direct else None

    def post(self, req: ReceiverRequest, sole: SoleWriter, name: bytes, told: int) -> bool:
        leader = self._decider()
        self.plain_receives.post(req, sole, name, leader=leader, told=told)
        return self._tells(leader)

    def _decider(self) -> int:
        """See `torchkv.core.loop.state.requests.Receive`, ``leader``."""
        siblings, rank = self._group_map.siblings, self._group_map.rank
        if len(siblings) == 1:
            return ALONE
        return siblings[0] if siblings[0] == rank or self.core.peers.reaches(siblings[0]) else NOBODY

    @property
    def posts(self) -> bool:
        return self._tells(self._decider())

    def _tells(self, leader: int) -> bool:
        return leader not in (ALONE, NOBODY, self._group_map.rank)

    def grant(self, req: ReceiverRequest) -> bool:
        assert req.flow is not None
        name = req.request.encode()
        if len(req.pages) > MAX_GRANTED or len(name) > MAX_NAME:
            return False
        if not all(map(self.core.peers.hears, req.writers)):
            return False
        writers, hashes = as_bits(self._group_map.own_numbers(tuple(req.writers))), name_hashes(req.request)
        self.core.receives.grant(
            req.flow,
            name,
            hashes,
            req.pages,
            prefix_tokens=req.prefix_tokens,
            writers=writers,
            slot=req.state_slot,
            serial=self.journal.number_receive(req),
        )
        return True

    def stop_unpacking(self, req: ReceiverRequest) -> bool:
        assert req.reserved is not None
        awaited = self.core.receives.stop_unpacking(req.reserved)
        if awaited:
            self._unpacking[req.reserved] = req
        return awaited

    def free_receive(self, flow: int) -> None:
        self.core.receives.free(flow)

    def arrived(self, req: ReceiverRequest) -> int:
        assert req.flow is not None
        return self.core.receives.arrived(req.flow)

    def look(self, req: ReceiverRequest) -> None:
        with self._standing_still():
            if req.flow is not None:
                self._add(req)

    def take_back_receive(self, req: ReceiverRequest) -> None:
        self.notices.take_back_receive(req)

    def _leave(self, req: ReceiverRequest, *, whole: bool = False) -> int:
        """Closes the request's flow, and adds what has arrived to the request. The bytes of all that.

        whole: everything has arrived, so nobody asks what.
        """
        assert req.flow is not None
        if whole:
            nbytes, staged, aux = self.core.receives.outcome(req.flow)
            if staged:
                req.loop_path = "staged"
            if aux:
                next(iter(req.writers.values())).aux = aux
        else:
            state = self._add(req)
            nbytes = state.nbytes
            for rank, known in zip(req.writers, state.writers, strict=True):
                if known.ring_only:
                    self._receiver.promised(rank, req)
            self.journal.hand_over_receive(req)
        self.journal.end_receive(req)
        del self._receives[req.flow]
        self.core.receives.close(req.flow)
        req.flow = None
        return nbytes

    def _add(self, req: ReceiverRequest) -> ReceiveState:
        """Adds to the request's writers what has arrived. Returns all that the loop knows."""
        assert req.flow is not None
        state = self.core.receives.state(req.flow)
        if state.staged:
            req.loop_path = "staged"
        for writer, known in zip(req.writers.values(), state.writers, strict=True):
            for layer, intervals in zip(writer.plan.layers, known.intervals, strict=True):
                for lo, hi in intervals:
                    writer.attested.add((layer,), lo, hi)
            if writer.plan.state is not None:
                writer.states.update(itertools.compress(writer.plan.state.layers, known.states))
            writer.aux = known.aux
            if known.sealed is not None:
                writer.sealed, writer.quiescent = known.sealed, True
        return state

    # ------------------------------------------------------------------ rounds

    def open_round(self, members: list[tuple[int, int, int, bool]]) -> int | None:
        for rank, flow, _, _ in members:
            if flow >= MAX_FLOWS or not (rank == self._group_map.rank or self.core.peers.reaches(rank)):
                return None
        index = self.core.rounds.open(members)
        if index is not None:
            self._rounds.add(index)
        return index

    def take_back_round(self, index: int) -> bool | None:
        with self._standing_still():
            if index not in self._rounds:
                return None
            self._rounds.remove(index)
            return self.core.rounds.take_back(index)

    def is_done(self, rank: int, flow: int, generation: int) -> bool:
        return flow < MAX_FLOWS and self.core.rounds.is_done(rank, flow, generation)

    # ------------------------------------------------------------------ what the loop tells

    def _standing_still(self) -> AbstractContextManager[None]:
        return self.notices.standing_still()


def _both(one: Callable[[], bool] | None, other: Callable[[], bool] | None) -> Callable[[], bool] | None:
    if one is None or other is None:
        return one or other
    return lambda: one() and other()
