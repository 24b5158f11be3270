"""The way of a plan's pages to a peer, as the resident loop knows it: made once, for all sends that take it."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.state.world import WAY

__all__ = ["Way"]


class Way:
    """It ends with the peer. rank: the peer's; slot: its number on the loop. geometry: of the plan: see
    `torchkv.transfer.loop_geometry`.

    kernels, state_kernels: the launch tables of pages and of states, if kernels copy them. packs: the pack table, if
    kernels pack the pages. src_page, dst_page: page sizes in tokens. max_page: the peer's pages are below this.
    max_slot: its state slots; 0 if it is owed no state. network: whether they are put through the network, with the
    keys in ``geometry``. staged: whether, unless an op says otherwise, they go through the standing stage that the peer
    has granted. keep: what must stay alive with the tables. address: of the record that the loop reads.
    """

    __slots__ = ("_kept", "_record", "address", "has_kernels", "has_state", "network", "rank")

    def __init__(
        self,
        rank: int,
        slot: int,
        *,
        geometry: Int64Array,
        kernels: Int64Array | None = None,
        state_kernels: Int64Array | None = None,
        packs: Int64Array | None = None,
        src_page: int,
        dst_page: int,
        max_page: int,
        max_slot: int = 0,
        network: bool = False,
        staged: bool = False,
        keep: Any = None,
    ) -> None:
        self.rank = rank
        self.network = network
        self.has_kernels = kernels is not None or packs is not None
        self.has_state = max_slot > 0
        self._kept = geometry, kernels, state_kernels, packs, keep  # the loop reads them at their addresses
        self._record = np.zeros(1, dtype=WAY)
        self._record[0] = (
            slot,
            max_page,
            max_slot,
            *(0 if words is None else words.ctypes.data for words in (geometry, kernels, state_kernels, packs)),
            src_page,
            dst_page,
            int(staged),
        )
        self.address = self._record.ctypes.data
