"""How a thread of compiled code sleeps on a word of memory, by Linux's futex, and yields its core.

syscall, number: address of libc's ``syscall``, and the number of the system call.
"""

from __future__ import annotations

from torchkv.arrays import Int64Array
from torchkv.host.jit import c_function, compiled

__all__ = ["call_yield", "futex_wait", "futex_wake"]

_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30

call_system = c_function(7, 64)
call_yield = c_function(1, 32)  # of the address of libc's ``sched_yield``, and an argument that is ignored


@compiled
def futex_wait(syscall: int, number: int, address: int, value: int, nanoseconds: int, scratch: Int64Array) -> None:
    """Sleeps until the word is no longer ``value`` and `futex_wake` was called, for so long at most.

    scratch: two words of the calling thread.
    """
    scratch[0], scratch[1] = nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000
    call_system(syscall, number, address, _WAIT, value, scratch.ctypes.data, 0, 0)


@compiled
def futex_wake(syscall: int, number: int, address: int) -> None:
    """Wakes all threads, of any process, that sleep on the word."""
    call_system(syscall, number, address, _WAKE, _EVERYBODY, 0, 0, 0)
