"""The Triton kernel that copies pages. `torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it.

A job is one (layer, component); the jobs of a launch have the same geometry. The words of a job (16 bytes each where
alignment allows) are numbered pair after pair and row after row. Source and target address of a word are computed from
its number. So runs of any length and any number of rows cost the same, a packed stage is the words in order, and blocks
share the work evenly.

The addresses take a few divisions by numbers that are fixed for the launch; each is a multiplication and a shift
(`div`). That is still about a hundred instructions per word, which is much where a few blocks must fill the link. With
``TABLE`` they are computed once per row, and each word looks its row up in shared memory. This halves the instructions
and costs at least two barriers per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "DIRECT",
    "GATHER",
    "NUM_INTEGERS",
    "SCATTER",
    "copy",
    "div",
    "locate",
    "report",
]

# Modes: from pages to pages, from pages into a packed stage, from a packed stage into pages.
DIRECT, GATHER, SCATTER = 0, 1, 2

NUM_INTEGERS = 41  # runtime parameters of the kernel; the rest are constants


@triton.jit
def div(n, magic, shift):
    """n // d for 0 <= n < 2**31; see `torchkv.kernels.launch.divisor`."""
    product = (n.to(tl.uint32) << 1).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)
    return (product >> 32).to(tl.int32) >> shift


@triton.jit
def locate(ids, pair, start, per_page, magic, shift, part_stride, page_stride, num_pages, live, PARTS: tl.constexpr):
    """For each pair: its byte offset from the job's base, whether its page id is valid, the id's index, and the id."""
    index = pair
    offset = tl.zeros_like(pair)
    if PARTS:
        index = div(pair, magic, shift)
        offset = (pair - index * per_page) * part_stride
    index -= start
    page = tl.load(ids.to(tl.pointer_type(tl.int64)) + index, mask=live, other=0)
    good = (page >= 0) & (page < num_pages)
    offset = tl.where(good, page, 0) * page_stride + offset
    return offset, good, index, page


@triton.jit
def report(errors, bad, index, page, side: tl.constexpr):
    """Stores a code for the bad page ids in the error word. side: 0 source, 1 destination."""
    # A plain store is enough: an aligned store of eight bytes is never torn, and any of the codes may win. An atomic
    # operation on host memory would need support by the bus.
    clipped = tl.minimum(tl.maximum(page, -(1 << 31)), (1 << 31) - 1)
    code = ((index.to(tl.int64) + 1) << 33) | (side << 32) | (clipped & 0xFFFFFFFF)
    tl.store(errors.to(tl.pointer_type(tl.int64)) + tl.zeros_like(index), code, mask=bad)


