"""Whether the pages of two tensors share bytes: pages of an adopted tensor may lie at any distance from each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchkv.arrays import Int64Array

__all__ = ["PageRange", "shared_pages"]


class PageRange(NamedTuple):
    """Page i is the bytes ``[start + i * stride, start + i * stride + nbytes)``, for 0 <= i < num_pages.

    start: an address. stride: at least ``nbytes`` if there are several pages.
    """

    start: int
    stride: int
    nbytes: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.start + (self.num_pages - 1) * self.stride + self.nbytes

    def starts(self) -> Int64Array:
        return self.start + self.stride * np.arange(self.num_pages, dtype=np.int64)


def shared_pages(one: PageRange, other: PageRange) -> tuple[int, int] | None:
    """The numbers of two pages, the first of ``one``, that have bytes in common; None if no two have."""
    if one.end <= other.start or other.end <= one.start:
        return None
    if one.stride == other.stride and min(one.num_pages, other.num_pages) > 1:
        return _of_equal_strides(one, other)
    if one.num_pages > other.num_pages:
        found = shared_pages(other, one)
        return None if found is None else (found[1], found[0])
    # The fewer pages are looked up among the more. A page of `one` meets the page of `other` that begins last before
    # its end, if that reaches beyond its start; pages of `other` do not overlap, so no earlier one reaches further.
    starts = one.starts()
    last = np.minimum((starts + one.nbytes - 1 - other.start) // max(other.stride, 1), other.num_pages - 1)
    met = (last >= 0) & (other.start + last * other.stride + other.nbytes > starts)
    where = np.flatnonzero(met)
    return (int(where[0]), int(last[where[0]])) if len(where) else None


def _of_equal_strides(one: PageRange, other: PageRange) -> tuple[int, int] | None:
    """Page i of ``one`` and page i + d of ``other`` are always equally far apart, so two values of d are all to try."""
    for distance in ((one.start - other.start) // one.stride, (one.start - other.start) // one.stride + 1):
        gap = other.start + distance * other.stride - one.start  # from page i to page i + d
        first = max(0, -distance)
        if -other.nbytes < gap < one.nbytes and first < one.num_pages and first + distance < other.num_pages:
            return first, first + distance
    return None
