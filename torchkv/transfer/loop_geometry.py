"""A plan between two ranks as compiled code reads it: addresses, strides and rows, one flat int64 array.

    positions n | first of each position, and the end: n + 1 words | segments, `SEGMENT_FIELDS` words each | scales

A *position* is the index of a layer in `PairPlan.layers`; behind these come the layers of the plan's state, whose slots
are treated as pages of one token. Both ends of a pair count alike. Segment words: addresses of
the layer's tensor here and there, page strides, bases, token strides, the seven of `StridedRuns`, and of the stripe:
tokens of a page pair, pairs of a unit, holders, holder, and its window (tokens, unit; -1 without one). Then the keys of
both tensors, where they are put through the network. Last how elements are converted: which conversion it is (of
`torchkv.host.convert_loops.KINDS`; -1 where bytes are copied), bytes of an element here and there, the two numbers of
`Conversion` that say whose a packed element is, and where the scales of the segment's heads lie, float32, in bytes from
the segment.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchkv.arrays import Float32Array, Int64Array
from torchkv.core.loop.limits import SEGMENT_FIELDS
from torchkv.host.convert_loops import KINDS
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.plan_segment import PlanSegment

__all__ = ["COPIED", "Place", "geometry", "has_keys"]

COPIED = (-1, 1, 1, 1, 1, 0)  # the last words of a segment that is not converted
_KEYS = 21  # of the words of a segment, the first that is a key

# (component, layer) -> address of the layer's tensor, bytes from one page to the next, and the key for puts, or 0.
Place = Callable[[str, int], tuple[int, int, int]]


def geometry(plan: PairPlan, ours: Place, theirs: Place, scales: Scales = NO_SCALES) -> Int64Array:
    """The array for ``plan``. ours, theirs: where the tensors lie, as the loop or the peer sees it. scales: of the
    receiver's pages."""
    first: list[int] = []
    words: list[int] = []
    scaled: list[tuple[int, Float32Array]] = []  # the first word of a segment that converts, and its scales
    of_state = () if plan.state is None else plan.state.segments_of.items()
    held = [*plan.segments_of.items(), *of_state]
    for layer, segments in held:
        first.append(len(words) // SEGMENT_FIELDS)
        for segment in segments:
            src, src_stride, src_key = ours(segment.component, layer)
            dst, dst_stride, dst_key = theirs(segment.component, layer)
            stripe = segment.stripe
            window = (-1, 1) if stripe.window is None else (stripe.window.tokens, stripe.window.unit)
            words += [src, dst, src_stride, dst_stride, segment.src_base, segment.dst_base]
            words += [segment.src_token_stride, segment.dst_token_stride, *segment.rows]
            words += [stripe.tokens, stripe.per_unit, stripe.holders, stripe.holder, *window]
            words += [src_key, dst_key, *_conversion(segment)]
            if segment.conversion is not None:
                scaled.append((len(words) - SEGMENT_FIELDS, scales.of(segment.component, layer, segment.heads)))
    first.append(len(words) // SEGMENT_FIELDS)
    assert not words or len(words) == first[-1] * SEGMENT_FIELDS
    for segment_at, of_heads in scaled:
        words[segment_at + SEGMENT_FIELDS - 1] = 8 * (len(words) - segment_at)
        words += np.resize(of_heads, len(of_heads) + len(of_heads) % 2).view(np.int64).tolist()
    return np.array([len(held), *first, *words], dtype=np.int64)


def has_keys(words: Int64Array) -> bool:
    """Whether the keys of all tensors of a `geometry` are known."""
    first = 2 + int(words[0])
    segments = words[first : first + int(words[first - 1]) * SEGMENT_FIELDS].reshape(-1, SEGMENT_FIELDS)
    return bool(segments[:, _KEYS : _KEYS + 2].all())


def _conversion(segment: PlanSegment) -> tuple[int, ...]:
    """The words of a conversion, without the place of its scales."""
    conversion = segment.conversion
    if conversion is None:
        return COPIED
    src, dst = conversion.src, conversion.dst
    return KINDS[src, dst], src.itemsize, dst.itemsize, conversion.head_elements, conversion.heads, 0
