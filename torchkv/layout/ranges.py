"""Arithmetic on ranges of heads, or of elements of a state: intersections, holders and gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

__all__ = ["overlap", "split_by_holders", "uncovered"]


def overlap(a: range, b: range) -> range:
    """The intersection of two ranges; empty if they are disjoint."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def split_by_holders(shared: range, present: list[tuple[int, range]]) -> Iterable[tuple[range, tuple[int, ...]]]:
    """Cuts ``shared`` into maximal parts that are held by the same ranks. Yields (part, ranks), both ascending.

    present: (rank, the part of ``shared`` that it holds), in rank order. For example, ``range(4)`` of which rank 0
    holds ``range(2)`` and rank 1 holds all is cut into ``range(0, 2)``, held by (0, 1), and ``range(2, 4)``, held by
    (1,).
    """
    cuts = sorted({shared.start, shared.stop, *(edge for _, held in present for edge in (held.start, held.stop))})
    parts = [
        (range(lo, hi), tuple(rank for rank, held in present if lo in held)) for lo, hi in itertools.pairwise(cuts)
    ]
    for holders, group in itertools.groupby(parts, key=lambda part: part[1]):
        ranges = [held for held, _ in group]
        yield range(ranges[0].start, ranges[-1].stop), holders


def uncovered(wanted: range, spans: Iterable[range]) -> range:
    """The first contiguous part of ``wanted`` that no span covers; empty if the spans cover all of it."""
    position = wanted.start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > position:
            return range(position, min(span.start, wanted.stop))
        position = max(position, min(span.stop, wanted.stop))
    return range(position, wanted.stop)
