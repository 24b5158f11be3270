"""The checksum of one page pair of one component and layer: what it is, and how the host computes it.

Of the pair's packed bytes (row after row, see `torchkv.pieces`), as little-endian words W_j of four bytes, the last one
filled up with zeros:

    seed(nbytes) + sum of W_j * K_j  mod 2**64,    K_j = splitmix64(j) | 1,    seed(n) = splitmix64(2**64 - 1 - n)

It is a sum, so words may be added up in any order and at any width, by many threads, on a GPU as on a host; it does not
depend on where pages lie. The seed makes a stage that nobody wrote, all zeros, a wrong one.

What it detects: any change within one word for certain, since an odd K_j has an inverse. A change of several words,
such as rows exchanged or left out, goes unnoticed with a chance of about 2**-63, or 2**-(63 - b) if every word changed
by a multiple of 2**b (b is at most 31). It is no message authentication code: whoever can write the bytes can write the
sum that belongs to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchkv.compiled import compiled
from torchkv.errors import ProtocolError
from torchkv.hostcopy import prefetch

__all__ = ["PagePattern", "checksum_reference", "keys", "page_sums", "seed", "warm_up"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

WORD_NBYTES = 4
_LINE = 64  # bytes of a cache line
_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class PagePattern(NamedTuple):
    """Where the packed bytes of a pair lie in its page: for a < n0, b < n1, ``run`` bytes at a * s0 + b * s1."""

    n0: int
    s0: int
    n1: int
    s1: int
    run: int


def seed(nbytes: int) -> int:
    """What the sum over a pair of ``nbytes`` bytes begins with."""
    return int(_splitmix64(np.array([_MASK - nbytes], np.uint64))[0])


def keys(count: int) -> UInt64Array:
    """K_0 to K_(count - 1), uint64 ``[count]``, read-only."""
    return _keys((count - 1).bit_length() if count > 1 else 0)[:count]


@cache
def _keys(bits: int) -> UInt64Array:
    """2**bits keys: as many tables as there are sizes, and all together twice the largest."""
    table = _splitmix64(np.arange(1 << bits, dtype=np.uint64)) | np.uint64(1)
    table.flags.writeable = False
    return table


def _splitmix64(number: UInt64Array) -> UInt64Array:
    """One step of the SplitMix64 generator from each state."""
    mixed = number + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX2)
    return mixed ^ (mixed >> np.uint64(31))


def checksum_reference(packed: npt.NDArray[np.uint8]) -> int:
    """The definition in plain numpy. packed: uint8 ``[nbytes]``. As a signed number, as it is stored."""
    count = -(-len(packed) // WORD_NBYTES)
    filled = np.zeros(count * WORD_NBYTES, np.uint8)
    filled[: len(packed)] = packed
    total = seed(len(packed))
    for word, key in zip(filled.view("<u4").tolist(), keys(count).tolist(), strict=True):
        total += word * key
    total &= _MASK
    return total - (total >> 63 << 64)


def page_sums(ptr: int, offsets: Int64Array, first: int, last: int, pattern: PagePattern, sums: Int64Array) -> None:
    """Stores the checksum of pair i in ``sums[i]`` for ``first <= i < last``. Runs without the GIL.

    ptr, offsets: pair i begins at address ``ptr + offsets[i]``, int64 ``[n]`` in bytes; its bytes lie there by
    ``pattern``. Addresses are trusted. Raises ``ProtocolError`` for arrays of the wrong kind and counts out of range.
    """
    if min(pattern.n0, pattern.n1, pattern.run) < 0:
        raise ProtocolError(f"{pattern}: n0, n1 and run must not be negative")
    for array in (offsets, sums):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ProtocolError(f"offsets and sums must be contiguous int64 [n], not {array.dtype} {array.shape}")
    if not 0 <= first <= last <= min(len(offsets), len(sums)):
        raise ProtocolError(f"pairs {first}..{last} of {len(offsets)} offsets and {len(sums)} sums")
    view = offsets.view()
    view.flags.writeable = False  # numba would compile anew for each mixture of read-only and writable
    nbytes = pattern.n0 * pattern.n1 * pattern.run
    start = seed(nbytes)
    _sums(ptr, view, first, last, *pattern, keys(-(-nbytes // WORD_NBYTES)), start - (start >> 63 << 64), sums)


def warm_up() -> None:
    """Loads the compiled kernel, or compiles it (seconds, once per machine where a cache can be written)."""
    none = np.zeros(0, np.int64)
    page_sums(0, none, 0, 0, PagePattern(0, 0, 0, 0, 0), none)


def _loads(bits: int) -> Callable[[int, int], Any]:
    """For compiled code: element ``index`` of unsigned ``bits``-bit numbers from address ``base`` on, however aligned.

    The address goes through a pointer and an index, not through integers: only so can the loop be vectorised.
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
        at = 0  # in the packed bytes
        for a in range(n0):
            for b in range(n1):
                row = ptr + offsets[i] + a * s0 + b * s1
                if b + 1 < n1:
                    for ahead in range(s1, s1 + run, _LINE):
                        prefetch(row + ahead)  # the processor cannot guess the next row of a strided page
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
