"""Routes: how the resident loop reaches a peer's pages, by a plan: by copies, by kernels, or through the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.device import NO_GATE, Gate
from torchkv.core.receives import Pieces
from torchkv.core.way import Way
from torchkv.engine.resident.standing_stages import StandingStages, fits
from torchkv.layout.pair_plan import PairPlan
from torchkv.transfer.loop_geometry import geometry, has_keys
from torchkv.transfer.loop_kernels import Kernels, Launches
from torchkv.transfer.path_cost import ASSUMED, BETWEEN_GPUS, is_cheaper_packed, puts_keep_up
from torchkv.transfer.peer_connection import Costs, LocalPages, PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.core.peers import NetworkLane
    from torchkv.protocol.actions import SendOp

__all__ = ["Route", "Routes"]

MIN_RUN = 4096  # bytes of the shortest run that the loop puts through the network: shorter ones are staged
MAX_STAGED_RUN = 32768  # bytes of the longest run that it stages, where that costs less than to put it
MAX_ROWS = 1024  # of one page pair that it puts
MAX_LAYER_SETS = 1024  # sets of layers whose positions are remembered for one plan


class _Positions(dict[tuple[int, ...], Int64Array]):
    """Layers -> their positions in the plan, ascending; those that it does not owe are left out. Made when asked.

    plan: None stands for one without layers. first: the position of its first layer.
    """

    def __init__(self, plan: PairPlan | None, first: int = 0) -> None:
        super().__init__()
        layers = () if plan is None else plan.layers
        self._position = {layer: position for position, layer in enumerate(layers, first)}

    def __missing__(self, layers: tuple[int, ...]) -> Int64Array:
        if len(self) >= MAX_LAYER_SETS:
            self.clear()
        found = sorted(self._position[layer] for layer in set(layers) if layer in self._position)
        positions = self[layers] = np.array(found, dtype=np.int64)
        return positions


class Route:
    """A plan towards a peer, as the loop reads it.

    launches, states: of kernels that copy the pages, and the state; packs: of those that pack the pages. lane: of pages
    that are not mapped. stages: whether they can be packed into a standing stage there; staged: whether they are if
    nobody says otherwise. path: as which `KVWork.path` and dumps count its bytes then. size: pages and state slots of
    the peer.

    A route through the network ends with its lane.
    """

    def __init__(
        self,
        core: Core,
        plan: PairPlan,
        local: LocalPages,
        connection: PeerConnection,
        *,
        launches: Launches | None = None,
        states: Launches | None = None,
        packs: Launches | None = None,
        lane: NetworkLane | None = None,
        stages: bool = False,
        staged: bool = False,
        path: str = "direct",
        size: tuple[int, int],
    ) -> None:
        self.plan = plan  # kept, because routes are found by its id
        self.connection = connection
        self.lane = lane
        self.stages = stages
        self.staged = staged
        self.path = "staged" if staged else path
        native = None if lane is None else lane.native

        def ours(component: str, layer: int) -> tuple[int, int, int]:
            placement = local.placements[component, layer]
            key = 0 if native is None else int(native.local_keys[local.regions[placement.storage]])
            return local.ptr(component, layer), placement.page_stride, key

        def theirs(component: str, layer: int) -> tuple[int, int, int]:
            placement = connection.placements[component, layer]
            if native is None:
                return connection.ptr(component, layer), placement.page_stride, 0
            at = int(native.remote_at[placement.storage]) + placement.offset
            return at, placement.page_stride, int(native.remote_keys[placement.storage])

        words = geometry(plan, ours, theirs, connection.scales)
        self.has_keys = has_keys(words)  # then all pages can be put
        self.way = Way(
            connection.rank,
            core.peers.slots[connection.rank],
            geometry=words,
            kernels=None if launches is None else launches.words,
            state_kernels=None if states is None else states.words,
            packs=None if packs is None else packs.words,
            src_page=plan.src_page_size,
            dst_page=plan.dst_page_size,
            max_page=size[0],
            max_slot=size[1] if plan.owes_state else 0,
            network=lane is not None,
            staged=staged,
            keep=(launches, states, packs),
        )
        self.positions, self.state_positions = _Positions(plan), _Positions(plan.state, len(plan.layers))

    def positions_of(self, op: SendOp) -> Int64Array:
        """Those of an op's layers in the plan, or of their states."""
        return (self.state_positions if op.state else self.positions)[op.layers]

    @property
    def usable(self) -> bool:
        return not self.connection.closed and (self.lane is None or self.lane.native is not None)


