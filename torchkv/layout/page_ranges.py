"""Whether the pages of two tensors share bytes: pages of an adopted tensor may lie at any distance from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.host.jit import at_register, compiled_with_gil

__all__ = ["PageRange", "meetings", "page_for_page", "pages_met", "shared_pages"]


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


def page_for_page(one: PageRange, other: PageRange) -> bool:
    """Whether page i of one may share bytes with page i of the other, and with no other page of it."""
    if one.num_pages != other.num_pages:
        return False
    spanned = max(one.start + one.nbytes, other.start + other.nbytes) - min(one.start, other.start)
    return one.num_pages == 1 or (one.stride == other.stride and spanned <= one.stride)


def _of_equal_strides(one: PageRange, other: PageRange) -> tuple[int, int] | None:
    """Page i of ``one`` and page i + d of ``other`` are always equally far apart, so two values of d are all to try."""
    for distance in ((one.start - other.start) // one.stride, (one.start - other.start) // one.stride + 1):
        gap = other.start + distance * other.stride - one.start  # from page i to page i + d
        first = max(0, -distance)
        if -other.nbytes < gap < one.nbytes and first < one.num_pages and first + distance < other.num_pages:
            return first, first + distance
    return None


def meetings(ours: Sequence[PageRange], theirs: Sequence[PageRange]) -> Int64Array:
    """How the pages of two caches lie to each other, for `pages_met`: int64 [n, 6], one row per geometry.

    No rows: no page of one shares a byte with a page of the other. The ranges of one side have the same page ids.
    A row: from the start of their range to that of ours, our stride and bytes, their stride, bytes and number of pages.
    """
    found: dict[tuple[int, ...], tuple[PageRange, PageRange]] = {}
    later = sorted(theirs)
    for one in ours:
        for other in later:
            if other.start >= one.end:
                break
            if other.end > one.start:  # layers that lie alike, as in two groups over one cache, share a row
                shape = one.stride, one.nbytes, max(other.stride, 1), other.nbytes, other.num_pages
                found.setdefault((one.start - other.start, *shape), (one, other))
    rows = [row for row, pair in found.items() if shared_pages(*pair) is not None]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


@compiled_with_gil
def pages_met(pages: Int64Array, rows: Int64Array, marks: Int64Array) -> Int64Array:
    """For each of our ``pages`` one of their pages that shares bytes with it and has a mark that is not 0; -1: none.

    rows: of `meetings`. marks: by their page.
    """
    met = np.full(len(pages), -1, dtype=np.int64)
    for row in range(len(rows)):
        distance, stride, nbytes, their_stride, their_nbytes, num_pages = rows[row]
        for i in range(len(pages)):
            begin = distance + pages[i] * stride
            first = max((begin - their_nbytes) // their_stride + 1, 0)
            end = min((begin + nbytes - 1) // their_stride + 1, num_pages)
            for page in range(first, end):
                if marks[page] != 0 and met[i] < 0:
                    met[i] = page
    return met


@at_register
def warm_up() -> None:
    """Compiles the loop above, or loads it from disk, so that the first request does not wait for it."""
    none = np.zeros(0, dtype=np.int64)
    pages_met(none, np.zeros((0, 6), dtype=np.int64), none)
