"""A set of half-open integer intervals: which pages were given, which tokens have arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

__all__ = ["Coverage"]


class Coverage:
    """Disjoint, sorted, merged intervals [lo, hi). Adding what is covered already changes nothing."""

    __slots__ = ("_his", "_los")

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []

    def add(self, lo: int, hi: int) -> None:
        if lo >= hi:
            return
        # The two common cases, many times a transfer: the first interval, and the same once more.
        if not self._los:
            self._los.append(lo)
            self._his.append(hi)
            return
        if self._los[-1] <= lo and hi <= self._his[-1]:
            return
        first = bisect_left(self._his, lo)
        last = bisect_right(self._los, hi)
        if first < last:
            lo = min(lo, self._los[first])
            hi = max(hi, self._his[last - 1])
        self._los[first:last] = [lo]
        self._his[first:last] = [hi]

    @property
    def end(self) -> int:
        """One past the highest member; 0 if empty."""
        return self._his[-1] if self._his else 0

    def gap(self, lo: int, hi: int) -> int | None:
        """The first member of [lo, hi) that is missing, or None."""
        if lo >= hi:
            return None
        at = bisect_right(self._los, lo) - 1
        if at < 0 or self._his[at] <= lo:
            return lo
        return None if self._his[at] >= hi else self._his[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._los, self._his, strict=True))
