"""How the progress thread waits: without the GIL, and lightly while requests are under way.

A sleeping thread is woken by a system call, which in a virtual machine takes a hundred microseconds from whoever makes
it: the caller of ``send_layer``, once a layer. So as long as verbs come, the thread rests in compiled code instead: it
spins for a moment, then takes naps of some microseconds, and looks at words in memory in between. To wake it is one
store. It spins for longer where an answer is due: then the core that it keeps from falling asleep would otherwise take
longer to wake up than the answer takes. While it spins it offers its core to others, and stops if one takes it. The
words that a GPU writes when a kernel ends are watched in the same way; asking the driver would take its lock, which the
model's own launches need.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchkv.compiled import c_function, compiled, monotonic_ns
from torchkv.transport import Int64Array

__all__ = ["begin", "rest", "warm_up"]

# Nanoseconds that it spins anyway; not at all where the caller, its model and this thread share so few cores.
SPIN = 100_000 if len(os.sched_getaffinity(0)) >= 4 else 0
NAP = 50_000
CROWDED = 20_000  # so long away from a core that was offered: somebody else needs it
# Seconds after which a thread that computes in Python hands the GIL to one that waits for it. Python's 5 ms are what a
# layer would take to begin its journey if its caller goes on in Python. It is a setting of the whole process.
SWITCH_INTERVAL = 0.0005
_TIMER_SLACK = 1_000  # else the kernel rounds each nap up, by as much again
_LOOK = 16  # rounds over the words between two looks at the file descriptors, which are system calls

_NONE = np.zeros(0, dtype=np.uint32)
_NOWHERE = np.zeros(0, dtype=np.int64)

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_TIMERSLACK = 29
_NAMES = ("ppoll", "clock_gettime", "sched_yield")
_FUNCTIONS = np.array([ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0 for name in _NAMES], np.int64)
_call_poll = c_function(4, 32)
_call_yield = c_function(1, 32)  # its argument is ignored


def begin() -> None:
    """For the thread that will rest: it wakes from naps in time, and gets the GIL soon when it has."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
    if _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_TIMERSLACK)")


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
    crowded: int,
    nanoseconds: int,
) -> int:
    clock = np.zeros(2, dtype=np.int64)
    limit = np.zeros(2, dtype=np.int64)  # a struct timespec: how long to sleep in ppoll
    began = monotonic_ns(functions[1], clock)
    called = False
    while True:
        for _ in range(_LOOK):
            if wake[0] != 0:
                called = True
            for i in range(len(indices)):
                # Wrapping difference: whether the word has reached the value, however often it has gone round.
                if np.int32(words[indices[i]] - values[i]) >= 0:
                    called = True
            if called:
                limit[1] = 0  # the file descriptors are looked at even so, or frequent calls would hide them
                break
        if _call_poll(functions[0], fds.ctypes.data, len(fds), limit.ctypes.data, 0) > 0:
            readable = 0
            for i in range(len(fds)):
                if fds[i] >> 48 != 0:  # what the kernel found, the last member of a struct pollfd
                    readable |= 1 << i
            return readable
        passed = monotonic_ns(functions[1], clock) - began
        if called or passed >= nanoseconds:
            return 0
        if passed < spin:
            _call_yield(functions[2], 0)
            if monotonic_ns(functions[1], clock) - began - passed > crowded:
                spin = 0
        else:
            limit[1] = min(nap, nanoseconds - passed)


@lru_cache(maxsize=64)
def _polled(fds: tuple[int, ...]) -> Int64Array:
    """An array of C's ``struct pollfd``, which is eight bytes."""
    return np.frombuffer(bytearray().join(struct.pack("=ihh", fd, select.POLLIN, 0) for fd in fds), np.int64)


def rest(
    wake: Int64Array,
    fds: tuple[int, ...],
    *,
    seconds: float,
    spin: float = 0.0,
    words: npt.NDArray[np.uint32] = _NONE,
    awaited: Sequence[tuple[int, int]] = (),
) -> int:
    """Returns soon after one of these, or at the latest after ``seconds``:

    ``wake[0]`` is not 0; ``words[index]`` has reached a value, for any of the ``awaited`` (index, value); a file
    descriptor is readable. Bit i of the result: whether ``fds[i]`` is, also if something else has ended the rest.

    For the first ``spin`` seconds at least it keeps its core, unless another thread wants that.
    """
    indices, values = _NOWHERE, _NONE
    if awaited:
        indices = np.array([index for index, _ in awaited], dtype=np.int64)
        values = np.array([value for _, value in awaited], dtype=np.uint32)
    times = (max(SPIN, int(spin * 1e9)), NAP, CROWDED, int(seconds * 1e9))
    return int(_rest(wake, words, indices, values, _polled(fds), _FUNCTIONS, *times))


def warm_up() -> None:
    """Compiles, or loads from disk, what the first verb would otherwise wait for."""
    rest(np.ones(1, dtype=np.int64), (), seconds=0)
