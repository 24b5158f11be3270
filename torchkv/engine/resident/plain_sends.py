"""What plain verbs (see `torchkv.group.plain`) do to the resident loop: the quick half of `Flows`.

Each method does nothing, and says so, where a verb needs more thought. All are called under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchkv.arrays import Int64Array
from torchkv.core.device import NO_GATE, Gate
from torchkv.core.loop.limits import MAX_GRANTED
from torchkv.engine.resident.bound_grants import as_bits, grant_bound_on
from torchkv.engine.resident.journal import Journal
from torchkv.engine.resident.routes import Route, Routes
from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.messages import name_hashes
from torchkv.protocol.sending.missing import likely_plan
from torchkv.protocol.sending.request import SenderRequest
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.engine.resident.notices import OnLoop

__all__ = ["Bound", "Call", "LatestSend", "Met", "PlainSends"]

# A verb: its name, the request, layers, this rank's pages, the receiver, the first page's position, and an event.
Call = tuple[str, str, tuple[int, ...], Int64Array, int, int, Any]
# What `meet` or `begin` has begun: its grant, the request's flow, the index of its first op, and its route.
Met = tuple[BoundGrant, int, int, Route]
# What `bind` has bound: its grant, the request's flow, and its route.
Bound = tuple[BoundGrant, int, Route]


@dataclass(eq=False, slots=True)
class LatestSend:
    """How the latest verb of a request went: one that differs in its layers and its event alone takes less time.

    verb, start, from_prompt: as it was called. op: of its pages behind the prefix, as it went by ``route``. flow: on
    which the loop remembers it.
    """

    verb: str
    start: int
    from_prompt: bool
    op: SendOp
    route: Route
    flow: int


class PlainSends:
    """One rank's. held: what is on the loop. num_pages: of this rank's cache."""

    def __init__(
        self,
        core: Core,
        held: OnLoop,
        *,
        group_map: GroupMap,
        routes: Routes,
        journal: Journal,
        connections: Mapping[int, PeerConnection],
        num_pages: int,
    ) -> None:
        self._core = core
        self._sends = core.sends
        self._held = held
        self._ops = held.ops
        self._group_map = group_map
        self._routes = routes
        self._journal = journal
        self._codes = journal.codes
        self._connections = connections
        self._num_pages = num_pages
        self._expected: dict[int, tuple[Route, int]] = {}  # by receiver: see `_likely`
        self._served: set[int] = set()  # receivers of requests that have been on the loop

    # ------------------------------------------------------------------ first verbs

    def has_served(self, dst: int) -> bool:
        """Whether the loop has served a request to ``dst``: then it soon may have another one. Any thread."""
        return dst in self._served

    def whose(self, request: str) -> int | None:
        """The rank that has granted a request of this name first, of those whose grants Python has not taken in."""
        return self._sends.whose(name_hashes(request))

    def bind(self, request: str, dst: int, begun: float) -> Bound | None:
        """Binds a request, of which no verb was called yet, to its grant, if that is as `meet` needs it: for `opened`.

        It may be behind a prefix. begun: when the request has begun.
        """
        likely = self._likely(request, dst)
        if likely is None or dst in self._held.dead or self._core.broken:
            return None
        route, writers = likely
        flow = self._sends.bind(
            route.way,
            hashes=name_hashes(request),
            writers=writers,
            serial=self._journal.next_serial(),
            begun=int(begun * 1e9),
        )
        if flow is None:
            return None
        return grant_bound_on(self._core, flow, request, dst, route.plan), flow, route

    def meet(self, call: Call, given: Int64Array, begun: float, from_prompt: bool) -> Met | None:
        """Begins a request with its first op, if its grant is there, and Python has not taken it in: for `met`.

        given: the op's page ids as the caller gave them, which are checked as they are copied. begun: when.
        from_prompt: whether they count from the prompt, so that the grant must be behind no prefix. The caller knows
        that nothing stands against such a request.
        """
        verb, request, layers, ids, dst, start, event = call
        likely = self._likely(request, dst)
        if likely is None or dst in self._held.dead:
            return None
        route, writers = likely
        way = route.way
        gate = NO_GATE if event is None and not way.has_kernels else self._routes.gate(event)
        if gate is None or self._core.broken or (way.has_kernels and len(ids) > MAX_GRANTED):
            return None
        begun_on_loop = self._sends.meet(
            way,
            route.positions[layers],
            given,
            ids,
            self._num_pages,
            start,
            gate,
            self._codes.get(verb, 0),  # of a verb with one part
            hashes=name_hashes(request),
            writers=writers,
            serial=self._journal.next_serial(),
            begun=int(begun * 1e9),
            prefixed=not from_prompt,
        )
        if begun_on_loop is None:
            return None
        flow, index = begun_on_loop
        return grant_bound_on(self._core, flow, request, dst, route.plan), flow, index, route

    def _likely(self, request: str, dst: int) -> tuple[Route, int] | None:
        """How the pages of a request go whose grant is not known yet, and a bit for each rank that it must name."""
        likely = self._expected.get(dst)
        if likely is not None and self._routes.is_current(dst, likely[0]):
            return likely
        plan, writers = likely_plan(self._group_map, request, dst)
        route = self._routes.to(dst, plan)
        if route is None:
            return None
        likely = route, as_bits(writers)
        if not self._group_map.parts:  # else the plan depends on the request's name, too
            self._expected[dst] = likely
        return likely

    def way(self, call: Call, grant: BoundGrant) -> tuple[Route, Gate] | None:
        """How `begin` can begin a request under this grant, which Python knows."""
        _, _, _, ids, dst, start, event = call
        plan = grant.plan
        if grant.flow is None or (start + len(ids) - 1) * plan.src_page_size >= len(grant.pages) * plan.dst_page_size:
            return None
        route, gate = self._routes.known.get((dst, id(plan))), self._routes.gate(event)
        if route is None or not self._routes.is_current(dst, route) or gate is None or self._core.broken:
            return None
        if route.way.has_kernels and max(len(ids), len(grant.pages)) > MAX_GRANTED:
            return None
        return route, gate

    def begin(
        self, call: Call, given: Int64Array, grant: BoundGrant, way: tuple[Route, Gate], begun: float
    ) -> Met | None:
        """As `meet`, under a grant that Python knows. way: what `way` has returned.

        None, and nothing is done, if one of the pages is none, or there is no room.
        """
        verb, _, layers, ids, _, start, _ = call
        route, gate = way
        assert grant.flow is not None
        begun_on_loop = self._sends.begin(
            route.way,
            route.positions[layers],
            given,
            ids,
            self._num_pages,
            start,
            gate,
            self._codes.get(verb, 0),  # of a verb with one part
            peer_flow=grant.flow,
            generation=grant.generation,
            granted=grant.pages,
            slot=grant.state_slot,
            serial=self._journal.next_serial(),
            begun=int(begun * 1e9),
        )
        return None if begun_on_loop is None else (grant, *begun_on_loop, route)

    def begin_bound(self, call: Call, grant: BoundGrant, way: tuple[Route, Gate], flow: int) -> Met:
        """As `begin`, of pages that are checked, on the flow that `bind` has given. There must be room for an op."""
        verb, _, layers, ids, _, start, _ = call
        route, gate = way
        index = self._sends.start_op(flow, route.positions[layers], ids, start, gate, self._codes.get(verb, 0))
        assert index is not None
        return grant, flow, index, route

    def met(self, req: SenderRequest, op: SendOp, met: Met) -> None:
        """What `meet` or `begin` has begun is of this request."""
        _, flow, index, route = met
        self.opened(req, flow, route)
        self._runs(req, op, index, self._codes.get(op.verb, 0))

    # ------------------------------------------------------------------ later verbs

    def start_more(
        self, req: SenderRequest, op: SendOp, pages: Int64Array, call: Call, from_prompt: bool
    ) -> LatestSend | None:
        """`Flows.start` of an op of a bound request, which is its latest one.

        pages: the op's page ids as the caller gave them, which are checked as they are copied to its ``source_pages``.
        call: the verb, whose first pages may lie behind the receiver's prefix. from_prompt: see `meet`.
        """
        if (way := self._more(req, op)) is None:
            return None
        flow, route, gate = way
        verb = self._codes.get(op.verb, 0)  # of a verb with one part
        copied = op.source_pages.pages
        called, _, _, checked, _, asked, _ = call
        index = self._sends.start_more(
            flow, route.positions[op.layers], pages, copied, self._num_pages, op.start, gate, verb, checked=checked
        )
        if index is None:
            return None
        self._runs(req, op, index, verb)
        return LatestSend(called, asked, from_prompt, op, route, flow)

    def again(
        self, req: SenderRequest, last: LatestSend, layers: tuple[int, ...], given: Int64Array, event: Any
    ) -> KVWork | None:
        """Starts an op that is as the latest one was, but for its layers and its event. Its work.

        given: the page ids as the caller gave them. None, and nothing is done, also if they are others. Most verbs are
        done here, so the loop has its command first, and the records of it are made while it works.
        """
        latest, route, flow = last.op, last.route, last.flow
        if req.flow != flow or (gate := self._gate(req, route, event)) is None:
            return None
        index = self._sends.start_again(flow, route.positions[layers], given, gate)
        if index is None:
            return None
        source = latest.source_pages
        if event is not source.event:
            source = SourcePages(source.pages, event, source.path)
        work = KVWork(latest.work._operation, latest.work._sync_words, latest.work._loop, 1)
        op = SendOp(latest.request, latest.dst, {}, layers, latest.start, latest.num_pages, work, source)
        op.verb = latest.verb
        self._runs(req, op, index, self._codes.get(op.verb, 0))
        req.add_sent(op)
        return work

    def again_all(
        self, reqs: list[SenderRequest], layers: tuple[int, ...], given: Int64Array, event: Any
    ) -> KVWork | None:
        """As `again`, of one verb to several receivers, whose latest one was one verb, too: all of its ops, or none."""
        gates = []
        for req in reqs:
            last: LatestSend = req.latest
            if req.flow != last.flow or (gate := self._gate(req, last.route, event)) is None:
                return None
            gates.append(gate)
        if not self._sends.has_ops(len(reqs)):
            return None
        last = reqs[0].latest
        latest, source = last.op, last.op.source_pages
        index = self._sends.start_again(last.flow, last.route.positions[layers], given, gates[0])
        if index is None:
            return None
        indices = [index]
        for req, gate in zip(reqs[1:], gates[1:], strict=True):
            # Of the pages that were compared just now: the caller's array may be written to by another thread.
            last = req.latest
            index = self._sends.start_op(last.flow, last.route.positions[layers], source.pages, latest.start, gate)
            assert index is not None
            indices.append(index)
        if event is not source.event:
            source = SourcePages(source.pages, event, source.path)
        work = KVWork(latest.work._operation, latest.work._sync_words, latest.work._loop, len(reqs))
        for req, index in zip(reqs, indices, strict=True):
            op = SendOp(req.request, req.dst, {}, layers, latest.start, latest.num_pages, work, source)
            self._runs(req, op, index, 0)
            req.add_sent(op)
        return work

    def remember(
        self, reqs: list[SenderRequest], ops: list[SendOp], verb: str, start: int, given: Int64Array, from_prompt: bool
    ) -> None:
        """For `again_all`: one verb of several ops that the loop has begun. verb, start: as it was called.

        given: its page ids as its caller gave them. from_prompt: see `meet`.
        """
        for req, op in zip(reqs, ops, strict=True):
            grant, flow = req.grant, req.flow
            if grant is None or flow is None:
                continue  # it was taken back at once
            route = self._routes.known[req.dst, id(grant.plan)]
            self._sends.remember(flow, given, op.source_pages.pages, op.start, 0)
            req.latest = LatestSend(verb, start, from_prompt, op, route, flow)

    def start_several(self, reqs: list[SenderRequest], ops: list[SendOp]) -> bool:
        """As `start_more`, of several ops at once, whose page ids are checked, or of states. All of them, or none."""
        ways = [self._more(req, op) for req, op in zip(reqs, ops, strict=True)]
        if None in ways or not self._sends.has_ops(len(ops)):
            return False
        for req, op, way in zip(reqs, ops, ways, strict=True):
            assert way is not None
            flow, route, gate = way
            positions = route.positions_of(op)
            index = self._sends.start_op(flow, positions, op.source_pages.pages, op.start, gate, of_state=op.state)
            assert index is not None
            self._runs(req, op, index, 0)
        return True

    def _more(self, req: SenderRequest, op: SendOp) -> tuple[int, Route, Gate] | None:
        """The flow on which an op of a bound request can start, its route, and its gate."""
        grant, flow = req.grant, req.flow
        if flow is None or grant is None or op.source_pages.path not in (None, "direct"):
            return None
        plan = grant.plan
        outside = (op.start + op.num_pages - 1) * plan.src_page_size >= len(grant.pages) * plan.dst_page_size
        if outside and not op.state:
            return None
        route = self._routes.known.get((req.dst, id(plan)))
        if route is None or (route.way.has_kernels and op.num_pages > MAX_GRANTED):
            return None
        gate = self._gate(req, route, op.source_pages.event)
        return None if gate is None else (flow, route, gate)

    def _gate(self, req: SenderRequest, route: Route, event: Any) -> Gate | None:
        """The gate of one more op of a request, if the request and its route still take any."""
        if req.finish is not None or req.loop_promised or self._core.broken:
            return None
        if route.connection is not self._connections.get(req.dst) or not route.usable:
            return None
        return NO_GATE if event is None and not route.way.has_kernels else self._routes.gate(event)

    # ------------------------------------------------------------------ what is on the loop

    def open(self, req: SenderRequest, grant: BoundGrant, route: Route) -> int | None:
        """A flow for a request that is bound to this grant; None if all are in use."""
        assert grant.flow is not None
        flow = self._sends.open(
            route.way,
            peer_flow=grant.flow,
            generation=grant.generation,
            pages=grant.pages,
            slot=grant.state_slot,
            serial=self._journal.next_serial(),
            begun=int(req.begun_at * 1e9),
        )
        if flow is not None:
            self.opened(req, flow, route)
        return flow

    def opened(self, req: SenderRequest, flow: int, route: Route) -> None:
        """The flow is of this request, whose number in the journal is the latest one."""
        req.flow, req.loop_path, req.loop_layers = flow, route.path, route.plan.layers
        req.loop_stages, req.serial = route.stages, self._journal.serial
        self._held.sends[flow] = req
        self._served.add(req.dst)
        if route.lane is not None:
            self._held.lanes[flow] = route.lane
            req.loop_may_lose = route.lane.is_driven and not self._core.peers.reaches(req.dst)

    def _runs(self, req: SenderRequest, op: SendOp, index: int, verb: int) -> None:
        """An op is on the loop. verb: as which that records it, or 0."""
        op.work._in_journal = verb != 0
        req.loop_wrote = True
        self._ops[index] = req, op
        req.running[op] = index

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended."""
        self._expected.pop(rank, None)
        self._served.discard(rank)
