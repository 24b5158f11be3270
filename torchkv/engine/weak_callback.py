"""Callbacks from a part to its owner that do not keep the owner alive.

A group must be freed with the last reference to it, not at Python's next search for reference cycles: it owns the
memory of its staging ring and of its cache, an engine that makes a new group needs that memory at once, and freeing GPU
memory waits for the whole GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

__all__ = ["weakly"]

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """``method`` without a strong reference to its object. For an object that the method's object owns and outlives."""
    known = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = known()
        assert alive is not None, "the callback's object was freed before the object that calls it"
        return alive(*args, **kwargs)

    return call
