"""From an address to the record that lies there, for the functions that callers call.

numba takes 8 us to recognise a record of this size among the arguments of a call, and nothing for an integer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from torchkv.core.records import WORLD, World

__all__ = ["world_at"]


def _plain(address: int) -> World:
    memory = (ctypes.c_uint8 * WORLD.itemsize).from_address(int(address))
    return cast(World, np.frombuffer(cast(Any, memory), WORLD)[0])


def _compiled() -> Callable[[int], World]:
    record = numba.from_dtype(WORLD)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(record))

    def definition(typing: Any, address: Any) -> Any:
        return record(types.int64), codegen

    return cast(Callable[[int], World], intrinsic(definition))


# world_at(address): the `World` at this address, which must stay allocated.
world_at: Callable[[int], World] = _plain if numba.config.DISABLE_JIT else _compiled()
