"""The GPU kernel that copies pages, in Triton; `torchkv.kernels` is its interface, `torchkv.kernellaunch` launches it.

Jobs are (layer, component) with a common geometry. The words of a job (16 bytes each where alignment allows) are
numbered pair after pair and row after row, and a word's number says where it comes from and goes to. So any run length
and any number of rows cost the same, a packed stage is simply the words in order, and blocks share the work evenly.

What this takes is a few divisions by numbers that are fixed for the launch: each is a multiplication and a shift
(`div`). Still it comes to a hundred instructions a word, which is much for a few blocks that are to fill the link.
With ``TABLE`` they are done once a row, and each word looks its row up in shared memory: half the instructions, for
two barriers a tile and more.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["DIRECT", "GATHER", "NUM_INTEGERS", "SCATTER", "SKIPPED", "copy", "div", "locate", "report"]

# Which sides are packed.
DIRECT, GATHER, SCATTER = 0, 1, 2

SKIPPED = -1  # in the error slot: nothing was unpacked, because the stage was not written

NUM_INTEGERS = 43  # runtime parameters of the kernel; the rest are constants


@triton.jit
def div(n, magic, shift):
    """n // d for 0 <= n < 2**31; see `torchkv.kernellaunch.divisor`."""
    product = (n.to(tl.uint32) << 1).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)
    return (product >> 32).to(tl.int32) >> shift


@triton.jit
def locate(ids, pair, start, per_page, magic, shift, part_stride, page_stride, num_pages, live, PARTS: tl.constexpr):
    """Byte offset of each pair from the job's base, whether its page id is good, its index and the id itself."""
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
    # A plain store: eight aligned bytes never tear, any of the codes will do, and atomics on host memory would need
    # support from the bus.
    clipped = tl.minimum(tl.maximum(page, -(1 << 31)), (1 << 31) - 1)
    code = ((index.to(tl.int64) + 1) << 33) | (side << 32) | (clipped & 0xFFFFFFFF)
    tl.store(errors.to(tl.pointer_type(tl.int64)) + tl.zeros_like(index), code, mask=bad)


# None of the integers is specialised on: one compiled variant serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def copy(
    jobs: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    stage: tl.int64,
    stage_stride: tl.int64,
    errors: tl.int64,
    guard: tl.int64,
    expected: tl.int64,
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
    """One block takes every ``num_programs``-th tile of ``TILE`` words. See `torchkv.kernellaunch` for the arguments.

    ROWS: how many of a pair's two row counts exceed 1. PARTS: whether pairs are striped or smaller than a page.
    TABLE: rows that a tile can touch, at most; 0 locates each word by itself. guard: address of a word (0: none); only
    if it holds ``expected``, there is anything to unpack.
    """
    dtype: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    ELEMENTS: tl.constexpr = 2 if UNIT == 16 else 1
    tiles = (words + TILE - 1) // TILE
    element = tl.arange(0, ELEMENTS)[None, :]
    tile = tl.program_id(0)
    end = num_jobs * tiles
    if MODE == 2:  # SCATTER
        guarded = guard != 0
        where = guard.to(tl.int64).to(tl.pointer_type(tl.int64))  # the interpreter takes small numbers for int32
        signal = tl.load(where, mask=guarded, other=0)
        if guarded & (signal != expected):
            tl.store(errors.to(tl.pointer_type(tl.int64)), -1)  # SKIPPED
            end = 0
    while tile < end:
        job = tile // tiles
        first_word = (tile - job * tiles) * TILE
        word = first_word + tl.arange(0, TILE)
        inside_job = word < words
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        # From here to the tables' end: of each word, or with TABLE of the first word of each row.
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

        first = live & (inside == 0) & (job == 0)  # all jobs have the same ids: one reports them
        packed = stage + job * stage_stride + head.to(tl.int64) * UNIT
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
            # No job lies at address 0, so it can stand for a bad row.
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
        value = tl.load(sources, mask=ok[:, None])
        tl.store(targets, value, mask=ok[:, None])
        tile += tl.num_programs(0)
