"""Machine code from Python functions: no compiler at installation, and none of Python's per-step cost at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

__all__ = ["c_function", "compiled", "compiled_with_gil", "monotonic_ns"]

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Runs without the GIL. Compiled at its first call, then kept on disk where numba finds a place to keep it."""
    return _compile(function, nogil=True)


def compiled_with_gil(function: _F) -> _F:
    """The same, but keeps the GIL: for the caller's thread, where letting go of it means waiting to get it back."""
    return _compile(function, nogil=False)


def _compile(function: _F, *, nogil: bool) -> _F:
    try:
        return cast(_F, numba.njit(nogil=nogil, cache=True)(function))
    except RuntimeError:
        # Neither the package's folder nor the user's cache folder can be written: compile in every process.
        return cast(_F, numba.njit(nogil=nogil)(function))


def c_function(arity: int, result_bits: int, *, signed: bool = True) -> Any:
    """``call(address, *arguments)`` for compiled code: a C function of ``arity`` integer or pointer arguments.

    The address arrives as a plain integer, so the machine code does not depend on where the library was loaded and
    can be kept on disk between runs. result_bits: 0 (void), 8, 32 or 64; signed: how a narrower result is widened.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        result = ir.VoidType() if result_bits == 0 else ir.IntType(result_bits)
        prototype = ir.FunctionType(result, [word] * arity)
        value = builder.call(builder.inttoptr(arguments[0], prototype.as_pointer()), arguments[1:])
        if result_bits == 0:
            return ir.Constant(word, 0)
        if result_bits == 64:
            return value
        return builder.sext(value, word) if signed else builder.zext(value, word)

    signature = types.int64(*[types.int64] * (arity + 1))
    # numba reads the parameters off the function it is given, so each arity needs one of its own.
    made: dict[int, Callable[..., Any]] = {
        1: lambda typing, f, a: (signature, codegen),
        2: lambda typing, f, a, b: (signature, codegen),
        3: lambda typing, f, a, b, c: (signature, codegen),
        4: lambda typing, f, a, b, c, d: (signature, codegen),
        5: lambda typing, f, a, b, c, d, e: (signature, codegen),
        6: lambda typing, f, a, b, c, d, e, g: (signature, codegen),
    }
    return intrinsic(made[arity])


_CLOCK_MONOTONIC = 1
_call_clock = c_function(2, 32)


@compiled
def monotonic_ns(clock_gettime: int, scratch: npt.NDArray[np.int64]) -> int:
    """For compiled code: the monotonic clock in ns. clock_gettime: address of libc's function; scratch: of length 2."""
    _call_clock(clock_gettime, _CLOCK_MONOTONIC, scratch.ctypes.data)
    now: int = scratch[0] * 1_000_000_000 + scratch[1]
    return now
