"""From a slab and page ids to byte offsets and descriptors, in numpy; nothing here loops over pages in Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchkv.slab import Slab

__all__ = ["PagePairs", "expand", "page_pairs", "pair_offsets"]

Int64Array = npt.NDArray[np.int64]

_ADD_AT_ONCE = 1024  # entries; twice as fast as rows of 16
_BLOCK = 8192  # entries whose temporaries fit the L2 cache


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

    start: in sender pages after the prefix. limit_tokens: tokens of the grant; what lies beyond is left out.
    """
    size = slab.tokens
    assert size == min(src_page_size, dst_page_size), "a slab belongs to the page sizes it was compiled for"
    assert limit_tokens % size == 0, "grants are whole pages"
    first = start * src_page_size // size
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
    rows = slab.rows
    if rows.per_pair == 1:
        return _merge(src_off, dst_off, rows.run)
    # One allocation, not three: the allocator then keeps the memory instead of returning it after each call.
    src, dst, length = np.empty((3, len(src_off) * rows.per_pair), dtype=np.int64)
    _spread(src_off, rows.n0, rows.s0, rows.n1, rows.s1, out=src)
    _spread(dst_off, rows.n0, rows.d0, rows.n1, rows.d1, out=dst)
    # Rows of one pair never touch on both sides (compiling the plan folded those): only the seams need a look.
    src_tail = (rows.n0 - 1) * rows.s0 + (rows.n1 - 1) * rows.s1 + rows.run
    dst_tail = (rows.n0 - 1) * rows.d0 + (rows.n1 - 1) * rows.d1 + rows.run
    if _adjacent(src_off, dst_off, src_tail, dst_tail).any():
        return _merge(src, dst, rows.run)
    length.fill(rows.run)
    return src, dst, length


def _spread(offsets: Int64Array, n0: int, stride0: int, n1: int, stride1: int, *, out: Int64Array) -> None:
    rows = (np.arange(n0, dtype=np.int64)[:, None] * stride0 + np.arange(n1, dtype=np.int64) * stride1).ravel()
    grid = out.reshape(len(offsets), len(rows))
    grid[:] = offsets[:, None]
    # A short last axis costs numpy more than the additions: add the rows to a batch of pairs at a time.
    batch = max(1, _ADD_AT_ONCE // len(rows))
    batches = len(offsets) // batch
    batched = grid[: batches * batch].reshape(batches, batch * len(rows))
    batched += np.tile(rows, batch)
    grid[batches * batch :] += rows


def _merge(src: Int64Array, dst: Int64Array, run: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    adjacent = _adjacent(src, dst, run, run)
    if not adjacent.any():
        return src, dst, np.full(len(src), run, dtype=np.int64)
    heads = np.concatenate(([0], np.flatnonzero(~adjacent) + 1))
    return src[heads], dst[heads], np.diff(heads, append=len(src)) * run


def _adjacent(src: Int64Array, dst: Int64Array, src_step: int, dst_step: int) -> npt.NDArray[np.bool_]:
    """Whether entry i + 1 follows entry i at exactly these steps on *both* sides; one shorter than the input."""
    adjacent = np.empty(max(0, len(src) - 1), dtype=np.bool_)
    for lo in range(0, len(adjacent), _BLOCK):
        hi = min(lo + _BLOCK, len(adjacent))
        np.equal(src[lo + 1 : hi + 1] - src[lo:hi], src_step, out=adjacent[lo:hi])
        adjacent[lo:hi] &= dst[lo + 1 : hi + 1] - dst[lo:hi] == dst_step
    return adjacent
