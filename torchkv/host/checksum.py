"""The checksum of one page pair of one component and layer: its definition, and its computation on the host.

The pair's packed bytes (row after row, see `torchkv.layout.pieces`) are read as little-endian words W_j of four bytes,
the last one padded with zeros. The checksum is

    seed(nbytes) + sum of W_j * K_j  mod 2**64,    K_j = splitmix64(j) | 1,    seed(n) = splitmix64(2**64 - 1 - n)

Since it is a sum, words may be added in any order and several at once, by many threads, on a GPU as well as on a host.
It does not depend on where pages lie. Because of the seed, the all-zero bytes and sums of a stage that was never
written do not match.

It detects any change within one word, since an odd K_j has an inverse. A change of several words, such as rows
exchanged or left out, goes undetected with a probability of about 2**-63, or 2**-(63 - b) if every word changed by a
multiple of 2**b (b is at most 31). It is not a message authentication code: a process that can write the bytes can also
write the matching sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchkv.arrays import Int64Array, UInt64Array
from torchkv.errors import ProtocolError
from torchkv.host.copy_loops import prefetch
from torchkv.host.jit import at_register, compiled

__all__ = ["PagePattern", "keys", "page_sums", "seed", "warm_up"]

WORD_NBYTES = 4
_LINE = 64  # bytes of a cache line
_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class PagePattern(NamedTuple):
    """Where the packed bytes of a pair lie in its page: for a < n0, b < n1, ``run`` bytes at offset a * s0 + b * s1."""

    n0: int
    s0: int
    n1: int
    s1: int
    run: int


def seed(nbytes: int) -> int:
    """The value that the sum over a pair of ``nbytes`` bytes starts with, in [0, 2**64)."""
    return int(_splitmix64(np.array([_MASK - nbytes], np.uint64))[0])


def keys(count: int) -> UInt64Array:
    """K_0 to K_(count - 1), uint64 ``[count]``, read-only."""
    return _keys((count - 1).bit_length() if count > 1 else 0)[:count]


@cache
def _keys(bits: int) -> UInt64Array:
    """The first 2**bits keys. Powers of two, so that all cached tables together are at most twice the largest."""
    table = _splitmix64(np.arange(1 << bits, dtype=np.uint64)) | np.uint64(1)
    table.flags.writeable = False
    return table


def _splitmix64(number: UInt64Array) -> UInt64Array:
    """One step of the SplitMix64 generator, from each of the states ``number``."""
    mixed = number + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX2)
    return mixed ^ (mixed >> np.uint64(31))


def page_sums(ptr: int, offsets: Int64Array, first: int, last: int, pattern: PagePattern, sums: Int64Array) -> None:
    """Stores the checksum of pair i in ``sums[i]``, int64 ``[n]``, for ``first <= i < last``. Releases the GIL.

    ptr, offsets: pair i begins at address ``ptr + offsets[i]``; offsets are int64 ``[n]``, in bytes. pattern: where the
    bytes of a pair lie from there. Addresses are trusted. Raises ``ProtocolError`` for arrays of the wrong kind and
    counts out of range.
    """
    if min(pattern.n0, pattern.n1, pattern.run) < 0:
        raise ProtocolError(f"{pattern}: n0, n1 and run must not be negative")
    for array in (offsets, sums):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ProtocolError(f"offsets and sums must be contiguous int64 [n], not {array.dtype} {array.shape}")
    if not 0 <= first <= last <= min(len(offsets), len(sums)):
        raise ProtocolError(f"pairs {first}..{last} of {len(offsets)} offsets and {len(sums)} sums")
    view = offsets.view()
    view.flags.writeable = False  # always, because numba compiles read-only and writable arrays separately
    nbytes = pattern.n0 * pattern.n1 * pattern.run
    start = seed(nbytes)
    _sums(ptr, view, first, last, *pattern, keys(-(-nbytes // WORD_NBYTES)), start - (start >> 63 << 64), sums)


@at_register
def warm_up() -> None:
    """Loads the compiled function, or compiles it (seconds, once per machine where a cache can be written)."""
    none = np.zeros(0, np.int64)
    page_sums(0, none, 0, 0, PagePattern(0, 0, 0, 0, 0), none)


def _loads(bits: int) -> Callable[[int, int], Any]:
    """For compiled code: a function that loads element ``index`` of the unsigned ``bits``-bit integers at ``base``.

    ``base`` may have any alignment. LLVM vectorises the loop only if the address is a pointer and an index, not a sum
    of integers.
    """

    def declare(_typing: Any, base: Any, index: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            number = ir.IntType(bits)
            pointer = builder.inttoptr(arguments[0], number.as_pointer())
            loaded = builder.load(builder.gep(pointer, [arguments[1]], source_etype=number), align=1, typ=number)
            return builder.zext(loaded, ir.IntType(64))

        return types.uint64(types.int64, types.int64), codegen

    return cast(Callable[[int, int], Any], intrinsic(declare))


_word = _loads(32)
_byte = _loads(8)


@compiled
def _sums(
    ptr: int,
    offsets: Int64Array,
    first: int,
    last: int,
    n0: int,
    s0: int,
    n1: int,
    s1: int,
    run: int,
    keys: UInt64Array,
    start: int,
    sums: Int64Array,
) -> None:
    for i in range(first, last):
        total = np.uint64(start)
        at = 0  # offset in the packed bytes
        for a in range(n0):
            for b in range(n1):
                row = ptr + offsets[i] + a * s0 + b * s1
                if b + 1 < n1:
                    for ahead in range(s1, s1 + run, _LINE):
                        prefetch(row + ahead)  # the hardware prefetcher cannot predict the next row of a strided page
                if run % 4 == 0:
                    here = keys[at // 4 : (at + run) // 4]
                    for j in range(len(here)):
                        total += _word(row, j) * here[j]
                else:
                    for j in range(run):
                        place = np.uint64(8 * ((at + j) % 4))
                        total += (_byte(row, j) << place) * keys[(at + j) // 4]
                at += run
        sums[i] = np.int64(total)
