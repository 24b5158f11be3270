"""Words of memory that several threads or processes read and write, and spin on, for compiled code.

LLVM moves and hoists plain loads and stores, so every word that somebody else writes goes through these. A word is a
signed 64-bit integer at an address that is a multiple of 8. With ``NUMBA_DISABLE_JIT=1`` the same functions run in
plain Python, for debuggers and coverage; then only one thread may use a word.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

from llvmlite import ir

from torchkv.host.jit import compiled, primitive

__all__ = ["LOOKS", "add", "exchange", "exchange_if", "fence", "load", "look_at", "pause", "store"]

LOOKS = 8  # of a thread that spins, with pauses between them, before it looks at the clock again

# The instruction for loops that wait, and its arguments.
_PAUSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
}
_WORD = ir.IntType(64)


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(int(address))


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _plain_store(address: int, value: int) -> int:
    _word(address).value = int(value)
    return 0


def _plain_exchange(address: int, value: int) -> int:
    word = _word(address)
    before, word.value = word.value, int(value)
    return before


def _plain_add(address: int, value: int) -> int:
    word = _word(address)
    before = word.value
    word.value = before + int(value)
    return before


def _plain_exchange_if(address: int, expected: int, value: int) -> int:
    word = _word(address)
    before = word.value
    if before == expected:
        word.value = int(value)
    return before


def _emit_exchange_if(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    pair = builder.cmpxchg(_at(builder, address), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def _emit_pause(builder: Any) -> Any:
    if platform.machine() not in _PAUSES:
        return ir.Constant(ir.IntType(64), 0)
    name, arguments = _PAUSES[platform.machine()]
    kinds = [ir.IntType(32)] * len(arguments)
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), kinds))
    return builder.call(function, [ir.Constant(ir.IntType(32), value) for value in arguments])


# load(address): what was written before the `store` that made this value is visible afterwards (acquire).
load = primitive(
    1, lambda b, address: b.load_atomic(_at(b, address), "acquire", 8, typ=_WORD), lambda address: _word(address).value
)
# store(address, value): everything written before is visible to whoever loads the value (release).
store = primitive(2, lambda b, address, value: b.store_atomic(value, _at(b, address), "release", 8), _plain_store)
# exchange(address, value): stores it and returns what was there, in one order with all other exchanges and fences.
exchange = primitive(
    2, lambda b, address, value: b.atomic_rmw("xchg", _at(b, address), value, "seq_cst"), _plain_exchange
)
# add(address, value): adds it and returns what was there, in the same order.
add = primitive(2, lambda b, address, value: b.atomic_rmw("add", _at(b, address), value, "seq_cst"), _plain_add)
# exchange_if(address, expected, value): as `exchange`, if ``expected`` is there. Returns what was there.
exchange_if = primitive(3, _emit_exchange_if, _plain_exchange_if)
# fence(): loads after it see what was stored before another thread's fence that came first.
fence = primitive(0, lambda b: b.fence("seq_cst"), lambda: 0)
# pause(): does nothing for some ten to fifty nanoseconds. Two cores of a machine are often one that runs two threads in
# turn, also where a virtual machine shows none of it: whoever looks at words again and again without a pause takes half
# of the speed of the thread beside it, which may be the caller's.
pause = primitive(0, _emit_pause, lambda: 0)


@compiled
def look_at(address: int, seen: int) -> None:
    """Waits until the word is no longer ``seen``, for less than a microsecond, most of which is pauses."""
    for _ in range(LOOKS):
        if load(address) != seen:
            break
        pause()
        pause()
