"""This rank's connections: made from what peers have published, and measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchkv.engine.joining.peer_metadata import PeerMetadata
from torchkv.engine.joining.probe import calibration, measure
from torchkv.errors import LayoutMismatch, ProtocolError, TransportUnavailable
from torchkv.layout.layout import KVLayout
from torchkv.options import Options
from torchkv.transfer.peer_connection import PeerConnection, StageTarget
from torchkv.transport.interface import Channel, Region, RemoteView, Transport

if TYPE_CHECKING:
    from torchkv.engine.engine import Engine
    from torchkv.engine.progress import ProgressThread
    from torchkv.kernels.gpu_context import GpuContext

__all__ = ["Connector"]


class Connector:
    """Used on the thread that owns ``transport``, except for methods that take a `ProgressThread`: on any other.

    metadata: what each rank has published, kept by the caller. regions: this rank's, in the published order; the last
    one is scratch memory, here and of each peer. key: the secret that tags records of resident loops. records: whether
    this rank has such a loop. gpu: None if the cache lies in host memory.
    """

    def __init__(
        self,
        rank: int,
        *,
        options: Options,
        transport: Transport,
        metadata: Mapping[int, PeerMetadata],
        regions: Sequence[Region],
        key: bytes,
        records: bool,
        gpu: GpuContext | None,
    ) -> None:
        self._calibrates = False  # whether the costs of connections made from now on are measured on first use
        self._rank = rank
        self._options = options
        self._transport = transport
        self._metadata = metadata
        self._regions = regions
        self._key = key
        self._records = records
        self._gpu = gpu

    def connect(self, rank: int) -> PeerConnection:
        """The connection to ``rank``. Raises ``LayoutMismatch``, ``ProtocolError``, ``TransportUnavailable``."""
        metadata = self._metadata[rank]
        layout = metadata.info().layout
        if layout is None:
            raise LayoutMismatch(f"rank {rank} registered no cache")
        if rank == self._rank:
            views: list[RemoteView | None] = [RemoteView(r.ptr, r.nbytes, r.device) for r in self._regions]
            return self._connection(metadata, layout, None, views)
        channel = self._transport.connect(metadata.address, [region.descriptor for region in metadata.regions])
        views = []
        why = ""
        for index, region in enumerate(metadata.regions):
            view = channel.view(index)
            if view is not None and view.nbytes < region.nbytes:
                channel.close()
                raise ProtocolError(
                    f"rank {rank}: region {index} of {region.nbytes} bytes is mapped with {view.nbytes}"
                )
            if view is None and not why:
                why = channel.why_no_view(index)
            views.append(view)
        connection = self._connection(metadata, layout, channel, views, why)
        if self._calibrates and not connection.direct:
            self._plan_calibration(connection)
        return connection

    def _connection(
        self,
        metadata: PeerMetadata,
        layout: KVLayout,
        channel: Channel | None,
        views: list[RemoteView | None],
        no_view: str = "",
    ) -> PeerConnection:
        return PeerConnection(
            rank=metadata.rank,
            layout=layout,
            placements=metadata.placement_map(),
            scales=metadata.page_scales(layout),
            channel=channel,
            views=views,
            staging=StageTarget(len(metadata.regions) - 2, metadata.staging) if metadata.staging else None,
            no_view=no_view,
            tags=self._tags(metadata) if metadata.mailboxes and self._records else None,
        )

    def _tags(self, peer: PeerMetadata) -> tuple[int, int]:
        """Of records from a peer, and of those to it; a process's address is like no other's."""
        ours, theirs = self._metadata[self._rank].address, peer.address
        return _tag(self._key, theirs, ours), _tag(self._key, ours, theirs)

    def measure(self, thread: ProgressThread, connection: PeerConnection) -> float:
        """The rate to a peer in GB/s (1e9 bytes/s), by stores or puts, as transfers do. Not for the progress thread."""
        target, mine = self._scratch(connection.rank), self._regions[-1]
        stores = connection.channel is None or (connection.direct and self._options.forced_path in (None, "direct"))
        return measure(thread, connection, mine, target, stores=stores, gpu=self._gpu)

    def calibrate(self, thread: ProgressThread, connection: PeerConnection) -> None:
        """Measures what puts cost on ``connection``, unless that is known. Not for the progress thread."""
        if connection.channel is None or connection.costs is not None:
            return
        thread.call(lambda: self._plan_calibration(connection))
        while not thread.call(connection.calibrated):  # one step per call: the thread serves requests in between
            continue

    def measure_all(self, thread: ProgressThread, engine: Engine) -> None:
        """Measures all connections: the cost of puts if paths depend on it, the rate if ``Options.min_gbps`` is set.

        Connections made later are measured by the first transfer that needs the costs. Without this call, as in
        simulations on a virtual clock, costs are assumed. Raises ``TransportUnavailable`` for a connection that is
        slower than ``Options.min_gbps``.
        """
        if self._regions and self._options.forced_path is None:
            self._calibrates = True
            for rank, connection in list(engine.connections.items()):
                if engine.group_map.owes(rank) and not connection.direct:
                    self.calibrate(thread, connection)
        if self._options.min_gbps is None:
            return
        for rank, connection in engine.connections.items():
            if connection.channel is None:
                continue
            rate = self.measure(thread, connection)
            if rate < self._options.min_gbps:
                lane = thread.call(lambda connection=connection: connection.lane)  # type: ignore[misc]  # a default argument
                raise TransportUnavailable(
                    f"the link to rank {rank} ({lane}) carries {rate:.3g} GB/s, Options.min_gbps asks for "
                    f"{self._options.min_gbps:g}; see explain({rank}) for why it is no better, or lower the limit"
                )

    def _plan_calibration(self, connection: PeerConnection) -> None:
        if connection.calibration is None:
            target = self._scratch(connection.rank)
            connection.calibration = calibration(connection, self._regions[-1], target, self._transport.progress)

    def _scratch(self, rank: int) -> int:
        """The region of a peer that may be written to at any time."""
        return len(self._metadata[rank].regions) - 1


def _tag(key: bytes, source: bytes, target: bytes) -> int:
    digest = hashlib.blake2b(key=key, digest_size=8, person=b"torchkv records")
    for part in (source, target):
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little", signed=True)
