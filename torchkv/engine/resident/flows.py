"""Hands requests over to the resident loop, and takes them back. What the loop has done since: see `notices`.

A request is on the loop from its first verb on, if its bytes can be copied straight into the receiver's pages: both
ranks are on this host, the pages are mapped and of the same dtypes, and there is no state. This host's processor copies
what lies in its memory, and no op of that waits for an event; kernels copy what lies on a GPU, after CUDA events. Pages
in host memory that are not mapped the loop puts through the network. If their runs are short, or packing them costs
less than puts, it stages them, once the receiver has granted a standing stage. Everything else, and everything that
goes wrong, is Python's: see `torchkv.protocol.flows`.

All methods are called under the engine's lock, but for those that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.core import Core
from torchkv.core.device import NO_GATE, Gate
from torchkv.core.loop.codes import ALONE, NOBODY
from torchkv.core.loop.limits import MAX_AUX, MAX_FLOWS, MAX_GRANTED, MAX_NAME, MAX_WRITERS
from torchkv.core.peers import NetworkLane
from torchkv.engine.resident.journal import Journal
from torchkv.engine.resident.notices import Notices, OnLoop, grant_bound_on
from torchkv.engine.resident.routes import Route, Routes
from torchkv.engine.resident.standing_stages import StandingStages
from torchkv.engine.weak_callback import weakly
from torchkv.layout.group_map import GroupMap
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.instance import InstanceLeader
from torchkv.protocol.messages import name_hashes
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.missing import likely_plan
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender
from torchkv.transfer.loop_kernels import Kernels
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

if TYPE_CHECKING:
    from torchkv.engine.scheduler import SourcePages
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
            core, local=local, connections=connections, kernels=kernels, puts=puts, sends_to=weakly(self._sends_to)
        )
        self._stages = None if stages is None else stages(self.routes)
        self.routes.stages = self._stages
        held = OnLoop()
        self._sends, self._lanes, self._waiting, self._ops = held.sends, held.lanes, held.waiting, held.ops
        self._receives, self._rounds, self._dead = held.receives, held.rounds, held.dead
        self.journal = Journal(core, recorder, sends=self._sends, receives=self._receives, ops=self._ops)
        self._codes = self.journal.codes
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
        return (path is None or path == "direct") and not op.state

    def await_grant(self, req: SenderRequest, plan: PairPlan, writers: tuple[int, ...]) -> None:
        route = self.routes.to(req.dst, plan)
        if route is None or not self.core.peers.hears(req.dst):  # then the grant comes in a message
            return
        flow = self.core.wait_for_grant(
            hashes=name_hashes(req.request),
            writers=_bits(writers),
            max_page=self._group_map.info[req.dst].num_pages,
            **self._way(req.dst, req.begun_at, route, plan),
        )
        if flow is not None:
            self._opened(req, flow, route, plan)
            self._waiting[flow] = plan, []

    def _way(self, dst: int, begun: float, route: Route, plan: PairPlan) -> dict[str, Any]:
        """What `Core` is told of each send: see `Core.open_send`."""
        return {
            "peer": dst,
            "geometry": route.words,
            "kernels": route.kernels,
            "src_page": plan.src_page_size,
            "dst_page": plan.dst_page_size,
            "network": route.lane is not None,
            "staged": route.staged,
            "serial": self.journal.next_serial(),
            "begun": int(begun * 1e9),
        }

    def _opened(self, req: SenderRequest, flow: int, route: Route, plan: PairPlan) -> None:
        req.flow, req.loop_path, req.loop_layers = flow, route.path, plan.layers
        req.serial = self.journal.serial
        self._sends[flow] = req
        if route.lane is not None:
            self._lanes[flow] = route.lane

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
        if grant.flow is None or route is None or (route.kernels is not None and len(grant.pages) > MAX_GRANTED):
            return
        flow = self.core.open_send(
            peer_flow=grant.flow,
            generation=grant.generation,
            pages=grant.pages,
            **self._way(req.dst, req.begun_at, route, grant.plan),
        )
        if flow is not None:
            self._opened(req, flow, route, grant.plan)

    def start(self, req: SenderRequest, op: SendOp) -> bool:
        assert req.flow is not None
        source: SourcePages = op.source_pages
        plan = self._waiting[req.flow][0] if req.grant is None else req.grant.plan
        route = self.routes.to(req.dst, plan)
        gate = self.routes.gate(source.event)
        if gate is None or route is None or not self.serves(op):
            return False
        pages = source.pages
        if not isinstance(pages, np.ndarray) or (route.kernels is not None and len(pages) > MAX_GRANTED):
            return False
        verb = self.journal.verb_of(op.work, op.verb)
        index = self.core.start_op(req.flow, route.positions[op.layers], pages, op.start, gate, verb)
        if index is None:
            return False
        op.work._in_journal |= verb != 0
        self._ops[index] = req, op
        if req.grant is None:
            self._waiting[req.flow][1].append(index)
        else:
            req.running[op] = index
        return True

    def start_more(self, req: SenderRequest, op: SendOp, pages: Int64Array) -> bool:
        """`start` for a verb's critical path: of a bound request, and nothing is done where that needs more thought.

        pages: the op's page ids as the caller gave them, which are checked as they are copied to its ``source_pages``.
        """
        grant = req.grant
        if req.flow is None or grant is None or req.finish is not None or op.source_pages.path not in (None, "direct"):
            return False
        plan = grant.plan
        if (op.start + op.num_pages - 1) * plan.src_page_size >= len(grant.pages) * plan.dst_page_size:
            return False
        route = self.routes.known.get((req.dst, id(plan)))
        if route is None or not route.usable or route.connection is not self._connections.get(req.dst):
            return False
        event = op.source_pages.event
        gate = NO_GATE if event is None and route.kernels is None else self.routes.gate(event)
        if gate is None or (route.kernels is not None and (self.core.broken or op.num_pages > MAX_GRANTED)):
            return False
        verb, ids = self._codes.get(op.verb, 0), op.source_pages.pages  # of a verb with one part
        index = self.core.start_more(
            req.flow, route.positions[op.layers], pages, ids, self._local.num_pages, op.start, gate, verb
        )
        if index is None:
            return False
        self._runs(req, op, index)
        return True

    def meet(self, op: SendOp, begun: float) -> tuple[BoundGrant, int, int, Route] | None:
        """Begins a request with this op, if its grant is there, and Python has not taken it in: for `met`.

        The grant, the request's flow, the op's index and the route. begun: when. None, and nothing is done, where it is
        not there, or that needs more thought. The caller knows that nothing stands against such a request.
        """
        dst, group_map = op.dst, self._group_map
        plan, writers = likely_plan(group_map, op.request, dst)
        route, gate = self.routes.to(dst, plan), self.routes.gate(op.source_pages.event)
        if route is None or gate is None or dst in self._dead:
            return None
        if route.kernels is not None and op.num_pages > MAX_GRANTED:
            return None
        begun_on_loop = self.core.meet(
            route.positions[op.layers],
            op.source_pages.pages,
            op.start,
            gate,
            self._codes.get(op.verb, 0),  # of a verb with one part
            hashes=name_hashes(op.request),
            writers=_bits(writers),
            max_page=group_map.info[dst].num_pages,
            **self._way(dst, begun, route, plan),
        )
        if begun_on_loop is None:
            return None
        flow, index = begun_on_loop
        return grant_bound_on(self.core, flow, op.request, dst, plan), flow, index, route

    def met(self, req: SenderRequest, op: SendOp, flow: int, index: int, route: Route) -> None:
        """What `meet` has begun is of this request."""
        self._opened(req, flow, route, route.plan)
        self._runs(req, op, index)

    def _runs(self, req: SenderRequest, op: SendOp, index: int) -> None:
        """An op of a verb with one part is on the loop."""
        op.work._in_journal = op.verb in self._codes
        self._ops[index] = req, op
        req.running[op] = index

    def way(self, grant: BoundGrant, op: SendOp) -> tuple[Route, Gate] | None:
        """How `begin` can begin a request under this grant with this op; None where that needs more thought."""
        plan = grant.plan
        if (op.start + op.num_pages - 1) * plan.src_page_size >= len(grant.pages) * plan.dst_page_size:
            return None
        route, gate = self.routes.known.get((op.dst, id(plan))), self.routes.gate(op.source_pages.event)
        if route is None or not self.routes.is_current(op.dst, route):
            return None
        if gate is None or grant.flow is None or not self.core.has_room:
            return None
        if route.kernels is not None and (self.core.broken or max(op.num_pages, len(grant.pages)) > MAX_GRANTED):
            return None
        return route, gate

    def begin(self, req: SenderRequest, op: SendOp, way: tuple[Route, Gate]) -> None:
        """`open_send`, then `start` of its first op: for a verb's critical path. way: that `way` has returned."""
        grant, (route, gate) = req.grant, way
        assert grant is not None
        assert grant.flow is not None
        flow = self.core.open_send(
            peer_flow=grant.flow,
            generation=grant.generation,
            pages=grant.pages,
            **self._way(req.dst, req.begun_at, route, grant.plan),
        )
        assert flow is not None
        self._opened(req, flow, route, grant.plan)
        verb = self._codes.get(op.verb, 0)  # of a verb with one part
        index = self.core.start_op(flow, route.positions[op.layers], op.source_pages.pages, op.start, gate, verb)
        assert index is not None
        self._runs(req, op, index)

    def may_finish(self, aux: bytes) -> bool:
        return len(aux) <= MAX_AUX

    def finish(self, req: SenderRequest) -> bool:
        assert req.flow is not None
        assert req.finish is not None
        if not self.may_finish(req.finish.aux):
            return False
        verb = self.journal.verb_of(req.finish.work, "finish")
        self.core.finish_send(req.flow, req.num_pages, req.finish.aux, verb)
        req.finish.work._in_journal |= verb != 0
        return True

    def moved(self, req: SenderRequest) -> int:
        assert req.flow is not None
        return self.core.moved(req.flow)

    def gated(self, req: SenderRequest) -> int:
        assert req.flow is not None
        return self.core.gated(req.flow)

    def take_back_send(self, req: SenderRequest) -> bool | None:
        with self._standing_still():
            if req.flow is None:
                return None
            left = [index for index in req.running.values() if index is not None]
            left += self._waiting.pop(req.flow, (None, []))[1]
            lane, staged = self._lanes.pop(req.flow, None), req.loop_path == "staged"
            if lane is not None and staged and self.core.moved(req.flow):
                req.landing = self._landing(req, lane)
            for index in left:
                if staged:
                    self._ops[index][1].landed = req.landing
                elif lane is not None and (posted := self.core.put(index)):
                    self._ops[index][1].landed = partial(self.core.peers.has_arrived, req.dst, lane, posted)
                elif self.core.device is not None and (posted := self.core.flying(index)):
                    self._ops[index][1].landed = partial(self.core.device.landed, posted)
            self.journal.hand_over_ops(req, left)
            sealed = self.core.take_back_send(req.flow, left)
            self.journal.end_send(req)
        for index in left:
            del self._ops[index]
        req.running = dict.fromkeys(req.running)
        del self._sends[req.flow]
        req.flow = None
        return sealed

    def _landing(self, req: SenderRequest, lane: NetworkLane) -> Callable[[], bool] | None:
        """Whether all that was staged to the receiver until now has arrived, and was unpacked if it still may be."""
        peers, rank = self.core.peers, req.dst
        posted, position = peers.staged(rank)

        def has_landed() -> bool:
            if posted and not peers.has_arrived(rank, lane, posted):
                return False
            # What goes on may be written again, with other bytes, which older ones must not follow.
            return req.error is not None or not position or peers.has_come_back(rank, lane, position)

        return has_landed if posted or position else None

    def take_stages(self) -> None:
        """Makes ready the standing stages that receivers have granted. Driver's thread."""
        if self._stages is not None:
            self._stages.take()

    def disconnect(self, rank: int) -> None:
        """The process of ``rank`` has ended, and its requests were taken back: unmaps what it shared with the loop."""
        self.routes.forget(rank)
        if self._stages is not None:
            self._stages.forget(rank)
        self.core.peers.disconnect(rank)
        self._dead.discard(rank)

    def _sends_to(self, rank: int) -> bool:
        return any(req.dst == rank for req in self._sends.values())

    # ------------------------------------------------------------------ receives

    def reserve(self, num_pages: int, plans: Mapping[int, PairPlan]) -> int | None:
        if not self._direct or not num_pages or not 0 < len(plans) <= MAX_WRITERS:
            return None
        if not self.routes.takes(plans):
            return None
        return self.core.reserve_receive()

    def open_receive(self, req: ReceiverRequest, told: int) -> None:
        assert req.flow is not None
        self._receives[req.flow] = req
        rank, writer = next(iter(req.writers.items()))
        req.loop_path = self.routes.path(rank, writer.plan)
        staged = self.routes.unpacked({rank: writer.plan for rank, writer in req.writers.items()})
        self.core.open_receive(
            req.flow,
            generation=req.generation,
            num_tokens=req.num_tokens,
            page_size=writer.plan.dst_page_size,
            leader=self._decider(),
            told=told,
            writers=[(rank, len(w.plan.layers), w.plan.src_page_size) for rank, w in req.writers.items()],
            network=any(lane.is_driven for rank in req.writers if (lane := self.core.peers.lane(rank)) is not None),
            staged=staged,
            pages=req.pages,
        )

    def _decider(self) -> int:
        """See `torchkv.core.loop.state.requests.Receive`, ``leader``."""
        siblings, rank = self._group_map.siblings, self._group_map.rank
        if len(siblings) == 1:
            return ALONE
        return siblings[0] if siblings[0] == rank or self.core.peers.reaches(siblings[0]) else NOBODY

    @property
    def posts(self) -> bool:
        return self._decider() not in (ALONE, NOBODY, self._group_map.rank)

    def grant(self, req: ReceiverRequest) -> bool:
        assert req.flow is not None
        name = req.request.encode()
        if len(req.pages) > MAX_GRANTED or len(name) > MAX_NAME:
            return False
        if not all(map(self.core.peers.hears, req.writers)):
            return False
        writers, hashes = _bits(self._group_map.own_numbers(tuple(req.writers))), name_hashes(req.request)
        prefix, serial = req.prefix_tokens, self.journal.number_receive(req)
        self.core.grant(req.flow, name, hashes, req.pages, prefix_tokens=prefix, writers=writers, serial=serial)
        return True

    def stop_unpacking(self, flow: int) -> None:
        self.core.stop_unpacking(flow)

    def free_receive(self, flow: int) -> None:
        self.core.free_receive(flow)

    def arrived(self, req: ReceiverRequest) -> int:
        assert req.flow is not None
        return self.core.arrived(req.flow)

    def look(self, req: ReceiverRequest) -> None:
        with self._standing_still():
            if req.flow is not None:
                self._add(req)

    def take_back_receive(self, req: ReceiverRequest) -> None:
        self.notices.take_back_receive(req)

    def _leave(self, req: ReceiverRequest, *, whole: bool = False) -> int:
        """Closes the request's flow, and adds what has arrived to the request. The bytes of all that.

        whole: everything has arrived, so its coverage matters no more.
        """
        nbytes = self._add(req, coverage=not whole)
        assert req.flow is not None
        if not whole:
            self.journal.hand_over_receive(req)
        self.journal.end_receive(req)
        del self._receives[req.flow]
        self.core.close_receive(req.flow)
        req.flow = None
        return nbytes

    def _add(self, req: ReceiverRequest, *, coverage: bool = True) -> int:
        """Adds to the request's writers what has arrived; the bytes of all that."""
        assert req.flow is not None
        state = self.core.receive_state(req.flow, coverage=coverage)
        if state.staged:
            req.loop_path = "staged"
        for writer, known in zip(req.writers.values(), state.writers, strict=True):
            for layer, intervals in zip(writer.plan.layers, known.intervals, strict=coverage):
                for lo, hi in intervals:
                    writer.attested.add((layer,), lo, hi)
            writer.aux = known.aux
            if known.sealed is not None:
                writer.sealed, writer.quiescent = known.sealed, True
        return state.nbytes

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


@lru_cache(maxsize=256)
def _bits(ranks: tuple[int, ...]) -> int:
    """A bit for each rank, as a signed word."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (1 << 64) if bits >> 63 else bits
