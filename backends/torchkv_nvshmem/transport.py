"""`NVSHMEMTransport`: one-sided writes between GPUs whose ranks were all there at the start."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.processes import this_process
from torchkv.spans import Table
from torchkv.transport import SIGNAL_SLOTS, Capabilities, Region, Revoke, Transport, check_signal
from torchkv_nvshmem import library, wire
from torchkv_nvshmem.channel import SIGNAL_NBYTES, NVSHMEMChannel
from torchkv_nvshmem.exchange import through_store
from torchkv_nvshmem.runtime import PROCESS, Membership, Party
from torchkv_nvshmem.wire import AddressBlob, RegionBlob

__all__ = ["RESERVE", "Region", "NVSHMEMTransport"]

# The staging memory and scratch memory of one group with default options. NVSHMEM's heap grows in steps of 512 MiB, so
# that asking for less would save nothing.
RESERVE = 416 << 20
SIGNALS = 1 << 20  # for the signal words of a few transports
_ROUND_NS = 1_000_000  # what one progress() may take, so that its thread can also look after other things


class NVSHMEMTransport(Transport):
    """See `torchkv.transport.Transport`. Memory of one GPU a process; needs `join` first.

    Memory from `allocate_shared` and `allocate` is symmetric: it has puts and views. Over an engine's own tensors
    there are views only, through CUDA IPC, and only where IPC can export them.
    """

    name = "nvshmem"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        stream_ordered=True,
        dynamic_members=False,
        revoke=frozenset({Revoke.WRITER_ACK, Revoke.WRITER_DEATH}),
        collective_memory=True,
    )

    @staticmethod
    def available() -> str | None:
        return library.why_not()

    @classmethod
    def join(cls, *, rank: int, size: int, store: Store, device: torch.device, reserve: int = 0) -> None:
        """Starts NVSHMEM with all ranks of a group, or finds that it runs with them. Collective.

        reserve: bytes that this rank's transports will `allocate`; every rank holds the largest reserve in advance.
        Raises ``TransportUnavailable`` on all ranks, naming the one that cannot take part and why, also if NVSHMEM
        runs in some of them already: its members are fixed at its start.
        """
        party = Party(rank, size, through_store(store, rank=rank, size=size))
        PROCESS.join(party, device, max(RESERVE, reserve + SIGNALS))

    @classmethod
    def allocate_shared(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        """An uninitialised uint8 tensor ``[nbytes]`` (0 or more) in symmetric memory, on all ranks of the group that
        called `join` last. Collective.

        Ranks may ask for different sizes; each sets the largest aside, unless all have enough left. Freed with the
        last tensor over the storage, for later allocations of this process. Raises ``TransportUnavailable`` on all
        ranks.
        """
        return PROCESS.allocate(nbytes, device)

    def __init__(self, membership: Membership = PROCESS) -> None:
        """Raises ``TransportUnavailable`` before `join`."""
        self._runtime = runtime = membership.runtime
        runtime.gpu.enter()
        words = runtime.take(SIGNAL_SLOTS * SIGNAL_NBYTES)
        place = None if words is None else runtime.find(words)
        if words is None or place is None:
            raise TransportUnavailable("no symmetric memory left for signal words: too many transports are open")
        self._place = place
        words.zero_()
        self._mailbox = words.view(torch.int64)
        runtime.gpu.settle()
        self._reader = runtime.gpu.stream()
        self._regions: dict[int, Region] = {}
        self._table = Table()
        self._channels: list[NVSHMEMChannel] = []
        # arm() must name a file descriptor, and nothing that happens to device memory makes one readable.
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Symmetric memory from what `join` has reserved. Not collective."""
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
        return wire.pack(
            AddressBlob(
                heap=runtime.heap_id,
                pe=runtime.pe,
                mailbox_block=self._place.block,
                mailbox_offset=self._place.offset,
                process=this_process(),
            )
        )

    def connect(self, address: bytes, regions: Sequence[bytes]) -> NVSHMEMChannel:
        self._require_open()
        peer = wire.unpack(address, AddressBlob)
        blobs = [wire.unpack(region, RegionBlob) for region in regions]
        channel = NVSHMEMChannel(self._runtime, peer, blobs, self._table)
        self._channels.append(channel)
        return channel

    def read_signal(self, slot: int) -> int:
        """Waits some microseconds for a copy from the device, but for no other work on it."""
        self._require_open()
        check_signal(slot)
        return self._reader.read_int64(self._mailbox, slot)

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
        """Takes no part of any other rank. NVSHMEM itself stays started, see `runtime`."""
        if self._closed:
            return
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._closed = True
        self._regions.clear()
        self._reader.close()
        os.close(self._event_fd)

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this NVSHMEM transport is closed")
