"""The allocator of symmetric memory: blocks that all PEs have, and spans of them that each PE gives out by itself.

NVSHMEM allocates and frees collectively: on all PEs, in the same order. But a tensor is freed when Python drops it, on
one rank alone, and a rank may die. So nothing is ever given back to NVSHMEM. All PEs together allocate a *block*, of
the same size everywhere, and each PE gives out spans of it by itself. A peer names a span by block and offset, so spans
need not lie at the same place on all PEs, and a span that is freed here can be used again here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchkv.errors import ProtocolError

__all__ = ["ALIGNMENT", "Block", "Heap", "Place"]

ALIGNMENT = 512  # bytes; what NVSHMEM aligns to, and enough for every vector load


@dataclass(frozen=True, slots=True)
class Place:
    """A span of symmetric memory: ``nbytes`` from ``offset`` on in block number ``block``."""

    block: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Block:
    """One collective allocation. free: unused spans (offset, bytes), in ascending order, none adjacent to another."""

    base: int  # address on this PE
    nbytes: int
    free: list[tuple[int, int]] = field(default_factory=list)


class Heap:
    """The blocks, in the order of their allocation, which is the same on all PEs. Thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        # Re-entrant, because a garbage collection while it is held may free a tensor and so call `give`.
        self._lock = threading.RLock()

    @property
    def blocks(self) -> Sequence[Block]:
        return tuple(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest span that `take` could return."""
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
            # The smallest span that fits, so that a small tensor does not split one that a cache will need again.
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
        """Frees what `take` returned; joins it with free neighbours."""
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
        """The place of [ptr, ptr + nbytes), or None if that does not lie inside one block."""
        for index, block in enumerate(self._blocks):
            if block.base <= ptr and ptr + nbytes <= block.base + block.nbytes:
                return Place(index, ptr - block.base, nbytes)
        return None

    def address(self, place: Place, owner: str) -> int:
        """The address of ``place`` on this PE, by which NVSHMEM names it on every PE.

        Raises ``ProtocolError`` if it does not lie inside a block. owner: who published it, for the message.
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
