"""Transfers between pages of unlike dtypes, over layouts of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.helpers.ranks.lane_transfer import Case
from tests.helpers.ranks.layout_cases import case, gqa, mla, tp
from torchkv import Component, KVLayout

__all__ = ["CONVERT_CASES", "PARTLY", "converting", "random_scales", "staged"]

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def random_scales(layout: KVLayout, seed: int) -> dict[str, list[list[float]]]:
    """Scales, some per layer and head, of those components that take others; others keep 1.0."""
    rng = np.random.default_rng(seed)
    return {
        c.name: rng.uniform(
            0.01, 3, (len(layout.component_layers(c.name)), len(layout.component_heads(c.name)))
        ).tolist()
        for c in layout.components
        if c.accept and torch.float8_e4m3fn in (c.dtype, *c.accept)
    }


def converting(name: str, make: Callable[..., KVLayout], src: torch.dtype, dst: torch.dtype, **settings: Any) -> Case:
    """From ``writers`` ranks with ``src`` pages to ``readers`` ranks with ``dst`` pages."""
    writer, reader = settings.pop("writer", {}), settings.pop("reader", {})
    writers = tp(make, settings.pop("writers", (0,)), dtype=src, **writer)
    readers = tp(make, settings.pop("readers", (2,)), dtype=dst, accept=(src,), **reader)
    scales = {rank: random_scales(layout, rank) for rank, layout in readers.items()}
    return case(name, writers, readers, scales=scales, **settings)


def staged(one: Case) -> Case:
    """The same case where it is staged: the narrower dtype crosses the link."""
    shares = set()
    for writer in one.writers:
        for reader in one.readers:
            ours, theirs = (one.layouts[rank].components[0].dtype.itemsize for rank in (writer, reader))
            shares.add(min(ours, theirs) / theirs)
    (share,) = shares
    return replace(one, link_share=share)


def partly(**changes: Any) -> KVLayout:
    """Components of which only some are converted."""
    dtype, accept = changes.pop("dtype"), changes.pop("accept", ())
    components = [
        Component("k", 4, 8, dtype, accept=accept),
        Component("v", 4, 12, torch.uint8, layers=(0, 2)),
        Component("index", 1, 20, dtype, sharded=False, layers=(1, 2), accept=accept),
    ]
    return KVLayout(components, **{"num_layers": 3, "page_size": 16, **changes})


WINDOWS: Mapping[str, Any] = {"windows": {0: 5, 1: 33}}
CONVERT_CASES = [
    converting("quantize-layer", gqa, BF16, FP8, verb="send_layer", chunks=2),
    converting("quantize-fp16-2to1-slice", gqa, FP16, FP8, writers=(0, 1), verb="send_slice", chunks=3),
    converting("quantize-1to2-HNDtoNHD", gqa, BF16, FP8, readers=(2, 3), writer={"order": "HND"}),
    converting("quantize-2to1-NHDtoHND", gqa, BF16, FP8, writers=(0, 1), reader={"order": "HND"}, prefix=48),
    converting(
        "quantize-HND-16to64-partial",
        gqa,
        BF16,
        FP8,
        writer={"order": "HND"},
        reader={"order": "HND", "page_size": 64},
        tokens=80,
    ),
    converting("quantize-64to16-clipped", gqa, BF16, FP8, writer={"page_size": 64}, tokens=80, prefix=64),
    converting("quantize-mla-striped", mla, BF16, FP8, writers=(0, 1), verb="send_layer"),
    converting("quantize-mla-16to64", mla, FP16, FP8, writers=(0, 1), reader={"page_size": 64}, tokens=272),
    converting(
        "quantize-replicated", gqa, BF16, FP8, writers=(0, 1), writer={"num_kv_heads": 1}, reader={"num_kv_heads": 1}
    ),
    converting(
        "quantize-odd-dim",
        gqa,
        BF16,
        FP8,
        writer={"head_dim": 5, "page_size": 1},
        reader={"head_dim": 5},
        tokens=37,
        prefix=16,
    ),
    converting("quantize-windows", gqa, BF16, FP8, writers=(0, 1), writer=WINDOWS, reader=WINDOWS, chunks=3),
    converting("dequantize-2to1", gqa, FP8, BF16, writers=(0, 1), verb="send_slice", chunks=2),
    converting(
        "dequantize-fp16-HNDtoNHD", gqa, FP8, FP16, writer={"order": "HND"}, reader={"page_size": 64}, tokens=272
    ),
    converting("dequantize-mla", mla, FP8, BF16, writers=(0, 1)),
    converting("fp16-to-bf16", gqa, FP16, BF16, readers=(2, 3), verb="send_slice"),
    converting("bf16-to-fp16", gqa, BF16, FP16, writers=(0, 1), reader={"order": "HND"}, chunks=2),
]
PARTLY = converting("partly", partly, BF16, FP8, writers=(0, 1), verb="send_slice", chunks=2)
