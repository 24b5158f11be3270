"""What a destroyed group has left behind, with Python's search for cycles turned off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["check_released"]

T = TypeVar("T")


def check_released(run_once: Callable[[], tuple[list[weakref.ref[Any]], T]]) -> T:
    """``run_once``: makes a group and destroys it; references to what must be gone then, and anything else.

    On every rank. Runs it twice, since some things come once a process; returns what else it gave the second time.
    """
    run_once()
    dist.barrier()
    gc.collect()
    gc.disable()
    try:
        references, rest = run_once()
        dist.barrier()
        left = [type(one).__name__ for reference in references if (one := reference()) is not None]
        assert not left, f"kept alive: {left}"
    finally:
        gc.enable()
    return rest
