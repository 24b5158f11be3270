"""The Triton kernel that copies pages and converts their elements to another dtype on the way.

`torchkv.kernels.copies` is its interface; `torchkv.kernels.launch` launches it. It addresses pages as
`torchkv.kernels.page_copy` does, but a word is a number of elements, of unlike bytes on both sides. It
computes what `torchkv.layout.conversion.convert` computes, bit for bit, but for the sign and payload of NaN.

GPUs since compute capability 8.9 convert all dtypes themselves (``NATIVE``), two elements an instruction. For older
ones, and for Triton's interpreter, which rounds otherwise, narrow dtypes are handled as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchkv.kernels.page_copy import div, draw, leave, locate, pointers, report

__all__ = ["NUM_INTEGERS", "convert"]

NUM_INTEGERS = 54  # runtime parameters of the kernel; the rest are constants


@triton.jit
def over(number, power, divisor, reciprocal):
    """number / scale, rounded once, for all quotients that fp8 tells from 0 and 448. The others stay below or above.

    A true division takes a branch for each element. Its fast half takes five operations where the reciprocal is known:
    a quotient and two corrections by what it leaves (Markstein 1990). With `normal` it holds for any scale.
    """
    # So that nothing overflows: a divisor is less than 2.
    number = tl.clamp(number * power, -4096.0, 4096.0, propagate_nan=tl.PropagateNan.ALL)
    quotient = number * reciprocal
    quotient = tl.fma(tl.fma(-divisor, quotient, number), reciprocal, quotient)
    quotient = tl.fma(tl.fma(-divisor, quotient, number), reciprocal, quotient)
    sign = number.to(tl.int32, bitcast=True) & -2147483648  # which corrections of a zero lose
    return (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def normal(scale):
    """A power of two, and its product with ``scale``: from 1 to 2, or where ``scale`` is denormal from 2**-22."""
    field = scale.to(tl.int32, bitcast=True) >> 23
    power = tl.maximum((254 - field) << 23, 1 << 22).to(tl.float32, bitcast=True)
    return power, scale * power


@triton.jit
def native(bits, scale, power, divisor, reciprocal, KIND: tl.constexpr):
    """The elements of which ``bits`` are the bits, converted. scale: of each; see `over`. KIND: as of `convert`."""
    src: tl.constexpr = (
        tl.bfloat16 if KIND == 0 or KIND == 5 else tl.float8e4nv if KIND == 2 or KIND == 3 else tl.float16
    )
    dst: tl.constexpr = tl.float8e4nv if KIND <= 1 else tl.bfloat16 if KIND == 2 or KIND == 4 else tl.float16
    number = bits.to(src, bitcast=True).to(tl.float32)
    if KIND <= 1:
        number = over(number, power, divisor, reciprocal)
    elif KIND <= 3:
        number *= scale
    return number.to(dst).to(tl.int8 if KIND <= 1 else tl.int16, bitcast=True)


# Of all that follows up to `emulated`, ``magnitude`` is the bits of an element without its sign, and numbers are
# float32, not negative. NaN is left to `emulated`.


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
def emulated(bits, scale, power, divisor, reciprocal, KIND: tl.constexpr):
    """As `native`, on any GPU."""
    bits = bits.to(tl.int32)
    if KIND == 0 or KIND == 5:
        magnitude, nan, number = bits & 0x7FFF, 0x7F80, from_bfloat16(bits & 0x7FFF)
    elif KIND == 1 or KIND == 4:
        magnitude, nan, number = bits & 0x7FFF, 0x7C00, from_float16(bits & 0x7FFF)
    else:
        magnitude, nan, number = bits & 0x7F, 0x7E, from_fp8(bits & 0x7F)
    if KIND <= 1:
        result = tl.where(magnitude > nan, 0x7F, to_fp8(over(number, power, divisor, reciprocal)))
        result = (result | ((bits >> 8) & 0x80)).to(tl.int8)
    else:
        if KIND <= 3:
            number *= scale
        sign = (bits & 0x80) << 8 if KIND <= 3 else bits & 0x8000
        if KIND == 2 or KIND == 4:
            result = tl.where(magnitude > nan, 0x7FC0, to_bfloat16(number)) | sign
        else:
            result = tl.where(magnitude > nan, 0x7E00, to_float16(number)) | sign
        result = result.to(tl.int16)
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
    tickets: tl.int64,
    completion: tl.int64,
    number: tl.int64,
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
    src_step: tl.int32,
    dst_step: tl.int32,
    order0: tl.int32,
    order1: tl.int32,
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
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Converts ``num_jobs`` jobs of ``words`` words. See `torchkv.kernels.launch` for the arguments.

    MODE, PARTS, STEPS, TILE: as of `torchkv.kernels.page_copy.copy`. KIND: which dtypes, as in
    `torchkv.host.convert_loops.KINDS`. ELEMENTS: of a word. order0, order1: by how many words of a stage a pair's rows
    lie apart. scales: address of a word for each job, the address of its float32 scales ``[heads]``. A word is of the
    same head in all steps.
    """
    SRC_SIZE: tl.constexpr = 1 if KIND == 2 or KIND == 3 else 2
    DST_SIZE: tl.constexpr = 1 if KIND <= 1 else 2
    src_dtype: tl.constexpr = tl.int8 if SRC_SIZE == 1 else tl.int16
    dst_dtype: tl.constexpr = tl.int8 if DST_SIZE == 1 else tl.int16
    element = tl.arange(0, ELEMENTS)[None, :]
    tiles = (words + TILE - 1) // TILE
    tile = tl.program_id(0)
    while tile < num_jobs * tiles:
        job = tile // tiles
        word = (tile - job * tiles) * TILE + tl.arange(0, TILE)
        ok = word < words
        bases = jobs.to(tl.pointer_type(tl.int64)) + job * 2

        rank = div(word, pair_magic, pair_shift)
        inside = word - rank * words_per_pair
        row = div(inside, row_magic, row_shift)
        column = inside - row * words_per_row
        outer = div(row, n1_magic, n1_shift)
        inner = row - outer * n1
        src_inside = outer * s0 + inner * s1 + column * (ELEMENTS * SRC_SIZE)
        dst_inside = outer * d0 + inner * d1 + column * (ELEMENTS * DST_SIZE)
        head = div(outer * order0 + inner * order1 + column, head_magic, head_shift)
        head -= div(head, heads_magic, heads_shift) * heads
        factors = tl.load(scales.to(tl.pointer_type(tl.int64)) + job).to(tl.pointer_type(tl.float32))
        scale = tl.load(factors + head, mask=ok, other=1.0)
        power, divisor = normal(scale)
        reciprocal = tl.div_rn(1.0, divisor)
        packed = stage + job * stage_stride
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

        read = ()
        for step in tl.static_range(STEPS):
            sources = pointers(source + step * src_step, element, ELEMENTS * SRC_SIZE, src_dtype)
            read += (tl.load(sources, mask=ok[:, None], other=0),)  # type: ignore[assignment]  # longer than before
        tile = draw(tickets)
        for step in tl.static_range(STEPS):
            arguments = read[step], scale[:, None], power[:, None], divisor[:, None], reciprocal[:, None]
            targets = pointers(target + step * dst_step, element, ELEMENTS * DST_SIZE, dst_dtype)
            if NATIVE:
                tl.store(targets, native(*arguments, KIND), mask=ok[:, None])
            else:
                tl.store(targets, emulated(*arguments, KIND), mask=ok[:, None])
    leave(tickets, completion, number)
