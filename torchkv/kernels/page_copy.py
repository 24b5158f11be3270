"""The Triton kernel that copies pages. `torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it.

A job is one (layer, component); the jobs of a launch have the same geometry. The words of a job (16 bytes each where
alignment allows) are numbered pair after pair and row after row. Source and target address of a word are computed from
its number. So runs of any length and any number of rows cost the same, a packed stage is the words in order, and blocks
share the work evenly.

The addresses take a few divisions by numbers that are fixed for the launch; each is a multiplication and a shift
(`div`). That is still about a hundred instructions per word, which is much where a few blocks must fill the link. With
``TABLE`` they are computed once per row, and each word looks its row up in shared memory. This halves the instructions
and costs at least two barriers per tile.

With ``SLOTS`` the stage does not hold all packed bytes but is a FIFO: a GATHER on one GPU and a SCATTER on another run
at the same time, and block b of each serves channel b. The gather packs chunk after chunk into the channel's few FIFO
slots, used in turn, and the scatter unpacks them. Progress words in the receiver's memory tell each side how far the
other is. A block that polls in vain for too long ends, and a later launch continues from there:
`torchkv.kernels.launch.FifoArgs` describes the protocol, and why blocks give up.
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
    "UNFINISHED",
    "copy",
    "div",
    "locate",
    "report",
]

# Modes: from pages to pages, from pages into a packed stage, from a packed stage into pages.
DIRECT, GATHER, SCATTER = 0, 1, 2

# In the low and high half of the second error word: a block of a FIFO kernel gave up with chunks left; a block moved a
# chunk.
UNFINISHED, MOVED = 1, 1

NUM_INTEGERS = 49  # runtime parameters of the kernel; the rest are constants


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
    """Stores a code for the bad page ids in the first error word. side: 0 source, 1 destination."""
    # A plain store is enough: an aligned store of eight bytes is never torn, and any of the codes may win. An atomic
    # operation on host memory would need support by the bus.
    clipped = tl.minimum(tl.maximum(page, -(1 << 31)), (1 << 31) - 1)
    code = ((index.to(tl.int64) + 1) << 33) | (side << 32) | (clipped & 0xFFFFFFFF)
    tl.store(errors.to(tl.pointer_type(tl.int64)) + tl.zeros_like(index), code, mask=bad)


@triton.jit
def turns(chunks, channel, channels):
    """How many of the FIFO's first ``chunks`` chunks belong to the channel."""
    return tl.maximum(chunks - channel + channels - 1, 0) // channels


@triton.jit
def wait(where, value, word, max_polls):
    """Polls the progress word at ``where`` until it has reached ``value``, at most ``max_polls`` times; returns it.

    word: the value read last. If that suffices, nothing is polled.
    """
    pointer = where.to(tl.int64).to(tl.pointer_type(tl.int64))
    polls = 0
    while (word < value) & (polls < max_polls):
        # An atomic with acquire semantics, not a load: one thread polls for the block, and afterwards all its threads
        # see what the other GPU wrote before it published the value.
        word = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        polls += 1
    return word


@triton.jit
def publish(where, value):
    """Stores this side's progress for the other GPU, after all reads and writes of the whole block are done."""
    tl.debug_barrier()
    tl.atomic_xchg(where.to(tl.int64).to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")


# Triton specialises on none of the integers, so that one compiled kernel serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def copy(
    jobs: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    stage: tl.int64,
    stage_stride: tl.int64,
    errors: tl.int64,
    wait_at: tl.int64,
    publish_at: tl.int64,
    state: tl.int64,
    base: tl.int64,
    max_polls: tl.int32,
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
    """Copies ``num_jobs`` jobs of ``words`` words. See `torchkv.kernels.launch` for the arguments.

    Each block takes every ``num_programs``-th tile of ``TILE`` words.

    ROWS: how many of a pair's two row counts exceed 1. PARTS: whether pairs are striped or smaller than a page.
    TABLE: an upper bound of the rows that a tile touches; 0: addresses are computed per word.

    SLOTS: FIFO slots of each channel; 0: the stage is packed. In a FIFO each block takes every ``num_programs``-th
    chunk. A chunk has ``chunk_tiles`` tiles, the last one of a job perhaps fewer; a job has ``job_chunks`` chunks, and
    ``first_chunk`` chunks come before the first job. wait_at, publish_at, state: addresses of channel 0's words, see
    `torchkv.kernels.launch.FifoArgs`; those of the other channels follow.
    """
    dtype: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    ELEMENTS: tl.constexpr = 2 if UNIT == 16 else 1
    tiles = (words + TILE - 1) // TILE
    element = tl.arange(0, ELEMENTS)[None, :]
    tile = tl.program_id(0)
    end = num_jobs * tiles
    limit = words
    if SLOTS > 0:
        # Tiles are numbered through all chunks of this channel, also those of other launches. A turn is the number of
        # a chunk within its channel.
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
        # If an earlier launch left chunks before these undone, this launch does nothing: that launch is repeated first.
        end = tl.where(done < first_turn, 0, last_turn) * chunk_tiles
        # The current chunk's place is computed once per chunk: divisions before each tile would cost a tenth.
        step = 0
        job = 0
        chunk_word = 0
        origin = stage.to(tl.int64)
        seen = base.to(tl.int64) - 1  # the value of wait_at read last; what earlier uses left there is less than base
    while tile < end:
        if SLOTS > 0:
            if step == 0:
                chunk = channel + turn * channels - first_chunk
                job = chunk // job_chunks
                chunk_word = (chunk - job * job_chunks) * chunk_tiles * TILE
                slot = (turn % SLOTS) * channels + channel
                origin = stage + (slot.to(tl.int64) * (chunk_tiles * TILE) - chunk_word) * UNIT
                # A scatter waits until this chunk is packed. A gather waits until the chunk that was in the slot before
                # is unpacked, and for nothing while the slots are used for the first time.
                lag = SLOTS if MODE == 1 else 0
                value = base + (turn + 1 - lag)
                seen = wait(wait_at, tl.where(turn < lag, seen, value), seen, max_polls)
                if (turn >= lag) & (seen < value):
                    limit = 0  # gave up: this tile copies nothing
                    end = 0
            first_word = chunk_word + step * TILE
        else:
            job = tile // tiles
            first_word = (tile - job * tiles) * TILE
            origin = stage + job * stage_stride
        word = first_word + tl.arange(0, TILE)
        inside_job = word < limit
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        # From here to the lookup in the table: for each word, or with TABLE for the first word of each row.
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
        # In the second error word, each half by itself: so no store overwrites a bad page in the first word, which is
        # reported only once, or what another block has stored in the other half.
        words = errors.to(tl.pointer_type(tl.int32)) + 2
        tl.store(words, 1, mask=done < last_turn)  # UNFINISHED
        tl.store(words + 1, 1, mask=done > began)  # MOVED
