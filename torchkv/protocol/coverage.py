"""Coverage: which tokens of each layer have arrived, or which pages were sent, as sets of half-open intervals.

Completion is decided by coverage and never by counting messages, so repeated, overlapping and reordered messages change
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Coverage", "LayerCoverage"]


class Coverage:
    """An immutable set of integers, kept as disjoint, sorted, merged intervals [lo, hi)."""

    __slots__ = ("_his", "_los")

    def __init__(self, los: tuple[int, ...] = (), his: tuple[int, ...] = ()) -> None:
        self._los = los
        self._his = his

    def plus(self, lo: int, hi: int) -> Coverage:
        """This set and [lo, hi). Returns this very object if [lo, hi) is covered already."""
        if not self._los and lo < hi:
            return Coverage((lo,), (hi,))
        if self.gap(lo, hi) is None:
            return self
        first = bisect_left(self._his, lo)
        last = bisect_right(self._los, hi)
        if first < last:
            lo = min(lo, self._los[first])
            hi = max(hi, self._his[last - 1])
        return Coverage(
            (*self._los[:first], lo, *self._los[last:]),
            (*self._his[:first], hi, *self._his[last:]),
        )

    def gap(self, lo: int, hi: int) -> int | None:
        """The smallest integer of [lo, hi) that is not in the set, or None."""
        if lo >= hi:
            return None
        at = bisect_right(self._los, lo) - 1
        if at < 0 or self._his[at] <= lo:
            return lo
        return None if self._his[at] >= hi else self._his[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._los, self._his, strict=True))


_NOTHING = Coverage()


class LayerCoverage:
    """The `Coverage` of many layers. Layers that are covered alike share one object."""

    __slots__ = ("_made", "_of", "_span")

    def __init__(self) -> None:
        self._of: dict[int, Coverage] = {}
        # What the last span has made of coverages, so that layers that come one by one share them too.
        self._span = (0, 0)
        self._made: dict[Coverage, Coverage] = {}

    def add(self, layers: Iterable[int], lo: int, hi: int) -> None:
        """Adds [lo, hi) to each of these layers."""
        if lo >= hi:
            return
        if (lo, hi) != self._span:
            self._span, self._made = (lo, hi), {}
        made = self._made
        for layer in layers:
            before = self._of.get(layer, _NOTHING)
            if before not in made:
                made[before] = before.plus(lo, hi)
            self._of[layer] = made[before]

    def first_gap(
        self, owed: Iterable[tuple[Iterable[int], list[tuple[int, int]]]], *, unit: int = 1
    ) -> tuple[int, int] | None:
        """The lowest layer that is ``owed`` and not covered, and its first integer that is not; or None.

        owed: layers, ascending, and intervals that each of them owes, none empty. unit: how many integers of ``owed``
        make one integer of this coverage (tokens in a page, if pages were added); one that is owed in part is owed.
        """
        first: tuple[int, int] | None = None
        for layers, intervals in owed:
            whole: Coverage | None = None  # what the layer before has; most layers share one object
            for layer in layers:
                coverage = self._of.get(layer, _NOTHING)
                if coverage is whole:
                    continue
                gaps = (coverage.gap(lo // unit, -(-hi // unit)) for lo, hi in intervals)
                missing = next((gap for gap in gaps if gap is not None), None)
                if missing is not None:
                    first = (layer, missing) if first is None or layer < first[0] else first
                    break
                whole = coverage
        return first
