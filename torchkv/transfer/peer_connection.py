"""The way to one peer: its channel, where its pages lie, which of them loads and stores reach, and what puts cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchkv.cache import Placement
from torchkv.cost import ASSUMED, Choice, Costs, cheapest, load_of
from torchkv.errors import TransportUnavailable
from torchkv.layout import KVLayout
from torchkv.pieces import Cutter
from torchkv.plan import PairPlan
from torchkv.slab import Slab
from torchkv.transport import Channel, RemoteView

if TYPE_CHECKING:
    from torchkv.jobs import JobTable

__all__ = ["Counter", "LocalPages", "Route", "StageTarget"]


@dataclass(slots=True)
class Counter:
    """What one lane has carried: ``transfers`` verbs' shares, ``spans`` descriptors or rows, ``nbytes``, seconds."""

    transfers: int = 0
    spans: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StageTarget:
    """A peer's staging ring: which of its regions, its bytes, behind which its signals lie, channels of a stream."""

    region: int
    nbytes: int
    channels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPages:
    """This rank's own pages: address of each storage, and its region index in the transport."""

    layout: KVLayout
    device: torch.device
    num_pages: int
    placements: Mapping[tuple[str, int], Placement]
    storage_ptrs: Sequence[int]
    regions: Sequence[int]

    def ptr(self, component: str, layer: int) -> int:
        place = self.placements[component, layer]
        return self.storage_ptrs[place.storage] + place.offset

    def page_stride(self, component: str, layer: int) -> int:
        return self.placements[component, layer].page_stride


@dataclass(eq=False, slots=True, kw_only=True)
class Route:
    """From this rank to ``rank``. ``channel`` is None towards itself, where everything is a local copy."""

    rank: int
    layout: KVLayout
    placements: Mapping[tuple[str, int], Placement]
    channel: Channel | None
    views: Sequence[RemoteView | None]  # by region of the peer
    staging: StageTarget | None = None  # None: the peer has none
    no_view: str = ""  # why not every region has a view
    costs: Costs | None = None  # as measured
    calibration: Iterator[None] | None = None  # what measures them, step by step, as long as it is not done
    counters: dict[str, Counter] = field(default_factory=dict)
    job_tables: list[JobTable] = field(default_factory=list)  # of the GPU's kernels, one a plan

    direct: bool = field(init=False)  # whether every page of the peer can be stored to

    def __post_init__(self) -> None:
        self.direct = all(self.views[place.storage] is not None for place in self.placements.values())

    def ptr(self, component: str, layer: int) -> int:
        """Address in this process of the peer's tensor. Only if ``direct``."""
        place = self.placements[component, layer]
        view = self.views[place.storage]
        assert view is not None
        return view.ptr + place.offset

    def path(self, *, forced: str | None, page_for_page: bool) -> str:
        """One of ``env.PATHS``, with puts for whatever is not mapped, which `choose` may know better.

        Raises ``TransportUnavailable`` if the forced one cannot work.
        """
        if self.channel is None:
            return "direct"  # whatever is forced: a local copy has no other path
        if forced == "direct" and not self.direct:
            raise TransportUnavailable(f"path 'direct' to rank {self.rank}: {self.no_view}; leave Options.path unset")
        if forced == "staged" and self.staging is None:
            raise TransportUnavailable(
                f"path 'staged' to rank {self.rank}: it has no staging ring; set Options.staging_recv there"
            )
        if forced is not None:
            return forced
        if self.direct:
            return "direct"
        return "runs" if page_for_page else "slices"

    def calibrated(self) -> bool:
        """Measures for a moment if need be. Whether all is measured that ever will be; else ask again."""
        if self.calibration is not None and next(self.calibration, self) is self:
            self.calibration = None
        return self.calibration is None

    @property
    def staging_view(self) -> RemoteView | None:
        """The peer's staging ring, where it is mapped here: then pieces are packed straight into it."""
        return None if self.staging is None else self.views[self.staging.region]

    def ring(self, own: int) -> int:
        """Bytes of the smaller ring, of those that are needed, with ``own`` bytes to send from; 0 if one is missing."""
        if self.staging is None:
            return 0
        return self.staging.nbytes if self.staging_view is not None else min(self.staging.nbytes, own)

    def choose(
        self,
        plan: PairPlan,
        local: LocalPages,
        layers: tuple[int, ...],
        *,
        start: int,
        num_pages: int,
        limit_tokens: int,
        runs: int | None,
        ring: int,
    ) -> Choice:
        """The cheapest path of a verb that cannot go ``direct``. Arguments as for `load_of` and `cheapest`."""
        load = load_of(
            plan,
            layers,
            start=start,
            num_pages=num_pages,
            limit_tokens=limit_tokens,
            runs=runs,
            seamless=lambda slab: self._seamless(plan, local, slab),
        )
        costs = self.costs or ASSUMED[local.device.type]
        mapped = self.staging_view is not None
        choice = cheapest(load, costs, page_for_page=plan.page_for_page, ring=ring, mapped=mapped)
        if choice.path != "staged":
            return choice
        cutter = Cutter(plan, layers, start, num_pages, limit_tokens=limit_tokens, checksum=False)
        if cutter.least <= ring:
            return choice
        return cheapest(load, costs, page_for_page=plan.page_for_page, ring=0)

    def _seamless(self, plan: PairPlan, local: LocalPages, slab: Slab) -> bool:
        """Whether pages that follow each other touch on both sides. Of a slab's layers the first speaks for all."""
        key = slab.component, slab.layers[0]
        src, dst = local.placements[key].page_stride, self.placements[key].page_stride
        pairs = plan.src_page_size // slab.tokens, plan.dst_page_size // slab.tokens
        return (src, dst) == (pairs[0] * slab.pair_nbytes, pairs[1] * slab.pair_nbytes)

    def job_table(self, plan: PairPlan) -> JobTable | None:
        """The one for ``plan``, if it was made."""
        return next((table for table in self.job_tables if table.plan is plan), None)

    @property
    def lane(self) -> str:
        """What carries bytes on this route, for people and tests."""
        if self.channel is None:
            return "local"
        return self.channel.link or "put"

    def count(self, lane: str, *, transfers: int = 0, spans: int = 0, nbytes: int = 0) -> None:
        counter = self.counters.setdefault(lane, Counter())
        counter.transfers += transfers
        counter.spans += spans
        counter.nbytes += nbytes

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
