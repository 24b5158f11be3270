"""How the progress thread waits while requests are active: without the GIL, and so that waking it is one store.

Waking a sleeping thread takes a system call, which in a virtual machine costs the calling thread a hundred
microseconds: the caller of ``send_layer``, once per layer. So as long as verbs come, the progress thread waits in
compiled code (`rest`). It spins for a moment, then sleeps for some microseconds at a time, and reads words in memory in
between. One store to a word wakes it.

It spins for longer while a peer's answer is due: an idle core would take longer to wake up than the answer takes to
arrive. While it spins, it offers its core to other threads, and stops spinning if one takes it.

The words that a GPU writes when a kernel is done are watched in the same way. Querying the driver instead would take
its lock, which the model's own launches need.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from torchkv.arrays import Int64Array, UInt32Array
from torchkv.host.jit import at_register, c_function, compiled, libc_functions, monotonic_ns

__all__ = ["rest", "wake_on_time", "warm_up"]

# The shortest time to spin, in nanoseconds; 0 where the caller, its model and this thread share few cores.
SPIN = 100_000 if len(os.sched_getaffinity(0)) >= 4 else 0
NAP = 50_000  # nanoseconds of one sleep between two looks at the words
CROWDED = 20_000  # nanoseconds; if yielding the core takes longer, another thread needs it
_TIMER_SLACK = 1_000  # nanoseconds; with the default, the kernel may double the length of a nap
_LOOK = 16  # looks at the words per look at the file descriptors, which is a system call

_NONE = np.zeros(0, dtype=np.uint32)
_NOWHERE = np.zeros(0, dtype=np.int64)

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_TIMERSLACK = 29
_FUNCTIONS = libc_functions("ppoll", "clock_gettime", "sched_yield")
_call_poll = c_function(4, 32)
_call_yield = c_function(1, 32)  # its argument is ignored


def wake_on_time() -> None:
    """Has the calling thread's short sleeps end when they should."""
    if _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_TIMERSLACK)")


@compiled
def _rest(
    wake: Int64Array,
    words: UInt32Array,
    indices: Int64Array,
    values: UInt32Array,
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
                # A difference modulo 2**32: whether the word has reached the value, even if it has wrapped around.
                if np.int32(words[indices[i]] - values[i]) >= 0:
                    called = True
            if called:
                limit[1] = 0  # the file descriptors are polled even so, else frequent verbs would starve them
                break
        if _call_poll(functions[0], fds.ctypes.data, len(fds), limit.ctypes.data, 0) > 0:
            readable = 0
            for i in range(len(fds)):
                if fds[i] >> 48 != 0:  # revents, the last member of a struct pollfd
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
    """The file descriptors as an array of C's ``struct pollfd``, of eight bytes each."""
    return np.frombuffer(bytearray().join(struct.pack("=ihh", fd, select.POLLIN, 0) for fd in fds), np.int64)


def rest(
    wake: Int64Array,
    fds: tuple[int, ...],
    *,
    seconds: float,
    spin: float = 0.0,
    words: UInt32Array = _NONE,
    awaited: Sequence[tuple[int, int]] = (),
) -> int:
    """Waits without the GIL until one of these is true, but at most ``seconds``:

    * ``wake[0]`` is not 0;
    * ``words[index]`` has reached ``value`` for any (index, value) in ``awaited``, modulo 2**32;
    * a file descriptor of ``fds`` is readable.

    Returns a bit mask: bit i is set if ``fds[i]`` is readable, whatever ended the wait. spin: seconds, at least, before
    the thread sleeps for the first time, unless another thread needs the core.
    """
    indices, values = _NOWHERE, _NONE
    if awaited:
        indices = np.array([index for index, _ in awaited], dtype=np.int64)
        values = np.array([value for _, value in awaited], dtype=np.uint32)
    times = (max(SPIN, int(spin * 1e9)), NAP, CROWDED, int(seconds * 1e9))
    return int(_rest(wake, words, indices, values, _polled(fds), _FUNCTIONS, *times))


@at_register
def warm_up() -> None:
    """Compiles the function, or loads it from disk, so that the first verb need not wait for it."""
    rest(np.ones(1, dtype=np.int64), (), seconds=0)