# Triton specialises on none of the integers, so that one compiled kernel serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def copy(
    jobs: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    stage: tl.int64,
    stage_stride: tl.int64,
    errors: tl.int64,
    num_jobs: tl.int32,
    first_rank: tl.int32,
    start: tl.int32,
    words: tl.int32,
    words_per_pair: tl.int32,
    pair_magic: tl.int32,
    pair_shift: tl.int32,
    words_per_row: tl.int32,
    row_magic: tl.int32,
    row_shift: tl.int32,
    n1: tl.int32,
    n1_magic: tl.int32,
    n1_shift: tl.int32,
    s0: tl.int32,
    d0: tl.int32,
    s1: tl.int32,
    d1: tl.int32,
    unit_magic: tl.int32,
    unit_shift: tl.int32,
    first_pair: tl.int32,
    jump: tl.int32,
    src_per_page: tl.int32,
    src_magic: tl.int32,
    src_shift: tl.int32,
    src_part_stride: tl.int32,
    src_page_stride: tl.int32,
    src_base: tl.int32,
    src_num_pages: tl.int32,
    dst_per_page: tl.int32,
    dst_magic: tl.int32,
    dst_shift: tl.int32,
    dst_part_stride: tl.int32,
    dst_page_stride: tl.int32,
    dst_base: tl.int32,
    dst_num_pages: tl.int32,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Copies ``num_jobs`` jobs of ``words`` words. See `torchkv.kernels.launch` for the arguments.

    Each block takes every ``num_programs``-th tile of ``TILE`` words.

    ROWS: how many of a pair's two row counts exceed 1. PARTS: whether pairs are striped or smaller than a page.
    TABLE: an upper bound of the rows that a tile touches; 0: addresses are computed per word.
    """
    dtype: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    ELEMENTS: tl.constexpr = 2 if UNIT == 16 else 1
    tiles = (words + TILE - 1) // TILE
    element = tl.arange(0, ELEMENTS)[None, :]
    tile = tl.program_id(0)
    end = num_jobs * tiles
    while tile < end:
        job = tile // tiles
        first_word = (tile - job * tiles) * TILE
        origin = stage + job * stage_stride
        word = first_word + tl.arange(0, TILE)
        inside_job = word < words
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        # From here to the lookup in the table: for each word, or with TABLE for the first word of each row.
        if TABLE > 0:
            first_row = div(first_word, row_magic, row_shift)
            head = first_row + tl.arange(0, TABLE)
            live = head < words // words_per_row
            head = tl.where(live, head, 0) * words_per_row
        else:
            head = word
            live = inside_job
        rank = div(head, pair_magic, pair_shift)
        inside = head - rank * words_per_pair
        src_inside = inside * UNIT
        dst_inside = inside * UNIT
        if ROWS > 0:
            row = div(inside, row_magic, row_shift)
            column = inside - row * words_per_row
            src_inside = row * s1 + column * UNIT
            dst_inside = row * d1 + column * UNIT
            if ROWS > 1:
                outer = div(row, n1_magic, n1_shift)
                src_inside += outer * (s0 - n1 * s1)
                dst_inside += outer * (d0 - n1 * d1)
        rank += first_rank
        pair = rank
        if PARTS:
            pair = first_pair + rank + div(rank, unit_magic, unit_shift) * jump

        first = live & (inside == 0) & (job == 0)  # all jobs have the same page ids, so only job 0 reports bad ones
        packed = origin + head.to(tl.int64) * UNIT
        source = packed
        target = packed
        ok = live
        if MODE != 2:  # not SCATTER
            offset, good, index, page = locate(
                src_ids,
                pair,
                start,
                src_per_page,
                src_magic,
                src_shift,
                src_part_stride,
                src_page_stride,
                src_num_pages,
                live,
                PARTS,
            )
            report(errors, first & ~good, index, page, 0)
            ok = ok & good
            source = tl.load(bases) + offset + (src_base + src_inside)
        if MODE != 1:  # not GATHER
            offset, good, index, page = locate(
                dst_ids,
                pair,
                0,
                dst_per_page,
                dst_magic,
                dst_shift,
                dst_part_stride,
                dst_page_stride,
                dst_num_pages,
                live,
                PARTS,
            )
            report(errors, first & ~good, index, page, 1)
            ok = ok & good
            target = tl.load(bases + 1) + offset + (dst_base + dst_inside)
        if TABLE > 0:
            # No job lies at address 0, so 0 can mark a bad row.
            source = tl.where(ok, source, 0)
            behind = first_word - first_row * words_per_row + tl.arange(0, TILE)
            row = div(behind, row_magic, row_shift)
            column = (behind - row * words_per_row) * UNIT
            row = tl.where(inside_job, row, 0)
            source = tl.gather(source, row, 0)
            target = tl.gather(target, row, 0) + column
            ok = inside_job & (source != 0)
            source += column

        sources = source.to(tl.pointer_type(dtype))[:, None] + element
        targets = target.to(tl.pointer_type(dtype))[:, None] + element
        sources = tl.max_contiguous(tl.multiple_of(sources, [UNIT, UNIT]), [1, ELEMENTS])
        targets = tl.max_contiguous(tl.multiple_of(targets, [UNIT, UNIT]), [1, ELEMENTS])
        copied = tl.load(sources, mask=ok[:, None])
        tl.store(targets, copied, mask=ok[:, None])
        tile += tl.num_programs(0)
