"""What a rank publishes when it registers: everything that a peer will address is checked before anybody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from torchkv.cache import KVCache
from torchkv.engine.joining.peer_metadata import PeerMetadata, PlacementMetadata, RegionMetadata, placement_metadata
from torchkv.errors import ProtocolError
from torchkv.host.processes import this_process
from torchkv.layout import codec
from torchkv.layout.component import Component, State
from torchkv.layout.conversion import ScaleMetadata
from torchkv.layout.layout import KVLayout

PAGES, SLOTS = 5, 3


def hybrid() -> KVLayout:
    return KVLayout(
        [Component("k", 2, 4, torch.int16)],
        num_layers=2,
        page_size=4,
        states=[State("ssm", (6, 4), torch.float32), State("conv", (5,), torch.uint8, layers=(1,))],
    )


def metadata(cache: KVCache, **changes: object) -> PeerMetadata:
    made = PeerMetadata(
        rank=4,
        incarnation=1,
        instance="x",
        process=this_process(),
        layout=codec.encode(cache.layout),
        num_pages=cache.num_pages,
        num_slots=cache.num_slots,
        regions=[RegionMetadata(b"", storage.nbytes) for storage in cache.storages],
        placements=placement_metadata(cache),
    )
    return PeerMetadata.decode(msgspec.structs.replace(made, **changes).encode())


@pytest.fixture
def cache() -> KVCache:
    return KVCache.empty(hybrid(), PAGES, device="cpu", num_slots=SLOTS)


def test_metadata_says_where_pages_and_slots_lie(cache: KVCache) -> None:
    made = metadata(cache)
    assert made.placement_map() == cache.placements
    assert {place.num_pages for (name, _), place in made.placement_map().items() if name == "k"} == {PAGES}
    assert {place.num_pages for (name, _), place in made.placement_map().items() if name != "k"} == {SLOTS}
    info = made.info()
    assert (info.num_pages, info.num_slots, info.layout) == (PAGES, SLOTS, cache.layout)


def test_metadata_of_state_alone() -> None:
    layout = KVLayout([], num_layers=1, page_size=4, states=[State("ssm", (6,), torch.float32)])
    made = metadata(KVCache.empty(layout, 1, device="cpu", num_slots=SLOTS))
    assert (made.info().num_pages, made.info().num_slots) == (1, SLOTS)


def test_metadata_says_how_pages_are_scaled() -> None:
    layout = KVLayout.gqa(
        num_layers=2, num_kv_heads=2, head_dim=4, page_size=4, dtype=torch.float8_e4m3fn, accept=(torch.bfloat16,)
    )
    cache = KVCache.empty(layout, PAGES, device="cpu", scales={"k": [[0.5, 1.0], [2.0, 0.1]]})
    made = metadata(cache, scales=cache.scales.metadata())
    made.info()
    assert made.page_scales(layout) is metadata(cache, rank=5, scales=cache.scales.metadata()).page_scales(layout)
    assert made.page_scales(layout).of("k", 1, range(2)).tolist() == pytest.approx([2.0, 0.1])
    assert made.page_scales(layout).of("v", 1, range(2)).tolist() == [1, 1]
    for values in (bytes(4), b"123", bytes(12), torch.tensor([float("nan")]).numpy().tobytes()):
        with pytest.raises(ProtocolError, match=r"rank 4.*'k'"):
            metadata(cache, scales=[ScaleMetadata("k", values)]).info()


def moved(name: str, **changes: int) -> Callable[[PeerMetadata], dict[str, Any]]:
    """Its placement of layer 1 changed by so much."""

    def change(made: PeerMetadata) -> dict[str, Any]:
        placements = [
            msgspec.structs.replace(p, **{field: getattr(p, field) + by for field, by in changes.items()})
            if (p.component, p.layer) == (name, 1)
            else p
            for p in made.placements
        ]
        return {"placements": placements}

    return change


def without(name: str, layer: int) -> Callable[[PeerMetadata], dict[str, Any]]:
    return lambda made: {"placements": [p for p in made.placements if (p.component, p.layer) != (name, layer)]}


def with_extra(name: str, layer: int) -> Callable[[PeerMetadata], dict[str, Any]]:
    return lambda made: {"placements": [*made.placements, PlacementMetadata(name, layer, 0, 0, 8)]}


BAD: dict[str, tuple[Callable[[PeerMetadata], dict[str, Any]], str]] = {
    "one slot more": (lambda made: {"num_slots": 1 << 20}, f"{1 << 20} slots of 'ssm', layer 0.*outside its region 0"),
    "one page more": (lambda made: {"num_pages": 1 << 20}, f"{1 << 20} pages of 'k', layer 0.*outside its region 0"),
    "no slots": (lambda made: {"num_slots": 0}, "0 slots of 'ssm'"),
    "no pages": (lambda made: {"num_pages": 0}, "0 pages of 'k'"),
    "slots further apart": (moved("ssm", page_stride=1 << 30), "3 slots of 'ssm', layer 1.*outside its region"),
    "state beyond": (moved("conv", offset=1 << 30), "slots of 'conv', layer 1.*outside its region"),
    "strange region": (moved("conv", region=1), "outside its region 1"),
    "state without a place": (without("ssm", 1), "placements do not fit its layout"),
    "pages without a place": (without("k", 0), "placements do not fit its layout"),
    "a state that the layer lacks": (with_extra("conv", 0), "placements do not fit its layout"),
    "an unknown state": (with_extra("other", 0), "placements do not fit its layout"),
    "an unheld layer": (with_extra("ssm", 2), "placements do not fit its layout"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_lie_inside_its_region_is_refused(name: str, cache: KVCache) -> None:
    change, words = BAD[name]
    good = metadata(cache)
    good.info()
    with pytest.raises(ProtocolError, match=words) as caught:
        metadata(cache, **change(good)).info()
    assert "rank 4" in str(caught.value)


@pytest.mark.parametrize("name", ["k", "ssm", "conv"])
def test_the_last_byte_of_the_last_page_or_slot_counts(name: str, cache: KVCache) -> None:
    """One byte less in the region, and one less before that of whatever ends there."""
    layout = cache.layout
    nbytes = layout.page_nbytes(name) if name == "k" else layout.state_nbytes(name)
    place = cache.placements[name, 1]
    end = place.offset + (place.num_pages - 1) * place.page_stride + nbytes
    room = cache.storages[0].nbytes - end
    metadata(cache, **moved(name, offset=room)(metadata(cache))).info()
    with pytest.raises(ProtocolError, match=f"end at byte {cache.storages[0].nbytes + 1}"):
        metadata(cache, **moved(name, offset=room + 1)(metadata(cache))).info()


@pytest.mark.parametrize("field", ["offset", "page_stride"])
def test_placements_are_bounded(field: str, cache: KVCache) -> None:
    for value in (-1, (1 << 46) + 1):
        placements = [msgspec.structs.replace(placement_metadata(cache)[0], **{field: value})]
        with pytest.raises(ProtocolError, match="registration metadata does not decode"):
            metadata(cache, placements=placements)
