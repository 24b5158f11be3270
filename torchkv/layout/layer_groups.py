"""Layer groups: parts of a layout that have page lists of their own, as engines of hybrid models keep them.

A request of n layer groups is n requests of the protocol, its *parts*, one per group. Each has a name that is made of
the request's and the group's, so each has its grant, leases, coverage and seal for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

__all__ = [
    "PAGES",
    "SEPARATOR",
    "SLOTS",
    "UNGROUPED",
    "Pools",
    "Space",
    "absent_allowed",
    "base_name",
    "group_of",
    "part_name",
]

Space: TypeAlias = tuple[str | None, bool]  # what numbers places: the pages, or with True the slots, of a layer group
Pools: TypeAlias = Mapping[Space, int]  # spaces of one pool: places of one number share bytes, see `torchkv.cache`
PAGES, SLOTS = 0, 1  # the pools of a layout without layer groups
UNGROUPED: Pools = {(None, False): PAGES, (None, True): SLOTS}

SEPARATOR = "\N{SYMBOL FOR UNIT SEPARATOR}"  # not in names of requests of layouts with groups; seen in messages


def part_name(request: str, group: str) -> str:
    """The name of one part of a request."""
    return f"{request}{SEPARATOR}{group}"


def group_of(name: str) -> str:
    """The layer group whose part has this name; an empty string if it is no part's."""
    return name.rpartition(SEPARATOR)[2] if SEPARATOR in name else ""


def base_name(name: str) -> str:
    """The request's name as the caller gave it, of one that may be a part's."""
    group = group_of(name)
    return name.removesuffix(f"{SEPARATOR}{group}") if group else name


def absent_allowed(num_pages: int, page_size: int, windows: Iterable[int | None]) -> int:
    """How many pages at the beginning of a receiver's list of ``num_pages`` may be absent.

    page_size: in tokens. windows: of all layers of the group that the rank holds; None: one attends to all tokens.

    Those that lie wholly before the window of every layer. Nobody tells how long the prompt is. The longest one that
    the pages hold is followed by the token at position ``num_pages * page_size``, which attends to ``window`` tokens,
    itself among them. A receiver whose prompt is shorter may need pages that this allows to be absent: only it knows.
    """
    tokens = num_pages * page_size
    reached = [tokens if window is None else min(window - 1, tokens) for window in windows]
    return (tokens - max(reached, default=0)) // page_size
