"""Callbacks that keep nobody alive.

A group owns the memory of its ring and of its cache. It goes with the last reference to it, not when Python happens to
look for cycles: an engine that makes a new group needs that memory then, and to free it waits for the whole GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

__all__ = ["weakly"]

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A bound method without a reference to its object, for somebody whom that object owns, and outlives."""
    known = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = known()
        assert alive is not None, "called by somebody whose owner is gone"
        return alive(*args, **kwargs)

    return call
