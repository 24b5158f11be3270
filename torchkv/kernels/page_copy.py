"""The GPU kernel that copies pages, in Triton; `torchkv.kernels` is its interface, `torchkv.kernellaunch` launches it.

Jobs are (layer, component) with a common geometry. The words of a job (16 bytes each where alignment allows) are
numbered pair after pair and row after row, and a word's number says where it comes from and goes to. So any run length
and any number of rows cost the same, a packed stage is simply the words in order, and blocks share the work evenly.

What this takes is a few divisions by numbers that are fixed for the launch: each is a multiplication and a shift
(`div`). Still it comes to a hundred instructions a word, which is much for a few blocks that are to fill the link.
With ``TABLE`` they are done once a row, and each word looks its row up in shared memory: half the instructions, for
two barriers a tile and more.

With ``SLOTS`` the stage is no packed copy but a stream: block b of a GATHER and block b of a SCATTER, which run at the
same time on two GPUs, are channel b. What the one packs, chunk by chunk, goes round in a few slots of the channel's
own, out of which the other unpacks it. Each tells the other how far it is in a word of the receiver's memory. Neither
waits for long: a block that waits in vain ends, and a later launch goes on where it stopped.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "DIRECT",
    "GATHER",
    "MOVED",
    "NUM_INTEGERS",
    "SCATTER",
    "SKIPPED",
    "UNFINISHED",
    "copy",
    "div",
    "locate",
    "report",
]

# Which sides are packed.
DIRECT, GATHER, SCATTER = 0, 1, 2

SKIPPED = -1  # in the error slot: nothing was unpacked, because the stage was not written
# In the halves of the error slot's second word: a stream's block has waited in vain, and has chunks left; a block has
# moved some.
UNFINISHED, MOVED = 1, 1

NUM_INTEGERS = 51  # runtime parameters of the kernel; the rest are constants


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


@triton.jit
def turns(chunks, channel, channels):
    """How many of the first ``chunks`` chunks are the channel's."""
    return tl.maximum(chunks - channel + channels - 1, 0) // channels


@triton.jit
def wait(where, value, word, patience):
    """The word at ``where``, perhaps once it has reached ``value``. word: what is known of it; read if that is less."""
    pointer = where.to(tl.int64).to(tl.pointer_type(tl.int64))
    polls = 0
    while (word < value) & (polls < patience):
        # Not a load: one thread polls for the block, and what the other GPU wrote before is then seen by all of it.
        word = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        polls += 1
    return word


@triton.jit
def publish(where, value):
    """Tells the other GPU, when the whole block has come here; what it read and wrote before is then done."""
    tl.debug_barrier()
    tl.atomic_xchg(where.to(tl.int64).to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")


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
    wait_at: tl.int64,
    publish_at: tl.int64,
    state: tl.int64,
    base: tl.int64,
    patience: tl.int32,
    first_chunk: tl.int32,
    chunk_tiles: tl.int32,
    job_chunks: tl.int32,
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
    SLOTS: tl.constexpr,
):
    """One block takes every ``num_programs``-th tile of ``TILE`` words. See `torchkv.kernellaunch` for the arguments.

    ROWS: how many of a pair's two row counts exceed 1. PARTS: whether pairs are striped or smaller than a page.
    TABLE: rows that a tile can touch, at most; 0 locates each word by itself. guard: address of a word (0: none); only
    if it holds ``expected``, there is anything to unpack.

    SLOTS: of each channel of a stream; 0: the stage is packed. Then a block takes every ``num_programs``-th chunk of
    ``chunk_tiles`` tiles, or fewer at a job's end; a job has ``job_chunks``, and ``first_chunk`` come before the first
    job. wait_at, publish_at, state: addresses of block 0's words, see `torchkv.kernellaunch.Flow`; others follow.
    """
    dtype: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    ELEMENTS: tl.constexpr = 2 if UNIT == 16 else 1
    tiles = (words + TILE - 1) // TILE
    element = tl.arange(0, ELEMENTS)[None, :]
    tile = tl.program_id(0)
    end = num_jobs * tiles
    limit = words
    if SLOTS > 0:
        # Tiles are numbered through the block's own chunks, of all runs.
        channel = tl.program_id(0)
        channels = tl.num_programs(0)
        wait_at += channel * 8
        publish_at += channel * 8
        progress = (state + channel * 8).to(tl.int64).to(tl.pointer_type(tl.int64))
        began = tl.load(progress).to(tl.int32)
        done = began
        first_turn = turns(first_chunk, channel, channels)
        last_turn = turns(first_chunk + num_jobs * job_chunks, channel, channels)
        turn = tl.maximum(done, first_turn)
        tile = turn * chunk_tiles
        # What an earlier launch has left of the chunks before these comes first, in a launch of its own.
        end = tl.where(done < first_turn, 0, last_turn) * chunk_tiles
        # Of the chunk that is being done, computed once: a few divisions before each tile would cost a tenth.
        step = 0
        job = 0
        chunk_word = 0
        origin = stage.to(tl.int64)
        seen = base.to(tl.int64) - 1  # of the words that it waits for; they may hold what others left
    elif MODE == 2:  # SCATTER
        guarded = guard != 0
        where = guard.to(tl.int64).to(tl.pointer_type(tl.int64))  # the interpreter takes small numbers for int32
        signal = tl.load(where, mask=guarded, other=0)
        if guarded & (signal != expected):
            tl.store(errors.to(tl.pointer_type(tl.int64)), -1)  # SKIPPED
            end = 0
    while tile < end:
        if SLOTS > 0:
            if step == 0:
                chunk = channel + turn * channels - first_chunk
                job = chunk // job_chunks
                chunk_word = (chunk - job * job_chunks) * chunk_tiles * TILE
                slot = (turn % SLOTS) * channels + channel
                origin = stage + (slot.to(tl.int64) * (chunk_tiles * TILE) - chunk_word) * UNIT
                # A gather waits until the slot's last chunk was unpacked, and at first for nothing.
                lag = SLOTS if MODE == 1 else 0
                value = base + (turn + 1 - lag)
                seen = wait(wait_at, tl.where(turn < lag, seen, value), seen, patience)
                if (turn >= lag) & (seen < value):
                    limit = 0  # nothing of this tile is there
                    end = 0
            first_word = chunk_word + step * TILE
        else:
            job = tile // tiles
            first_word = (tile - job * tiles) * TILE
            origin = stage + job * stage_stride
        word = first_word + tl.arange(0, TILE)
        inside_job = word < limit
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        # From here to the tables' end: of each word, or with TABLE of the first word of each row.
        if TABLE > 0:
            first_row = div(first_word, row_magic, row_shift)
            head = first_row + tl.arange(0, TABLE)
            live = head < limit // words_per_row
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
        copied = tl.load(sources, mask=ok[:, None])
        tl.store(targets, copied, mask=ok[:, None])
        if SLOTS > 0:
            tile += 1
            step += 1
            if (step == chunk_tiles) | (first_word + TILE >= words):
                step = 0
                turn += 1
                tile = turn * chunk_tiles
                if limit > 0:
                    done = turn
                    publish(publish_at, base + done)
        else:
            tile += tl.num_programs(0)
    if SLOTS > 0:
        tl.store(progress, done.to(tl.int64))
        # Words of their own, or they could hide a bad page, which is told once, or what other blocks say.
        words = errors.to(tl.pointer_type(tl.int32)) + 2
        tl.store(words, 1, mask=done < last_turn)  # UNFINISHED
        tl.store(words + 1, 1, mask=done > began)  # MOVED
