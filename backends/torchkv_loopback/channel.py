"""`LoopbackChannel`: puts whose bytes land later in virtual time, piece by piece and in random order."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.errors import PeerLost, ProtocolError
from torchkv.transport import Batch, Channel, Completion, Region, RemoteView
from torchkv_loopback.operation import Flush, Piece, Put, Span, cut
from torchkv_loopback.world import OpenTransport, World

__all__ = ["LoopbackChannel"]


class LoopbackChannel(Channel):
    """See `torchkv.transport.Channel`. Made by ``LoopbackTransport.connect``."""

    def __init__(
        self,
        world: World,
        *,
        node: int,
        peer: OpenTransport,
        local: Mapping[int, Region],
        remote: list[Region],
        views: bool,
    ) -> None:
        self._world = world
        self.node = node
        self._peer = peer
        self._local = local
        self._remote = remote
        self._views = views
        self._operations: deque[Put | Flush] = deque()  # in the order of their posting
        self._acknowledging: list[Flush] = []  # flushes whose acknowledgement is on its way back
        self._lost = ""  # why the peer is lost, or ""
        self._closed = False
        world.watch(peer.node, self)

    @property
    def link(self) -> str:
        return "loopback"

    # ------------------------------------------------------------------ the contract

    def put(self, batch: Batch) -> Completion:
        self._require_usable("put")
        spans, regions = self._spans(batch)
        put = Put(spans, regions)
        self._operations.append(put)
        self._post(put)
        put.settle()
        return put

    def flush(self) -> Completion:
        self._require_usable("flush")
        flush = Flush()
        self._operations.append(flush)
        self._reach_flushes()
        return flush

    def view(self, region: int) -> RemoteView | None:
        if not 0 <= region < len(self._remote):
            raise ProtocolError(f"view of region {region}: the peer published {len(self._remote)}")
        if not self._views or self._closed:
            return None
        found = self._remote[region]
        return RemoteView(found.ptr, found.nbytes, torch.device("cpu"))

    @property
    def drained(self) -> bool:
        return not self._world.alive(self._peer.node) and not self._world.in_flight[self._peer.node, self.node]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._world.unwatch(self._peer.node, self)
        for operation in (*self._acknowledging, *self._operations):
            # Pieces that are under way find the channel closed and are dropped, so none of them lands any more.
            if isinstance(operation, Put):
                self._world.in_flight[self.node, self._peer.node] -= operation.flying
                operation.flying = 0
            operation.fail(PeerLost(f"channel to node {self._peer.node} was closed with this operation pending"))
        self._operations.clear()
        self._acknowledging.clear()

    # ------------------------------------------------------------------ for the transport and the world

    def uses_local(self, region: int) -> bool:
        return any(isinstance(op, Put) and not op.done and region in op.regions for op in self._operations)

    def progress(self) -> bool:
        """Posts a window of the oldest put that is not yet posted in full. True if there was one."""
        self._reach_flushes()  # the put that a flush waits for may have been cancelled
        waiting = next((op for op in self._operations if isinstance(op, Put) and op.unposted), None)
        if waiting is not None:
            self._post(waiting)
        return waiting is not None

    def lose(self, reason: str) -> None:
        """Fails everything pending, because the peer has ended or the link to it is broken."""
        if self._closed or self._lost:
            return
        self._lost = reason
        for operation in (*self._acknowledging, *self._operations):
            operation.fail(PeerLost(f"loopback: {reason}; what was sent to it is lost"))
        self._acknowledging.clear()
        self._reach_flushes()

    # ------------------------------------------------------------------ inside

    def _require_usable(self, what: str) -> None:
        if self._closed:
            raise ProtocolError(f"{what} on a closed channel to node {self._peer.node}; connect again")
        if self._lost:
            raise PeerLost(f"{what}: {self._lost}; connect to another peer")

    def _spans(self, batch: Batch) -> tuple[list[Span], frozenset[int]]:
        """Absolute addresses, each span checked against both regions. Raises ``ProtocolError``."""
        columns = (batch.local_region, batch.local_offset, batch.remote_region, batch.remote_offset, batch.length)
        if any(c.ndim != 1 or c.dtype != np.int64 or len(c) != len(batch.length) for c in columns):
            raise ProtocolError("a batch needs five int64 arrays of one dimension and one length")
        local = _bases("local", batch.local_region, batch.local_offset, batch.length, self._local)
        # Regions that the peer has deregistered since are noticed when a piece arrives, as on real hardware.
        remote = _bases("remote", batch.remote_region, batch.remote_offset, batch.length, dict(enumerate(self._remote)))
        facts = (local, remote, batch.length, batch.remote_region)
        spans: list[Span] = list(zip(*(fact.tolist() for fact in facts), strict=True))
        return [span for span in spans if span[2]], frozenset(batch.local_region.tolist())

    def _post(self, put: Put) -> None:
        faults = self._world.faults
        window = [put.unposted.pop() for _ in range(min(faults.window, len(put.unposted)))]
        for parts in cut(self._world.random, window, faults.pieces):
            piece = Piece(put, parts)
            put.unread += 1
            put.flying += 1
            self._world.in_flight[self.node, self._peer.node] += 1
            self._world.schedule(self._world.delay(), lambda piece=piece: self._read(piece))  # type: ignore[misc]

    def _read(self, piece: Piece) -> None:
        """Copies the piece's bytes from the source, which may change afterwards."""
        if self._closed:
            return
        if not self._world.alive(self.node):
            self._end(piece, read=True)
            return
        piece.data = [ctypes.string_at(src, length) for src, _, length, _ in piece.parts]
        piece.put.unread -= 1
        piece.put.settle()
        self._world.schedule(self._world.delay(), lambda: self._land(piece))

    def _land(self, piece: Piece) -> None:
        """Writes the piece's bytes into the peer's memory, unless a fault drops or delays them."""
        world = self._world
        if self._closed:
            return
        writer_alive = world.alive(self.node)
        if writer_alive and not world.reaches(self.node, self._peer.node):
            world.hold(self.node, self._peer.node, lambda: self._land(piece))
            return
        if not world.alive(self._peer.node):
            self._end(piece)
            self.lose(f"node {self._peer.node} has ended")
            return
        if writer_alive or world.random.random() < world.faults.survive:
            for (_, dst, length, region), data in zip(piece.parts, piece.data, strict=True):
                if not self._peer.has(self._remote[region]):
                    piece.put.fail(ProtocolError(f"a region of node {self._peer.node} was deregistered under a put"))
                    break
                ctypes.memmove(dst, data, length)
        self._end(piece)

    def _end(self, piece: Piece, *, read: bool = False) -> None:
        """Accounts for a piece that has landed or was dropped. read: whether it had not been read yet."""
        piece.data.clear()
        piece.put.unread -= read
        piece.put.flying -= 1
        self._world.in_flight[self.node, self._peer.node] -= 1
        piece.put.settle()
        self._reach_flushes()

    def _reach_flushes(self) -> None:
        """Removes puts that have landed from the front of the queue, and acknowledges the flushes behind them."""
        while self._operations:
            first = self._operations[0]
            if isinstance(first, Put):
                if not first.landed:
                    return
                self._operations.popleft()
                continue
            self._operations.popleft()
            if not first.ended:
                self._acknowledging.append(first)
                # The acknowledgement takes a delay of its own on the way back.
                self._world.schedule(self._world.delay(), lambda flush=first: self._acknowledge(flush))  # type: ignore[misc]

    def _acknowledge(self, flush: Flush) -> None:
        if not flush.ended:
            flush.ended = True
            self._acknowledging.remove(flush)


def _bases(
    side: str,
    index: Int64Array,
    offset: Int64Array,
    length: Int64Array,
    regions: Mapping[int, Region],
) -> Int64Array:
    """Address of each span. Raises ``ProtocolError`` that names the first span outside its region."""
    table = max(regions, default=-1) + 1
    sizes = np.full(table + 1, -1, dtype=np.int64)  # the last entry stands for every unknown index
    bases = np.zeros(table + 1, dtype=np.int64)
    for known, region in regions.items():
        sizes[known], bases[known] = region.nbytes, region.ptr
    at = np.where((index >= 0) & (index < table), index, table)
    size = sizes[at]
    bad = (size < 0) | (offset < 0) | (length < 0) | (length > size) | (offset > size - length)
    if bad.any():
        i = int(np.argmax(bad))
        raise ProtocolError(
            f"span {i}: {side} region {int(index[i])}, offset {int(offset[i])}, length {int(length[i])} lies outside "
            f"the {len(regions)} registered regions or the region's {max(0, int(size[i]))} bytes; nothing was posted"
        )
    result: Int64Array = bases[at] + offset
    return result
