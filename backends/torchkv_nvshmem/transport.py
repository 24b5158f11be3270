"""`NVSHMEMTransport`: one-sided writes between GPUs over NVSHMEM, whose members are fixed when it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host.processes import this_process
from torchkv.transport import Capabilities, Region, Transport
from torchkv.transport.batch_check import Table
from torchkv_nvshmem import library, wire
from torchkv_nvshmem.channel import NVSHMEMChannel
from torchkv_nvshmem.exchange import through_store
from torchkv_nvshmem.runtime import PROCESS, Membership, Party
from torchkv_nvshmem.wire import AddressBlob, RegionBlob

__all__ = ["RESERVE", "Region", "NVSHMEMTransport"]

# Bytes: staging and scratch memory of one group with default options. NVSHMEM's heap grows in steps of 512 MiB, so less
# would save nothing.
RESERVE = 416 << 20
ROUNDING = 1 << 20  # each allocation is rounded up to `heap.ALIGNMENT`
_ROUND_NS = 1_000_000  # what one progress() may take: its thread has other work, too


class NVSHMEMTransport(Transport):
    """The `torchkv.transport.Transport` over NVSHMEM, for memory of one GPU per process; `join` must come first.

    Memory from `allocate_shared` and `allocate` is symmetric: peers can put into it and map it. Other device memory
    they can only map, through CUDA IPC, and only where IPC can export it.
    """

    name = "nvshmem"
    capabilities = Capabilities(devices=frozenset({"cuda"}), collective_memory=True)

    @staticmethod
    def available() -> str | None:
        return library.why_not()

    @classmethod
    def join(cls, *, rank: int, size: int, store: Store, device: torch.device, reserve: int = 0) -> None:
        """Collective: starts NVSHMEM with all ranks of a group, or checks that all are members if it has been started.

        reserve: bytes that this rank's transports will `allocate`; every rank takes the largest reserve of the group.
        Raises ``TransportUnavailable`` on all ranks, naming the rank that cannot take part and why. Ranks of which only
        some are members cannot: the members are fixed at the start.
        """
        party = Party(rank, size, through_store(store, rank=rank, size=size))
        PROCESS.join(party, device, max(RESERVE, reserve + ROUNDING))

    @classmethod
    def allocate_shared(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        """Collective over the group that called `join` last: an uninitialised uint8 tensor in symmetric memory.

        nbytes: its length, 0 or more. Ranks may ask for different sizes; the heap grows by the largest on every rank,
        unless all have enough free. The memory is freed with the last tensor over the storage, for later allocations of
        this process. Raises ``TransportUnavailable`` on all ranks.
        """
        return PROCESS.allocate(nbytes, device)

    def __init__(self, membership: Membership = PROCESS) -> None:
        """Raises ``TransportUnavailable`` before `join`."""
        self._runtime = membership.runtime
        self._runtime.gpu.enter()
        self._regions: dict[int, Region] = {}
        self._table = Table()
        self._channels: list[NVSHMEMChannel] = []
        # For arm(), which must return a file descriptor. Nothing makes this one readable: no event of the GPU can, and
        # progress() has no other work.
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor [nbytes] in symmetric memory, from what `join` has reserved. Not collective."""
        self._require_open()
        self._runtime.check_device(device)
        tensor = self._runtime.take(nbytes)
        if tensor is None:
            raise TransportUnavailable(
                f"{nbytes} bytes of symmetric memory: {self._runtime.heap.largest_free} are left in one piece; ask for "
                "them in join(reserve=), or allocate_shared them on all ranks together"
            )
        return tensor

    def register(self, tensor: torch.Tensor) -> Region:
        self._require_open()
        self._runtime.check_device(tensor.device)
        runtime = self._runtime
        nbytes = tensor.untyped_storage().nbytes()
        place = runtime.find(tensor) if nbytes else None
        if place is not None:
            blob = RegionBlob(runtime.heap_id, runtime.pe, place.block, place.offset, nbytes)
        else:
            share = runtime.gpu.share(tensor) if nbytes else b""
            blob = RegionBlob(runtime.heap_id, runtime.pe, wire.NO_BLOCK, 0, nbytes, share)
        base = 0 if place is None else tensor.untyped_storage().data_ptr()
        index = self._table.add(base, nbytes)
        self._regions[index] = region = Region(index, tensor, wire.pack(blob))
        return region

    def deregister(self, region: Region) -> None:
        self._require_open()
        if self._regions.get(region.index) is not region:
            raise ProtocolError(f"region {region.index} is not registered with this transport")
        if any(channel.uses_local(region.index) for channel in self._channels):
            raise ProtocolError(f"region {region.index} cannot be deregistered: a put of it is still pending")
        self._table.remove(region.index)
        del self._regions[region.index]

    def address(self) -> bytes:
        self._require_open()
        runtime = self._runtime
        return wire.pack(AddressBlob(heap=runtime.heap_id, pe=runtime.pe, process=this_process()))

    def connect(self, address: bytes, regions: Sequence[bytes]) -> NVSHMEMChannel:
        self._require_open()
        peer = wire.unpack(address, AddressBlob)
        blobs = [wire.unpack(region, RegionBlob) for region in regions]
        channel = NVSHMEMChannel(self._runtime, peer, blobs, self._table)
        self._channels.append(channel)
        return channel

    def progress(self) -> bool:
        self._require_open()
        moved = False
        active = [channel for channel in self._channels if not channel.idle]
        for channel in active:
            moved = channel.step(_ROUND_NS // len(active)) or moved
        return moved

    def arm(self) -> int | None:
        self._require_open()
        return self._event_fd if all(channel.idle for channel in self._channels) else None

    def close(self) -> None:
        """Not collective. NVSHMEM itself stays started, see `runtime`."""
        if self._closed:
            return
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._closed = True
        self._regions.clear()
        os.close(self._event_fd)

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this NVSHMEM transport is closed")
