"""`UCXChannel`: puts to one peer over UCX. It holds an endpoint, the peer's remote keys, and a queue of operations."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PeerLost, TransportUnavailable
from torchkv.transport import Batch, NativeChannel
from torchkv_ucx import pump, sockets
from torchkv_ucx.environment import put_seconds
from torchkv_ucx.libucp import HOST, KEY_WORD, LibUCP, request_params
from torchkv_ucx.operation import FlushOperation, Link, PutOperation, VectoredPut
from torchkv_ucx.process import LocalProcess, holds
from torchkv_ucx.queue_channel import QueueChannel
from torchkv_ucx.spans import LocalRegions, resolve
from torchkv_ucx.wire import AddressBlob, RegionBlob

__all__ = ["UCXChannel"]

# Nothing of an ended process can land once its endpoint has failed. Over TCP, UCX has one connection per pair; it reads
# that to its end before it reports the endpoint as failed, and closes it. Over cma the writer's own process stores;
# over cuda_ipc a stream of that process copies, and the driver destroys it with the process. These rounds of progress
# let UCX finish what it has deferred: discarding lanes, purging requests.
#
# UCX does not notice the end of a process whose sockets another one has inherited. If the kernel reports that end, this
# side closes the endpoint itself, and waits until no TCP connection within this host holds bytes that it has not read:
# an ended process sends no others, and those who have inherited the connection run no UCX.
_ROUNDS_AFTER_DEATH = 3
_LOOK_SECONDS = 0.02  # between two looks at the sockets
_SMALL = 32 << 10  # average bytes per span below which system calls dominate the time of a put (measured)
_CLOSE_SECONDS = 5.0  # limit for UCX to return requests after a forced close; it takes milliseconds


class UCXChannel(QueueChannel):
    """See `torchkv.transport.Channel`. Made by ``UCXTransport.connect``, where both sides have a UCX worker."""

    def __init__(
        self,
        library: LibUCP,
        worker: int,
        endpoint: Any,
        peer: AddressBlob,
        regions: Sequence[RegionBlob],
        local: LocalRegions,
        device: Callable[[], torch.device],
    ) -> None:
        super().__init__(f"peer process {peer.pid}", regions, local, device)
        self._library = library
        self._endpoint = endpoint
        self._closing: Callable[[], None] | None = None  # tells the resident loop that the endpoint ends
        self._handle = int(endpoint.handle)
        self._on_device = any(blob.device != "cpu" for blob in regions)
        channel = weakref.proxy(self)  # a strong reference would be a cycle and keep the transport's memory alive
        self._link = Link(library.functions, worker, self._handle, lambda *failure: channel._describe(*failure))
        self._lane_texts: dict[str, str] = {}
        self._rounds_after_death = 0
        self._severed = False  # the peer's process has ended, and its endpoint was closed here
        self._look_at = 0.0  # when to look whether its last bytes have been read; infinite once they have
        self._probe_rkeys = np.zeros(len(peer.probes), dtype=np.int64)
        # Opened before the greeting: if that succeeds, the peer was alive, so this pid is the peer's.
        self._process = _local_process(peer.pid)
        self._sees_end = self._process is not None and _is_seen(peer)
        self._unpack_rkeys(peer, regions)
        # UCX connects on the first traffic, and notices the peer's death only on a connected endpoint.
        self._greeting = FlushOperation(self._link, f"connecting to {self._peer}")
        self._enqueue(self._greeting)

    def _unpack_rkeys(self, peer: AddressBlob, regions: Sequence[RegionBlob]) -> None:
        try:
            for index, blob in enumerate(regions):
                if blob.nbytes and blob.device == "cpu":
                    self._remote.rkey[index] = self._library.unpack_rkey(self._handle, blob.rkey)
        except TransportUnavailable:
            self._destroy_rkeys()
            raise
        if self._on_device:
            self._unpack_device_rkeys(peer.probes, regions)

    def _unpack_device_rkeys(self, probes: Sequence[bytes], regions: Sequence[RegionBlob]) -> None:
        """A failure here excludes puts into device memory, not the channel: views need no remote keys."""
        reason = ""
        try:
            for place, packed in enumerate(probes):
                self._probe_rkeys[place] = self._library.unpack_rkey(self._handle, packed)
        except TransportUnavailable as error:
            reason = str(error)
        for index, blob in enumerate(regions):
            if blob.device == "cpu":
                continue
            if reason or not blob.rkey:
                self._remote.no_put[index] = reason or "its owner's UCX can export no device memory"
                continue
            try:
                self._remote.rkey[index] = self._library.unpack_rkey(self._handle, blob.rkey)
            except TransportUnavailable as error:
                self._remote.no_put[index] = str(error)

    def _destroy_rkeys(self) -> None:
        for rkeys in (self._probe_rkeys, self._remote.rkey):
            for rkey in rkeys[rkeys != 0]:
                self._library.destroy_rkey(int(rkey))
            rkeys[:] = 0

    @property
    def link(self) -> str:
        return self._lanes("cuda" if self._on_device else "cpu")

    def _lanes(self, device_type: str) -> str:
        """What carries puts of one kind of memory; "" until the endpoint is connected."""
        if not self._greeting.done:
            # A later flush may have been reaped in this round of progress before the greeting was.
            self._greeting.step(0)
        known = self._lane_texts.get(device_type, "")
        if not known and self._greeting.done and self._failure is None and not self._closed:
            known = self._lane_texts[device_type] = self._library.put_lanes(self._handle, device_type)
        return known

    def put(self, batch: Batch) -> PutOperation:
        self._require_usable()
        spans = resolve(batch, self._local, self._remote, self._peer)
        name = f"put of {len(spans.length)} spans to {self._peer}"
        # process_vm_writev copies host memory only, and UCX's cma lane carries nothing else.
        on_host = spans.memory_type == HOST
        if self._process is not None and on_host and _are_small(spans.length) and self._lanes("cpu").startswith("cma"):
            operation: PutOperation = VectoredPut(self._link, name, spans, self._process)
        else:
            operation = PutOperation(self._link, name, spans)
        self._enqueue(operation)
        return operation

    def flush(self) -> FlushOperation:
        self._require_usable()
        operation = FlushOperation(self._link, f"flush to {self._peer}")
        self._enqueue(operation)
        return operation

    def native(self, closing: Callable[[], None]) -> NativeChannel | None:
        if self._failure is not None or self._closed or not self._library.is_thread_safe(self._link.worker):
            return None
        kind = int(max(self._local.memory_type, default=HOST))
        if self._on_device != (kind != HOST) or (self._on_device and not self._puts_cheaply()):
            return None
        self._closing = closing
        return NativeChannel(
            functions=self._library.native,
            worker=self._link.worker,
            endpoint=self._handle,
            put_params=request_params(kind),
            key_word=KEY_WORD,
            params=request_params(),
            local_keys=np.where(self._local.memory_type == kind, self._local.memh, 0),
            remote_keys=np.where(self._remote.memory_type == kind, self._remote.rkey, 0),
            remote_at=self._remote.base,
            put_seconds=put_seconds(),
        )

    def _puts_cheaply(self) -> bool:
        """Whether puts of device memory are known to be a network's: each of CUDA IPC takes 4 us of a processor."""
        lanes = self._lanes("cuda")
        return bool(lanes) and "cuda_ipc" not in lanes and not lanes.startswith("none")

    @property
    def drained(self) -> bool:
        # Of a channel without work this is asked when the peer is known to have ended in another way.
        if self._failure is None and not self._closed:
            if not self._alive:
                self.working[self] = None  # the next round of progress notices
            elif self._sees_end and self._process is not None and self._process.ended:
                self._sever()
        return self._rounds_after_death >= _ROUNDS_AFTER_DEATH

    def _sever(self) -> None:
        """The peer's process has ended, and UCX may never notice: ends the requests towards it."""
        self._severed = True
        self._fail(PeerLost(f"{self._peer} has ended"))
        self._close_endpoint()

    @property
    def _alive(self) -> bool:
        return not self._severed and self._endpoint is not None and bool(self._endpoint.alive)

    def _has_read_all(self) -> bool:
        """Whether UCX has read everything that the peer had sent when its process ended."""
        if not self._severed or self._look_at == math.inf:
            return True
        if (now := time.monotonic()) < self._look_at:
            return False
        quiet = not sockets.has_unread_bytes()
        self._look_at = math.inf if quiet else now + _LOOK_SECONDS
        return quiet

    def note_round(self) -> None:
        """Called once per round of progress, after all channels have been stepped; `drained` counts the rounds."""
        if self._failure is not None and self.idle and not self._alive and not self._closed and self._has_read_all():
            self._rounds_after_death = min(self._rounds_after_death + 1, _ROUNDS_AFTER_DEATH)

    @property
    def wants_progress(self) -> bool:
        """Whether progress has work that no event of UCX announces."""
        cut_off = self._failure is None and not self._closed and not self._alive  # which the next step notices
        return self._unstepped or cut_off or self._draining or (self._on_device and not self.idle)

    def _describe(self, status: int, what: str) -> KVError:
        return self._library.error(status, what, peer_alive=self._alive)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail(PeerLost(f"the channel to {self._peer} was closed"))
        # Remote keys and sources must live until the requests have ended.
        self._close_endpoint()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self.idle and time.monotonic() < deadline:
            pump.advance(self._link.functions, self._link.worker, 100_000)
            self.step(100_000)
        self._destroy_rkeys()
        if self._process is not None:
            self._process.close()
        self._views.close()
        self._endpoint = None  # it holds a reference to UCXX's worker, and so to UCX's file descriptors

    def _close_endpoint(self) -> None:
        """A forced close, which waits for no peer, because the endpoint was made with error handling: ends requests."""
        if self._closing is not None:
            self._closing()
            self._closing = None
        self._endpoint.close_blocking(period=1_000_000, max_attempts=1000)


def _is_seen(peer: AddressBlob) -> bool:
    """Whether the process with the peer's pid is the peer, so that its end is seen, and its sockets are, too."""
    try:
        return sockets.same_network(peer.pid) and holds(peer.pid, peer.token_at, peer.token)
    except OSError:
        return False


def _local_process(pid: int) -> LocalProcess | None:
    """The process of this host with the peer's pid, if there is one. It is the peer if UCX chooses the cma lane."""
    try:
        return LocalProcess(pid)
    except OSError:
        return None


def _are_small(length: Int64Array) -> bool:
    """Whether puts of these lengths would spend more time in system calls than in copying."""
    return len(length) > 1 and int(length.sum()) < len(length) * _SMALL
