"""`UCXTransport`: one-sided writes between processes over UCX, on shared memory, TCP or RDMA."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torchkv import hostmem
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.transport import Capabilities, Region, Revoke, Transport
from torchkv_ucx import environment, libucp, pump, wire
from torchkv_ucx.channel import UCXChannel
from torchkv_ucx.mailbox import SLOTS, Mailbox
from torchkv_ucx.spans import LocalRegions

__all__ = ["UCXRegion", "UCXTransport"]

_ROUND_NS = 1_000_000  # what one progress() may take, so that its thread can also look after other things
_INSTALL = "pip install ucxx-cu13"


class UCXRegion(Region):
    """Host memory that UCX has mapped. Made by ``UCXTransport.register``."""

    def __init__(self, index: int, tensor: torch.Tensor, memh: int, descriptor: bytes) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        self.ptr = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self.memh = memh
        self._storage = storage
        self._descriptor = descriptor

    def descriptor(self) -> bytes:
        return self._descriptor


class UCXTransport(Transport):
    """See `torchkv.transport.Transport`. Host memory only; one UCX worker, owned by the constructing thread."""

    name = "ucx"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        stream_ordered=False,
        dynamic_members=True,
        revoke=frozenset({Revoke.WRITER_ACK, Revoke.WRITER_DEATH}),
    )

    @staticmethod
    def available() -> str | None:
        if sys.platform != "linux":
            return f"UCX needs Linux, not {sys.platform}"
        if importlib.util.find_spec("ucxx") is None:
            return f"the Python package ucxx is missing: {_INSTALL}"
        return None

    def __init__(self) -> None:
        """Raises ``TransportUnavailable`` with the reason and what mends it."""
        reason = self.available()
        if reason is not None:
            raise TransportUnavailable(f"transport 'ucx' cannot work here: {reason}")
        core = _import_ucxx()
        features = (core.Feature.RMA, core.Feature.WAKEUP)
        self._core = core
        self._context: Any = core.UCXContext(environment.context_config(), feature_flags=features)
        self._worker: Any = core.UCXWorker(self._context)
        self._library = libucp.load()
        self._context_handle = int(self._context.handle)
        self._worker_handle = int(self._worker.handle)
        self._event_fd = self._library.event_fd(self._worker_handle)
        self._regions: dict[int, UCXRegion] = {}
        self._tables = LocalRegions()
        self._channels: list[UCXChannel] = []
        self._mailbox = Mailbox()
        self._mailbox_memh, self._mailbox_blob = self._map(self._mailbox.base, self._mailbox.words.nbytes, b"")
        self._busy = True
        self._closed = False

    def _map(self, base: int, nbytes: int, share: bytes) -> tuple[int, wire.RegionBlob]:
        if nbytes == 0:
            return 0, wire.RegionBlob(base, 0, b"", share)
        memh = self._library.map_memory(self._context_handle, base, nbytes)
        rkey = self._library.pack_rkey(self._context_handle, memh)
        return memh, wire.RegionBlob(base, nbytes, rkey, share)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        _require_host(device)
        return hostmem.allocate(nbytes)

    def register(self, tensor: torch.Tensor) -> UCXRegion:
        self._require_open()
        _require_host(tensor.device)
        storage = tensor.untyped_storage()
        memh, blob = self._map(storage.data_ptr(), storage.nbytes(), hostmem.share(tensor) or b"")
        index = self._tables.add(blob.base, blob.nbytes, memh)
        self._regions[index] = region = UCXRegion(index, tensor, memh, wire.pack(blob))
        return region

    def deregister(self, region: Region) -> None:
        self._require_open()
        if self._regions.get(region.index) is not region:
            raise ProtocolError(f"region {region.index} is not registered with this transport")
        if any(channel.uses_local(region.index) for channel in self._channels):
            raise ProtocolError(f"region {region.index} cannot be deregistered: a put of it is still pending")
        self._release(self._regions.pop(region.index))

    def _release(self, region: UCXRegion) -> None:
        self._tables.remove(region.index)
        if region.memh:
            self._library.unmap_memory(self._context_handle, region.memh)

    def address(self) -> bytes:
        self._require_open()
        return wire.pack(wire.AddressBlob(bytes(self._worker.address.tobytes()), self._mailbox_blob, os.getpid()))

    def connect(self, address: bytes, regions: Sequence[bytes]) -> UCXChannel:
        self._require_open()
        peer = wire.unpack_address(address)
        blobs = [wire.unpack_region(region) for region in regions]
        where = self._core.UCXAddress.create_from_buffer(peer.worker)
        try:
            endpoint = self._core.UCXEndpoint.create_from_worker_address(
                self._worker, where, endpoint_error_handling=True
            )
        except self._core.UCXError as error:
            raise TransportUnavailable(
                f"UCX has no lane to peer process {peer.pid}: {error}; "
                f"compare UCX_TLS and UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES')} on both sides"
            ) from error
        channel = UCXChannel(
            self._library, self._worker_handle, endpoint, peer, blobs, self._tables, self._mailbox, self._mailbox_memh
        )
        self._channels.append(channel)
        self._busy = True
        return channel

    def read_signal(self, slot: int) -> int:
        if not 0 <= slot < SLOTS:
            raise ProtocolError(f"signal slot {slot}: allowed are 0..{SLOTS - 1}")
        return self._mailbox.read(slot)

    def progress(self) -> bool:
        self._require_open()
        moved = bool(pump.advance(self._library.functions, self._worker_handle, _ROUND_NS))
        active = sum(not channel.idle for channel in self._channels)
        for channel in self._channels:
            moved = channel.step(_ROUND_NS // max(1, active)) or moved
        for channel in self._channels:
            channel.note_round()
        self._busy = moved
        return moved

    def arm(self) -> int | None:
        self._require_open()
        # Lanes that copy inside progress() (cma) raise no event: sleep only after a round in which nothing moved.
        if self._busy or any(channel.wants_progress for channel in self._channels):
            return None
        return self._event_fd if self._library.arm(self._worker_handle) else None

    def close(self) -> None:
        if self._closed:
            return
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._closed = True
        for region in self._regions.values():
            self._release(region)
        self._regions.clear()
        self._library.unmap_memory(self._context_handle, self._mailbox_memh)
        # UCXX destroys worker and context with the last reference, in this order.
        self._worker = None
        self._context = None

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this UCX transport is closed")


def _require_host(device: torch.device) -> None:
    if device.type != "cpu":
        raise TransportUnavailable(
            f"{device}: device memory is not supported by this transport yet; use tensors on the CPU"
        )


def _import_ucxx() -> Any:
    """The module of UCXX's synchronous classes; loads UCX on the first call, with torchkv's settings."""
    environment.prepare()
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"ucxx is installed but does not load: {error}; mend it with: {_INSTALL}") from error
