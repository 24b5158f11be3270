"""The way of a plan's pages to a peer, as the resident loop knows it: made once, for all sends that take it."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.state.world import WAY

__all__ = ["Way"]


class Way:
    """rank: the peer; slot: its number on the loop. geometry: of the plan: see `torchkv.transfer.loop_geometry`.

    kernels: the launch table, if kernels copy the pages. src_page, dst_page: page sizes in tokens. max_page: the peer's
    pages are below this. network: whether they are put through the network, with the keys in ``geometry``; staged:
    through the standing stage that the peer has granted. address: of the record that the loop reads.
    """

    __slots__ = ("_geometry", "_kernels", "_record", "address", "has_kernels", "network", "rank", "staged")

    def __init__(
        self,
        rank: int,
        slot: int,
        geometry: Int64Array,
        kernels: Int64Array | None,
        *,
        src_page: int,
        dst_page: int,
        max_page: int,
        network: bool,
        staged: bool,
    ) -> None:
        self.rank = rank
        self.network = network
        self.staged = staged
        self.has_kernels = kernels is not None
        self._geometry, self._kernels = geometry, kernels  # which the loop reads at their addresses
        self._record = np.zeros(1, dtype=WAY)
        self._record[0] = (
            slot,
            max_page,
            geometry.ctypes.data,
            0 if kernels is None else kernels.ctypes.data,
            src_page,
            dst_page,
            int(staged),
        )
        self.address = self._record.ctypes.data
