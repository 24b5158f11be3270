"""Copying and bounds-checking page ids in one pass, compiled, on the caller's thread."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import at_register, compiled_with_gil

__all__ = ["copy_ids", "warm_up"]


@compiled_with_gil
def copy_ids(source: Int64Array, target: Int64Array, limit: int) -> bool:
    """Copies ``source`` into ``target``, both int64 ``[n]``, and returns whether all ids are in [0, limit).

    Compiled, because numpy releases the GIL for more than 500 elements: the progress thread then takes it, and the
    caller waits to get it back. The loop has no branch, so that it compiles to vector instructions.
    """
    outside = np.int64(0)  # negative once an id or ``limit - 1 - id`` is
    for i in range(len(source)):
        page = source[i]
        target[i] = page
        outside |= page | (limit - 1 - page)
    return bool(outside >= 0)


@at_register
def warm_up() -> None:
    """Compiles the function, or loads it from disk, so that the first verb need not wait for it."""
    ids = np.zeros(1, dtype=np.int64)
    copy_ids(ids, ids.copy(), 1)
