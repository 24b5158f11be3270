"""What a rank publishes when it registers: who it is, what it holds, how to reach it. Hostile until checked."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torchkv.cache import KVCache, Placement
from torchkv.errors import ProtocolError, make_error
from torchkv.layout import KVLayout
from torchkv.processes import ProcessId
from torchkv.roster import Member
from torchkv.staging import signal_offset
from torchkv.transport import Region

__all__ = ["MAX_CARD", "Card", "PlacementCard", "RegionCard", "placement_cards", "region_card"]

MAX_CARD = 64 << 20
MAX_NBYTES = 1 << 46

Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class RegionCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    descriptor: Annotated[bytes, msgspec.Meta(max_length=4096)]
    nbytes: Offset


class PlacementCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    component: Name
    layer: Count
    region: Count
    offset: Offset
    page_stride: Offset


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's answer in ``register``. A rank that could not take part sends ``error_kind`` and ``error_text``."""

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
    staging: Offset = 0  # bytes of its staging ring, which is the last region but one
    signals: Count = 0  # right behind that ring
    channels: Count = 0  # of a stream through that ring
    checksum: bool = False  # whether it sends checksums
    device: Name = ""  # type of the memory that the pages lie in
    secret: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # of the lowest rank: keys the control channel
    regions: Annotated[list[RegionCard], msgspec.Meta(max_length=1 << 16)] = []
    placements: Annotated[list[PlacementCard], msgspec.Meta(max_length=1 << 20)] = []
    error_kind: Name = ""
    error_text: Annotated[str, msgspec.Meta(max_length=4096)] = ""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Card:
        """Raises ``ProtocolError`` for anything that is no card."""
        if len(data) > MAX_CARD:
            raise ProtocolError(f"registration card of {len(data)} bytes, the limit is {MAX_CARD}")
        try:
            return msgspec.msgpack.decode(data, type=Card)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"registration card does not decode: {error}; run one version of torchkv") from error

    def raise_error(self) -> None:
        """Raises what this rank reported, if it reported a failure."""
        if self.error_kind:
            raise make_error(self.error_kind, f"rank {self.rank} could not register: {self.error_text}")

    def member(self) -> Member:
        """Raises ``ProtocolError`` unless every page and slot lies inside its region."""
        staging = signal_offset(self.staging, self.signals) if self.signals else self.staging
        if staging and (len(self.regions) < 2 or staging > self.regions[-2].nbytes):
            raise ProtocolError(
                f"rank {self.rank}: its card's staging ring of {self.staging} bytes and {self.signals} signals is "
                "no region of it"
            )
        layout = KVLayout.decode(self.layout) if self.layout else None
        if layout is not None:
            self._check_placements(layout)
        return Member(
            rank=self.rank,
            incarnation=self.incarnation,
            instance=self.instance,
            layout=layout,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            staging=self.staging,
            signals=self.signals,
            channels=self.channels,
            checksum=self.checksum,
        )

    def placement_map(self) -> dict[tuple[str, int], Placement]:
        states = {state.name for state in KVLayout.decode(self.layout).states}
        return {
            (p.component, p.layer): Placement(
                p.region, p.offset, p.page_stride, self.num_slots if p.component in states else self.num_pages
            )
            for p in self.placements
        }

    def _check_placements(self, layout: KVLayout) -> None:
        pages = {c.name: (self.num_pages, "pages", layout.page_nbytes(c.name)) for c in layout.components}
        slots = {s.name: (self.num_slots, "slots", layout.state_nbytes(s.name)) for s in layout.states}
        expected = {(c.name, layer) for c in layout.components for layer in layout.component_layers(c.name)}
        expected |= {(s.name, layer) for s in layout.states for layer in layout.state_layers(s.name)}
        if {(p.component, p.layer) for p in self.placements} != expected:
            raise ProtocolError(f"rank {self.rank}: its card's placements do not fit its layout")
        for p in self.placements:
            count, what, nbytes = (pages | slots)[p.component]
            end = p.offset + (count - 1) * p.page_stride + nbytes
            if not count or p.region >= len(self.regions) or end > self.regions[p.region].nbytes:
                raise ProtocolError(
                    f"rank {self.rank}: {count} {what} of {p.component!r}, layer {p.layer}, end at byte {end}, "
                    f"outside its region {p.region}"
                )


def placement_cards(cache: KVCache) -> list[PlacementCard]:
    """A cache's placements; regions are its storages, registered in order."""
    return [
        PlacementCard(component, layer, place.storage, place.offset, place.page_stride)
        for (component, layer), place in cache.placements.items()
    ]


def region_card(region: Region) -> RegionCard:
    return RegionCard(region.descriptor(), region.nbytes)
