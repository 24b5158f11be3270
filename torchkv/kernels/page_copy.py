"""The Triton kernel that copies pages. `torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it.

A job is one (layer, component); the jobs of a launch have the same geometry. The words of a job (16 bytes each where
alignment allows) are numbered pair after pair and row after row. Source and target address of a word are computed from
its number. So runs of any length and any number of rows cost the same, a packed stage is the words in order, and blocks
share the work evenly.

The addresses take a few divisions by numbers that are fixed for the launch; each is a multiplication and a shift
(`div`). That is still about a hundred instructions, which is much for a word where a few blocks must fill the link. So
a pair's words are copied in ``STEPS`` steps, which lie alike (`torchkv.kernels.steps`): a thread computes the address
of one word of the first step, and moves the same word of each step, a fixed distance from one to the next. Only words
of the first step are numbered.

Blocks draw their tiles, but for the first ones, because they are not equally fast: some share their way to the link
with others, and with tiles dealt out beforehand all would wait for those. ``tickets`` are two int32: how many tiles
were drawn, and how many blocks have ended. Both are zero before and after each kernel, so kernels that may run at the
same time, as on two streams, must have tickets of their own.

A kernel tells of its own end: its last block stores ``number`` in the word at the address ``completion``. Whoever sees
it there, on the host too, can tell others that the pages are where they belong. An operation behind the kernel that
says so would have to be enqueued, too, and whoever enqueues waits for whoever else does in the process.
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
    "draw",
    "leave",
    "locate",
    "pointers",
    "report",
]

# Modes: from pages to pages, from pages into a packed stage, from a packed stage into pages.
DIRECT, GATHER, SCATTER = 0, 1, 2

NUM_INTEGERS = 46  # runtime parameters of the kernel; the rest are constants


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


@triton.jit
def pointers(address, element, UNIT: tl.constexpr, dtype: tl.constexpr):
    """To the elements of words of ``UNIT`` bytes, of which ``element`` are the numbers, at each ``address``."""
    found = address.to(tl.pointer_type(dtype))[:, None] + element
    return tl.max_contiguous(tl.multiple_of(found, [UNIT, UNIT]), [1, element.shape[1]])


@triton.jit
def draw(tickets):
    """The number of the block's next tile. Takes a round trip to the GPU's memory: better while loads are under way."""
    return tl.num_programs(0) + tl.atomic_add(tickets.to(tl.pointer_type(tl.int32)), 1, sem="relaxed")


@triton.jit
def leave(tickets, completion, number):
    """The end of a block that has drawn a tile too many. The last one to end leaves tickets for the next kernel.

    It also stores ``number`` at the address ``completion``, unless that is 0.
    """
    ended = tickets.to(tl.pointer_type(tl.int32)) + 1
    # What all threads of the block have stored is visible to the whole system before the block counts as ended, and so
    # is what all blocks have stored before the last one goes on.
    tl.debug_barrier()
    if tl.atomic_add(ended, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(ended - 1, 0)
        tl.store(ended, 0)
        if completion != 0:
            tl.store(completion.to(tl.pointer_type(tl.int64)), number)


# Triton specialises on none of the integers, so that one compiled kernel serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def copy(
    jobs: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    stage: tl.int64,
    stage_stride: tl.int64,
    errors: tl.int64,
    tickets: tl.int64,
    completion: tl.int64,
    number: tl.int64,
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
    src_step: tl.int32,
    dst_step: tl.int32,
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
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copies ``num_jobs`` jobs of ``words`` words. See `torchkv.kernels.launch` for the arguments.

    Each block copies one tile of ``TILE`` words after another, and moves ``STEPS`` words for each.

    ROWS: how many of a pair's two row counts exceed 1. PARTS: whether pairs are striped or smaller than a page.
    """
    dtype: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    element = tl.arange(0, 2 if UNIT == 16 else 1)[None, :]
    tiles = (words + TILE - 1) // TILE
    tile = tl.program_id(0)
    while tile < num_jobs * tiles:
        job = tile // tiles
        word = (tile - job * tiles) * TILE + tl.arange(0, TILE)
        ok = word < words
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        rank = div(word, pair_magic, pair_shift)
        inside = word - rank * words_per_pair
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
        packed = stage + job * stage_stride  # a stage is a page for each pair, one behind the other
        source = packed + rank.to(tl.int64) * src_page_stride + src_inside
        target = packed + rank.to(tl.int64) * dst_page_stride + dst_inside
        rank += first_rank
        pair = rank
        if PARTS:
            pair = first_pair + rank + div(rank, unit_magic, unit_shift) * jump

        first = ok & (inside == 0) & (job == 0)  # all jobs have the same page ids, so only job 0 reports bad ones
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
                ok,
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
                ok,
                PARTS,
            )
            report(errors, first & ~good, index, page, 1)
            ok = ok & good
            target = tl.load(bases + 1) + offset + (dst_base + dst_inside)

        copied = ()  # all are read before the first is written, so that they are on their way together
        for step in tl.static_range(STEPS):
            sources = pointers(source + step * src_step, element, UNIT, dtype)
            copied += (tl.load(sources, mask=ok[:, None]),)  # type: ignore[assignment]  # longer than before
        tile = draw(tickets)
        for step in tl.static_range(STEPS):
            tl.store(pointers(target + step * dst_step, element, UNIT, dtype), copied[step], mask=ok[:, None])
    leave(tickets, completion, number)
