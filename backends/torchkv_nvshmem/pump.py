"""The compiled inner loop: posts puts to a stream. No Python per span, no GIL.

C functions are called through their addresses, which arrive as plain integers: so the machine code does not
depend on where NVSHMEM was loaded, and numba can keep it on disk between runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from torchkv.compiled import compiled
from torchkv.transport import Int64Array

__all__ = ["CURSOR", "STATE_WORDS", "post"]

# Words of a put's state: next span to post.
CURSOR, STATE_WORDS = 0, 1

# Indices into the table of function addresses; the order is library.FUNCTIONS.
_PUT, _CLOCK = 0, 1

_CLOCK_MONOTONIC = 1
_BURST = 32  # puts between two looks at the clock


def _codegen(arity: int, result_bits: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        result = ir.VoidType() if result_bits == 0 else ir.IntType(result_bits)
        prototype = ir.FunctionType(result, [word] * arity)
        value = builder.call(builder.inttoptr(arguments[0], prototype.as_pointer()), arguments[1:])
        return ir.Constant(word, 0) if result_bits == 0 else builder.sext(value, word)

    return codegen


def _signature(arity: int) -> Any:
    return types.int64(*[types.int64] * (arity + 1))


# An int argument takes the low half of its 64-bit register, on x86-64 as on AArch64.
_call_put = intrinsic(lambda typing, f, target, source, nbytes, pe, stream: (_signature(5), _codegen(5, 0)))
_call_clock = intrinsic(lambda typing, f, clock, result: (_signature(2), _codegen(2, 32)))


@compiled
def _now(functions: Int64Array, clock: Int64Array) -> int:
    _call_clock(functions[_CLOCK], _CLOCK_MONOTONIC, clock.ctypes.data)
    now: int = clock[0] * 1_000_000_000 + clock[1]
    return now


@compiled
def post(
    functions: Int64Array,
    pe: int,
    stream: int,
    source: Int64Array,
    target: Int64Array,
    length: Int64Array,
    state: Int64Array,
    max_spans: int,
    max_nbytes: int,
    budget_ns: int,
) -> int:
    """Enqueues spans from the cursor on until one of the bounds is reached, but at least one; returns their bytes.

    source, target, length: int64[n], absolute addresses here, symmetric addresses of the peer, and bytes.
    """
    clock = np.empty(2, dtype=np.int64)
    deadline = _now(functions, clock) + budget_ns
    first = state[CURSOR]
    nbytes = 0
    while state[CURSOR] < len(length) and state[CURSOR] - first < max_spans:
        i = state[CURSOR]
        if nbytes > 0 and nbytes + length[i] > max_nbytes:
            break
        state[CURSOR] = i + 1
        if length[i] > 0:
            _call_put(functions[_PUT], target[i], source[i], length[i], pe, stream)
            nbytes += length[i]
        if (i - first) % _BURST == _BURST - 1 and _now(functions, clock) > deadline:
            break
    return nbytes
