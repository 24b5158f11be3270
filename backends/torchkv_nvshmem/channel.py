"""`NVSHMEMChannel`: puts to one PE. It holds a CUDA stream, the peer's regions, and a queue of operations."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from torchkv.cuda import ipc
from torchkv.errors import KVError, PeerLost, ProtocolError, TransportUnavailable
from torchkv.host.processes import process_ended, watch_process
from torchkv.transport import Batch, Channel, RemoteView
from torchkv.transport.batch_check import Table
from torchkv_nvshmem import wire
from torchkv_nvshmem.heap import Place
from torchkv_nvshmem.operation import FlushOperation, Operation, PutOperation
from torchkv_nvshmem.runtime import Runtime
from torchkv_nvshmem.spans import OUTSIDE, resolve
from torchkv_nvshmem.wire import AddressBlob, RegionBlob

__all__ = ["NVSHMEMChannel"]

_CLOSE_SECONDS = 5.0  # limit for what is on the stream to end; over NVLink it takes milliseconds
_CLOSE_POLL = 0.0005


class NVSHMEMChannel(Channel):
    """See `torchkv.transport.Channel`. Made by ``NVSHMEMTransport.connect``."""

    def __init__(self, runtime: Runtime, peer: AddressBlob, regions: Sequence[RegionBlob], local: Table) -> None:
        self._runtime = runtime
        self._pe = peer.pe
        self._peer = f"PE {peer.pe} (process {peer.process.pid})"
        self._local = local
        self._regions = list(regions)
        self._remote = Table()
        self._check_member(peer.heap, peer.pe, "its address")
        if not 0 <= peer.pe < runtime.size:
            raise ProtocolError(f"{self._peer}: this NVSHMEM job has {runtime.size} PEs")
        for index, blob in enumerate(self._regions):
            self._remote.add(self._address_of(index, blob), blob.nbytes)
        self._views: dict[int, RemoteView | str] = {}  # or why there is none
        self._mappings: list[ipc.Mapping] = []
        self._queue: deque[Operation] = deque()
        self._posted: list[Operation] = []
        self._failure: KVError | None = None
        self._closed = False
        with runtime.lock:
            # Whether loads and stores reach a PE depends on the PE and not on the address: any block shows it.
            self._mapped = bool(runtime.library.pointer(runtime.heap.blocks[0].base, self._pe))
        self._pidfd = watch_process(peer.process)
        self._ended = False
        self._stream = runtime.gpu.stream()

    def _address_of(self, index: int, blob: RegionBlob) -> int:
        """The symmetric address of a region, or `OUTSIDE`."""
        what = f"its region {index}"
        self._check_member(blob.heap, blob.pe, what)
        if blob.block == wire.NO_BLOCK:
            return OUTSIDE
        return self._runtime.heap.address(Place(blob.block, blob.offset, blob.nbytes), f"{self._peer}: {what}")

    def _check_member(self, heap: bytes, pe: int, what: str) -> None:
        if heap != self._runtime.heap_id:
            raise TransportUnavailable(f"{self._peer}: {what} belongs to another NVSHMEM job; use another transport")
        if pe != self._pe:
            raise ProtocolError(f"{self._peer}: {what} names PE {pe}")

    # ------------------------------------------------------------------ the contract

    @property
    def link(self) -> str:
        return "nvshmem/p2p" if self._mapped else "nvshmem/remote"

    def put(self, batch: Batch) -> PutOperation:
        self._require_usable()
        spans = resolve(batch, self._local, self._remote, self._peer)
        name = f"put of {len(batch)} spans to {self._peer}"
        operation = PutOperation(name, self._runtime, self._stream, pe=self._pe, spans=spans)
        self._queue.append(operation)
        return operation

    def flush(self) -> FlushOperation:
        self._require_usable()
        operation = FlushOperation(f"flush to {self._peer}", self._runtime, self._stream)
        self._queue.append(operation)
        return operation

    def view(self, region: int) -> RemoteView | None:
        """See `torchkv.transport.Channel.view`; the address is for kernels on this rank's GPU."""
        found = self._view(region)
        return found if isinstance(found, RemoteView) else None

    def why_no_view(self, region: int) -> str:
        found = self._view(region)
        return "" if isinstance(found, RemoteView) else found

    def _view(self, region: int) -> RemoteView | str:
        if self._closed:
            raise ProtocolError(f"view of region {region}: the channel to {self._peer} is closed")
        if not 0 <= region < len(self._regions):
            raise ProtocolError(f"{self._peer} has no region {region}: it published {len(self._regions)}")
        if region not in self._views:
            self._views[region] = self._map(region)
        return self._views[region]

    def _map(self, region: int) -> RemoteView | str:
        blob, device = self._regions[region], self._runtime.gpu.device
        address = int(self._remote.base[region])
        if address != OUTSIDE:
            with self._runtime.lock:
                ptr = self._runtime.library.pointer(address, self._pe)
            if not ptr:
                return f"NVSHMEM reaches {self._peer} over the network only: no NVLink or PCIe peer access to its GPU"
            return RemoteView(ptr, blob.nbytes, device)
        if not blob.share:
            return f"{self._peer} has no bytes in region {region}"
        try:
            mapping = self._runtime.gpu.open_share(blob.share)
        except TransportUnavailable as error:
            return str(error)
        self._mappings.append(mapping)
        if mapping.nbytes != blob.nbytes:
            raise ProtocolError(
                f"{self._peer} published region {region} with {blob.nbytes} bytes over memory of {mapping.nbytes}"
            )
        return RemoteView(mapping.ptr, mapping.nbytes, device)

    @property
    def drained(self) -> bool:
        # A peer on this host writes through its own GPU contexts, which are destroyed before its process counts as
        # ended. Packets of a peer on another host may still be on their way after its end, and nothing here shows it.
        return self._mapped and self._peer_ended()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail(PeerLost(f"the channel to {self._peer} was closed"))
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.step(0) or not self.idle:
            if time.monotonic() > deadline:
                break  # operations towards a dead peer over the network never end; they keep their memory
            time.sleep(_CLOSE_POLL)
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()
        self._views.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self.idle:
            self._stream.close()

    # ------------------------------------------------------------------ for the transport

    @property
    def idle(self) -> bool:
        """Whether no operation is pending."""
        return not self._queue and not self._posted

    def uses_local(self, region: int) -> bool:
        """Whether an unfinished put reads from local region ``region``."""
        return any(
            isinstance(operation, PutOperation) and operation.uses_local(region)
            for operation in (*self._posted, *self._queue)
        )

    def step(self, budget_ns: int) -> bool:
        """Advances the operations for about ``budget_ns``. True if anything moved."""
        if self.idle:
            return False
        if self._failure is None and self._peer_ended():
            self._fail(PeerLost(f"{self._peer} has ended; what was sent to it is lost"))
        moved = False
        for operation in self._posted:
            moved = operation.step(budget_ns) or moved
        while self._queue:
            operation = self._queue[0]
            moved = operation.step(budget_ns) or moved
            if not operation.posted:
                break
            self._posted.append(self._queue.popleft())
        for operation in self._posted:
            # A failed operation fails the channel: a later flush could not tell what has arrived.
            if operation.done and operation.failed and self._failure is None:
                assert operation.error is not None
                self._fail(operation.error)
        self._posted = [operation for operation in self._posted if not operation.done]
        return moved

    # ------------------------------------------------------------------ inside

    def _peer_ended(self) -> bool:
        """Whether the peer's process has ended, all its threads included. Always False for one on another host."""
        self._ended = self._ended or (self._pidfd is not None and process_ended(self._pidfd))
        return self._ended

    def _fail(self, failure: KVError) -> None:
        self._failure = failure
        for operation in (*self._posted, *self._queue):
            operation.stop(failure)

    def _require_usable(self) -> None:
        if self._closed:
            raise ProtocolError(f"the channel to {self._peer} is closed")
        if self._failure is None and self._peer_ended():
            self._fail(PeerLost(f"{self._peer} has ended"))
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
