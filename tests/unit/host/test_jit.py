"""Compiled functions."""

from __future__ import annotations

import numba
import pytest

from torchkv.host.jit import compiled


@compiled
def _shifted(value: int, by: tuple[int, int]) -> int:
    return value + by[0] - by[1]


@compiled
def _called(value: int) -> int:
    return _shifted(value, (0, 7)) + _shifted(1, (value, value)) + _shifted(2, (3, value))


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_callers_that_pass_constants_share_a_function() -> None:
    """Of the loop's functions there would be a third more, which take as much longer to compile."""
    assert _called(5) == 5 - 7 + 1 + 2 + 3 - 5
    integer = numba.types.int64
    assert _shifted.signatures == [(integer, numba.types.UniTuple(integer, 2))]  # type: ignore[attr-defined]
