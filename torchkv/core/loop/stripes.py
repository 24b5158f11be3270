"""A plan as compiled code reads it: which page pairs are owed, of those that several hold, and where. Compiled."""

from __future__ import annotations

from torchkv.arrays import Int64Array
from torchkv.core.loop.limits import SEGMENT_FIELDS
from torchkv.core.loop.state.requests import Op, Send
from torchkv.host.atomics import load
from torchkv.host.jit import compiled

__all__ = ["conversion", "converts", "granted_to", "owed_pairs", "place_pairs", "segments", "sizes"]

_CONVERSION, _SRC_SIZE, _DST_SIZE, _HEAD_ELEMENTS, _HEADS, _SCALES = (8 * field for field in range(23, 29))


@compiled
def granted_to(send: Send, op: Op) -> tuple[int, int, int, int]:
    """Where an op may write: address of the receiver's page ids, their tokens, and page sizes here and there."""
    if op["of_state"] != 0:
        return send["ids"] + 8 * (send["granted"] // send["dst_page"]), 1, 1, 1
    return send["ids"], send["granted"], send["src_page"], send["dst_page"]


@compiled
def first_owed(granted: int, window: int, unit: int, src_page: int, dst_page: int) -> int:
    """`torchkv.layout.plan_segment.first_owed`."""
    if window < 0:
        return 0
    shortest = (granted - max(src_page, dst_page)) // src_page * src_page + 1
    return max(0, (shortest - 1 - window) // unit * unit)


@compiled
def before(pair: int, per_unit: int, holders: int, holder: int) -> int:
    """How many pairs of this holder's units have a smaller number than ``pair``: its ordinal, or the next one's."""
    if holders == 1:
        return pair
    round_ = per_unit * holders
    return pair // round_ * per_unit + min(max(pair % round_ - holder * per_unit, 0), per_unit)


@compiled
def owed_pairs(granted: int, src_page: int, dst_page: int, start: int, count: int, stripe: int) -> tuple[int, int]:
    """`Stripe.ordinals` of the sender's pages [start, start + count): the first, and the one behind the last.

    granted: tokens. stripe: address of tokens of a page pair, pairs of a unit, holders, holder, and its window (tokens,
    unit).
    """
    tokens, per_unit, holders, holder = load(stripe), load(stripe + 8), load(stripe + 16), load(stripe + 24)
    owed = first_owed(granted, load(stripe + 32), load(stripe + 40), src_page, dst_page)
    per_page = src_page // tokens
    low = max(start * per_page, owed // tokens)
    high = max(low, min((start + count) * per_page, granted // tokens))
    return before(low, per_unit, holders, holder), before(high, per_unit, holders, holder)


@compiled
def place_pairs(
    offsets: Int64Array, seg: int, side: int, ids: int, start: int, page: int, ordinal: int, count: int
) -> None:
    """Offsets of ``count`` page pairs of the segment at ``seg``, from ``ordinal`` on, on one side of the pair.

    side: 0 for the sender, 1 for the receiver. ids: address of that side's page ids, of which the first is of its page
    ``start``. page: its page size in tokens.
    """
    stride, base, by_token = load(seg + 16 + 8 * side), load(seg + 32 + 8 * side), load(seg + 48 + 8 * side)
    tokens, per_unit, holders, holder = load(seg + 120), load(seg + 128), load(seg + 136), load(seg + 144)
    for i in range(count):
        pair = ordinal + i
        if holders > 1:
            pair = pair // per_unit * per_unit * holders + holder * per_unit + pair % per_unit
        token = pair * tokens
        offsets[i] = load(ids + 8 * (token // page - start)) * stride + base + token % page * by_token


@compiled
def segments(geometry: int, position: int) -> tuple[int, int]:
    """Addresses of the first segment of the layer at a position, and behind its last one."""
    at = geometry + 8 * (2 + load(geometry))
    size = 8 * SEGMENT_FIELDS
    return at + load(geometry + 8 * (1 + position)) * size, at + load(geometry + 8 * (2 + position)) * size


@compiled
def sizes(seg: int) -> tuple[int, int, int]:
    """Bytes of an element of a segment here, there, and in a stage: of the narrower one. All 1 if it does not convert.

    Those of its rows are bytes there.
    """
    src, dst = load(seg + _SRC_SIZE), load(seg + _DST_SIZE)
    return src, dst, min(src, dst)


@compiled
def converts(seg: int) -> bool:
    """Whether the elements of a segment are converted."""
    return bool(load(seg + _CONVERSION) >= 0)


@compiled
def conversion(seg: int) -> tuple[int, int, int, int]:
    """Of a segment: which of `torchkv.host.convert_loops.KINDS`, elements of a head, address of the scales, heads."""
    return load(seg + _CONVERSION), load(seg + _HEAD_ELEMENTS), seg + load(seg + _SCALES), load(seg + _HEADS)
