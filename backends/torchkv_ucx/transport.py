"""`UCXTransport`: one-sided writes between processes over UCX, on shared memory, TCP, RDMA or NVLink.

A job on one host without GPUs needs no UCX, and then none is loaded: see `torchkv_ucx.local_channel`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from torchkv.cuda import ipc
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.transport import Capabilities, Region, Transport
from torchkv_ucx import environment, gpu, libucp, pump, wire
from torchkv_ucx.channel import UCXChannel
from torchkv_ucx.local_channel import LocalChannel, Token, needs_ucx
from torchkv_ucx.queue_channel import QueueChannel
from torchkv_ucx.spans import LocalRegions

__all__ = ["UCXRegion", "UCXTransport"]

_ROUND_NS = 1_000_000  # what one progress() may take: its thread has other work, too
_INSTALL = "pip install ucxx-cu13"

# UCX destroys closed endpoints in steps of which progress reports none as work. If the worker is destroyed before the
# last step (the flush of a cma lane), UCX aborts the process.
_ROUNDS_AFTER_CLOSE = 16
_CLOSE_SECONDS = 2.0
_ENDS = 8  # ends of processes noticed in one round


class UCXRegion(Region):
    """A region registered with UCX. Made by ``UCXTransport.register``.

    memh: its memory handle, 0 for none. no_put: why UCX can put nothing from or into it, "" if it can. Device memory
    that UCX cannot put can still be viewed.
    """

    def __init__(self, index: int, tensor: torch.Tensor, memh: int, descriptor: bytes, no_put: str = "") -> None:
        super().__init__(index, tensor, descriptor)
        self.memh = memh
        self.no_put = no_put


class _Capabilities:
    """Looks for GPUs when the attribute is read, not at import: that would initialise CUDA before a program forks."""

    def __get__(self, instance: UCXTransport | None, owner: type[UCXTransport]) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}),
        )


class UCXTransport(Transport):
    """The `torchkv.transport.Transport` over UCX: one worker, owned by the constructing thread.

    Views of peers' device memory are for kernels on the GPU of the first device region registered here, or on the
    thread's current GPU if there is none.
    """

    name = "ucx"
    capabilities = _Capabilities()

    @staticmethod
    def available() -> str | None:
        if sys.platform != "linux":
            return f"UCX needs Linux, not {sys.platform}"
        if importlib.util.find_spec("ucxx") is None:
            return f"the Python package ucxx is missing: {_INSTALL}"
        return None

    def __init__(self) -> None:
        """Raises ``TransportUnavailable`` with the reason and what would help."""
        reason = self.available()
        if reason is not None:
            raise TransportUnavailable(f"transport 'ucx' cannot work here: {reason}")
        self._worker: Any = None  # UCX's, if there is one
        # Peers without UCX, by pidfd; and what shows that one of them has ended.
        self._local: dict[int, list[LocalChannel]] = {}
        self._ends = select.epoll()
        if needs_ucx():
            self._start_ucx()
        self._token = Token()
        self._armed = False  # whether the event descriptor was armed since UCX was last driven
        self._regions: dict[int, UCXRegion] = {}
        self._device: torch.device | None = None  # of the first device region
        self._probes: dict[torch.device, tuple[int, bytes]] = {}  # memory handle and remote key of `gpu.probe_memory`
        self._tables = LocalRegions()
        self._channels: list[QueueChannel] = []
        # Those with something to do: what a round costs depends on them, and not on how many peers were ever used.
        self._working: dict[QueueChannel, None] = {}
        self._busy = True
        self._closed = False

    def _start_ucx(self) -> None:
        self._core = core = _import_ucxx()
        features = (core.Feature.RMA, core.Feature.TAG, core.Feature.WAKEUP)
        try:
            self._context: Any = core.UCXContext(environment.context_config(), feature_flags=features)
            self._worker = core.UCXWorker(self._context)
        except core.UCXError as error:
            chosen = os.environ.get("UCX_TLS")
            raise TransportUnavailable(
                f"transport 'ucx' cannot start: {type(error).__name__}: {error}; check UCX_TLS={chosen!r} and "
                "UCX_NET_DEVICES, that /dev/shm has room, and the limits on open files (ulimit -n)"
            ) from error
        self._library = libucp.load()
        self._context_handle = int(self._context.handle)
        self._worker_handle = int(self._worker.handle)
        self._event_fd = self._library.event_fd(self._worker_handle)
        self._ends.register(self._event_fd, select.EPOLLIN)

    def _map(self, base: int, nbytes: int, share: bytes) -> tuple[int, wire.RegionBlob]:
        if nbytes == 0 or self._worker is None:
            return 0, wire.RegionBlob(base, nbytes, b"", share)
        memh, rkey = self._export(base, nbytes, "cpu")
        return memh, wire.RegionBlob(base, nbytes, rkey, share)

    def _export(self, base: int, nbytes: int, device_type: str) -> tuple[int, bytes]:
        """Memory handle and remote key."""
        memh = self._library.map_memory(self._context_handle, base, nbytes, device_type)
        try:
            return memh, self._library.pack_rkey(self._context_handle, memh)
        except TransportUnavailable:
            self._library.unmap_memory(self._context_handle, memh)
            raise

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        _require_known(device)
        return shared_memory.allocate(nbytes) if device.type == "cpu" else ipc.allocate(nbytes, device)

    def register(self, tensor: torch.Tensor) -> UCXRegion:
        self._require_open()
        _require_known(tensor.device)
        if tensor.device.type == "cuda":
            return self._register_device(tensor)
        storage = tensor.untyped_storage()
        memh, blob = self._map(storage.data_ptr(), storage.nbytes(), shared_memory.share(tensor) or b"")
        index = self._tables.add(blob.base, blob.nbytes, memh)
        self._regions[index] = region = UCXRegion(index, tensor, memh, wire.pack(blob))
        return region

    def _register_device(self, tensor: torch.Tensor) -> UCXRegion:
        """Registers device memory. Where UCX cannot put it, peers can still map it."""
        ipc.check_shareable(tensor)
        share = ipc.share(tensor)
        if self._device is None:
            ipc.make_current(tensor.device)
            self._device = tensor.device
        storage = tensor.untyped_storage()
        base, nbytes = storage.data_ptr(), storage.nbytes()
        memh, rkey = 0, b""
        no_put = (
            "UCX was not started"
            if self._worker is None
            else gpu.why_no_lane(self._context.info, self._library.version)
        )
        if not no_put:
            try:
                self._export_probe(tensor.device)
                memh, rkey = self._export(base, nbytes, "cuda")
            except TransportUnavailable as error:
                no_put = str(error)
        index = self._tables.add(base, nbytes, memh, libucp.MEMORY_TYPES["cuda"], no_put)
        blob = wire.RegionBlob(base, nbytes, rkey, share, "cuda")
        self._regions[index] = region = UCXRegion(index, tensor, memh, wire.pack(blob), no_put)
        return region

    def _export_probe(self, device: torch.device) -> None:
        if device not in self._probes:
            memory = gpu.probe_memory(device)
            self._probes[device] = self._export(memory.data_ptr(), memory.numel(), "cuda")

    def _device_of_views(self) -> torch.device:
        return self._device or torch.device("cuda", torch.cuda.current_device())

    def deregister(self, region: Region) -> None:
        self._require_open()
        if self._regions.get(region.index) is not region:
            raise ProtocolError(f"region {region.index} is not registered with this transport")
        if any(channel.uses_local(region.index) for channel in self._working):
            raise ProtocolError(f"region {region.index} cannot be deregistered: a put of it is still pending")
        self._release(self._regions.pop(region.index))

    def _release(self, region: UCXRegion) -> None:
        self._tables.remove(region.index)
        if region.memh:
            self._library.unmap_memory(self._context_handle, region.memh)

    def address(self) -> bytes:
        self._require_open()
        probes = tuple(rkey for _, rkey in self._probes.values())
        worker = b"" if self._worker is None else bytes(self._worker.address.tobytes())
        return wire.pack(wire.AddressBlob(worker, os.getpid(), self._token.address, self._token.value, probes))

    def connect(self, address: bytes, regions: Sequence[bytes]) -> UCXChannel | LocalChannel:
        self._require_open()
        peer = wire.unpack_address(address)
        blobs = [wire.unpack_region(region) for region in regions]
        if self._device is not None and any(blob.device == "cuda" for blob in blobs):
            ipc.make_current(self._device)  # the caller may have switched since
        # Both sides decide alike. A peer that could put through UCX, to which this side has no endpoint, would not be
        # seen to have drained.
        local = self._worker is None or not peer.worker
        channel = self._connect_local(peer, blobs) if local else self._connect_ucx(peer, blobs)
        # Those of peers that are gone are forgotten here, where it costs no round of `progress` anything.
        self._channels = [*(known for known in self._channels if not known.over), channel]
        channel.working = self._working
        self._working[channel] = None
        self._busy = True
        return channel

    def _connect_local(self, peer: wire.AddressBlob, blobs: Sequence[wire.RegionBlob]) -> LocalChannel:
        channel = LocalChannel(peer, blobs, self._tables, self._device_of_views)
        # Once: a descriptor that stays readable would keep the owner awake.
        once = select.EPOLLIN | select.EPOLLONESHOT
        try:
            self._ends.register(channel.fd, once)
        except FileExistsError:  # others in this process watch the peer with the same descriptor
            self._ends.modify(channel.fd, once)
        there = [known for known in self._local.get(channel.fd, ()) if not known.closed]
        self._local[channel.fd] = [*there, channel]
        return channel

    def _connect_ucx(self, peer: wire.AddressBlob, blobs: Sequence[wire.RegionBlob]) -> UCXChannel:
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
        return UCXChannel(
            self._library, self._worker_handle, endpoint, peer, blobs, self._tables, self._device_of_views
        )

    def progress(self) -> bool:
        return self._round(drive=self._worker is not None)

    def look_after(self) -> bool:
        return self._round(drive=False)

    def _round(self, *, drive: bool) -> bool:
        self._require_open()
        self._armed = False
        moved = bool(self._local) and self._note_ends()
        if drive:
            moved = bool(pump.advance(self._library.functions, self._worker_handle, _ROUND_NS)) or moved
        working = list(self._working)
        active = sum(not channel.idle for channel in working)
        for channel in working:
            moved = channel.step(_ROUND_NS // max(1, active)) or moved
        for channel in working:
            channel.note_round()
            if not channel.works:
                del self._working[channel]
        self._busy = moved
        return moved

    def _note_ends(self) -> bool:
        """Tells channels that their peer's process has ended. True if one has."""
        ended = [fd for fd, _ in self._ends.poll(0, _ENDS) if fd in self._local]
        for fd in ended:
            for channel in self._local.pop(fd):
                channel.end()
                self._working[channel] = None
        return bool(ended)

    def arm(self) -> int | None:
        self._require_open()
        # Lanes that copy inside progress() (cma) cause no event: sleep only after a round in which nothing moved.
        if self._busy:
            return None
        for channel in self._working:  # a loop, because a generator would be made in every round
            if channel.wants_progress:
                return None
        if self._worker is None:
            return self._ends.fileno()
        if not self._armed:
            self._armed = self._library.arm(self._worker_handle)
        if not self._armed:
            return None
        return self._ends.fileno() if self._local else self._event_fd

    def close(self) -> None:
        if self._closed:
            return
        if self._device is not None:
            ipc.make_current(self._device)
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._working.clear()
        self._local.clear()
        if self._worker is not None:
            self._settle()
        self._ends.close()
        self._closed = True
        for region in self._regions.values():
            self._release(region)
        self._regions.clear()
        for memh, _ in self._probes.values():
            self._library.unmap_memory(self._context_handle, memh)
        self._probes.clear()
        if self._worker is None:
            return
        # UCXX destroys an object with its last reference; the worker must go before the context.
        self._worker = None
        self._context = None

    def _settle(self) -> None:
        """Drives UCX until nothing has moved for `_ROUNDS_AFTER_CLOSE` rounds."""
        quiet = 0
        deadline = time.monotonic() + _CLOSE_SECONDS
        while quiet < _ROUNDS_AFTER_CLOSE and time.monotonic() < deadline:
            moved = pump.advance(self._library.functions, self._worker_handle, _ROUND_NS)
            quiet = 0 if moved else quiet + 1

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this UCX transport is closed")


def _require_known(device: torch.device) -> None:
    if device.type not in libucp.MEMORY_TYPES:
        raise TransportUnavailable(f"{device}: this transport moves cpu and cuda memory; keep the tensors there")


def _import_ucxx() -> Any:
    """The module of UCXX's synchronous classes. The first call loads UCX, with torchkv's settings."""
    environment.prepare()
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"ucxx is installed but does not load: {error}; mend it with: {_INSTALL}") from error
