"""Explores every order of events in a small world: all states that the real functions can reach, each visited once.

A world is run from its beginning, choice after choice. Where several are possible all are followed, unless the state
that one leads to has been seen. What must hold is asked in every state, and more where nothing can happen any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np

__all__ = ["Found", "World", "explore", "freeze"]


class World(Protocol):
    """One run. Equal choices in equal states lead to equal states."""

    def choices(self) -> Sequence[str]:
        """What may happen next."""

    def do(self, choice: str) -> None:
        """It happens."""

    def state(self) -> object:
        """All that the future depends on, hashable."""

    def problem(self) -> str:
        """What is wrong now; empty if nothing is."""

    def problem_at_rest(self) -> str:
        """What is wrong if nothing happens any more; empty if nothing is."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an exploration has seen. path: the choices that led to the first problem, if there is one."""

    states: int
    runs: int
    ends: int
    problem: str = ""
    path: tuple[str, ...] = ()


def explore(make: Callable[[], World], *, limit: int = 10_000_000) -> Found:
    """Visits all states, depth first; stops at the first problem. Raises ``AssertionError`` beyond ``limit`` states."""
    seen: set[int] = set()
    runs = ends = 0
    todo: list[tuple[str, ...]] = [()]
    while todo:
        path = todo.pop()
        world = make()
        runs += 1
        for choice in path:
            world.do(choice)
        while True:
            if problem := world.problem():
                return Found(len(seen), runs, ends, problem, path)
            state = hash(world.state())
            if state in seen:
                break
            seen.add(state)
            assert len(seen) <= limit, f"more than {limit} states"
            choices = world.choices()
            if not choices:
                ends += 1
                if problem := world.problem_at_rest():
                    return Found(len(seen), runs, ends, problem, path)
                break
            todo.extend((*path, choice) for choice in choices[1:])
            path = (*path, choices[0])  # this run goes on with the first one
            world.do(choices[0])
    return Found(len(seen), runs, ends)


def freeze(value: Any, skip: frozenset[str] = frozenset(), known: dict[int, int] | None = None) -> Any:
    """``value`` and all that it refers to, as nested tuples. skip: names of attributes that never matter."""
    known = {} if known is None else known
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, msgspec.Struct):
        return repr(value)
    if callable(value):
        return "function"
    if id(value) in known:
        return "seen", known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, Mapping):
        items = [(freeze(key, skip, known), freeze(item, skip, known)) for key, item in value.items()]
        return tuple(sorted(items, key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted((freeze(item, skip, known) for item in value), key=repr))
    if isinstance(value, Sequence) or hasattr(value, "popleft"):
        return tuple(freeze(item, skip, known) for item in value)
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    else:
        names = sorted(vars(value)) if hasattr(value, "__dict__") else list(type(value).__slots__)
    return type(value).__name__, *(freeze(getattr(value, name), skip, known) for name in names if name not in skip)
