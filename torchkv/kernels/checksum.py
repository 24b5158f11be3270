"""The Triton kernel that computes the checksums of page pairs.

`torchkv.host.checksum` defines the checksum; `torchkv.kernels.checksum_launch` launches the kernel.

The words of a pair are numbered in packed order, row after row, wherever its page lies. A tile consists of words with
the same numbers, its columns, of several pairs. So each key is computed once for all these pairs; computed per word,
keys would take more instructions than everything else.

The kernel uses no atomics: each block keeps the first mismatch that it finds, and stores it in a buffer entry of its
own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchkv.kernels.page_copy import div, locate, report

__all__ = ["NUM_INTEGERS", "VERIFY", "WRITE", "sum_pairs"]

# Modes: the sender writes sums, the receiver verifies them. The number is also the side's column in the job table.
WRITE, VERIFY = 0, 1

NUM_INTEGERS = 32  # runtime parameters of the kernel; the rest are constants

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
_NONE = tl.constexpr((1 << 63) - 1)


@triton.jit
def _key(number):
    """K_j of `torchkv.host.checksum`."""
    mixed = number.to(tl.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MIX1
    mixed = (mixed ^ (mixed >> 27)) * _MIX2
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit
def _keep(slot, code):
    """Stores ``code`` at address ``slot``, unless it is ``_NONE`` or a smaller code is there already; 0 is no code."""
    place = slot.to(tl.pointer_type(tl.int64))
    known = tl.load(place, mask=code < _NONE, other=0)
    tl.store(place, tl.where(known == 0, code, tl.minimum(known, code)), mask=code < _NONE)


# Triton specialises on none of the integers, so that one compiled kernel serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def sum_pairs(
    jobs: tl.int64,
    ids: tl.int64,
    sums: tl.int64,
    mismatches: tl.int64,
    errors: tl.int64,
    seed: tl.int64,
    items: tl.int32,
    pairs: tl.int32,
    pairs_magic: tl.int32,
    pairs_shift: tl.int32,
    first_rank: tl.int32,
    start: tl.int32,
    words: tl.int32,
    words_per_row: tl.int32,
    row_magic: tl.int32,
    row_shift: tl.int32,
    n1: tl.int32,
    n1_magic: tl.int32,
    n1_shift: tl.int32,
    s0: tl.int32,
    s1: tl.int32,
    unit_magic: tl.int32,
    unit_shift: tl.int32,
    first_pair: tl.int32,
    jump: tl.int32,
    per_page: tl.int32,
    page_magic: tl.int32,
    page_shift: tl.int32,
    part_stride: tl.int32,
    page_stride: tl.int32,
    base: tl.int32,
    num_pages: tl.int32,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes one sum per item. The items are the pairs of the first job, then those of the second, and so on.

    Each block takes every ``num_programs``-th tile of ``PAIRS`` items. The sum of item i is ``sums[i]``.

    jobs: the column of this side holds a job's base address, the other column its number in the order in which
    mismatches are reported. The code of a mismatch is ``(number << 31 | rank) + 1``, where rank counts this launch's
    pairs of a job. s0, s1: this side's strides. The other arguments as for `page_copy.copy`.
    """
    dtype: tl.constexpr = tl.uint32 if UNIT >= 4 else tl.uint16 if UNIT == 2 else tl.uint8
    ELEMENTS: tl.constexpr = UNIT // 4 if UNIT >= 4 else 1  # four-byte words of a word
    SHARES: tl.constexpr = 4 // UNIT if UNIT < 4 else 1  # words of a four-byte word
    element = tl.arange(0, ELEMENTS)[None, :]
    found = tl.full((), _NONE, tl.int64)
    tile = tl.program_id(0)
    while tile * PAIRS < items:
        item = tile * PAIRS + tl.arange(0, PAIRS)
        live = item < items
        item = tl.where(live, item, 0)
        job = div(item, pairs_magic, pairs_shift)
        rank = item - job * pairs
        pair = first_rank + rank
        if PARTS:
            pair += first_pair + div(pair, unit_magic, unit_shift) * jump
        offset, good, index, page = locate(
            ids, pair, start, per_page, page_magic, page_shift, part_stride, page_stride, num_pages, live, PARTS
        )
        report(errors, live & ~good & (job == 0), index, page, MODE)
        good = good & live
        of_job = jobs.to(tl.pointer_type(tl.int64)) + job * 2
        begin = tl.load(of_job + MODE) + offset + base

        # Columns are the first dimension: of two dimensions that look alike, Triton lays neighbouring threads along the
        # first, so that these load neighbouring words.
        total = tl.zeros((COLUMNS, PAIRS), tl.uint64)
        first = 0
        while first < words:
            column = first + tl.arange(0, COLUMNS)
            inside = column * UNIT
            if ROWS > 0:
                row = div(column, row_magic, row_shift)
                inside = row * s1 + (column - row * words_per_row) * UNIT
                if ROWS > 1:
                    inside += div(row, n1_magic, n1_shift) * (s0 - n1 * s1)
            key = _key((column // SHARES)[:, None] * ELEMENTS + element)
            if SHARES > 1:
                key = key << (column % SHARES * (8 * UNIT))[:, None].to(tl.uint64)
            source = (begin[None, :] + inside[:, None]).to(tl.pointer_type(dtype))[:, :, None] + element[None, :, :]
            source = tl.max_contiguous(tl.multiple_of(source, [UNIT, UNIT, UNIT]), [1, 1, ELEMENTS])
            value = tl.load(source, mask=(good[None, :] & (column < words)[:, None])[:, :, None], other=0)
            total += tl.sum(value.to(tl.uint64) * key[:, None, :], axis=2)
            first += COLUMNS
        got = tl.sum(total, axis=0).to(tl.int64) + seed

        place = sums.to(tl.pointer_type(tl.int64)) + item
        if MODE == 0:  # WRITE
            tl.store(place, got, mask=live)
        else:
            wanted = tl.load(place, mask=live, other=0)
            code = (tl.load(of_job + (1 - MODE)) << 31 | rank) + 1
            found = tl.minimum(found, tl.min(tl.where(good & (got != wanted), code, _NONE), axis=0))
        tile += tl.num_programs(0)
    if MODE == 1:  # VERIFY
        _keep(mismatches + tl.program_id(0).to(tl.int64) * 8, found)
