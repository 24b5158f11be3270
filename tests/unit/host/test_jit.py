"""Compiled functions."""

from __future__ import annotations

from typing import Any

import numba
import pytest

from torchkv.host.jit import compiled

# Of no file, so that nothing of it is on disk: what is loaded from there says less of itself.
_CODE = """
@compiled
def shifted(value, by):
    return value + by[0] - by[1]

@compiled
def called(value):
    return shifted(value, (0, 7)) + shifted(1, (value, value)) + shifted(2, (3, value))
"""


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_callers_that_pass_constants_share_a_function() -> None:
    """Of the loop's functions there would be a third more, which take as much longer to compile."""
    made: dict[str, Any] = {"compiled": compiled}
    exec(_CODE, made)
    assert made["called"](5) == 5 - 7 + 1 + 2 + 3 - 5
    integer = numba.types.int64
    assert made["shifted"].signatures == [(integer, numba.types.UniTuple(integer, 2))]
