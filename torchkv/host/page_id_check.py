"""Copying and bounds-checking page ids in one pass, compiled, on the caller's thread."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import at_register, compiled_with_gil

__all__ = ["copy_ids", "copy_present", "warm_up"]


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


@compiled_with_gil
def copy_present(source: Int64Array, target: Int64Array, limit: int) -> int:
    """Copies ``source`` without the -1 at its beginning to the beginning of ``target``, which may be the same.

    Both int64 ``[n]``. How many there are; less than 0 if one of the other ids is not in [0, limit).
    """
    absent = 0
    while absent < len(source) and source[absent] == -1:
        absent += 1
    outside = np.int64(0)
    for i in range(absent, len(source)):
        page = source[i]
        target[i - absent] = page
        outside |= page | (limit - 1 - page)
    return absent if outside >= 0 else -1


@at_register
def warm_up() -> None:
    """Compiles the function, or loads it from disk, so that the first verb need not wait for it."""
    ids = np.zeros(1, dtype=np.int64)
    copy_ids(ids, ids.copy(), 1)
    copy_present(ids, ids.copy(), 1)
