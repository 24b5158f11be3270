"""How sure a median is: the interval between two order statistics, which assumes nothing about the distribution.

This is the confidence interval of the sign test. Each value lies below the true median with probability one half, so
how many do follows the binomial distribution, and the k-th smallest and the k-th largest value enclose the median with
a probability that can be told exactly (W. J. Conover, Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Interval", "confidence", "median_interval"]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and what encloses the true one."""

    low: float
    median: float
    high: float

    def apart(self, other: Interval) -> bool:
        """Whether the two have no value in common."""
        return self.high < other.low or other.high < self.low

    def inverse(self, scale: float = 1.0) -> Interval:
        """Of ``scale`` divided by each value; all are positive."""
        return Interval(scale / self.high, scale / self.median, scale / self.low)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of independent values, at least one, with an interval of at least `CONFIDENCE`.

    Of fewer than six values no two enclose it so surely; then it is their range.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Interval(ordered[rank], statistics.median(ordered), ordered[len(ordered) - 1 - rank])


def confidence(count: int) -> float:
    """The probability with which `median_interval` of so many values encloses the true median."""
    return 1.0 - 2.0 * _below(count, _rank(count))


def _rank(count: int) -> int:
    """The position of the interval's lower end, from 0: the highest that is sure enough, else 0."""
    return max((rank for rank in range(count // 2) if 1.0 - 2.0 * _below(count, rank) >= CONFIDENCE), default=0)


def _below(count: int, rank: int) -> float:
    """The probability that at most ``rank`` of ``count`` values lie below the true median."""
    return sum(math.comb(count, k) for k in range(rank + 1)) / 2.0**count
