"""Symmetric memory as this process sees it: blocks that every PE has, and local tenants inside them.

NVSHMEM allocates and frees collectively, on all PEs, in one order. A tensor is freed whenever Python drops it, on
one rank alone, and a rank may die. So nothing is ever given back to NVSHMEM: what all PEs allocate together is a
*block*, of one size everywhere, and from it each PE hands out spans by itself. A peer names a span by block and
offset, so spans need not lie at the same place on all PEs, and what is freed here is used again here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchkv.errors import ProtocolError

__all__ = ["ALIGNMENT", "Block", "Heap", "Place"]

ALIGNMENT = 512  # bytes; NVSHMEM's own, and enough for every vector load


@dataclass(frozen=True, slots=True)
class Place:
    """A span of symmetric memory: ``nbytes`` from ``offset`` on in block number ``block``."""

    block: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Block:
    """One collective allocation. ``free``: spans (offset, bytes) that nobody has, ascending, never touching."""

    base: int  # address on this PE
    nbytes: int
    free: list[tuple[int, int]] = field(default_factory=list)


class Heap:
    """The blocks, in the order of their allocation, which is the same on all PEs. Thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        # Re-entrant: a garbage collection in any of these sections may give a span back.
        self._lock = threading.RLock()

    @property
    def blocks(self) -> Sequence[Block]:
        return tuple(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def largest_free(self) -> int:
        """The largest span that `take` could give."""
        with self._lock:
            return max((size for block in self._blocks for _, size in block.free), default=0)

    def add(self, base: int, nbytes: int) -> None:
        """A new block, all of it free."""
        with self._lock:
            self._blocks.append(Block(base, nbytes, [(0, nbytes)]))

    def take(self, nbytes: int) -> Place | None:
        """A free span of ``nbytes`` (at least 1), aligned to ``ALIGNMENT``; None if there is none."""
        size = aligned(nbytes)
        with self._lock:
            # The tightest fit, so that a small tensor does not break the span that a cache needs again.
            fits = [
                (room, index, i)
                for index, block in enumerate(self._blocks)
                for i, (_, room) in enumerate(block.free)
                if room >= size
            ]
            if not fits:
                return None
            room, index, i = min(fits)
            offset, _ = self._blocks[index].free[i]
            self._blocks[index].free[i : i + 1] = [(offset + size, room - size)] if room > size else []
            return Place(index, offset, nbytes)

    def give(self, place: Place) -> None:
        """Takes back what `take` gave; joined with free neighbours."""
        start, end = place.offset, place.offset + aligned(place.nbytes)
        with self._lock:
            free = self._blocks[place.block].free
            i = sum(offset < start for offset, _ in free)
            assert i == 0 or sum(free[i - 1]) <= start, "given back twice"
            assert i == len(free) or end <= free[i][0], "given back twice"
            if i < len(free) and free[i][0] == end:
                end += free.pop(i)[1]
            if i and sum(free[i - 1]) == start:
                i -= 1
                start = free.pop(i)[0]
            free.insert(i, (start, end - start))

    def find(self, ptr: int, nbytes: int) -> Place | None:
        """Where [ptr, ptr + nbytes) lies, or None if that is not inside one block."""
        for index, block in enumerate(self._blocks):
            if block.base <= ptr and ptr + nbytes <= block.base + block.nbytes:
                return Place(index, ptr - block.base, nbytes)
        return None

    def address(self, place: Place, owner: str) -> int:
        """The address of ``place`` on this PE, which names it on every PE. Raises ``ProtocolError`` outside a block.

        owner: whose claim it is, for the message.
        """
        if not 0 <= place.block < len(self._blocks):
            raise ProtocolError(
                f"{owner} names block {place.block} of the symmetric heap, which has {len(self._blocks)} here; all "
                "ranks must allocate together"
            )
        block = self._blocks[place.block]
        if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > block.nbytes:
            raise ProtocolError(
                f"{owner} names bytes {place.offset} to {place.offset + place.nbytes} of block {place.block} of the "
                f"symmetric heap, which has {block.nbytes}"
            )
        return block.base + place.offset


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
