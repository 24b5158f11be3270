"""Descriptors: a segment and page ids expanded into a list of byte ranges, in numpy and compiled code.

`page_pairs` lists the page pairs of a segment. `pair_offsets` takes the page ids and computes where each pair begins in
the tensors of one layer. `expand` lists the rows as (source offset, destination offset, length).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import at_register, compiled
from torchkv.layout.plan_segment import PlanSegment

__all__ = ["PagePairs", "expand", "page_pairs", "pair_offsets", "warm_up"]


@dataclass(slots=True)
class PagePairs:
    """Page pairs, as int64 arrays of equal length.

    src_index: position in the verb's list of page ids. dst_index: position in the grant's list of page ids.
    src_token, dst_token: the pair's first token, counted from the beginning of that page.
    """

    src_index: Int64Array
    src_token: Int64Array
    dst_index: Int64Array
    dst_token: Int64Array

    def __len__(self) -> int:
        return len(self.src_index)


def page_pairs(
    segment: PlanSegment, *, num_src_pages: int, start: int, limit_tokens: int, src_page_size: int, dst_page_size: int
) -> PagePairs:
    """The pairs that ``segment`` owes of sender pages [start, start + num_src_pages), in order of their tokens.

    start: counted from the end of the prefix. limit_tokens: tokens of the grant; pairs beyond it are left out, and so
    are pairs before the segment's window. Page sizes are in tokens.
    """
    size = segment.tokens
    assert size == min(src_page_size, dst_page_size), "not the page sizes that the segment was compiled for"
    assert limit_tokens % size == 0, "a grant consists of whole pages"
    stripe, per_page = segment.stripe, src_page_size // size
    owned = stripe.ordinals(start=start, num_src_pages=num_src_pages, per_page=per_page, limit_tokens=limit_tokens)
    pairs = np.empty((4, len(owned)), dtype=np.int64)
    numbering = (owned.start, stripe.per_unit, stripe.holders, stripe.holder)
    _list_pairs(pairs, *numbering, start, size, per_page, dst_page_size // size)
    return PagePairs(*pairs)


@compiled
def _list_pairs(
    pairs: Int64Array,
    first: int,
    per_unit: int,
    holders: int,
    holder: int,
    start: int,
    size: int,
    src_per_page: int,
    dst_per_page: int,
) -> None:
    """Fills ``pairs``, one line for each field of `PagePairs`, with the pairs of ordinals ``first``, ``first + 1``, ...

    per_unit, holders, holder: of the `Stripe`. size: tokens of a pair. src_per_page, dst_per_page: pairs of a page.
    """
    for i in range(pairs.shape[1]):
        pair = first + i
        if holders > 1:
            pair = pair // per_unit * per_unit * holders + holder * per_unit + pair % per_unit
        pairs[0, i], pairs[1, i] = pair - start, 0
        pairs[2, i], pairs[3, i] = pair, 0
        if src_per_page > 1:
            pairs[0, i], pairs[1, i] = pair // src_per_page - start, pair % src_per_page * size
        if dst_per_page > 1:
            pairs[2, i], pairs[3, i] = pair // dst_per_page, pair % dst_per_page * size


def pair_offsets(
    segment: PlanSegment,
    pairs: PagePairs,
    src_pages: Int64Array,
    dst_pages: Int64Array,
    src_page_stride: int,
    dst_page_stride: int,
) -> tuple[Int64Array, Int64Array]:
    """Byte offset of each pair's first row in the sender's and in the receiver's tensor of one layer.

    src_pages, dst_pages: page ids of the verb and of the grant. src_page_stride, dst_page_stride: bytes from one page
    to the next.
    """
    src, dst = np.empty((2, len(pairs)), dtype=np.int64)
    src_strides = (src_page_stride, segment.src_base, segment.src_token_stride)
    dst_strides = (dst_page_stride, segment.dst_base, segment.dst_token_stride)
    inside = _locate(src, src_pages, pairs.src_index, pairs.src_token, *src_strides)
    inside &= _locate(dst, dst_pages, pairs.dst_index, pairs.dst_token, *dst_strides)
    assert inside, "the pairs were listed for other pages"
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
    """Fills ``offsets`` for one side; False if a pair names a page that is not in ``pages``."""
    for i in range(len(offsets)):
        if not 0 <= index[i] < len(pages):
            return False
        offsets[i] = pages[index[i]] * page_stride + base + token[i] * token_stride
    return True


def expand(segment: PlanSegment, src_off: Int64Array, dst_off: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Descriptors of the pairs at these offsets: int64 arrays of source offset, destination offset, length in bytes.

    Consecutive rows that are adjacent on both sides become one descriptor.
    """
    # One allocation instead of three, as then the allocator keeps the memory and does not return it after each call.
    spans = np.empty((3, len(src_off) * segment.rows.per_pair), dtype=np.int64)
    count = _expand(np.ascontiguousarray(src_off), np.ascontiguousarray(dst_off), *segment.rows, spans)
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
    """Fills ``spans`` (source, destination, length) and returns how many descriptors there are after merging.

    Rows of one pair are never adjacent on both sides, as `StridedRuns.folded` has merged such rows. So only the last
    row of a pair and the first of the next one can merge, which keeps the inner loop simple enough to be vectorised.
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


@at_register
def warm_up() -> None:
    """Compiles this module's functions, or loads them from disk, so that the first transfer need not wait for it."""
    none = np.zeros(0, dtype=np.int64)
    _list_pairs(np.zeros((4, 0), dtype=np.int64), 0, 1, 1, 0, 0, 1, 1, 1)
    _locate(none, none, none, none, 0, 0, 0)
    _locate(none, np.frombuffer(b"", dtype=np.int64), none, none, 0, 0, 0)  # read-only, as the page ids of grants are
    _expand(none, none, 0, 0, 0, 0, 0, 0, 0, np.zeros((3, 0), dtype=np.int64))
