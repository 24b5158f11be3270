"""What a copy kernel has to know of a slab: strides, page sizes and striping, as plain integers, without addresses.

The pairs of a stripe are numbered without gaps: the pair of rank r is number
``index * per_unit + r + (r // per_unit) * per_unit * (holders - 1)`` of all pairs behind the prefix. So a kernel finds
the pages of any pair by itself, and nobody has to list the pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchkv.errors import TransportUnavailable
from torchkv.slab import Rows, Slab, Window, owed_pairs

__all__ = ["Geometry", "Side", "geometry"]

WIDEST = 16  # bytes that one thread moves at once
LIMIT = 1 << 31  # kernels compute inside a page, and count pages, in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where pages lie on one side of a copy.

    page_stride: bytes from one page to the next. base: bytes inside a page before the first head of token 0.
    token_stride: bytes from one token to the next. per_page: page pairs in one page of this side. num_pages: page ids
    are less than this.
    """

    page_stride: int
    base: int
    token_stride: int
    per_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What copies of one slab have in common, whatever their pages and layers; hashable.

    tokens: of a page pair. holders, index, per_unit: the writer's stripe has units of ``per_unit`` pairs, those with
    ``unit % holders == index``. rows: the runs of a pair. alignment: the largest power of two up to 16 that divides
    the jobs' base addresses. window: as in `Slab`.
    """

    tokens: int
    holders: int
    index: int
    per_unit: int
    rows: Rows
    src: Side
    dst: Side
    alignment: int
    window: Window | None = None

    @property
    def unit(self) -> int:
        """Bytes of the widest word (16, 8, 4, 2 or 1) that never straddles two rows and is always aligned."""
        rows = self.rows
        inside = [stride for count, *strides in (rows[0:3], rows[3:6]) if count > 1 for stride in strides]
        sides = [stride for side in (self.src, self.dst) for stride in _strides(side, self.tokens)]
        return _power_of_two([self.alignment, rows.run, *inside, *sides])

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one page pair in one job."""
        return self.rows.per_pair * self.rows.run

    @property
    def seamless(self) -> bool:
        """Whether pairs are whole in one run, and nothing lies between those of consecutive pages on either side."""
        sides = (self.src, self.dst)
        return self.rows.per_pair == 1 and all(side.page_stride == side.per_page * self.rows.run for side in sides)

    def pairs(self, *, num_src_pages: int, start: int, limit_tokens: int) -> range:
        """Ranks, within the stripe, of the pairs of sender pages [start, start + num_src_pages).

        start: in sender pages after the prefix. limit_tokens: tokens of the grant; pairs beyond it are left out,
        and those before the window.
        """
        return owed_pairs(
            start=start,
            num_src_pages=num_src_pages,
            per_page=self.src.per_page,
            tokens=self.tokens,
            limit_tokens=limit_tokens,
            window=self.window,
            per_unit=self.per_unit,
            holders=self.holders,
            index=self.index,
        )


def geometry(
    slab: Slab,
    *,
    src_page_stride: int,
    dst_page_stride: int,
    src_page_size: int,
    dst_page_size: int,
    num_src_pages: int,
    num_dst_pages: int,
    addresses: Iterable[int],
) -> Geometry:
    """The geometry of ``slab`` between two pools of pages.

    strides: bytes from one page to the next. sizes: tokens. num_pages: of the pools. addresses: base addresses of the
    jobs that will use it (both sides); only their alignment counts. Raises ``TransportUnavailable`` for pools that
    kernels cannot address.
    """
    src = Side(
        page_stride=src_page_stride,
        base=slab.src_base,
        token_stride=slab.src_token_stride,
        per_page=src_page_size // slab.tokens,
        num_pages=num_src_pages,
    )
    dst = Side(
        page_stride=dst_page_stride,
        base=slab.dst_base,
        token_stride=slab.dst_token_stride,
        per_page=dst_page_size // slab.tokens,
        num_pages=num_dst_pages,
    )
    for who, side in (("sender", src), ("receiver", dst)):
        if max(side.page_stride, side.num_pages) >= LIMIT:
            raise TransportUnavailable(
                f"component {slab.component!r}: the {who}'s {side.num_pages} pages at {side.page_stride} bytes from "
                f"each other are beyond what a copy kernel addresses ({LIMIT} of either); use another path"
            )
    return Geometry(
        tokens=slab.tokens,
        holders=slab.holders,
        index=slab.index,
        per_unit=slab.unit // slab.tokens,
        rows=slab.rows,
        src=src,
        dst=dst,
        alignment=_power_of_two(addresses),
        window=slab.window,
    )


def _strides(side: Side, tokens: int) -> tuple[int, ...]:
    """What the offsets of pairs are made of."""
    return side.page_stride, side.base, tokens * side.token_stride if side.per_page > 1 else 0


def _power_of_two(numbers: Iterable[int]) -> int:
    """The largest power of two, up to ``WIDEST``, that divides all ``numbers``."""
    bits = WIDEST
    for number in numbers:
        bits |= number
    return bits & -bits
