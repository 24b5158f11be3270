"""The staging ring as an allocator: contiguous stages, taken as a cursor walks round, given back in any order.

A ring that takes space back in the order in which it gave it stands still behind one stage that is leaked, slow or
quarantined. This one steps over whatever is still held, so such a stage costs its own bytes and nothing more. Whenever
it is empty it begins at its start again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

__all__ = [
    "ALIGNMENT",
    "CHUNK_UNIT",
    "MAX_CHANNELS",
    "SIGNALS",
    "SIGNAL_STEP",
    "SLOTS",
    "Signal",
    "Stage",
    "StagingRing",
    "Stream",
    "signal_offset",
]

ALIGNMENT = 256  # bytes; of stages, and of what lies in them: whole cache lines, and the widest words of a GPU

SIGNALS = 64  # signals behind a ring: so many stages may be written early at once
SIGNAL_STEP = 1 << 20  # between the values of two signals
MAX_CHANNELS = 256  # of a stream
SLOTS = 4  # chunks of a channel that may be in the stage at once
CHUNK_UNIT = 32 << 10  # bytes; of a chunk: a whole number of any kernel's tiles


class Signal(NamedTuple):
    """How a writer's GPU tells the receiver's how far a stage is written: by int64 words behind the ring.

    A signal is ``2 * MAX_CHANNELS`` words, which only rise, and ``value`` is larger than anything they have held. The
    first becomes ``value`` when the stage is written, and one more when the receiver waits no longer. In a stream,
    word c becomes ``value`` and the number of chunks that channel c has written, and word ``MAX_CHANNELS + c`` that of
    those that were read.
    """

    word: int
    value: int


class Stream(NamedTuple):
    """How a piece of any size passes through a stage: in chunks of ``chunk`` bytes, which ``channels`` channels share.

    The stage has `SLOTS` chunks for each channel.
    """

    chunk: int
    channels: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stage that it takes."""
        return self.chunk * self.channels * SLOTS

    def chunks(self, job_nbytes: int) -> int:
        """Chunks of so many bytes of one slab and layer, the last one perhaps partly filled."""
        return -(-job_nbytes // self.chunk)


def signal_offset(ring_nbytes: int, word: int) -> int:
    """Where signal ``word`` of a ring of ``ring_nbytes`` bytes lies, in bytes from the ring's start."""
    return -(-ring_nbytes // 8) * 8 + 8 * 2 * MAX_CHANNELS * word


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """Bytes [offset, offset + nbytes) of a ring, both multiples of its alignment. ``owner``: who it was taken for."""

    offset: int
    nbytes: int
    owner: Hashable

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class StagingRing:
    """Next-fit over [0, capacity). A stage never straddles the end. Not thread-safe; owns no memory.

    capacity: bytes, rounded down to the alignment; 0 is a ring into which nothing fits. Taking and giving back cost
    at most a walk over the free spans.
    """

    def __init__(self, capacity: int, *, alignment: int = ALIGNMENT) -> None:
        assert capacity >= 0, f"a ring of {capacity} bytes"
        assert alignment >= 1, f"an alignment of {alignment} bytes"
        self._alignment = alignment
        self._capacity = capacity - capacity % alignment
        self._cursor = 0
        # The free spans, in order; neighbours are merged.
        self._los = [0] if self._capacity else []
        self._his = [self._capacity] if self._capacity else []
        self._live: dict[int, Stage] = {}  # by offset
        self._quarantine: dict[int, Stage] = {}
        self._in_use = 0
        self._room = self._capacity
        # No free span is as long as this. A waiting ask is tried again at every release: mostly this refuses it.
        self._too_long = self._capacity + 1

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
    def room(self) -> int:
        """The largest stage there could be if all were released but the quarantined ones."""
        return self._room

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The live stages, the quarantined ones included, in the order in which they were taken."""
        return tuple(self._live.values())

    def allocate(self, nbytes: int, owner: Hashable) -> Stage | None:
        """A stage of ``nbytes`` > 0, rounded up to the alignment, or None if no free span is that long now."""
        assert nbytes > 0, f"a stage of {nbytes} bytes"
        size = -(-nbytes // self._alignment) * self._alignment
        if size >= self._too_long:
            return None
        place = self._find(size)
        if place is None:
            self._too_long = size
            return None
        index, offset = place
        stage = Stage(offset, size, owner)
        self._cut(index, offset, stage.end)
        self._live[offset] = stage
        self._in_use += size
        self._cursor = stage.end
        return stage

    def release(self, stage: Stage) -> None:
        """Gives a live stage back, quarantined or not."""
        assert self._live.get(stage.offset) is stage, f"{stage} is not taken"
        del self._live[stage.offset]
        self._in_use -= stage.nbytes
        self._merge(stage.offset, stage.end)
        if self._quarantine.pop(stage.offset, None) is not None:
            self._room = self._largest_gap()
        if not self._live:
            self._cursor = 0  # memory that was used lately is still in caches, and has been faulted in

    def quarantine(self, stage: Stage) -> None:
        """Bytes may still land in this live stage: it stays taken until `release`, and `room` does without it."""
        assert self._live.get(stage.offset) is stage, f"{stage} is not taken"
        self._quarantine[stage.offset] = stage
        self._room = self._largest_gap()

    def _find(self, size: int) -> tuple[int, int] | None:
        """(which free span, offset): from the cursor on, then from the start of the ring."""
        here = bisect_right(self._los, self._cursor) - 1
        if here >= 0 and self._cursor + size <= self._his[here]:
            return here, self._cursor
        # The span in which the cursor stands comes last, then as a whole: an empty ring is one such span.
        for index in chain(range(here + 1, len(self._los)), range(here + 1)):
            if self._his[index] - self._los[index] >= size:
                return index, self._los[index]
        return None

    def _cut(self, index: int, lo: int, hi: int) -> None:
        """Takes [lo, hi) out of the free span ``index``."""
        rest = [(a, b) for a, b in ((self._los[index], lo), (hi, self._his[index])) if a < b]
        self._los[index : index + 1] = [a for a, _ in rest]
        self._his[index : index + 1] = [b for _, b in rest]

    def _merge(self, lo: int, hi: int) -> None:
        """Adds [lo, hi) to the free spans."""
        first = bisect_left(self._his, lo)
        last = bisect_right(self._los, hi)
        if first < last:
            lo = min(lo, self._los[first])
            hi = max(hi, self._his[last - 1])
        self._los[first:last] = [lo]
        self._his[first:last] = [hi]
        self._too_long = max(self._too_long, hi - lo + 1)

    def _largest_gap(self) -> int:
        """The longest span between quarantined stages."""
        largest, at = 0, 0
        for offset in sorted(self._quarantine):
            largest = max(largest, offset - at)
            at = self._quarantine[offset].end
        return max(largest, self._capacity - at)
