"""The connection to one peer: its channel, its pages' addresses, which of them are mapped here, and what puts cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchkv.cache import Placement
from torchkv.errors import TransportUnavailable
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.layer_groups import UNGROUPED, Pools
from torchkv.layout.layout import KVLayout
from torchkv.transport.interface import Channel, RemoteView

__all__ = ["Costs", "Counter", "LocalPages", "PeerConnection", "StageTarget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a channel costs, in seconds.

    descriptor: each put, beside its bytes. byte: each byte put in bulk. pack: each byte gathered from short runs, or
    scattered to them, in the memory at the channel's ends.
    """

    descriptor: float
    byte: float
    pack: float


@dataclass(slots=True)
class Counter:
    """What one lane has carried: ``transfers`` (verbs), ``spans`` and bytes.

    spans: descriptors, runs or pieces, depending on the lane.
    """

    transfers: int = 0
    spans: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StageTarget:
    """A peer's staging ring. region: its index among the peer's regions. nbytes: of the ring."""

    region: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPages:
    """This rank's own pages. storage_ptrs, regions: address of each storage, and its region index in the transport.

    pools: which of them share memory, see `torchkv.protocol.receiving.leases`. scales: of pages that are converted.
    """

    layout: KVLayout
    device: torch.device
    num_pages: int
    placements: Mapping[tuple[str, int], Placement]
    storage_ptrs: Sequence[int]
    regions: Sequence[int]
    pools: Pools = field(default_factory=lambda: UNGROUPED)
    scales: Scales = NO_SCALES

    def ptr(self, component: str, layer: int) -> int:
        placement = self.placements[component, layer]
        return self.storage_ptrs[placement.storage] + placement.offset

    def page_stride(self, component: str, layer: int) -> int:
        return self.placements[component, layer].page_stride


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class PeerConnection:
    """What this rank needs to write to ``rank``. ``channel`` is None if that is this rank itself: copies are local."""

    rank: int
    layout: KVLayout
    placements: Mapping[tuple[str, int], Placement]
    channel: Channel | None
    views: Sequence[RemoteView | None]  # by region of the peer; None for a region that is not mapped here
    staging: StageTarget | None = None  # None: the peer has no staging ring
    no_view: str = ""  # why a region is not mapped
    tags: tuple[int, int] | None = None  # of records from there, and to there; None if the peer has no resident loop
    costs: Costs | None = None  # measured
    calibration: Iterator[None] | None = None  # measures the costs, step by step; None when done
    counters: dict[str, Counter] = field(default_factory=dict)
    closed: bool = False
    scales: Scales = NO_SCALES  # of the peer's pages
    name: str = ""  # of the rank, in messages

    direct: bool = field(init=False)  # whether all pages of the peer are mapped here

    def __post_init__(self) -> None:
        self.name = self.name or f"rank {self.rank}"
        self.direct = all(self.views[placement.storage] is not None for placement in self.placements.values())

    def ptr(self, component: str, layer: int) -> int:
        """The address, in this process, of the peer's tensor of a component and layer. Only if ``direct``."""
        placement = self.placements[component, layer]
        view = self.views[placement.storage]
        assert view is not None
        return view.ptr + placement.offset

    def path(self, *, forced: str | None, page_for_page: bool, converts: bool = False) -> str:
        """One of ``torchkv.options.PATHS``. For pages that are not mapped a put path; `choose` may prefer staging then.

        forced: a path to take, or None. converts: whether pages are converted to another dtype, which the put paths
        cannot do: then pages that are not mapped are staged. Raises ``TransportUnavailable`` if the forced path cannot
        work, or no path can.
        """
        if self.channel is None:
            return "direct"  # also if another path is forced: a local copy has no other
        if forced == "direct" and not self.direct:
            raise TransportUnavailable(f"path 'direct' to {self.name}: {self.no_view}; leave Options.path unset")
        if converts and forced in ("runs", "slices"):
            raise TransportUnavailable(
                f"path {forced!r} to {self.name}: it puts bytes as they are, and pages to this peer are converted to "
                f"another dtype; leave Options.path unset, or force 'direct' or 'staged'"
            )
        if converts and forced is None and not self.direct:
            forced = "staged"
        if forced == "staged" and self.staging is None:
            why = "; pages that are converted to another dtype need it" if converts else ""
            raise TransportUnavailable(
                f"path 'staged' to {self.name}: it has no staging ring{why}; set Options.staging_recv there"
            )
        if forced is not None:
            return forced
        if self.direct:
            return "direct"
        return "runs" if page_for_page else "slices"

    def calibrated(self) -> bool:
        """Does one step of the measurement of costs. Returns whether it is over; if not, call again."""
        if self.calibration is not None and next(self.calibration, self) is self:
            self.calibration = None
        return self.calibration is None

    @property
    def staging_view(self) -> RemoteView | None:
        """The peer's staging ring if it is mapped here, so that pieces are gathered straight into it; else None."""
        return None if self.staging is None else self.views[self.staging.region]

    def ring(self, own: int) -> int:
        """Bytes of the smaller of the rings that staging to this peer needs; 0 if it is not possible.

        own: bytes of this rank's send ring, which is not needed if the peer's ring is mapped here.
        """
        if self.staging is None:
            return 0
        return self.staging.nbytes if self.staging_view is not None else min(self.staging.nbytes, own)

    @property
    def lane(self) -> str:
        """What carries the bytes that are put, as named in counters: ``local``, or the channel's link."""
        if self.channel is None:
            return "local"
        return self.channel.link or "put"

    def count(self, lane: str, *, transfers: int = 0, spans: int = 0, nbytes: int = 0) -> None:
        counter = self.counters.get(lane) or self.counters.setdefault(lane, Counter())
        counter.transfers += transfers
        counter.spans += spans
        counter.nbytes += nbytes

    def close(self) -> None:
        self.closed = True
        if self.channel is not None:
            self.channel.close()
