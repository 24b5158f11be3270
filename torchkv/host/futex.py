"""How a thread of compiled code waits: it sleeps on a word of memory, by Linux's futex, yields its core, or pauses.

syscall, number: address of libc's ``syscall``, and the number of the system call.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir

from torchkv.arrays import Int64Array
from torchkv.host.atomics import load
from torchkv.host.jit import c_function, compiled, primitive

__all__ = ["LOOKS", "call_yield", "futex_wait", "futex_wake", "look_at", "pause"]

LOOKS = 8  # of a thread that spins, with pauses between them, before it looks at the clock again

_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30
# The instruction for loops that wait, and its arguments.
_PAUSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
}

call_system = c_function(7, 64)
call_yield = c_function(1, 32)  # of the address of libc's ``sched_yield``, and an argument that is ignored


def _emit_pause(builder: Any) -> Any:
    if platform.machine() not in _PAUSES:
        return ir.Constant(ir.IntType(64), 0)
    name, arguments = _PAUSES[platform.machine()]
    kinds = [ir.IntType(32)] * len(arguments)
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), kinds))
    return builder.call(function, [ir.Constant(ir.IntType(32), value) for value in arguments])


# pause(): does nothing for some ten to fifty nanoseconds. Two cores of a machine are often one that runs two threads in
# turn, also where a virtual machine shows none of it: whoever looks at words again and again without a pause takes half
# of the speed of the thread beside it, which may be the caller's.
pause = (lambda: 0) if numba.config.DISABLE_JIT else primitive(0, _emit_pause)


@compiled
def look_at(address: int, seen: int) -> None:
    """Waits until the word is no longer ``seen``, for less than a microsecond, most of which is pauses."""
    for _ in range(LOOKS):
        if load(address) != seen:
            break
        pause()
        pause()


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
