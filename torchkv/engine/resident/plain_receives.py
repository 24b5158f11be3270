"""What plain receives (see `torchkv.group.plain`) do to the resident loop: the quick half of `Flows`.

All methods are called under the engine's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchkv.core.loop.limits import MAX_GRANTED, MAX_NAME
from torchkv.core.receives import Source
from torchkv.engine.resident.bound_grants import as_bits
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.messages import name_hashes
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.engine.resident.journal import Journal
    from torchkv.engine.resident.notices import OnLoop
    from torchkv.engine.resident.routes import Routes
    from torchkv.layout.group_map import GroupMap

__all__ = ["PlainReceives", "SoleWriter", "owed"]


@dataclass(eq=False, slots=True)
class SoleWriter:
    """The writer of a receive, if it has one. path: as which its bytes count."""

    plan: PairPlan
    connection: PeerConnection
    source: Source
    path: str


class PlainReceives:
    """One rank's. held: what is on the loop."""

    def __init__(self, core: Core, held: OnLoop, *, group_map: GroupMap, routes: Routes, journal: Journal) -> None:
        self._core = core
        self._receives = held.receives
        self._group_map = group_map
        self._routes = routes
        self._journal = journal
        self._known: dict[tuple[int, int], SoleWriter] = {}  # by writer, and its plan's identity

    def sole_writer(self, rank: int, plan: PairPlan, num_pages: int, name: bytes) -> SoleWriter | None:
        """How ``rank`` would write so many pages of a request. name: in UTF-8. None where that needs more thought."""
        if not ((num_pages or plan.owes_state) and num_pages <= MAX_GRANTED and 0 < len(name) <= MAX_NAME):
            return None
        if not self._core.receives.has_room:
            return None
        sole, connection = self._known.get((rank, id(plan))), self._routes.serving(rank)
        if sole is None or sole.plan is not plan or sole.connection is not connection:
            plans = {rank: plan}
            if connection is None or not self._routes.takes(plans):
                return None
            lane, (layers, states) = self._core.peers.lane(rank), owed(plan)
            source = Source(
                slot=self._core.peers.slots[rank],
                layers=layers,
                states=states,
                page_size=plan.dst_page_size,
                writer_page=plan.src_page_size,
                writers=as_bits(self._group_map.own_numbers((rank,))),
                network=lane is not None and lane.is_driven,
                pieces=self._routes.unpacked(plans).get(rank),
            )
            sole = self._known[rank, id(plan)] = SoleWriter(plan, connection, source, self._routes.path(rank, plan))
        return sole if self._core.peers.hears(rank) else None

    def post(self, req: ReceiverRequest, sole: SoleWriter, name: bytes, *, leader: int, told: int) -> None:
        """The loop grants the request, and serves it. sole: what `sole_writer` has just returned.

        leader, told: see `torchkv.core.loop.state.requests.Receive`.
        """
        req.loop_path = sole.path
        req.flow = req.reserved = self._core.receives.post(
            sole.source,
            generation=req.generation,
            num_tokens=req.num_tokens,
            leader=leader,
            told=told,
            prefix_tokens=req.prefix_tokens,
            name=name,
            hashes=name_hashes(req.request),
            pages=req.pages,
            state_slot=req.state_slot,
            serial=self._journal.number_receive(req),
        )
        self._receives[req.flow] = req

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended."""
        self._known = {key: sole for key, sole in self._known.items() if key[0] != rank}


def owed(plan: PairPlan) -> tuple[int, int]:
    """How many layers a writer owes, and of how many layers the state."""
    return len(plan.layers), 0 if plan.state is None else len(plan.state.layers)
