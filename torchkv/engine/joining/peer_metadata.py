"""What a rank publishes in ``register``: its identity, layout and pages, and how to reach it.

Bytes of peers are not trusted: every field has bounds, and `PeerMetadata.info` checks that pages lie in their regions.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec

from torchkv.cache import KVCache, Placement
from torchkv.errors import ProtocolError, error_kind, make_error
from torchkv.host.processes import ProcessId, this_process
from torchkv.layout import codec
from torchkv.layout.conversion import ScaleMetadata, Scales, decode_scales
from torchkv.layout.group_map import RankInfo
from torchkv.layout.layout import MAX_COMPONENTS, KVLayout
from torchkv.transport.interface import Region

__all__ = [
    "MAX_METADATA",
    "PeerMetadata",
    "PlacementMetadata",
    "RegionMetadata",
    "failure_metadata",
    "new_incarnation",
    "placement_metadata",
    "region_metadata",
]

MAX_METADATA = 64 << 20
MAX_NBYTES = 1 << 46

Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class RegionMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A memory region that peers may write to. descriptor: opaque bytes for the transport."""

    descriptor: Annotated[bytes, msgspec.Meta(max_length=4096)]
    nbytes: Offset


class PlacementMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where the pages (or state slots) of one component and layer lie: a byte offset in a region, and a byte stride."""

    component: Name
    layer: Count
    region: Count
    offset: Offset
    page_stride: Offset


class PeerMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank publishes in ``register``. A rank that failed before sends ``error_kind`` and ``error_text``.

    regions: first those of the cache's storages, then the staging ring (if ``staging`` is not 0), then the scratch
    memory in which peers measure rates.
    """

    rank: Count
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    instance: Name
    process: ProcessId
    endpoint: Name = ""
    transport: Name = ""
    address: Annotated[bytes, msgspec.Meta(max_length=16 << 10)] = b""
    layout: Annotated[bytes, msgspec.Meta(max_length=64 << 10)] = b""
    num_pages: Count = 0
    num_slots: Count = 0
    staging: Offset = 0  # bytes of the staging ring, which is the last region but one
    checksum: bool = False  # whether the rank sends checksums
    device: Name = ""  # torch device type of the memory with the pages
    secret: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # that of the lowest rank authenticates control frames
    regions: Annotated[list[RegionMetadata], msgspec.Meta(max_length=1 << 16)] = []
    placements: Annotated[list[PlacementMetadata], msgspec.Meta(max_length=1 << 20)] = []
    scales: Annotated[list[ScaleMetadata], msgspec.Meta(max_length=MAX_COMPONENTS)] = []  # 1.0 where there are none
    mailboxes: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""  # of the resident loop; empty if there is none
    error_kind: Name = ""
    error_text: Annotated[str, msgspec.Meta(max_length=4096)] = ""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> PeerMetadata:
        """Raises ``ProtocolError`` for bytes that are no registration metadata."""
        if len(data) > MAX_METADATA:
            raise ProtocolError(f"registration metadata of {len(data)} bytes, the limit is {MAX_METADATA}")
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(
                f"registration metadata does not decode: {error}; run one version of torchkv on all ranks"
            ) from error

    def raise_error(self) -> None:
        """Raises the error that this rank reported, if any."""
        if self.error_kind:
            raise make_error(self.error_kind, f"rank {self.rank} could not register: {self.error_text}")

    def info(self) -> RankInfo:
        """The rank as the group sees it.

        Raises ``ProtocolError`` if a page, slot or stage lies outside its region, and for bad scales.
        """
        if self.staging and (len(self.regions) < 2 or self.staging > self.regions[-2].nbytes):
            raise ProtocolError(
                f"rank {self.rank}: its staging ring of {self.staging} bytes does not fit into the region that it "
                "published"
            )
        layout = codec.decode(self.layout) if self.layout else None
        if layout is not None:
            self._check_placements(layout)
            self.page_scales(layout)
        return RankInfo(
            rank=self.rank,
            incarnation=self.incarnation,
            instance=self.instance,
            layout=layout,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            staging=self.staging,
            checksum=self.checksum,
        )

    def placement_map(self) -> Mapping[tuple[str, int], Placement]:
        """(component or state, global layer id) -> placement. One object for all ranks whose caches look alike."""
        return _placement_map(self.layout, self.num_pages, self.num_slots, tuple(self.placements))

    def page_scales(self, layout: KVLayout) -> Scales:
        """The scales of the rank's pages. layout: its own. Raises ``ProtocolError``."""
        try:
            return _scales(layout, tuple(self.scales))
        except ProtocolError as error:
            raise ProtocolError(f"rank {self.rank}: {error}") from None

    def _check_placements(self, layout: KVLayout) -> None:
        pages = {c.name: (self.num_pages, "pages", layout.page_nbytes(c.name)) for c in layout.components}
        slots = {s.name: (self.num_slots, "slots", layout.state_nbytes(s.name)) for s in layout.states}
        expected = {(c.name, layer) for c in layout.components for layer in layout.component_layers(c.name)}
        expected |= {(s.name, layer) for s in layout.states for layer in layout.state_layers(s.name)}
        if {(p.component, p.layer) for p in self.placements} != expected:
            raise ProtocolError(f"rank {self.rank}: its published placements do not fit its layout")
        for p in self.placements:
            count, unit, nbytes = (pages | slots)[p.component]
            end = p.offset + (count - 1) * p.page_stride + nbytes
            if not count or p.region >= len(self.regions) or end > self.regions[p.region].nbytes:
                raise ProtocolError(
                    f"rank {self.rank}: {count} {unit} of {p.component!r}, layer {p.layer}, end at byte {end}, "
                    f"outside its region {p.region}"
                )


# One object for all ranks with the same scales: tables in GPU memory are made for each.
_scales = functools.lru_cache(maxsize=32)(decode_scales)


@functools.lru_cache(maxsize=32)
def _placement_map(
    layout: bytes, num_pages: int, num_slots: int, placements: tuple[PlacementMetadata, ...]
) -> Mapping[tuple[str, int], Placement]:
    states = {state.name for state in codec.decode(layout).states}
    return MappingProxyType(
        {
            (p.component, p.layer): Placement(
                p.region, p.offset, p.page_stride, num_slots if p.component in states else num_pages
            )
            for p in placements
        }
    )


# Made on import, not by the first call: msgspec's own preparation for a type is not safe among threads.
_decoder = msgspec.msgpack.Decoder(PeerMetadata)


def placement_metadata(cache: KVCache) -> list[PlacementMetadata]:
    """The placements of a cache. Region i is storage i: storages are registered first, in order."""
    return [
        PlacementMetadata(component, layer, place.storage, place.offset, place.page_stride)
        for (component, layer), place in cache.placements.items()
    ]


def region_metadata(region: Region) -> RegionMetadata:
    return RegionMetadata(region.descriptor(), region.nbytes)


def failure_metadata(rank: int, incarnation: int, error: Exception) -> PeerMetadata:
    """What a rank publishes if it cannot take part, because the other ranks wait for its metadata."""
    return PeerMetadata(
        rank=rank,
        incarnation=incarnation,
        instance="",
        process=this_process(),
        error_kind=error_kind(error),
        error_text=str(error).encode(errors="backslashreplace").decode()[:4096],
    )


def new_incarnation() -> int:
    """A random number that tells this registration of a rank from earlier ones."""
    return secrets.randbits(62)
