"""Standing stages: parts of staging rings that resident loops use for all requests of a writer, leased by Python.

See `torchkv.core.loop.staging`. A receiver grants one when it first expects a writer to stage, and tells it so; until
that has come, and wherever there is no room for one, requests are staged by Python.
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
from torchkv.protocol.sending.staging_requester import StagingRequester
from torchkv.staging.packer import Staging
from torchkv.transfer.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torchkv.core.core import Core
    from torchkv.core.peers import NetworkLane

__all__ = ["StandingStages", "fits"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Used:
    """A standing stage that this rank puts into, over one lane only. own: as much of its own ring; None: unusable."""

    lane: NetworkLane
    own: Stage | None


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

    def serves(self, rank: int, plan: PairPlan) -> bool:
        """Whether ``rank``, which the loop can reach, has a stage here that serves a plan, or is granted one now."""
        if self._staging.receiving is None or not fits(plan, self._credits.standing_nbytes):
            return False
        known = self._credits.stands(rank)
        stage = self._credits.stand(rank)
        if stage is not None and not known:
            self._core.peers.let_stage(rank, self._staging.receiving.span(stage).ptr, stage.nbytes)
        return stage is not None

    def to(self, rank: int, lane: NetworkLane | None) -> int:
        """Bytes of the stage of ``rank`` that may be put into over this lane; 0 if there is none.

        What was under way on an earlier lane may still land, so the stage is not used over another one.
        """
        used = self._used.get(rank)
        return used.own.nbytes if used is not None and used.own is not None and used.lane is lane else 0

    def take(self) -> None:
        """Makes ready what receivers have granted, once they are reached. Driver, under the lock."""
        for rank, span in self._requester.standing.items():
            if rank in self._used or (connection := self._connection(rank)) is None or connection.staging is None:
                continue
            lane = self._lane(rank, connection)
            if lane is None or lane.native is None:
                continue
            sending, native = self._staging.sending, lane.native
            try:
                memory = sending.take()
            except TransportUnavailable as error:
                log.info("rank %d: requests to rank %d are staged by Python: %s", self._core.rank, rank, error)
                self._used[rank] = _Used(lane, None)
                continue
            own = sending.ring.allocate_for_long(span.nbytes, ("standing", rank))
            if own is None:
                continue  # later
            target, keys = connection.staging.region, native.local_keys
            key, there_key = (
                int(keys[memory.region]) if memory.region < len(keys) else 0,
                int(native.remote_keys[target]),
            )
            if not key or not there_key:
                sending.ring.release(own)
                own = None
            self._used[rank] = _Used(lane, own)
            if own is not None:
                there = int(native.remote_at[target]) + span.offset, there_key
                self._core.peers.use_stage(rank, (memory.span(own).ptr, key), there, own.nbytes)

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended, or it has left: nothing is under way to it. Driver."""
        self._requester.standing.pop(rank, None)
        used = self._used.pop(rank, None)
        if used is not None and used.own is not None:
            self._staging.sending.ring.release(used.own)


def fits(plan: PairPlan, nbytes: int) -> bool:
    """Whether a stage of so many bytes serves a plan: every page of a layer is a piece, if need be."""
    return plan.staged_page_nbytes <= nbytes // SHARE
