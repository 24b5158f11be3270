"""`PeerViews`: a peer's regions mapped into this process, by shared memory on the host and by CUDA IPC on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torchkv.cuda import ipc
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.transport import RemoteView
from torchkv_ucx.wire import RegionBlob

__all__ = ["PeerViews"]


class _Mapped(Protocol):
    ptr: int
    nbytes: int

    def close(self) -> None: ...


class PeerViews:
    """Maps each region on first use.

    device: returns the GPU whose kernels will use the views of device memory. peer: names it in messages.
    """

    def __init__(self, regions: Sequence[RegionBlob], device: Callable[[], torch.device], peer: str) -> None:
        self._regions = regions
        self._device = device
        self._peer = peer
        self._mapped: dict[int, tuple[_Mapped, torch.device]] = {}
        self._refused: dict[int, str] = {}

    def view(self, region: int) -> RemoteView | None:
        """The region mapped here, or None where that is impossible.

        Raises ``ProtocolError`` for a region that does not exist, or whose memory is smaller than the peer published.
        """
        self._check(region)
        if region not in self._mapped and region not in self._refused:
            try:
                self._mapped[region] = self._map(region)
            except TransportUnavailable as error:  # puts may still reach it
                self._refused[region] = str(error)
        if region in self._refused:
            return None
        mapped, device = self._mapped[region]
        return RemoteView(mapped.ptr, self._regions[region].nbytes, device)

    def why_not(self, region: int) -> str:
        """Why `view` returned None for this region; "" if it did not, or was not called."""
        self._check(region)
        return self._refused.get(region, "")

    def _check(self, region: int) -> None:
        if not 0 <= region < len(self._regions):
            raise ProtocolError(f"{self._peer} has no region {region}: it published {len(self._regions)}")

    def _map(self, region: int) -> tuple[_Mapped, torch.device]:
        blob = self._regions[region]
        mapped: _Mapped
        if not blob.share:
            raise TransportUnavailable(
                f"region {region} of {self._peer} is not in memory that can be mapped; allocate it with "
                "torchkv.KVCache.empty"
            )
        if blob.device == "cuda":
            device = self._device()
            mapped = ipc.open_share(blob.share, device)
        else:
            device = torch.device("cpu")
            mapped = shared_memory.open_segment(blob.share)
        if mapped.nbytes < blob.nbytes:
            mapped.close()
            raise ProtocolError(
                f"{self._peer} published region {region} with {blob.nbytes} bytes over memory of {mapped.nbytes}"
            )
        return mapped, device

    def close(self) -> None:
        for mapped, _ in self._mapped.values():
            mapped.close()
        self._mapped.clear()
