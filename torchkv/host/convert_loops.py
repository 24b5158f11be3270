"""Conversion of strided runs between addresses of this process, compiled, without the GIL.

Computes what `torchkv.layout.conversion.convert` computes, bit for bit, but for the sign and payload of NaN: all
roundings are to nearest, ties to even. They are written such that LLVM can vectorise the loops.

Addresses are plain integers, multiples of the size of their elements. The caller must check them against regions;
nothing here does. Source and destination must not overlap.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from torchkv.arrays import Float32Array, Int64Array
from torchkv.errors import ProtocolError
from torchkv.host.atomics import fence
from torchkv.host.copy_loops import StridedRuns, checked_offsets
from torchkv.host.jit import at_register, compiled

__all__ = ["KINDS", "convert_at", "convert_pairs", "warm_up"]

# (dtype of the source, dtype of the destination) -> the argument ``kind`` of `convert_pairs`.
KINDS = {
    (torch.bfloat16, torch.float8_e4m3fn): 0,
    (torch.float16, torch.float8_e4m3fn): 1,
    (torch.float8_e4m3fn, torch.bfloat16): 2,
    (torch.float8_e4m3fn, torch.float16): 3,
    (torch.float16, torch.bfloat16): 4,
    (torch.bfloat16, torch.float16): 5,
}

_U8, _U16, _U32, _F32 = np.uint8, np.uint16, np.uint32, np.float32
_INFINITY = 0x7F800000  # bits of a float32; those of NaN are greater


def _plain_pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(address))


def _make_pointer() -> Any:
    """For compiled code: an address as a pointer, for `numba.carray`. With ``NUMBA_DISABLE_JIT=1`` plain Python."""
    if numba.config.DISABLE_JIT:
        return _plain_pointer

    def pointer(_typing: Any, _address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.int64), codegen

    return intrinsic(pointer)


_pointer = _make_pointer()


@compiled
def _from_bfloat16(half: int) -> Any:
    return _U32(_U32(half) << _U32(16)).view(_F32)


@compiled
def _from_float16(half: int) -> Any:
    bits = _U32(half)
    magnitude = _U32(bits & _U32(0x7FFF))
    # Exponents 1 to 30 get a new bias, exponent 31 (infinity and NaN) the largest one, and 0 is a multiple of 2**-24.
    number = _U32((magnitude << _U32(13)) + _U32(0x38000000))
    number = _U32(number + _U32(0x38000000)) if magnitude >= _U32(0x7C00) else number
    small = _F32(_F32(magnitude) * _F32(2.0**-24)).view(_U32)
    number = small if magnitude < _U32(0x400) else number
    return _U32(number | ((bits & _U32(0x8000)) << _U32(16))).view(_F32)


@compiled
def _from_fp8(byte: int) -> Any:
    bits = _U32(byte)
    magnitude = _U32(bits & _U32(0x7F))
    number = _U32((magnitude << _U32(20)) + _U32(0x3C000000))
    number = _U32(0x7FC00000) if magnitude == _U32(0x7F) else number
    small = _F32(_F32(magnitude) * _F32(2.0**-9)).view(_U32)
    number = small if magnitude < _U32(8) else number
    return _U32(number | ((bits & _U32(0x80)) << _U32(24))).view(_F32)


@compiled
def _to_bfloat16(number: Any) -> Any:
    bits = _U32(_F32(number).view(_U32))
    rounded = _U32((bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))
    return _U16(0x7FC0) if _U32(bits & _U32(0x7FFFFFFF)) > _U32(_INFINITY) else _U16(rounded)


@compiled
def _to_float16(number: Any) -> Any:
    bits = _U32(_F32(number).view(_U32))
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    rounded = _U32((magnitude - _U32(0x38000000) + _U32(0xFFF) + ((magnitude >> _U32(13)) & _U32(1))) >> _U32(13))
    # Below 2**-14 the result is a multiple of 2**-24: as the last bits of a sum with a float32 of that precision.
    small = _U32(_F32(_U32(magnitude).view(_F32) + _F32(0.5)).view(_U32) - _U32(0x3F000000))
    half = small if magnitude < _U32(0x38800000) else rounded
    half = _U32(0x7C00) if magnitude >= _U32(0x477FF000) else half  # rounds to 65536
    half = _U32(0x7E00) if magnitude > _U32(_INFINITY) else half
    return _U16(half | ((bits >> _U32(16)) & _U32(0x8000)))


@compiled
def _to_fp8(number: Any) -> Any:
    bits = _U32(_F32(number).view(_U32))
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    clamped = _U32(min(magnitude, _U32(0x43E00000)))  # 448
    rounded = _U32((clamped - _U32(0x3C000000) + _U32(0x7FFFF) + ((clamped >> _U32(20)) & _U32(1))) >> _U32(20))
    # Below 2**-6 the result is a multiple of 2**-9, as in `_to_float16`.
    small = _U32(_F32(_U32(clamped).view(_F32) + _F32(16384.0)).view(_U32) - _U32(0x46800000))
    byte = small if clamped < _U32(0x3C800000) else rounded
    byte = _U32(0x7F) if magnitude > _U32(_INFINITY) else byte
    return _U8(byte | ((bits >> _U32(24)) & _U32(0x80)))


@compiled
def _convert(kind: int, src: int, dst: int, count: int, scale: Any) -> None:
    """Converts ``count`` contiguous elements."""
    # np.divide: for ``/`` numba would check in the loop that the scale is not 0, and LLVM could not vectorise it.
    if kind == 0:
        halves, bytes_ = numba.carray(_pointer(src), count, _U16), numba.carray(_pointer(dst), count, _U8)
        for i in range(count):
            bytes_[i] = _to_fp8(_F32(np.divide(_from_bfloat16(halves[i]), scale)))
    elif kind == 1:
        halves, bytes_ = numba.carray(_pointer(src), count, _U16), numba.carray(_pointer(dst), count, _U8)
        for i in range(count):
            bytes_[i] = _to_fp8(_F32(np.divide(_from_float16(halves[i]), scale)))
    elif kind == 2:
        bytes_, halves = numba.carray(_pointer(src), count, _U8), numba.carray(_pointer(dst), count, _U16)
        for i in range(count):
            halves[i] = _to_bfloat16(_F32(_from_fp8(bytes_[i]) * scale))
    elif kind == 3:
        bytes_, halves = numba.carray(_pointer(src), count, _U8), numba.carray(_pointer(dst), count, _U16)
        for i in range(count):
            halves[i] = _to_float16(_F32(_from_fp8(bytes_[i]) * scale))
    elif kind == 4:
        here, there = numba.carray(_pointer(src), count, _U16), numba.carray(_pointer(dst), count, _U16)
        for i in range(count):
            there[i] = _to_bfloat16(_from_float16(here[i]))
    else:
        here, there = numba.carray(_pointer(src), count, _U16), numba.carray(_pointer(dst), count, _U16)
        for i in range(count):
            there[i] = _to_float16(_from_bfloat16(here[i]))


@compiled
def convert_at(
    kind: int,
    src_size: int,
    dst_size: int,
    src_ptr: int,
    dst_ptr: int,
    src_off: Int64Array,
    dst_off: Int64Array,
    first: int,
    last: int,
    n0: int,
    s0: int,
    d0: int,
    n1: int,
    s1: int,
    d1: int,
    run: int,
    head_elements: int,
    scales_ptr: int,
    heads: int,
) -> None:
    """`convert_pairs` without its checks, for compiled callers.

    kind: of `KINDS`. src_size, dst_size: bytes of an element of the source and of the destination. scales_ptr: address
    of the float32 scales of the ``heads``.
    """
    scales = numba.carray(_pointer(scales_ptr), heads, _F32)
    elements = run // dst_size
    for i in range(first, last):
        for a in range(n0):
            for b in range(n1):
                src = src_ptr + src_off[i] + a * s0 + b * s1
                dst = dst_ptr + dst_off[i] + a * d0 + b * d1
                packed = (a * n1 + b) * elements
                done = 0
                while done < elements:
                    head, inside = divmod(packed + done, head_elements)
                    count = min(elements - done, head_elements - inside)
                    scale = scales[head % heads]
                    _convert(kind, src + done * src_size, dst + done * dst_size, count, scale)
                    done += count
    fence()


def convert_pairs(
    dtypes: tuple[torch.dtype, torch.dtype],
    src_ptr: int,
    dst_ptr: int,
    src_off: Int64Array,
    dst_off: Int64Array,
    first: int,
    last: int,
    rows: StridedRuns,
    head_elements: int,
    scales: Float32Array,
) -> None:
    """Converts the runs described by ``rows`` between each pair of pages ``first <= i < last``.

    dtypes: of source and destination, a key of `KINDS`. Offsets and ``rows`` as for
    `torchkv.host.copy_loops.copy_pairs`, with source offsets and strides in the source's bytes, and all others, also
    ``run``, in the destination's. scales: float32 ``[heads]``. Element number e of a pair, row after row, has the scale
    number ``e // head_elements % heads``. Visibility as for `copy_pairs`. Raises ``ProtocolError`` for arrays of the
    wrong kind and for counts out of range.
    """
    if min(rows[0], rows[3], rows[6]) < 0 or head_elements < 1 or not len(scales) or scales.dtype != np.float32:
        raise ProtocolError(f"rows {rows}, {head_elements} elements of a head, scales {scales.shape} {scales.dtype}")
    src_off, dst_off = checked_offsets(first, last, src_off, dst_off)
    scales = np.ascontiguousarray(scales)
    sizes = dtypes[0].itemsize, dtypes[1].itemsize
    with np.errstate(all="ignore"):  # without the compiler, numpy warns where machine words wrap
        convert_at(
            KINDS[dtypes],
            *sizes,
            src_ptr,
            dst_ptr,
            src_off,
            dst_off,
            first,
            last,
            *rows,
            head_elements,
            scales.ctypes.data,
            len(scales),
        )


@at_register
def warm_up() -> None:
    """Loads the compiled functions, or compiles them."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.float32)
    for dtypes in KINDS:
        convert_pairs(dtypes, 0, 0, none, none, 0, 0, (0, 0, 0, 0, 0, 0, 0), 1, one)
