"""The loop's records at their addresses, for what callers compile: see `torchkv.core.posting`.

Who calls passes an address. numba takes 8 us to recognise a record of the size of `World` among the arguments of a
call, a tenth of a microsecond for an array, and hardly anything for an integer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from torchkv.core.loop.state.requests import Repeat, Way
from torchkv.core.loop.state.world import REPEAT, WAY, WORLD, World

__all__ = ["repeat_at", "way_at", "world_at"]


def _plain(dtype: np.dtype[np.void]) -> Callable[[int], Any]:
    def record_at(address: int) -> Any:
        memory = (ctypes.c_uint8 * dtype.itemsize).from_address(int(address))
        return np.frombuffer(cast(Any, memory), dtype)[0]

    return record_at


def _compiled(dtype: np.dtype[np.void]) -> Callable[[int], Any]:
    record = numba.from_dtype(dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(record))

    def definition(typing: Any, address: Any) -> Any:
        return record(types.int64), codegen

    return cast(Callable[[int], Any], intrinsic(definition))


_record_at = _plain if numba.config.DISABLE_JIT else _compiled
# Of an address, which must stay allocated.
world_at: Callable[[int], World] = _record_at(WORLD)
way_at: Callable[[int], Way] = _record_at(WAY)
repeat_at: Callable[[int], Repeat] = _record_at(REPEAT)
