"""From a slab and page ids to byte offsets and descriptors: numpy and compiled code, no Python per page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchkv.compiled import compiled
from torchkv.slab import Slab, first_owed

__all__ = ["PagePairs", "expand", "page_pairs", "pair_offsets", "warm_up"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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
    window = first_owed(limit_tokens, slab.window)
    first = max(start * src_page_size, window) // size
    end = min((start + num_src_pages) * src_page_size, limit_tokens) // size
    pair = _stripe(slab, first, max(first, end))
    src_page, src_token = _locate(pair, src_page_size // size, size)
    dst_page, dst_token = _locate(pair, dst_page_size // size, size)
    return PagePairs(src_page - start, src_token, dst_page, dst_token)


def _locate(pair: Int64Array, per_page: int, size: int) -> tuple[Int64Array, Int64Array]:
    """Page and token within it where each pair begins, on a side whose pages hold ``per_page`` pairs."""
    if per_page == 1:
        return pair, np.zeros_like(pair)
    page, part = np.divmod(pair, per_page)
    return page, part * size


def _stripe(slab: Slab, first: int, end: int) -> Int64Array:
    """The pairs of [first, end), numbered from the prefix, whose unit this writer owns."""
    if slab.holders == 1:
        return np.arange(first, end, dtype=np.int64)
    per_unit = slab.unit // slab.tokens
    unit = first // per_unit
    unit += (slab.index - unit) % slab.holders
    units = np.arange(unit, -(-end // per_unit), slab.holders, dtype=np.int64)
    pairs = (units[:, None] * per_unit + np.arange(per_unit, dtype=np.int64)).ravel()
    return pairs[(pairs >= first) & (pairs < end)]


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
    src, dst = src_pages[pairs.src_index], dst_pages[pairs.dst_index]
    src *= src_page_stride
    dst *= dst_page_stride
    src += slab.src_base
    dst += slab.dst_base
    # Whole pages, the commonest case, all begin at token 0: two large temporaries less.
    if pairs.src_token.any():
        src += pairs.src_token * slab.src_token_stride
    if pairs.dst_token.any():
        dst += pairs.dst_token * slab.dst_token_stride
    return src, dst


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
    _expand(none, none, 0, 0, 0, 0, 0, 0, 0, np.zeros((3, 0), dtype=np.int64))
