"""A histogram of durations, in plain integers. Pure."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["BOUNDS", "Histogram"]

# Upper bounds of the buckets in seconds: 10 us to 50 s.
BOUNDS = tuple(factor * 10.0**power for power in range(-5, 2) for factor in (1.0, 2.5, 5.0))


class Histogram:
    """counts: of durations up to each of `BOUNDS`, and beyond, each counted once. total: their sum in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def copy(self) -> Histogram:
        made = Histogram()
        made.counts, made.total = list(self.counts), self.total
        return made

    def merge(self, other: Histogram) -> None:
        """Adds the durations of another one."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, how many are not above it) of each bucket, as Prometheus wants them."""
        found, so_far = [], 0
        for bound, count in zip((*BOUNDS, float("inf")), self.counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", so_far))
        return found
