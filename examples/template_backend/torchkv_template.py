"""A torchkv transport between processes of one host: a channel maps the peer's regions, and a put copies into them.
It keeps the whole contract of `torchkv.transport.interface`. What another network needs instead is marked YOURS."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import torch

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.host.processes import ProcessId, process_ended, this_process, watch_process
from torchkv.transport import Batch, Capabilities, Channel, Region, RemoteView, Transport
from torchkv.transport.batch_check import Table, resolve
from torchkv.transport.framing import Frame

ROUND_SECONDS = 0.001  # what one progress() may take: its thread has other work, too
CHUNK = 1 << 20  # bytes copied between two looks at the clock

# Peers publish closed types, in a frame with a digest: what is damaged or foreign is refused before it is parsed.
FRAME = Frame(transport="template", magic=b"tktm1")


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="address"):
    process: ProcessId


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="region"):
    share: bytes  # YOURS: what a peer needs to reach a region, such as a remote key


class Operation:
    """A put, or a flush if there are no copies to make: a `torchkv.transport.Completion`."""

    def __init__(self, copies: Iterable[tuple[int, int, int]] = (), regions: Iterable[int] = ()) -> None:
        self.done = False
        self.error: KVError | None = None
        self.copies = deque(copies)  # still to make: source address, target address, bytes
        self.regions = frozenset(regions)  # local ones, which must stay registered

    def cancel(self) -> None:
        if self.copies:
            self.end(TransferCancelled(f"put stopped with {len(self.copies)} spans not yet copied"))

    def end(self, error: KVError | None = None) -> None:
        # YOURS: where posted bytes travel on by themselves, an operation is done only when none of them can land.
        if not self.done:
            self.copies.clear()
            self.done, self.error = True, error


class TemplateChannel(Channel):
    link = "shared-memory"

    def __init__(self, peer: Address, shares: Sequence[bytes], local: Table) -> None:
        self._peer = f"process {peer.process.pid}"
        self._local, self._remote = local, Table()
        self._failure = ""
        self.queue: deque[Operation] = deque()
        self._segments = [shared_memory.open_segment(share) for share in shares]
        for segment in self._segments:
            self._remote.add(segment.ptr, segment.nbytes)
        self._pidfd = watch_process(peer.process)
        if self._pidfd is None:
            raise TransportUnavailable(f"{self._peer} is on another host; use another transport")

    def put(self, batch: Batch) -> Operation:
        self._require_alive()
        spans = resolve(batch, self._local, self._remote, self._peer)  # copies the arrays, and checks every span
        copies = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
        self.queue.append(Operation(copies, spans.local_region.tolist()))
        return self.queue[-1]

    def flush(self) -> Operation:
        self._require_alive()
        self.queue.append(Operation())  # its turn comes after that of all earlier puts
        return self.queue[-1]

    def view(self, region: int) -> RemoteView | None:
        if not 0 <= region < len(self._segments):
            raise ProtocolError(f"{self._peer} has no region {region}: it published {len(self._segments)}")
        return RemoteView(self._segments[region].ptr, self._segments[region].nbytes, torch.device("cpu"))

    @property
    def drained(self) -> bool:
        return self._pidfd is not None and process_ended(self._pidfd)  # YOURS: and all that it sent has been read

    def step(self, deadline: float) -> None:
        if self.drained:
            self._fail(f"{self._peer} has ended; what was sent to it is lost")
        while self.queue and time.monotonic() < deadline:
            copies = self.queue[0].copies
            if not copies:
                self.queue.popleft().end()
                continue
            source, target, nbytes = copies.popleft()
            ctypes.memmove(target, source, min(nbytes, CHUNK))  # visible to the peer at once
            if nbytes > CHUNK:
                copies.appendleft((source + CHUNK, target + CHUNK, nbytes - CHUNK))

    def close(self) -> None:
        self._fail(f"the channel to {self._peer} was closed")
        while self._segments:
            self._segments.pop().close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = None

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        while self.queue:
            self.queue.popleft().end(PeerLost(reason))

    def _require_alive(self) -> None:
        if self.drained:
            self._fail(f"{self._peer} has ended")
        if self._failure:
            raise PeerLost(self._failure)


class TemplateTransport(Transport):
    name = "template"
    capabilities = Capabilities(devices=frozenset({"cpu"}))

    @staticmethod
    def available() -> str | None:
        return None if hasattr(os, "pidfd_open") else "this transport needs Linux"

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._table = Table()
        self._channels: list[TemplateChannel] = []
        self._event_fd: int | None = os.eventfd(0)  # YOURS: readable when the network has something; here it never has

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise TransportUnavailable(f"{device}: this transport moves host memory only")
        return shared_memory.allocate(nbytes)

    def register(self, tensor: torch.Tensor) -> Region:
        self._require_open()
        share = shared_memory.share(tensor)
        if share is None:
            raise TransportUnavailable(f"{tensor.device} memory that peers cannot map; allocate it with KVCache.empty")
        index = self._table.add(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        self._regions[index] = Region(index, tensor, FRAME.pack(Descriptor(share)))
        return self._regions[index]

    def deregister(self, region: Region) -> None:
        self._require_open()
        if self._regions.get(region.index) is not region:
            raise ProtocolError(f"region {region.index} is not registered with this transport")
        if any(region.index in operation.regions for channel in self._channels for operation in channel.queue):
            raise ProtocolError(f"region {region.index} cannot be deregistered: a put of it is still pending")
        self._table.remove(region.index)
        del self._regions[region.index]

    def address(self) -> bytes:
        self._require_open()
        return FRAME.pack(Address(this_process()))

    def connect(self, address: bytes, regions: Sequence[bytes]) -> TemplateChannel:
        self._require_open()
        shares = [FRAME.unpack(region, Descriptor, limit=4 << 10).share for region in regions]
        self._channels.append(TemplateChannel(FRAME.unpack(address, Address, limit=16 << 10), shares, self._table))
        return self._channels[-1]

    def progress(self) -> bool:
        self._require_open()
        busy = [channel for channel in self._channels if channel.queue]
        for channel in busy:
            channel.step(time.monotonic() + ROUND_SECONDS / len(busy))
        return bool(busy)

    def arm(self) -> int | None:
        self._require_open()
        return None if any(channel.queue for channel in self._channels) else self._event_fd

    def close(self) -> None:
        if self._event_fd is not None:
            for channel in self._channels:
                channel.close()
            self._regions.clear()
            os.close(self._event_fd)
            self._event_fd = None

    def _require_open(self) -> None:
        if self._event_fd is None:
            raise ProtocolError("this transport is closed")
