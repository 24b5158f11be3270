"""A slab: the part of a plan in which every page pair has the same geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Rows", "Slab", "stripe_ranks"]


class Rows(NamedTuple):
    """The runs of one page pair: for a in n0, b in n1, ``run`` bytes at a * s0 + b * s1 -> a * d0 + b * d1."""

    n0: int
    s0: int
    d0: int
    n1: int
    s1: int
    d1: int
    run: int

    @property
    def per_pair(self) -> int:
        """Runs of one page pair."""
        return self.n0 * self.n1


@dataclass(frozen=True, slots=True)
class Slab:
    """Heads of one component, in some layers, that the same ranks among the writers hold.

    component: its name. layers, heads: global ids. holders, index: this writer is number ``index`` of ``holders``
    and writes unit u of ``unit`` tokens iff ``u % holders == index``. tokens: per page pair, the smaller page size.
    src_base, dst_base: byte offset, inside a page, of the first head of token 0. src_token_stride,
    dst_token_stride: bytes from one token to the next. rows: the runs of a pair. is_page: a pair is exactly one
    whole page on both sides.
    """

    component: str
    layers: tuple[int, ...]
    heads: range
    holders: int
    index: int
    unit: int
    tokens: int
    src_base: int
    dst_base: int
    src_token_stride: int
    dst_token_stride: int
    rows: Rows
    is_page: bool

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one page pair in one layer."""
        return self.rows.per_pair * self.rows.run

    def owed(self, limit_tokens: int) -> list[tuple[int, int]]:
        """Token intervals [lo, hi) of [0, limit_tokens) in this writer's stripe, ascending."""
        if self.holders == 1:
            return [(0, limit_tokens)] if limit_tokens else []
        step = self.holders * self.unit
        starts = range(self.index * self.unit, limit_tokens, step)
        return [(lo, min(lo + self.unit, limit_tokens)) for lo in starts]


def stripe_ranks(first: int, end: int, *, per_unit: int, holders: int, index: int) -> range:
    """The pairs [first, end) that are in a stripe, as ranks within it: numbered without gaps; empty if end < first.

    The stripe has units of ``per_unit`` pairs, those with ``unit % holders == index``.
    """

    def before(pair: int) -> int:
        full, rest = divmod(pair, per_unit * holders)
        return full * per_unit + min(max(rest - index * per_unit, 0), per_unit)

    return range(before(first), before(max(first, end)))
