"""Small layouts: of one rank, of the ranks of one instance, and any pair of instances that can transfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from torchkv.layout.layout import Component, KVLayout

__all__ = ["divides", "group", "instances", "mla"]


def mla(**given: object) -> KVLayout:
    fields = {"num_layers": 2, "latent_dim": 4, "rope_dim": 1, "page_size": 4, "dtype": torch.int16}
    return KVLayout.mla(**{**fields, **given})


def group(make: Callable[..., KVLayout], size: int, **given: object) -> dict[int, KVLayout]:
    """Group rank -> layout of a tensor-parallel instance; ranks start at 3 and have gaps on purpose."""
    return {3 + 2 * rank: make(tp_rank=rank, tp_size=size, **given) for rank in range(size)}


def divides(a: int, b: int) -> bool:
    return max(a, b) % min(a, b) == 0


@st.composite
def instances(draw: st.DrawFn) -> tuple[dict[int, KVLayout], KVLayout]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sizes = st.sampled_from([size for size in (1, 2, 3, 4, 6, 8) if divides(size, heads)])
    components = [
        Component("k", heads, draw(st.integers(1, 3)), draw(st.sampled_from([torch.uint8, torch.bfloat16]))),
        Component("v", heads, draw(st.integers(1, 3)), torch.float8_e4m3fn),
    ]
    if draw(st.booleans()):
        components.append(Component("latent", draw(st.integers(1, 2)), 3, torch.float32, sharded=False, layers=(0, 2)))
    page_sizes = draw(st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 8), (8, 2), (3, 3), (3, 6)]))
    num_layers = draw(st.integers(1, 3))
    stages = draw(st.sampled_from([1, 2])) if num_layers > 1 else 1
    cut = draw(st.integers(1, num_layers - 1)) if stages == 2 else num_layers
    order = st.sampled_from(["NHD", "HND"])
    windows = draw(st.just({}) | st.dictionaries(st.integers(0, 2), st.integers(1, 12)))

    def layout(page_size: int, layers: range, rank: int, size: int, order: str) -> KVLayout:
        return KVLayout(
            components,
            num_layers=num_layers,
            page_size=page_size,
            layers=layers,
            tp_rank=rank,
            tp_size=size,
            order=order,
            windows=windows,
        )

    size, writer_order = draw(sizes), draw(order)
    layers = [range(cut), range(cut, num_layers)][:stages]
    writers = {
        10 * stage + rank: layout(page_sizes[0], layers[stage], rank, size, writer_order)
        for stage in range(stages)
        for rank in range(size)
    }
    size = draw(sizes)
    reader = layout(page_sizes[1], range(num_layers), draw(st.integers(0, size - 1)), size, draw(order))
    return writers, reader
