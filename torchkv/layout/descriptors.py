"""From a slab and page ids to byte offsets and descriptors: numpy and compiled code, no Python per page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchkv.compiled import compiled
from torchkv.slab import Slab

__all__ = ["PagePairs", "expand", "page_pairs", "pair_offsets", "warm_up"]

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class PagePairs:
    """Pairs of page parts, as int64 arrays of one length; tokens are positions inside a page.

    src_index: position in the pages of the call. dst_index: position in the pages of the grant.
    """

    src_index: Int64Array
    src_token: Int64Array
    dst_index: Int64Array
    dst_token: Int64Array

    def __len__(self) -> int:
        return len(self.src_index)


def page_pairs(
    slab: Slab, *, num_src_pages: int, start: int, limit_tokens: int, src_page_size: int, dst_page_size: int
) -> PagePairs:
    """The pairs of ``slab``'s stripe for sender pages [start, start + num_src_pages), in order of position.

    start: in sender pages after the prefix. limit_tokens: tokens of the grant; what lies beyond is left out, and so is
    what lies before the slab's window.
    """
    size = slab.tokens
    assert size == min(src_page_size, dst_page_size), "a slab belongs to the page sizes it was compiled for"
    assert limit_tokens % size == 0, "grants are whole pages"
    owned = slab.pairs(num_src_pages=num_src_pages, start=start, limit_tokens=limit_tokens, src_page_size=src_page_size)
    pairs = np.empty((4, len(owned)), dtype=np.int64)
    stripe = (owned.start, slab.unit // size, slab.holders, slab.index)
    _list_pairs(pairs, *stripe, start, size, src_page_size // size, dst_page_size // size)
    return PagePairs(*pairs)


@compiled
def _list_pairs(
    pairs: Int64Array,
    first: int,
    per_unit: int,
    holders: int,
    index: int,
    start: int,
    size: int,
    src_per_page: int,
    dst_per_page: int,
) -> None:
    """Fills the rows of ``pairs``: the fields of `PagePairs`, for the pairs of ranks ``first`` and up in the stripe.

    src_per_page, dst_per_page: how many pairs a page holds.
    """
    for i in range(pairs.shape[1]):
        pair = first + i
        if holders > 1:
            pair = pair // per_unit * per_unit * holders + index * per_unit + pair % per_unit
        pairs[0, i], pairs[1, i] = pair - start, 0
        pairs[2, i], pairs[3, i] = pair, 0
        if src_per_page > 1:
            pairs[0, i], pairs[1, i] = pair // src_per_page - start, pair % src_per_page * size
        if dst_per_page > 1:
            pairs[2, i], pairs[3, i] = pair // dst_per_page, pair % dst_per_page * size


def pair_offsets(
    slab: Slab,
    pairs: PagePairs,
    src_pages: Int64Array,
    dst_pages: Int64Array,
    src_page_stride: int,
    dst_page_stride: int,
) -> tuple[Int64Array, Int64Array]:
    """Byte offsets of each pair's first row in the sender's and the receiver's tensor of one layer.

    src_pages, dst_pages: page ids of the call and of the grant. strides: bytes from one page to the next.
    """
    src, dst = np.empty((2, len(pairs)), dtype=np.int64)
    src_strides = (src_page_stride, slab.src_base, slab.src_token_stride)
    dst_strides = (dst_page_stride, slab.dst_base, slab.dst_token_stride)
    inside = _locate(src, src_pages, pairs.src_index, pairs.src_token, *src_strides)
    inside &= _locate(dst, dst_pages, pairs.dst_index, pairs.dst_token, *dst_strides)
    assert inside, "pairs are of the pages that they are listed for"
    return src, dst


@compiled
def _locate(
    offsets: Int64Array,
    pages: Int64Array,
    index: Int64Array,
    token: Int64Array,
    page_stride: int,
    base: int,
    token_stride: int,
) -> bool:
    """Where pairs begin on one side; False if there is no such page."""
    for i in range(len(offsets)):
        if not 0 <= index[i] < len(pages):
            return False
        offsets[i] = pages[index[i]] * page_stride + base + token[i] * token_stride
    return True


def expand(slab: Slab, src_off: Int64Array, dst_off: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Descriptors (src, dst, length in bytes) of the pairs at these offsets, merged where neighbours touch.

    Two neighbours merge only if they are adjacent on both sides.
    """
    # One allocation, not three: the allocator then keeps the memory instead of returning it after each call.
    spans = np.empty((3, len(src_off) * slab.rows.per_pair), dtype=np.int64)
    count = _expand(np.ascontiguousarray(src_off), np.ascontiguousarray(dst_off), *slab.rows, spans)
    if count < spans.shape[1] // 2:
        spans = spans[:, :count].copy()
    return spans[0, :count], spans[1, :count], spans[2, :count]


@compiled
def _expand(
    src_off: Int64Array,
    dst_off: Int64Array,
    n0: int,
    s0: int,
    d0: int,
    n1: int,
    s1: int,
    d1: int,
    run: int,
    spans: Int64Array,
) -> int:
    """Fills ``spans`` (src, dst, length) and returns how many there are after merging.

    Rows of one pair never touch on both sides (compiling the plan has folded those), so only the seams between
    pairs need a look, and the loop inside is plain enough for the compiler to vectorise.
    """
    count = 0
    src_end = dst_end = np.int64(-1)
    for i in range(len(src_off)):
        src, dst = src_off[i], dst_off[i]
        skip = 0
        if count > 0 and src == src_end and dst == dst_end:
            spans[2, count - 1] += run
            skip = 1
        for a in range(n0):
            src_row, dst_row, length_row = spans[0, count:], spans[1, count:], spans[2, count:]
            for b in range(skip, n1):
                src_row[b - skip] = src + a * s0 + b * s1
                dst_row[b - skip] = dst + a * d0 + b * d1
                length_row[b - skip] = run
            count += n1 - skip
            skip = 0
        src_end = src + (n0 - 1) * s0 + (n1 - 1) * s1 + run
        dst_end = dst + (n0 - 1) * d0 + (n1 - 1) * d1 + run
    return count


def warm_up() -> None:
    """Compiles, or loads from disk, what the first transfer would otherwise wait for."""
    none = np.zeros(0, dtype=np.int64)
    _list_pairs(np.zeros((4, 0), dtype=np.int64), 0, 1, 1, 0, 0, 1, 1, 1)
    _locate(none, none, none, none, 0, 0, 0)
    _locate(none, np.frombuffer(b"", dtype=np.int64), none, none, 0, 0, 0)  # read-only, as the pages of grants are
    _expand(none, none, 0, 0, 0, 0, 0, 0, 0, np.zeros((3, 0), dtype=np.int64))
