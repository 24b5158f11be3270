"""Ranges of heads, or of a state's elements: what two layouts share, who holds which part, what nobody holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

__all__ = ["overlap", "split_by_holders", "uncovered"]


def overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def split_by_holders(shared: range, present: list[tuple[int, range]]) -> Iterable[tuple[range, tuple[int, ...]]]:
    """Cuts ``shared`` into maximal ranges with equal holders, which come in rank order.

    present: (rank, what it holds of ``shared``), in rank order.
    """
    cuts = sorted({shared.start, shared.stop, *(edge for _, held in present for edge in (held.start, held.stop))})
    pieces = [
        (range(lo, hi), tuple(rank for rank, held in present if lo in held)) for lo, hi in itertools.pairwise(cuts)
    ]
    for holders, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        ranges = [held for held, _ in group]
        yield range(ranges[0].start, ranges[-1].stop), holders


def uncovered(wanted: range, spans: Iterable[range]) -> range:
    """The first stretch of ``wanted`` that no span covers; empty if there is none."""
    position = wanted.start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > position:
            return range(position, min(span.start, wanted.stop))
        position = max(position, min(span.stop, wanted.stop))
    return range(position, wanted.stop)
