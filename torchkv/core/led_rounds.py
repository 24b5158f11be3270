"""Rounds of the instance that this rank leads, on the resident loop: see `torchkv.core.loop.rounds`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core import posting
from torchkv.core.loop import loop, rounds
from torchkv.core.loop.codes import DECIDED
from torchkv.core.loop.limits import MAX_ROUNDS

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["LedRounds"]


class LedRounds:
    """Of one loop. Under the engine's lock. slots: which peer of the loop a rank is: see `LoopPeers`."""

    def __init__(self, runner: Runner, slots: Mapping[int, int]) -> None:
        self._runner = runner
        self._world = runner.world
        self._address = runner.address
        self._memory = runner.memory
        self._slots = slots
        self._free = list(range(MAX_ROUNDS))
        self._kept: dict[int, Int64Array] = {}  # what the loop reads at addresses that it was given

    def open(self, members: list[tuple[int, int, int, bool]]) -> int | None:
        """Leads a round of parts (rank, flow, generation, known to be complete); None if too many are under way.

        An event tells that it is over: all ranks have been told that the request has succeeded.
        """
        if not self._free:
            return None
        index = self._free.pop()
        parts = [(self._slots[rank], flow, generation, done) for rank, flow, generation, done in members]
        self._kept[index] = np.array(parts, dtype=np.int64)
        posting.open_round(self._address, index, self._kept[index])
        self._runner.told()
        return index

    def is_done(self, rank: int, flow: int, generation: int) -> bool:
        """Whether the loop has heard that this part is complete."""
        slot = self._slots.get(rank)
        return slot is not None and bool(self._memory[0]["votes"][slot, flow] == generation)

    def end(self, index: int) -> None:
        """Frees the index of a round that is over."""
        del self._kept[index]
        self._free.append(index)

    def take_back(self, index: int) -> bool:
        """Takes a round from the loop, which stands still and has settled. Whether the request has succeeded.

        Then it is not known which of the ranks have been told.
        """
        decided = bool(self._memory[0]["rounds"][index]["missing"] == 0)
        loop.drop_due(self._world, DECIDED, index)
        rounds.drop_round(self._world, index)
        self.end(index)
        return decided
