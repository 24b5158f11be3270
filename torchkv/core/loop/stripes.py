"""Which page pairs of an op this rank owes, of those that several ranks hold. Compiled."""

from __future__ import annotations

from torchkv.core.loop.records import Op, Send
from torchkv.host.atomics import load
from torchkv.host.jit import compiled

__all__ = ["owed_pairs"]


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
def owed_pairs(send: Send, op: Op, stripe: int) -> tuple[int, int]:
    """`Stripe.ordinals` of an op: the first, and the one behind the last.

    stripe: address of tokens of a page pair, pairs of a unit, holders, holder, and its window (tokens, unit).
    """
    tokens, per_unit, holders, holder = load(stripe), load(stripe + 8), load(stripe + 16), load(stripe + 24)
    owed = first_owed(send["granted"], load(stripe + 32), load(stripe + 40), send["src_page"], send["dst_page"])
    per_page = send["src_page"] // tokens
    low = max(op["start"] * per_page, owed // tokens)
    high = max(low, min((op["start"] + op["count"]) * per_page, send["granted"] // tokens))
    return before(low, per_unit, holders, holder), before(high, per_unit, holders, holder)
