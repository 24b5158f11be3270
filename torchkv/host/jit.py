"""Python functions compiled to machine code by numba, on first use: no compiler is needed at installation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from torchkv.arrays import Int64Array
from torchkv.host.jit_cache import cached_by_source, compiled_once, sources

__all__ = [
    "at_register",
    "c_function",
    "compiled",
    "compiled_with_gil",
    "libc_functions",
    "monotonic_ns",
    "primitive",
    "warm_up",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_WORD = ir.IntType(64)


def compiled(function: _F) -> _F:
    """Compiles ``function`` at its first call, to run without the GIL. Cached on disk where numba can write a cache."""
    return _compile(function, nogil=True)


def compiled_with_gil(function: _F) -> _F:
    """As `compiled`, but keeps the GIL: for callers' threads, which would have to wait to get it back."""
    return _compile(function, nogil=False)


_warm_ups: list[Callable[[], None]] = []
_warm: set[Callable[[], None]] = set()  # those of them that have been called


def at_register(function: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that calls a module's compiled functions once, so that `warm_up` compiles or loads them."""
    _warm_ups.append(function)
    return function


def warm_up() -> None:
    """Compiles the functions of all modules imported so far, or loads them from disk. Later calls take microseconds."""
    todo = [function for function in _warm_ups if function not in _warm]
    if numba.config.DISABLE_JIT or not todo:
        return  # there is nothing to compile
    files = (sources(Path(function.__code__.co_filename)) for function in todo)
    with compiled_once(frozenset().union(*files)):
        for function in todo:
            function()
    _warm.update(todo)


def _compile(function: _F, *, nogil: bool) -> _F:
    file = Path(function.__code__.co_filename)
    # Without what C could call, which takes a twentieth of the time to compile.
    compiles = partial(numba.njit, nogil=nogil, no_cfunc_wrapper=True)
    try:
        with cached_by_source(file) if file.is_file() else nullcontext():
            return cast(_F, _of_any_value(compiles(cache=True)(function)))
    except RuntimeError:
        # Neither the package's folder nor the user's cache folder can be written: compile in every process.
        return cast(_F, _of_any_value(compiles()(function)))


def _of_any_value(dispatcher: Any) -> Any:
    """Compiled callers share the function, whatever constants they pass: numba would compile it for each of these."""
    template = getattr(dispatcher, "get_call_template", None)
    if template is not None:  # else plain Python is run
        dispatcher.get_call_template = lambda args, kws: template(
            tuple(map(types.unliteral, args)), {name: types.unliteral(arg) for name, arg in kws.items()}
        )
    return dispatcher


def c_function(arity: int, result_bits: int, *, signed: bool = True) -> Any:
    """For compiled code: ``call(address, *arguments)`` calls a C function with ``arity`` integer or pointer arguments.

    The address is an argument, so the machine code does not depend on where the library was loaded and can be cached on
    disk. result_bits: 0 (void), 8, 32 or 64. signed: how a narrower result is widened to 64 bits.
    """
    result = ir.VoidType() if result_bits == 0 else ir.IntType(result_bits)
    pointer = ir.FunctionType(result, [_WORD] * arity).as_pointer()

    def emit(builder: Any, address: Any, *arguments: Any) -> Any:
        value = builder.call(builder.inttoptr(address, pointer), arguments)
        if result_bits in (0, 64):
            return value
        return builder.sext(value, _WORD) if signed else builder.zext(value, _WORD)

    return primitive(arity + 1, emit, _plain_call(arity, result_bits, signed))


def _plain_call(arity: int, result_bits: int, signed: bool) -> Callable[..., int]:
    kinds: dict[tuple[int, bool], Any] = {
        (8, True): ctypes.c_int8,
        (32, True): ctypes.c_int32,
        (64, True): ctypes.c_int64,
    }
    kinds |= {(8, False): ctypes.c_uint8, (32, False): ctypes.c_uint32, (64, False): ctypes.c_uint64}
    prototype = ctypes.CFUNCTYPE(kinds.get((result_bits, signed)), *[ctypes.c_int64] * arity)

    def call(address: int, *arguments: int) -> int:
        return int(prototype(int(address))(*map(int, arguments)) or 0)

    return call


def libc_functions(*names: str) -> Int64Array:
    """Addresses of libc's functions, for `c_function`."""
    libc = ctypes.CDLL(None)
    return np.array([ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0 for name in names], np.int64)


def primitive(arity: int, emit: Callable[..., Any], plain: Callable[..., int]) -> Any:
    """For compiled code: a function of ``arity`` int64 arguments that returns an int64.

    emit: ``emit(builder, *arguments)`` adds its LLVM instructions and returns the result, for which void stands as 0.
    plain: the same in Python, with ``NUMBA_DISABLE_JIT=1``.
    """
    if numba.config.DISABLE_JIT:
        return plain

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(builder, *arguments)
        return ir.Constant(_WORD, 0) if isinstance(value.type, ir.VoidType) else value

    def definition(typing: Any, *arguments: Any) -> Any:
        return types.int64(*[types.int64] * arity), codegen

    # numba takes the number of parameters from the signature.
    names = ["typing", *(f"a{i}" for i in range(arity))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    definition.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(definition)


_CLOCK_MONOTONIC = 1
_call_clock = c_function(2, 32)


@compiled
def monotonic_ns(clock_gettime: int, scratch: Int64Array) -> int:
    """For compiled code: the monotonic clock in ns. clock_gettime: address of libc's function. scratch: two int64."""
    _call_clock(clock_gettime, _CLOCK_MONOTONIC, scratch.ctypes.data)
    now: int = scratch[0] * 1_000_000_000 + scratch[1]
    return now
