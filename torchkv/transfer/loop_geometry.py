"""A plan between two ranks as compiled code reads it: addresses, strides and rows, one flat int64 array.

    positions n | first of each position, and the end: n + 1 words | segments, `SEGMENT_FIELDS` words each

A *position* is the index of a layer in `PairPlan.layers`; both ends of a pair count alike. Segment words: addresses of
the layer's tensor here and there, page strides, bases, token strides, the seven of `StridedRuns`, and of the stripe:
tokens of a page pair, pairs of a unit, holders, holder, and its window (tokens, unit; -1 without one). Last the keys of
both tensors, where they are put through the network.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.limits import SEGMENT_FIELDS
from torchkv.layout.pair_plan import PairPlan

__all__ = ["Place", "geometry"]

# (component, layer) -> address of the layer's tensor, bytes from one page to the next, and the key for puts, or 0.
Place = Callable[[str, int], tuple[int, int, int]]


def geometry(plan: PairPlan, ours: Place, theirs: Place) -> Int64Array:
    """The array for ``plan``. ours, theirs: where the tensors lie, as the loop or the peer sees it."""
    first: list[int] = []
    words: list[int] = []
    for layer in plan.layers:
        first.append(len(words) // SEGMENT_FIELDS)
        for segment in plan.segments_of[layer]:
            src, src_stride, src_key = ours(segment.component, layer)
            dst, dst_stride, dst_key = theirs(segment.component, layer)
            stripe = segment.stripe
            window = (-1, 1) if stripe.window is None else (stripe.window.tokens, stripe.window.unit)
            words += [src, dst, src_stride, dst_stride, segment.src_base, segment.dst_base]
            words += [segment.src_token_stride, segment.dst_token_stride, *segment.rows]
            words += [stripe.tokens, stripe.per_unit, stripe.holders, stripe.holder, *window]
            words += [src_key, dst_key]
    first.append(len(words) // SEGMENT_FIELDS)
    assert not words or len(words) == first[-1] * SEGMENT_FIELDS
    return np.array([len(plan.layers), *first, *words], dtype=np.int64)
