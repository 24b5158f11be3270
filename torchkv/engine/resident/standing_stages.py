"""Standing stages: parts of staging rings that resident loops use for all requests of a writer, leased by Python.

See `torchkv.core.loop.staging`. A receiver grants one when it first expects a writer to stage, or sees that it does,
and tells it so; until that has come, and wherever there is no room for one, requests are staged by Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchkv.core.loop.staging import SHARE
from torchkv.errors import TransportUnavailable
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.protocol.sending.staging_requester import Span, StagingRequester
from torchkv.staging.packer import Staging
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.core.peers import NetworkLane

__all__ = ["StandingStages", "fits"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Used:
    """A standing stage that this rank packs for. nbytes: of it; 0: it is unusable.

    lane: the only one over which it may be put into; None where it is mapped. own: as many bytes of this rank's ring.
    """

    nbytes: int
    lane: NetworkLane | None = None
    own: Stage | None = None


class StandingStages:
    """One rank's, in both directions. What is not marked "driver" is called under the engine's lock.

    lane: the way to a rank through the network, if there is one.
    """

    def __init__(
        self,
        core: Core,
        *,
        staging: Staging,
        credits: StagingCredits,
        requester: StagingRequester,
        connection: Callable[[int], PeerConnection | None],
        lane: Callable[[int, PeerConnection], NetworkLane | None],
    ) -> None:
        self._core = core
        self._staging = staging
        self._credits = credits
        self._requester = requester
        self._connection = connection
        self._lane = lane
        self._used: dict[int, _Used] = {}
        self._said: set[tuple[int, str]] = set()  # ranks, and options that leave them no room

    def serves(self, rank: int, plan: PairPlan) -> bool:
        """Whether ``rank``, which the loop can reach, has a stage here that serves a plan, or is granted one now."""
        nbytes = self._credits.standing_nbytes(rank, mapped=self._is_mapped(rank))
        return self.grants and fits(plan, nbytes) and self._grant(rank)

    def _is_mapped(self, rank: int) -> bool:
        """Whether ``rank`` is expected to have mapped this rank's ring, as this one has its."""
        connection = self._connection(rank)
        return connection is not None and connection.staging_view is not None and self._core.peers.reaches(rank)

    @property
    def grants(self) -> bool:
        """Whether writers may have stages here, sooner or later."""
        return self._staging.receiving is not None

    def offer(self, rank: int) -> None:
        """``rank`` stages by Python: its loop may do that from now on, if it can be reached."""
        if not self.grants or self._connection(rank) is None or self._credits.stands(rank):
            return
        lane = self._core.peers.lane(rank)
        if self._is_mapped(rank) or (lane is not None and lane.is_driven):
            self._grant(rank)

    def _grant(self, rank: int) -> bool:
        receiving = self._staging.receiving
        assert receiving is not None
        known = self._credits.stands(rank)
        stage = self._credits.stand(rank, mapped=self._is_mapped(rank))
        if stage is None:
            self._say(rank, "requests of", "staging_recv")
        elif not known:
            self._core.peers.let_stage(rank, receiving.span(stage).ptr, stage.nbytes)
        return stage is not None

    def promised(self, rank: int, generation: int) -> None:
        """The loop has promised ``rank`` to write to its stage only under this generation: Python keeps to that."""
        self._requester.promised(rank, generation)

    def uses(self, rank: int) -> bool:
        """Whether ``rank`` has granted a stage."""
        return rank in self._used

    def to(self, rank: int, lane: NetworkLane | None) -> int:
        """Bytes of the stage of ``rank`` that may be used over this lane; 0 if there is none.

        What was under way on an earlier lane may still land, so the stage is not used over another one.
        """
        used = self._used.get(rank)
        return used.nbytes if used is not None and used.lane in (None, lane) else 0

    def lane_to(self, rank: int) -> NetworkLane | None:
        """Over which pieces go into the stage of ``rank``; None where it is mapped."""
        return self._used[rank].lane

    def take(self) -> None:
        """Makes ready what receivers have granted, once they are reached. Driver, under the lock."""
        for rank, span in self._requester.standing.items():
            if rank in self._used or (connection := self._connection(rank)) is None or connection.staging is None:
                continue
            if connection.staging_view is not None and self._core.peers.reaches(rank):
                at = connection.staging_view.ptr + span.offset
                self._used[rank] = _Used(span.nbytes)
                self._core.peers.use_stage(rank, (at, 0), (0, 0), span.nbytes)
                continue
            lane = self._lane(rank, connection)
            if lane is not None and lane.is_driven:
                self._take(rank, connection.staging.region, span, lane)

    def _take(self, rank: int, target: int, span: Span, lane: NetworkLane) -> None:
        """Makes a stage ready that is put into. target: the region of the ring that it is a part of."""
        sending, native = self._staging.sending, lane.native
        assert native is not None
        try:
            memory = sending.take()
        except TransportUnavailable as error:
            log.info("rank %d: requests to rank %d are staged by Python: %s", self._core.rank, rank, error)
            self._used[rank] = _Used(0, lane)
            return
        own = sending.ring.allocate_for_long(span.nbytes, ("standing", rank))
        if own is None:
            self._say(rank, "requests to", "staging_send")
            return  # later
        keys = native.local_keys
        key, there_key = int(keys[memory.region]) if memory.region < len(keys) else 0, int(native.remote_keys[target])
        if not key or not there_key:
            sending.ring.release(own)
            self._used[rank] = _Used(0, lane)
            return
        self._used[rank] = _Used(own.nbytes, lane, own)
        there = int(native.remote_at[target]) + span.offset, there_key
        self._core.peers.use_stage(rank, (memory.span(own).ptr, key), there, own.nbytes)

    def _say(self, rank: int, which: str, option: str) -> None:
        """Says once that there is no room for a standing stage."""
        if (rank, option) not in self._said:
            self._said.add((rank, option))
            text = "rank %d: %s rank %d that are to be staged go through Python: no room for a standing stage; raise %s"
            log.info(text, self._core.rank, which, rank, f"Options.{option}")

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended, or it has left: nothing is under way to it. Driver."""
        self._requester.standing.pop(rank, None)
        used = self._used.pop(rank, None)
        if used is not None and used.own is not None:
            self._staging.sending.ring.release(used.own)


def fits(plan: PairPlan, nbytes: int) -> bool:
    """Whether a stage of so many bytes serves a plan: every page of a layer is a piece, if need be.

    Elements that are converted lie at multiples of their size there, because all that lies before them ends at one.
    """
    aligned = max((each.conversion.wire.itemsize for each in plan.segments if each.conversion is not None), default=1)
    even = all(segment.stage_nbytes % aligned == 0 for segment in plan.segments)
    return even and plan.staged_page_nbytes <= nbytes // SHARE
