"""The allocator of a staging ring: contiguous stages, allocated next-fit and released in any order.

A ring that reclaims space in the order of allocation stands still behind one stage that is leaked, slow or quarantined.
This one steps over stages that are still live, so such a stage costs its own bytes and no more. Whenever the ring is
empty, allocation begins at offset 0 again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain

from torchkv.layout.stage_format import ALIGNMENT

__all__ = ["Stage", "StagingRing"]


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """Bytes [offset, offset + nbytes) of a ring; both are multiples of its alignment. owner: whom it belongs to."""

    offset: int
    nbytes: int
    owner: Hashable

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class StagingRing:
    """Next-fit over [0, capacity). A stage never straddles the end. Not thread-safe; owns no memory.

    capacity: bytes, rounded down to the alignment; into a ring of 0 nothing fits. `allocate` and `release` cost at most
    a walk over the free spans.
    """

    def __init__(self, capacity: int, *, alignment: int = ALIGNMENT) -> None:
        assert capacity >= 0, f"a ring of {capacity} bytes"
        assert alignment >= 1, f"an alignment of {alignment} bytes"
        self._alignment = alignment
        self._capacity = capacity - capacity % alignment
        self._cursor = 0
        # Free span i is [_los[i], _his[i]): ascending, adjacent ones merged.
        self._los = [0] if self._capacity else []
        self._his = [self._capacity] if self._capacity else []
        self._live: dict[int, Stage] = {}  # by offset
        self._quarantine: dict[int, Stage] = {}
        self._kept: dict[int, Stage] = {}  # those that nobody is expected to release, the quarantined ones included
        self._in_use = 0
        self._largest_possible = self._capacity
        # No free span has this many bytes. An ask that waits is tried again at every release; mostly this rejects it
        # without a search.
        self._unavailable = self._capacity + 1

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def in_use(self) -> int:
        """Bytes of all live stages, the quarantined ones included."""
        return self._in_use

    @property
    def quarantined(self) -> int:
        """Bytes of the quarantined stages."""
        return sum(stage.nbytes for stage in self._quarantine.values())

    @property
    def largest_possible(self) -> int:
        """Bytes of the largest stage that could be allocated if all stages but the quarantined ones were released."""
        return self._largest_possible

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The live stages, the quarantined ones included, in the order of allocation."""
        return tuple(self._live.values())

    def allocate(self, nbytes: int, owner: Hashable) -> Stage | None:
        """A stage of ``nbytes`` > 0, rounded up to the alignment; None if no free span is that long now."""
        assert nbytes > 0, f"a stage of {nbytes} bytes"
        size = -(-nbytes // self._alignment) * self._alignment
        if size >= self._unavailable:
            return None
        place = self._find(size)
        if place is None:
            self._unavailable = size
            return None
        stage = self._take(*place, size, owner)
        self._cursor = stage.end
        return stage

    def allocate_for_long(self, nbytes: int, owner: Hashable) -> Stage | None:
        """As `allocate`, of a stage that is not expected to be released: `largest_possible` does not count on it.

        As near to the end of the ring as can be, so that what is left is in one piece; half of the ring at most is
        given away like this.
        """
        size = -(-nbytes // self._alignment) * self._alignment
        if sum(stage.nbytes for stage in self._kept.values()) + size > self._capacity // 2:
            return None
        fitting = (index for index in reversed(range(len(self._los))) if self._his[index] - self._los[index] >= size)
        if (index := next(fitting, None)) is None:
            return None
        stage = self._take(index, self._his[index] - size, size, owner)
        self._keep(stage)
        return stage

    def _take(self, index: int, offset: int, size: int, owner: Hashable) -> Stage:
        stage = Stage(offset, size, owner)
        self._cut(index, offset, stage.end)
        self._live[offset] = stage
        self._in_use += size
        return stage

    def release(self, stage: Stage) -> None:
        """Frees a live stage, quarantined or not."""
        assert self._live.get(stage.offset) is stage, f"{stage} is not taken"
        del self._live[stage.offset]
        self._in_use -= stage.nbytes
        self._merge(stage.offset, stage.end)
        self._quarantine.pop(stage.offset, None)
        if self._kept.pop(stage.offset, None) is not None:
            self._largest_possible = self._largest_gap()
        if not self._live:
            self._cursor = 0  # memory that was used before is in caches and faulted in

    def quarantine(self, stage: Stage) -> None:
        """Marks a live stage that is not read any more, but in which late bytes may still land.

        It stays allocated until `release`, and `largest_possible` no longer counts on its space.
        """
        assert self._live.get(stage.offset) is stage, f"{stage} is not taken"
        self._quarantine[stage.offset] = stage
        self._keep(stage)

    def _keep(self, stage: Stage) -> None:
        self._kept[stage.offset] = stage
        self._largest_possible = self._largest_gap()

    def _find(self, size: int) -> tuple[int, int] | None:
        """(index of a free span, offset) for ``size`` bytes: from the cursor on, then from the start of the ring."""
        here = bisect_right(self._los, self._cursor) - 1
        if here >= 0 and self._cursor + size <= self._his[here]:
            return here, self._cursor
        # The span that holds the cursor is tried once more at the end, from its start: an empty ring is one such span.
        for index in chain(range(here + 1, len(self._los)), range(here + 1)):
            if self._his[index] - self._los[index] >= size:
                return index, self._los[index]
        return None

    def _cut(self, index: int, lo: int, hi: int) -> None:
        """Removes [lo, hi) from the free span ``index``."""
        rest = [(a, b) for a, b in ((self._los[index], lo), (hi, self._his[index])) if a < b]
        self._los[index : index + 1] = [a for a, _ in rest]
        self._his[index : index + 1] = [b for _, b in rest]

    def _merge(self, lo: int, hi: int) -> None:
        """Adds [lo, hi) to the free spans, merged with adjacent ones."""
        first = bisect_left(self._his, lo)
        last = bisect_right(self._los, hi)
        if first < last:
            lo = min(lo, self._los[first])
            hi = max(hi, self._his[last - 1])
        self._los[first:last] = [lo]
        self._his[first:last] = [hi]
        self._unavailable = max(self._unavailable, hi - lo + 1)

    def _largest_gap(self) -> int:
        """Bytes of the longest span between stages that are kept."""
        largest, at = 0, 0
        for offset in sorted(self._kept):
            largest = max(largest, offset - at)
            at = self._kept[offset].end
        return max(largest, self._capacity - at)