class Routes:
    """The routes of one rank, each made when it is first asked for.

    core, local, connections, kernels: see `torchkv.engine.resident.flows.Flows`. puts: False where pages that are not
    mapped are not to be put by the loop. sends_to: whether a send to a rank is on the loop. size: pages and state slots
    of a rank.
    """

    def __init__(
        self,
        core: Core,
        *,
        local: LocalPages,
        connections: Mapping[int, PeerConnection],
        kernels: Kernels | None,
        puts: bool,
        sends_to: Callable[[int], bool],
        size: Callable[[int], tuple[int, int]],
    ) -> None:
        self._size = size
        self.known: dict[tuple[int, int], Route] = {}  # by rank and the plan's id
        self._core = core
        self._local = local
        self._connections = connections
        self._kernels = kernels
        self.gate = _no_gate if kernels is None else kernels.gate  # `Kernels.gate`
        self._puts = puts
        self._sends_to = sends_to
        self.stages: StandingStages | None = None  # set by the flows, if loops may stage
        self._unpacked: dict[int, tuple[PairPlan, Pieces, Launches | None]] = {}  # of writers that stage, by plan's id
        # What became of each connection whose pages are not mapped.
        self._laned: WeakKeyDictionary[PeerConnection, NetworkLane | None] = WeakKeyDictionary()

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended."""
        for key in [key for key in self.known if key[0] == rank]:
            self._core.sends.retire(self.known.pop(key).way)

    def _learn(self, rank: int, route: Route) -> Route:
        """From now on this is the route of its plan to ``rank``."""
        if (earlier := self.known.get((rank, id(route.plan)))) is not None:
            self._core.sends.retire(earlier.way)
        self.known[rank, id(route.plan)] = route
        return route

    def serving(self, rank: int) -> PeerConnection | None:
        """The connection to ``rank``, if the loop can copy to it, or put, and reach it."""
        connection = self._connections.get(rank)
        if connection is None or connection.channel is None or connection.closed:
            return None
        if not connection.direct:
            lane = self.lane(rank, connection)
            if lane is None:
                return None
            if lane.is_driven:  # which carries records, too
                return connection
        return connection if self._core.peers.reaches(rank) else None

    def lane(self, rank: int, connection: PeerConnection) -> NetworkLane | None:
        """The way to ``rank`` through the network, made when it is first needed."""
        if connection.channel is None or connection.tags is None or not self._puts:
            return None
        if self._kernels is not None and not connection.channel.link:
            return None  # what carries puts of device memory is not known yet
        if connection not in self._laned:
            if self._sends_to(rank):
                return None  # of an earlier connection, and about to be taken back
            self._laned[connection] = self._core.peers.connect_network(rank, connection.channel, connection.tags)
        lane = self._laned[connection]
        return lane if lane is not None and lane is self._core.peers.lane(rank) else None

    def broken(self) -> list[PeerConnection]:
        """Open connections whose lane has failed."""
        return [
            connection
            for rank, connection in self._connections.items()
            if not connection.closed and self._laned.get(connection) not in (None, self._core.peers.lane(rank))
        ]

    def to(self, rank: int, plan: PairPlan) -> Route | None:
        """How the loop copies a plan to ``rank``; None if it cannot do that."""
        route = self.known.get((rank, id(plan)))
        if route is not None and self.is_current(rank, route):
            return None if self._core.broken else route
        connection = self.serving(rank)
        if connection is None or not plan.parts or self._core.broken:
            return None
        if not connection.direct:
            return self._of_puts(rank, plan, connection)
        launches = states = None
        if self._kernels is not None:
            if plan.owes_state and plan.state is not None:
                states = self._kernels.launches(plan.state, connection, first=len(plan.layers))
            launches = self._kernels.launches(plan, connection) if plan.segments else states
            if launches is None or (plan.owes_state and states is None):
                return None
        stages, packs = self._packing(rank, plan, None)
        route = Route(
            self._core,
            plan,
            self._local,
            connection,
            launches=launches,
            states=states,
            packs=packs,
            stages=stages,
            size=self._size(rank),
        )
        return self._learn(rank, route)

    def is_current(self, rank: int, route: Route) -> bool:
        """Whether a route still leads to the peer, and need not become one that can stage."""
        if route.connection is not self._connections.get(rank) or not route.usable:
            return False
        if route.lane is not None and route.lane is not self._core.peers.lane(rank):
            return False  # it has failed, which the loop tells once
        if route.stages or self.stages is None or not self.stages.uses(rank):
            return True
        return not self._packing(rank, route.plan, route.lane)[0]

    def _packing(self, rank: int, plan: PairPlan, lane: NetworkLane | None) -> tuple[bool, Launches | None]:
        """Whether the loop can pack a plan into a stage of ``rank``, and the kernels that it needs for that."""
        if self.stages is None or not _has_pieces(plan) or not fits(plan, self.stages.to(rank, lane)):
            return False, None
        if self._kernels is None:
            return True, None
        packs = self._kernels.packs(plan, self._connections[rank].scales, sending=True)
        return packs is not None, packs

    def _of_puts(self, rank: int, plan: PairPlan, connection: PeerConnection) -> Route | None:
        """How the loop puts a plan to ``rank``, or stages it; None if it cannot yet, or a part cannot be put."""
        lane = self.lane(rank, connection)
        stages, packs = self._packing(rank, plan, lane)
        staged = stages and self._wants_stage(plan, connection, lane)
        if not staged and not (_is_coarse(plan) and self._keeps_up(plan, connection, lane)):
            return None
        route = Route(
            self._core,
            plan,
            self._local,
            connection,
            packs=packs,
            lane=lane,
            stages=stages,
            staged=staged,
            path=self.path(rank, plan),
            size=self._size(rank),
        )
        if not staged and not route.has_keys:
            return None
        return self._learn(rank, route)

    def _wants_stage(self, plan: PairPlan, connection: PeerConnection, lane: NetworkLane | None) -> bool:
        """Whether a plan is to be staged if there is a stage."""
        if not self._may_stage(plan, lane):
            return False
        if not _is_coarse(plan):
            return True
        if self._kernels is not None:
            return not self._keeps_up(plan, connection, lane)
        costs = _costs(connection, lane, ASSUMED["cpu"])
        return costs is not None and is_cheaper_packed(plan, costs)

    def _keeps_up(self, plan: PairPlan, connection: PeerConnection, lane: NetworkLane | None) -> bool:
        """Whether puts of a plan, if it is between GPUs, keep up with the network."""
        if self._kernels is None:
            return True
        costs = _costs(connection, lane, BETWEEN_GPUS)
        return costs is not None and puts_keep_up(plan, costs)

    def path(self, rank: int, plan: PairPlan) -> str:
        """How bytes of a plan go to or from ``rank`` unless they are staged: one of ``torchkv.options.PATHS``."""
        connection = self._connections.get(rank)
        if connection is None:
            return "direct"
        if plan.converts and not connection.direct:
            return "staged"
        return connection.path(forced=None, page_for_page=plan.page_for_page)

    def takes(self, plans: Mapping[int, PairPlan]) -> bool:
        """Whether these ranks are expected to have routes to this one, for these plans.

        Whether a writer has mapped this rank's pages is not known here; this rank has mapped its pages for the same
        reasons. If it has not after all, the request is taken back with its first message.
        """
        if not all(self.serving(rank) for rank in plans) or not all(plan.parts for plan in plans.values()):
            return False
        return all(self._is_taken(rank, plan) for rank, plan in plans.items())

    def _is_taken(self, rank: int, plan: PairPlan) -> bool:
        """Whether the loop of a writer copies a plan, puts it, or stages it; else its Python does."""
        may_stage = self.stages is not None and self.stages.grants and _has_pieces(plan)
        if may_stage and self._of_pieces(plan) is None:
            return False  # its loop may stage, and cannot know that this one is not ready
        if self._connections[rank].direct:
            return True
        if self.stages is not None and self._may_stage(plan, self._core.peers.lane(rank)):
            return self.stages.serves(rank, plan) or _is_coarse(plan)
        return _is_coarse(plan)

    def _may_stage(self, plan: PairPlan, lane: NetworkLane | None) -> bool:
        """Whether its writer's loop may stage a plan, and its reader's has to be ready for that: both ends agree.

        To a process of this host, short runs are Python's: by measured costs it puts or stages them. States are put.
        """
        if self.stages is None or lane is None or not lane.is_driven or not _has_pieces(plan):
            return False
        return not _is_coarse(plan) or any(segment.rows.run <= MAX_STAGED_RUN for segment in plan.segments)

    def unpacked(self, plans: Mapping[int, PairPlan]) -> dict[int, Pieces]:
        """How the loop unpacks the pieces of writers, by rank: any of them may stage."""
        if self.stages is None or not self.stages.grants:
            return {}
        staged = {rank: plan for rank, plan in plans.items() if _has_pieces(plan)}
        return {rank: pieces for rank, plan in staged.items() if (pieces := self._of_pieces(plan)) is not None}

    def _of_pieces(self, plan: PairPlan) -> Pieces | None:
        """How the loop unpacks pieces of a plan; None while the kernels are not loaded."""

        def ours(component: str, layer: int) -> tuple[int, int, int]:
            return self._local.ptr(component, layer), self._local.page_stride(component, layer), 0

        if id(plan) not in self._unpacked:
            launches = None if self._kernels is None else self._kernels.packs(plan, self._local.scales, sending=False)
            if self._kernels is not None and launches is None:
                return None
            words = geometry(plan, lambda component, layer: (0, 0, 0), ours, self._local.scales)
            pieces = Pieces(words, None if launches is None else launches.words)
            self._unpacked[id(plan)] = plan, pieces, launches
        return self._unpacked[id(plan)][1]


def _costs(connection: PeerConnection, lane: NetworkLane | None, assumed: Costs) -> Costs | None:
    """What a connection has been measured to cost, or else may."""
    if connection.costs is not None or lane is None or lane.native is None:
        return connection.costs
    return replace(assumed, descriptor=lane.native.put_seconds)


def _has_pieces(plan: PairPlan) -> bool:
    """Whether loops may stage a plan at all. Both ends decide alike."""
    return not plan.owes_state


def _is_coarse(plan: PairPlan) -> bool:
    """Whether the loop can put a plan: bytes as they are, in runs that are not short. Both ends decide alike."""
    rows = [segment.rows for part in plan.parts for segment in part.segments]
    return not plan.converts and all(row.run >= MIN_RUN and row.per_pair <= MAX_ROWS for row in rows)


def _no_gate(event: object | None) -> Gate | None:
    """The gate of an op that the host's processor copies: it waits for none."""
    return NO_GATE if event is None else None
