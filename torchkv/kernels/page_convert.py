"""The Triton kernel that copies pages and converts their elements to another dtype on the way.

`torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it. It addresses pages as
`torchkv.kernels.page_copy` does, but a word is a number of elements, of unlike bytes on both sides. It
computes what `torchkv.layout.conversion.convert` computes, bit for bit, but for the sign and payload of NaN: narrow
dtypes are handled as integers, so that any GPU, and Triton's interpreter, round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchkv.kernels.page_copy import div, locate, report

__all__ = ["NUM_INTEGERS", "convert"]

NUM_INTEGERS = 47  # runtime parameters of the kernel; the rest are constants


# Of all that follows, ``magnitude`` is the bits of an element without its sign, and numbers are float32, not negative.
# NaN is left to `converted`.


@triton.jit
def from_bfloat16(magnitude):
    return (magnitude << 16).to(tl.float32, bitcast=True)


@triton.jit
def from_float16(magnitude):
    # The bits of a float32 whose exponent is 2**112 times too small, which is exact for denormals too; infinity apart.
    number = (magnitude << 13).to(tl.float32, bitcast=True) * 5.192296858534828e33
    return tl.where(magnitude == 0x7C00, float("inf"), number)


@triton.jit
def from_fp8(magnitude):
    return (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120; see `from_float16`


@triton.jit
def to_bfloat16(number):
    bits = number.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def to_float16(number):
    bits = number.to(tl.int32, bitcast=True)
    # Exponents 1 to 30 get a new bias. Below 2**-14 the result is a multiple of 2**-24: as the last bits of a sum with
    # a float32 of that precision. The minimum keeps compilers from rounding a product and this sum at once.
    rounded = (bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13
    small = (tl.minimum(bits, 0x38800000).to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
    half = tl.where(bits < 0x38800000, small, rounded)
    return tl.where(bits >= 0x477FF000, 0x7C00, half)  # rounds to 65536


@triton.jit
def to_fp8(number):
    clamped = tl.minimum(number.to(tl.int32, bitcast=True), 0x43E00000)  # 448
    rounded = (clamped - 0x3C000000 + 0x7FFFF + ((clamped >> 20) & 1)) >> 20
    # Below 2**-6 the result is a multiple of 2**-9, as in `to_float16`.
    small = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(clamped < 0x3C800000, small, rounded)


@triton.jit
def over(number, power, divisor, reciprocal):
    """number / scale, rounded once, for all quotients that fp8 tells from 0 and 448. The others stay below or above.

    A true division takes a branch for each element. Its fast half takes five operations where the reciprocal is known:
    a quotient and two corrections by what it leaves (Markstein 1990). With `normal` it holds for any scale.
    """
    number = tl.minimum(number * power, 4096.0)  # so that nothing overflows: a divisor is less than 2
    quotient = number * reciprocal
    quotient = tl.fma(tl.fma(-divisor, quotient, number), reciprocal, quotient)
    return tl.fma(tl.fma(-divisor, quotient, number), reciprocal, quotient)


@triton.jit
def normal(scale):
    """A power of two, and its product with ``scale``: from 1 to 2, or where ``scale`` is denormal from 2**-22."""
    field = scale.to(tl.int32, bitcast=True) >> 23
    power = tl.maximum((254 - field) << 23, 1 << 22).to(tl.float32, bitcast=True)
    return power, scale * power


@triton.jit
def converted(bits, scale, power, divisor, reciprocal, KIND: tl.constexpr):
    """The elements of which ``bits`` are the bits, converted, as bits. scale: of each; see `over`. KIND: as there."""
    if KIND == 0 or KIND == 5:
        magnitude, nan, number = bits & 0x7FFF, 0x7F80, from_bfloat16(bits & 0x7FFF)
    elif KIND == 1 or KIND == 4:
        magnitude, nan, number = bits & 0x7FFF, 0x7C00, from_float16(bits & 0x7FFF)
    else:
        magnitude, nan, number = bits & 0x7F, 0x7E, from_fp8(bits & 0x7F)
    if KIND <= 1:
        result = tl.where(magnitude > nan, 0x7F, to_fp8(over(number, power, divisor, reciprocal)))
        result |= (bits >> 8) & 0x80
    else:
        if KIND <= 3:
            number *= scale
            sign = (bits & 0x80) << 8
        else:
            sign = bits & 0x8000
        if KIND == 2 or KIND == 4:
            result = tl.where(magnitude > nan, 0x7FC0, to_bfloat16(number)) | sign
        else:
            result = tl.where(magnitude > nan, 0x7E00, to_float16(number)) | sign
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
        power, divisor = normal(scale)
        reciprocal = tl.div_rn(1.0, divisor)
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
        result = converted(bits, scale[:, None], power[:, None], divisor[:, None], reciprocal[:, None], KIND)
        tl.store(targets, result.to(dst_dtype), mask=ok[:, None])
        tile += tl.num_programs(0)
