"""The compiled inner loop: posts puts to a stream. No Python per span, no GIL.

C functions are called through their addresses, which arrive as plain integers: so the machine code does not
depend on where NVSHMEM was loaded, and numba can keep it on disk between runs.
"""

from __future__ import annotations

import numpy as np

from torchkv.compiled import c_function, compiled, monotonic_ns
from torchkv.transport import Int64Array

__all__ = ["CURSOR", "STATE_WORDS", "post"]

# Words of a put's state: next span to post.
CURSOR, STATE_WORDS = 0, 1

# Indices into the table of function addresses; the order is library.FUNCTIONS.
_PUT, _CLOCK = 0, 1

_BURST = 32  # puts between two looks at the clock

# An int argument takes the low half of its 64-bit register, on x86-64 as on AArch64.
_call_put = c_function(5, 0)


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
    deadline = monotonic_ns(functions[_CLOCK], clock) + budget_ns
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
        if (i - first) % _BURST == _BURST - 1 and monotonic_ns(functions[_CLOCK], clock) > deadline:
            break
    return nbytes
