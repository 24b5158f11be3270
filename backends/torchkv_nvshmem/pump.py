"""The compiled inner loop: posts puts to a stream; no Python per span, and without the GIL.

C functions are called through their addresses, which are passed as integers. So the machine code does not depend on
where NVSHMEM was loaded, and numba can cache it on disk between runs.
"""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import c_function, compiled, monotonic_ns

__all__ = ["CURSOR", "STATE_WORDS", "post"]

# Words of a put's state: next span to post.
CURSOR, STATE_WORDS = 0, 1

# Indices into the table of function addresses; the order is library.FUNCTIONS.
_PUT, _CLOCK = 0, 1

_BURST = 32  # spans posted between two reads of the clock

# nvshmemx_putmem_on_stream. An int argument is the low half of a 64-bit register, on x86-64 and on AArch64.
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

    source, target, length: int64[n]: addresses here, symmetric addresses for the peer ``pe``, bytes.
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
