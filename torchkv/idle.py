"""How the progress thread waits: without the GIL, and lightly while requests are under way.

A sleeping thread is woken by a system call, which in a virtual machine takes a hundred microseconds from whoever makes
it: the caller of ``send_layer``, once a layer. So as long as verbs come, the thread rests in compiled code instead: it
spins for a moment, then takes naps of some microseconds, and looks at words in memory in between. To wake it is one
store. The words that a GPU writes when a kernel ends are watched in the same way; asking the driver would take its
lock, which the model's own launches need.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchkv.compiled import c_function, compiled, monotonic_ns
from torchkv.transport import Int64Array

__all__ = ["rest", "warm_up"]

# Nanoseconds; not at all where the caller, its model and this thread share so few cores.
SPIN = 100_000 if len(os.sched_getaffinity(0)) >= 4 else 0
NAP = 50_000
_LOOK = 16  # rounds over the words between two looks at the file descriptors, which are system calls

_libc = ctypes.CDLL(None)
_FUNCTIONS = np.array(
    [ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0 for name in ("ppoll", "clock_gettime")],
    dtype=np.int64,
)
_call_poll = c_function(4, 32)


@compiled
def _rest(
    wake: Int64Array,
    words: npt.NDArray[np.uint32],
    indices: Int64Array,
    values: npt.NDArray[np.uint32],
    fds: Int64Array,
    functions: Int64Array,
    spin: int,
    nap: int,
    nanoseconds: int,
) -> None:
    clock = np.zeros(2, dtype=np.int64)
    limit = np.zeros(2, dtype=np.int64)  # a struct timespec: how long to sleep in ppoll
    began = monotonic_ns(functions[1], clock)
    while True:
        for _ in range(_LOOK):
            if wake[0] != 0:
                return
            for i in range(len(indices)):
                # Wrapping difference: whether the word has reached the value, however often it has gone round.
                if np.int32(words[indices[i]] - values[i]) >= 0:
                    return
        if _call_poll(functions[0], fds.ctypes.data, len(fds), limit.ctypes.data, 0) > 0:
            return
        passed = monotonic_ns(functions[1], clock) - began
        if passed >= nanoseconds:
            return
        if passed >= spin:
            limit[1] = min(nap, nanoseconds - passed)


def rest(
    wake: Int64Array,
    fds: Iterable[int],
    *,
    seconds: float,
    words: npt.NDArray[np.uint32] | None = None,
    awaited: Iterable[tuple[int, int]] = (),
) -> None:
    """Returns soon after one of these, or at the latest after ``seconds``:

    ``wake[0]`` is not 0; ``words[index]`` has reached a value, for any of the ``awaited`` (index, value); a file
    descriptor is readable.
    """
    pairs = list(awaited)
    indices = np.array([index for index, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.uint32)
    # An array of C's ``struct pollfd``, which is eight bytes.
    polled = bytearray().join(struct.pack("=ihh", fd, select.POLLIN, 0) for fd in fds)
    watched = _NONE if words is None else words
    _rest(wake, watched, indices, values, np.frombuffer(polled, np.int64), _FUNCTIONS, SPIN, NAP, int(seconds * 1e9))


_NONE = np.zeros(0, dtype=np.uint32)


def warm_up() -> None:
    """Compiles, or loads from disk, what the first verb would otherwise wait for."""
    rest(np.ones(1, dtype=np.int64), (), seconds=0)
