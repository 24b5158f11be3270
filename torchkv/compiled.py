"""Machine code from Python functions: no compiler at installation, and none of Python's per-step cost at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled", "compiled_with_gil"]

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
