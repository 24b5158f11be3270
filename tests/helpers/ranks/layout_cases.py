"""The layout cases that every lane must carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.helpers.ranks.lane_transfer import Case
from torchkv import Component, KVLayout

__all__ = ["CASES", "case", "gqa", "mla", "tp"]

BF16 = torch.bfloat16


def gqa(**changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": BF16, **changes}
    return KVLayout.gqa(**settings)


def mla(**changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "latent_dim": 24, "rope_dim": 8, "page_size": 16, "dtype": BF16, **changes}
    return KVLayout.mla(**settings)


def mixed(**changes: Any) -> KVLayout:
    """Components of unlike kinds: a sharded one, an unsharded index in some layers, a draft layer."""
    return KVLayout(
        [
            Component("k", 4, 8, torch.float16),
            Component("v", 4, 12, torch.float8_e4m3fn, layers=(0, 1, 2)),
            Component("index", 1, 20, torch.uint8, sharded=False, layers=(1, 3)),
        ],
        **{"num_layers": 3, "page_size": 16, "layers": (0, 1, 2, 3), **changes},
    )


def tp(make: Callable[..., KVLayout], ranks: tuple[int, ...], **changes: Any) -> dict[int, KVLayout]:
    """One layout a rank, sharded over ``ranks``."""
    return {rank: make(tp_rank=at, tp_size=len(ranks), **changes) for at, rank in enumerate(ranks)}


def case(name: str, writers: Mapping[int, KVLayout], readers: Mapping[int, KVLayout], **settings: Any) -> Case:
    return Case(
        **{
            "name": name,
            "layouts": {**writers, **readers},
            "writers": tuple(writers),
            "readers": tuple(readers),
            "tokens": 96,
            **settings,
        }
    )


LOCAL = {"windows": {0: 5, 1: 33, 2: 33}}  # every layer of `gqa` and `mla`
PP = {"num_layers": 15, "num_kv_heads": 2, "head_dim": 4}
CASES = [
    case("1to1-layer", tp(gqa, (0,)), tp(gqa, (2,)), verb="send_layer", chunks=2),
    case(
        "1to1-contiguous-fp32", tp(gqa, (0,), dtype=torch.float32), tp(gqa, (2,), dtype=torch.float32), contiguous=True
    ),
    case("2to2-layer-prefix", tp(gqa, (0, 1)), tp(gqa, (2, 3)), verb="send_layer", prefix=48),
    case("2to1-slice", tp(gqa, (0, 1)), tp(gqa, (2,)), verb="send_slice", chunks=3),
    case("1to2-fp8", tp(gqa, (0,), dtype=torch.float8_e5m2), tp(gqa, (2, 3), dtype=torch.float8_e5m2)),
    case("replicated-writers", tp(gqa, (0, 1), num_kv_heads=1), tp(gqa, (2,), num_kv_heads=1), chunks=2),
    case("replicated-readers", tp(gqa, (0,), num_kv_heads=1), tp(gqa, (2, 3), num_kv_heads=1)),
    case("mla-striped", tp(mla, (0, 1)), tp(mla, (2,)), verb="send_layer"),
    case("mla-striped-16to64", tp(mla, (0, 1)), tp(mla, (2,), page_size=64), tokens=272, verb="send_slice"),
    case("unlike-kv-HNDtoNHD", tp(gqa, (0,), v_head_dim=5, order="HND"), tp(gqa, (2,), v_head_dim=5)),
    case("2to1-NHDtoHND", tp(gqa, (0, 1)), tp(gqa, (2,), order="HND"), verb="send_slice"),
    case("16to64-partial", tp(gqa, (0,)), tp(gqa, (2,), page_size=64), tokens=80, chunks=2),
    case("64to16-clipped", tp(gqa, (0,), page_size=64), tp(gqa, (2,)), tokens=80, prefix=64),
    case("1to16", tp(gqa, (0,), page_size=1, head_dim=4), tp(gqa, (2,), head_dim=4), tokens=37, prefix=16),
    case("16to1-2to1", tp(gqa, (0, 1)), tp(gqa, (2,), page_size=1), tokens=40),
    case("pp-15to7+8", tp(gqa, (0,), **PP), {2: gqa(**PP, layers=range(7)), 3: gqa(**PP, layers=range(7, 15))}),
    case("pp-7+8to15", {0: gqa(**PP, layers=range(7)), 1: gqa(**PP, layers=range(7, 15))}, tp(gqa, (2,), **PP)),
    case("mixed-components-2to1", tp(mixed, (0, 1)), tp(mixed, (2,), order="HND"), verb="send_slice", chunks=2),
    case("window-chunks", tp(gqa, (0,), windows={1: 20}), tp(gqa, (2,), windows={1: 20}), chunks=4),
    case("window-layer-prefix", tp(gqa, (0,), **LOCAL), tp(gqa, (2,), **LOCAL), verb="send_layer", prefix=48, chunks=3),
    case("window-2to1-slice", tp(gqa, (0, 1), **LOCAL), tp(gqa, (2,), **LOCAL), verb="send_slice", chunks=2),
    case("window-16to64", tp(gqa, (0,), **LOCAL), tp(gqa, (2,), page_size=64, **LOCAL), tokens=272, chunks=3),
    case("window-64to16-2to1", tp(gqa, (0, 1), page_size=64, **LOCAL), tp(gqa, (2,), **LOCAL), tokens=208, prefix=64),
    case("window-mla-striped", tp(mla, (0, 1), **LOCAL), tp(mla, (2,), **LOCAL), tokens=208, verb="send_slice"),
    case("uint8-one-token", tp(gqa, (0,), dtype=torch.uint8), tp(gqa, (3,), dtype=torch.uint8), tokens=1),
]
