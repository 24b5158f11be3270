"""Strided copies between addresses of this process, compiled, without the GIL.

A page transfer between host pools is bound by memory bandwidth, so these copies use:

* Non-temporal stores. An ordinary store first reads the cache line that it overwrites, and leaves it in the cache;
  a receiver's pool is far larger than any cache.
* Two runs alternately, four lines each. Pages are scattered, so each begins with misses in cache and TLB; a second,
  independent run keeps the memory busy meanwhile. Four runs, or single lines alternately, were slower: too many
  half-filled write-combining buffers.
* Prefetches of the first lines of the next two pages, and of the next row of a strided source, which the hardware
  prefetcher cannot predict.
* No library memcpy for long runs to unaligned addresses: where it uses ``rep movsb`` that costs a factor of five.

Addresses are plain integers. The caller must check them against regions; nothing here does. Source and destination must
not overlap.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
from llvmlite import ir

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError
from torchkv.host.jit import at_register, compiled, primitive

__all__ = [
    "SHORT_RUN",
    "STEP_BYTES",
    "StridedRuns",
    "checked_offsets",
    "copy_bytes",
    "copy_pairs",
    "copy_spans",
    "pairs_at",
    "prefetch",
    "spans_at",
    "warm_up",
]

StridedRuns = tuple[int, int, int, int, int, int, int]  # n0, s0, d0, n1, s1, d1, run; see `copy_pairs`

# One step of a host copy. It takes about two milliseconds: short enough for the progress thread to stay responsive, and
# long compared with the tenth of a millisecond that the rest of the thread's loop takes.
STEP_BYTES = 16 << 20

# Bytes. Many rows shorter than this are worth merging before they are copied.
SHORT_RUN = 4096

_DTYPE = np.dtype(np.int64)
_LINE = 64  # bytes of a cache line
_TURN = 4 * _LINE  # bytes copied of one run before it is the other's turn
_NONTEMPORAL_MIN = 128  # bytes; shorter runs are copied with ordinary stores
_AHEAD = 8 * _LINE  # bytes prefetched of the next runs; the hardware prefetcher takes over from there

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_INT64, 4)
_VECTOR_NBYTES = 32


def _plain_copy(dst: int, src: int, nbytes: int) -> int:
    ctypes.memmove(int(dst), int(src), int(nbytes))
    return 0


def _emit_copy(builder: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    function = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _INT64])
    volatile = ir.Constant(ir.IntType(1), 0)
    return builder.call(function, [builder.inttoptr(dst, _BYTES), builder.inttoptr(src, _BYTES), nbytes, volatile])


def _emit_nontemporal_line(builder: Any, dst: Any, src: Any) -> Any:
    pointer = _VECTOR.as_pointer()
    offsets = [ir.Constant(_INT64, offset) for offset in range(0, _LINE, _VECTOR_NBYTES)]
    vectors = [
        builder.load(builder.inttoptr(builder.add(src, offset), pointer), align=1, typ=_VECTOR) for offset in offsets
    ]
    once = builder.module.add_metadata([ir.Constant(_INT32, 1)])
    for offset, vector in zip(offsets, vectors, strict=True):
        address = builder.inttoptr(builder.add(dst, offset), pointer)
        store = builder.store(vector, address, align=_VECTOR_NBYTES)
        store.set_metadata("nontemporal", once)
    return store


def _emit_prefetch(builder: Any, address: Any) -> Any:
    signature = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], signature)
    read, keep, data = (ir.Constant(_INT32, value) for value in (0, 3, 1))
    return builder.call(function, [builder.inttoptr(address, _BYTES), read, keep, data])


def _emit_fence(builder: Any) -> Any:
    fence = builder.fence("seq_cst")
    if not _IS_X86:
        return fence
    # LLVM's fence becomes a locked instruction on x86, which need not order non-temporal stores.
    sfence = builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), ir.FunctionType(ir.VoidType(), ()))
    return builder.call(sfence, ())


# copy_bytes(dst, src, nbytes): for compiled code; they must not overlap.
copy_bytes = primitive(3, _emit_copy, _plain_copy)
# Copies one cache line with non-temporal stores; ``dst`` must be a multiple of 64, ``src`` need not.
_nontemporal_line = primitive(2, _emit_nontemporal_line, lambda dst, src: _plain_copy(dst, src, _LINE))
# Prefetches a cache line. A hint: harmless at any address, mapped or not.
prefetch = primitive(1, _emit_prefetch, lambda address: 0)
# Orders non-temporal stores before any later store, such as the one that publishes the bytes.
_fence = primitive(0, _emit_fence, lambda: 0)


@compiled
def _copy_one(dst: int, src: int, nbytes: int) -> None:
    if nbytes < _NONTEMPORAL_MIN:
        copy_bytes(dst, src, nbytes)
        return
    done = -dst & (_LINE - 1)
    if done > 0:
        copy_bytes(dst, src, done)
    while done + _LINE <= nbytes:
        _nontemporal_line(dst + done, src + done)
        done += _LINE
    if done < nbytes:
        copy_bytes(dst + done, src + done, nbytes - done)


@compiled
def _copy_two(dst0: int, src0: int, dst1: int, src1: int, nbytes: int) -> None:
    if nbytes < _NONTEMPORAL_MIN or (dst0 | dst1) & (_LINE - 1) != 0:
        _copy_one(dst0, src0, nbytes)
        _copy_one(dst1, src1, nbytes)
        return
    done = 0
    while done + _TURN <= nbytes:
        for at in range(done, done + _TURN, _LINE):
            _nontemporal_line(dst0 + at, src0 + at)
        for at in range(done, done + _TURN, _LINE):
            _nontemporal_line(dst1 + at, src1 + at)
        done += _TURN
    if done < nbytes:
        _copy_one(dst0 + done, src0 + done, nbytes - done)
        _copy_one(dst1 + done, src1 + done, nbytes - done)


@compiled
def _prefetch_run(dst: int, src: int, nbytes: int) -> None:
    prefetch(dst)  # one line, to load its TLB entry
    for at in range(0, min(nbytes, _AHEAD), _LINE):
        prefetch(src + at)


@compiled
def pairs_at(
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
) -> None:
    """`copy_pairs` without its checks, for compiled code."""
    ahead = min(run, _AHEAD)
    source_strided = n1 > 1 and s1 != run
    for i in range(first, last, 2):
        k = min(i + 1, last - 1)
        for j in range(i + 2, min(i + 4, last)):
            _prefetch_run(dst_ptr + dst_off[j], src_ptr + src_off[j], run)
        for a in range(n0):
            for b in range(n1):
                dst = dst_ptr + a * d0 + b * d1
                src = src_ptr + a * s0 + b * s1
                if source_strided:
                    for at in range(s1, s1 + ahead, _LINE):
                        prefetch(src + src_off[i] + at)
                        prefetch(src + src_off[k] + at)
                if i < k:
                    _copy_two(dst + dst_off[i], src + src_off[i], dst + dst_off[k], src + src_off[k], run)
                else:
                    _copy_one(dst + dst_off[i], src + src_off[i], run)
    _fence()


@compiled
def spans_at(
    src_ptr: int,
    dst_ptr: int,
    src_off: Int64Array,
    dst_off: Int64Array,
    length: Int64Array,
    first: int,
    last: int,
) -> None:
    """`copy_spans` without its checks, for compiled code."""
    for i in range(first, last, 2):
        k = min(i + 1, last - 1)
        for j in range(i + 2, min(i + 4, last)):
            _prefetch_run(dst_ptr + dst_off[j], src_ptr + src_off[j], length[j])
        # Two spans alternately up to the length of the shorter one, then the rest of the longer one.
        both = min(length[i], length[k]) if i < k else 0
        _copy_two(dst_ptr + dst_off[i], src_ptr + src_off[i], dst_ptr + dst_off[k], src_ptr + src_off[k], both)
        for j in range(i, k + 1):
            _copy_one(dst_ptr + dst_off[j] + both, src_ptr + src_off[j] + both, length[j] - both)
    _fence()


def copy_pairs(
    src_ptr: int, dst_ptr: int, src_off: Int64Array, dst_off: Int64Array, first: int, last: int, rows: StridedRuns
) -> None:
    """Copies the runs described by ``rows`` between each pair of pages ``first <= i < last``.

    src_off, dst_off: int64 ``[n]``, byte offsets of the pages from the addresses ``src_ptr`` and ``dst_ptr``.
    rows: ``(n0, s0, d0, n1, s1, d1, run)``. For a < n0 and b < n1, ``run`` bytes go from offset
    ``src_off[i] + a * s0 + b * s1`` to ``dst_off[i] + a * d0 + b * d1``; strides are in bytes.

    When this has returned, any thread or process that is told so sees the bytes. Runs must not overlap.
    Raises ``ProtocolError`` for offsets of the wrong kind and for counts out of range.
    """
    if rows[0] < 0 or rows[3] < 0 or rows[6] < 0:
        raise ProtocolError(f"rows {rows}: n0, n1 and run must not be negative")
    src_off, dst_off = checked_offsets(first, last, src_off, dst_off)
    pairs_at(src_ptr, dst_ptr, src_off, dst_off, first, last, *rows)


def copy_spans(
    src_ptr: int, dst_ptr: int, src_off: Int64Array, dst_off: Int64Array, length: Int64Array, first: int, last: int
) -> None:
    """Copies ``length[i]`` bytes from offset ``src_off[i]`` to ``dst_off[i]`` for ``first <= i < last``.

    All three are int64 ``[n]``, in bytes; see `copy_pairs` for visibility, overlap and errors.
    """
    src_off, dst_off, length = checked_offsets(first, last, src_off, dst_off, length)
    if (length[first:last] < 0).any():
        raise ProtocolError(f"a span among {first}..{last} has a negative length: {int(length[first:last].min())}")
    spans_at(src_ptr, dst_ptr, src_off, dst_off, length, first, last)


@at_register
def warm_up() -> None:
    """Loads the compiled functions, or compiles them (seconds, once per machine where a cache can be written)."""
    none = np.zeros(0, np.int64)
    copy_pairs(0, 0, none, none, 0, 0, (0, 0, 0, 0, 0, 0, 0))
    copy_spans(0, 0, none, none, none, 0, 0)


def checked_offsets(first: int, last: int, *arrays: Int64Array) -> list[Int64Array]:
    """The arrays as the compiled functions expect them. Raises ``ProtocolError`` for arrays of the wrong kind."""
    for array in arrays:
        if array.dtype != _DTYPE or array.ndim != 1 or not array.flags.c_contiguous:
            raise ProtocolError(
                f"offsets must be contiguous one-dimensional int64, not {array.dtype} of shape {array.shape}"
            )
    if not 0 <= first <= last <= min(map(len, arrays)):
        raise ProtocolError(f"entries {first}..{last} of offset arrays of lengths {[len(a) for a in arrays]}")
    # numba compiles a function separately for each mixture of read-only and writable arrays; most are writable.
    return [array if array.flags.writeable else array.copy() for array in arrays]
