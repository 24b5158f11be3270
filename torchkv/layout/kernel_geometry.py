"""The parameters of a copy kernel for one segment: strides, page sizes and stripe, as plain integers.

A kernel gets a range of ordinals (see `torchkv.layout.plan_segment.Stripe`), computes the number of each pair and from
it the position of its page in the list of page ids. So the host never lists the pairs. Addresses are not a part of the
geometry: one geometry serves all layers and requests with the same strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torchkv.errors import TransportUnavailable
from torchkv.layout.component import Conversion
from torchkv.layout.plan_segment import PlanSegment, StridedRuns, Stripe

__all__ = ["BadPage", "Geometry", "PageAddressing", "geometry"]

WIDEST = 16  # bytes of the widest word that one thread moves at once
LIMIT = 1 << 31  # kernels count pages, and bytes inside a page, in 32 bits


class BadPage(NamedTuple):
    """A page id that is out of range, as reported by a kernel.

    side: ``source`` or ``destination``. position: in the list of that side's page ids. page: the id, clipped to int32.
    """

    side: str
    position: int
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddressing:
    """How pages are addressed on one side of a copy.

    page_stride: bytes from one page to the next. base: byte offset, inside a page, of the segment's first head of the
    first token. token_stride: bytes from one token to the next. per_page: page pairs of one page. num_pages: pages of
    the pool; all page ids must be less.
    """

    page_stride: int
    base: int
    token_stride: int
    per_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What all copies of one segment have in common, for any pages and layers. Hashable.

    stripe, rows, conversion: as in `PlanSegment`. alignment: the largest power of two up to `WIDEST` that divides the
    base addresses of all layers.
    """

    stripe: Stripe
    rows: StridedRuns
    src: PageAddressing
    dst: PageAddressing
    alignment: int
    conversion: Conversion | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one page pair."""
        return self.stripe.tokens

    @property
    def unit(self) -> int:
        """Bytes of the widest word (16, 8, 4, 2 or 1) that is always aligned and lies within one row."""
        rows = self.rows
        inside = [stride for count, *strides in (rows[0:3], rows[3:6]) if count > 1 for stride in strides]
        sides = [stride for side in (self.src, self.dst) for stride in _strides(side, self.tokens)]
        return _power_of_two([self.alignment, rows.run, *inside, *sides])

    @property
    def elements(self) -> int:
        """With a conversion: elements of one head that are always aligned on both sides, at most 16 bytes on either."""
        assert self.conversion is not None
        (n0, s0, d0, n1, s1, d1, run), (src, dst, _, of_head) = self.rows, self.conversion
        longer = max(src.itemsize, dst.itemsize)
        numbers = [self.alignment // longer, run // dst.itemsize, of_head]
        for side, size, strides in ((self.src, src.itemsize, (s0, s1)), (self.dst, dst.itemsize, (d0, d1))):
            inside = [stride for count, stride in zip((n0, n1), strides, strict=True) if count > 1]
            every = [*inside, *_strides(side, self.tokens)]
            if any(stride % size for stride in every) or self.alignment < longer:
                raise TransportUnavailable(
                    f"pages that lie at no multiple of {size} bytes, the size of an element, cannot be converted"
                )
            numbers += [stride // size for stride in every]
        return min(_power_of_two(numbers), WIDEST // longer)

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one page pair in one layer."""
        return self.rows.per_pair * self.rows.run

    def ordinals(self, *, num_src_pages: int, start: int, limit_tokens: int) -> range:
        """`Stripe.ordinals` of sender pages [start, start + num_src_pages)."""
        return self.stripe.ordinals(
            start=start, num_src_pages=num_src_pages, per_page=self.src.per_page, limit_tokens=limit_tokens
        )


def geometry(
    segment: PlanSegment,
    *,
    src_page_stride: int,
    dst_page_stride: int,
    src_page_size: int,
    dst_page_size: int,
    num_src_pages: int,
    num_dst_pages: int,
    addresses: Iterable[int],
) -> Geometry:
    """The geometry of ``segment`` between two pools of pages.

    src_page_stride, dst_page_stride: bytes from one page to the next. src_page_size, dst_page_size: in tokens.
    num_src_pages, num_dst_pages: of the pools. addresses: base addresses, of both sides, of all layers that will use
    this geometry; only their alignment matters. Raises ``TransportUnavailable`` for pools that kernels cannot address.
    """
    src = PageAddressing(
        page_stride=src_page_stride,
        base=segment.src_base,
        token_stride=segment.src_token_stride,
        per_page=src_page_size // segment.tokens,
        num_pages=num_src_pages,
    )
    dst = PageAddressing(
        page_stride=dst_page_stride,
        base=segment.dst_base,
        token_stride=segment.dst_token_stride,
        per_page=dst_page_size // segment.tokens,
        num_pages=num_dst_pages,
    )
    for owner, side in (("sender", src), ("receiver", dst)):
        if max(side.page_stride, side.num_pages) >= LIMIT:
            raise TransportUnavailable(
                f"component {segment.component!r}: the {owner} has {side.num_pages} pages, {side.page_stride} bytes "
                f"apart; copy kernels need both numbers to be below {LIMIT}; use another path"
            )
    return Geometry(
        stripe=segment.stripe,
        rows=segment.rows,
        src=src,
        dst=dst,
        alignment=_power_of_two(addresses),
        conversion=segment.conversion,
    )


def _strides(side: PageAddressing, tokens: int) -> tuple[int, ...]:
    """All summands of a pair's offset on this side. tokens: of a pair."""
    return side.page_stride, side.base, tokens * side.token_stride if side.per_page > 1 else 0


def _power_of_two(numbers: Iterable[int]) -> int:
    """The largest power of two, up to ``WIDEST``, that divides all ``numbers``."""
    bits = WIDEST
    for number in numbers:
        bits |= number
    return bits & -bits
