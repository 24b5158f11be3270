"""The Triton kernel that copies pages and converts their elements to another dtype on the way.

`torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it. It addresses pages as
`torchkv.kernels.page_copy` does, but a word is a number of elements, of unlike bytes on both sides. It
computes what `torchkv.layout.conversion.convert` computes, bit for bit, but for the sign and payload of NaN: dtypes are
handled as integers, so that any GPU, and Triton's interpreter, round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchkv.kernels.page_copy import div, locate, report

__all__ = ["NUM_INTEGERS", "convert"]

NUM_INTEGERS = 47  # runtime parameters of the kernel; the rest are constants


@triton.jit
def from_bfloat16(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def from_float16(bits):
    magnitude = bits & 0x7FFF
    # Exponents 1 to 30 get a new bias, exponent 31 (infinity and NaN) the largest one, and 0 is a multiple of 2**-24.
    number = (magnitude << 13) + 0x38000000
    number = tl.where(magnitude >= 0x7C00, number + 0x38000000, number)
    small = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
    number = tl.where(magnitude < 0x400, small, number)
    return (number | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def from_fp8(bits):
    magnitude = bits & 0x7F
    number = tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude << 20) + 0x3C000000)
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    number = tl.where(magnitude < 8, small, number)
    return (number | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(number):
    bits = number.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def to_float16(number):
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # Below 2**-14 the result is a multiple of 2**-24: as the last bits of a sum with a float32 of that precision.
    small = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
    half = tl.where(magnitude < 0x38800000, small, rounded)
    half = tl.where(magnitude >= 0x477FF000, 0x7C00, half)  # rounds to 65536
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    return half | ((bits >> 16) & 0x8000)


@triton.jit
def to_fp8(number):
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448
    rounded = (clamped - 0x3C000000 + 0x7FFFF + ((clamped >> 20) & 1)) >> 20
    # Below 2**-6 the result is a multiple of 2**-9, as in `to_float16`.
    small = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(clamped < 0x3C800000, small, rounded)
    byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def converted(bits, scale, KIND: tl.constexpr):
    """The elements of which ``bits`` are the bits, converted, as bits. scale: of each. KIND: see `convert`."""
    if KIND == 0:
        result = to_fp8(tl.div_rn(from_bfloat16(bits), scale))
    elif KIND == 1:
        result = to_fp8(tl.div_rn(from_float16(bits), scale))
    elif KIND == 2:
        result = to_bfloat16(from_fp8(bits) * scale)
    elif KIND == 3:
        result = to_float16(from_fp8(bits) * scale)
    elif KIND == 4:
        result = to_bfloat16(from_float16(bits))
    else:
        result = to_float16(from_bfloat16(bits))
    return result


# Triton specialises on none of the integers, so that one compiled kernel serves every layout and request.
@triton.jit(do_not_specialize=range(NUM_INTEGERS))
def convert(
    jobs: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    stage: tl.int64,
    stage_stride: tl.int64,
    errors: tl.int64,
    scales: tl.int64,
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
    head_magic: tl.int32,
    head_shift: tl.int32,
    heads: tl.int32,
    heads_magic: tl.int32,
    heads_shift: tl.int32,
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
    KIND: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Converts ``num_jobs`` jobs of ``words`` words. See `torchkv.kernels.launch` for the arguments.

    Each block takes every ``num_programs``-th tile of ``TILE`` words. MODE: as in `torchkv.kernels.page_copy`. KIND:
    which dtypes, as in `torchkv.host.convert_loops.KINDS`. ELEMENTS: of a word. PARTS: whether pairs are striped or
    smaller than a page. scales: address of a word for each job, the address of its float32 scales ``[heads]``.
    """
    SRC_SIZE: tl.constexpr = 1 if KIND == 2 or KIND == 3 else 2
    DST_SIZE: tl.constexpr = 1 if KIND <= 1 else 2
    src_dtype: tl.constexpr = tl.int8 if SRC_SIZE == 1 else tl.int16
    dst_dtype: tl.constexpr = tl.int8 if DST_SIZE == 1 else tl.int16
    tiles = (words + TILE - 1) // TILE
    element = tl.arange(0, ELEMENTS)[None, :]
    tile = tl.program_id(0)
    while tile < num_jobs * tiles:
        job = tile // tiles
        word = (tile - job * tiles) * TILE + tl.arange(0, TILE)
        live = word < words
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2
        packed = stage + job * stage_stride

        rank = div(word, pair_magic, pair_shift)
        inside = word - rank * words_per_pair
        row = div(inside, row_magic, row_shift)
        column = inside - row * words_per_row
        outer = div(row, n1_magic, n1_shift)
        src_inside = row * s1 + outer * (s0 - n1 * s1) + column * (ELEMENTS * SRC_SIZE)
        dst_inside = row * d1 + outer * (d0 - n1 * d1) + column * (ELEMENTS * DST_SIZE)
        head = div(inside, head_magic, head_shift)
        head -= div(head, heads_magic, heads_shift) * heads
        factors = tl.load(scales.to(tl.pointer_type(tl.int64)) + job).to(tl.pointer_type(tl.float32))
        scale = tl.load(factors + head, mask=live, other=1.0)
        rank += first_rank
        pair = rank
        if PARTS:
            pair = first_pair + rank + div(rank, unit_magic, unit_shift) * jump

        first = live & (inside == 0) & (job == 0)  # all jobs have the same page ids, so only job 0 reports bad ones
        ok = live
        source = packed + word.to(tl.int64) * (ELEMENTS * SRC_SIZE)
        target = packed + word.to(tl.int64) * (ELEMENTS * DST_SIZE)
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

        sources = source.to(tl.pointer_type(src_dtype))[:, None] + element
        targets = target.to(tl.pointer_type(dst_dtype))[:, None] + element
        sources = tl.max_contiguous(tl.multiple_of(sources, [ELEMENTS * SRC_SIZE, ELEMENTS * SRC_SIZE]), [1, ELEMENTS])
        targets = tl.max_contiguous(tl.multiple_of(targets, [ELEMENTS * DST_SIZE, ELEMENTS * DST_SIZE]), [1, ELEMENTS])
        bits = tl.load(sources, mask=ok[:, None], other=0).to(tl.int32)
        bits &= 0xFF if SRC_SIZE == 1 else 0xFFFF
        tl.store(targets, converted(bits, scale[:, None], KIND).to(dst_dtype), mask=ok[:, None])
        tile += tl.num_programs(0)
