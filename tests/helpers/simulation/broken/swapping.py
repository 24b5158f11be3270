"""How a broken loop is made of a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Break", "swap"]

Break = tuple[Callable[[], None], bool]  # what breaks a loop, and whether runs in a bad network alone are to show it


def swap(owner: object, **functions: Callable[..., Any] | property) -> None:
    """Replaces functions of a module, or methods of a class."""
    for name, function in functions.items():
        assert hasattr(owner, name)
        setattr(owner, name, function)
