"""Leases: which request holds which page and state slot of this rank, until no write can land there any more.

A lease begins with `recv_pages` and ends when the request succeeds, or when it has failed and all its writers are
quiescent. A leased page is not granted again. The lease of a failed request is a quarantine: late writes may still
land.

A lease is of a *place*: a number in a *pool*, whose places share no bytes. The pages of a cache are one pool, its state
slots another. With layer groups each has pools of its own, unless groups lay their pages over the same memory: these
share one, so that a place that one group leases is leased for all of them (`KVCache.pools`).

The same memory may hold pages of several process groups of this process. Each group has `Leases` of its own; those of
the others are asked through `OtherLeases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import PageOutOfRange
from torchkv.host.jit import at_register, compiled_with_gil
from torchkv.layout.layer_groups import PAGES, UNGROUPED, Pools
from torchkv.protocol.receiving.request import ReceiverRequest

__all__ = ["Leases", "OtherLeases", "Wanted", "warm_up"]


class Wanted(NamedTuple):
    """What one call wants to lease. group: None if the layout has no layer groups."""

    pages: Int64Array
    slot: int | None
    group: str | None = None


@compiled_with_gil
def _are_free(pages: Int64Array, leases: Int64Array) -> bool:
    """Whether all pages are in range, named once and not leased. Pages seen are marked -1, and unmarked at the end."""
    seen = 0
    while seen < len(pages):
        page = pages[seen]
        if page < 0 or page >= len(leases) or leases[page] != 0:
            break
        leases[page] = -1
        seen += 1
    for i in range(seen):
        leases[pages[i]] = 0
    return bool(seen == len(pages))


@compiled_with_gil
def _mark(pages: Int64Array, leases: Int64Array, generation: int) -> None:
    for page in pages:
        leases[page] = generation


@compiled_with_gil
def _copy_and_mark(given: Int64Array, pages: Int64Array, leases: Int64Array, generation: int) -> bool:
    """Copies ``given`` to ``pages`` and marks them, if all are in range, named once and not leased; else marks none."""
    marked = 0
    while marked < len(given):
        page = given[marked]
        if page < 0 or page >= len(leases) or leases[page] != 0:
            break
        leases[page] = generation
        pages[marked] = page
        marked += 1
    if marked < len(given):
        for i in range(marked):
            leases[pages[i]] = 0
    return bool(marked == len(given))


@at_register
def warm_up() -> None:
    """Compiles the loops above, or loads them from disk, so that the first request does not wait for it."""
    none = np.zeros(0, dtype=np.int64)
    _are_free(none, none)
    _mark(none, none, 0)
    _copy_and_mark(none, none, none, 0)


class OtherLeases(Protocol):
    """What other groups of this process, also destroyed ones, hold of the memory of one group's pages and slots."""

    def check(self, places: Int64Array, pool: int, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a place of ``pool`` that shares bytes with what another group leases."""

    def quarantined(self, pool: int) -> list[int]:
        """The places of ``pool`` that share bytes with what another group has in quarantine."""


class Leases:
    """The leases of one rank. num_pages, num_slots: of its cache. pools: its pools.

    others: the leases of other groups on the same memory; None as long as this group has it alone. guard: held from
    `check` to `take`, so that no other group leases the same bytes in between.
    """

    def __init__(self, *, num_pages: int, num_slots: int, pools: Pools = UNGROUPED) -> None:
        sizes = dict.fromkeys(pools.values(), 0)
        for (_, of_slots), pool in pools.items():
            sizes[pool] = max(sizes[pool], num_slots if of_slots else num_pages)
        self.pools = pools
        # By pool: place -> generation, 0 = free.
        self._marks: list[Int64Array] = [np.zeros(sizes[pool], dtype=np.int64) for pool in sorted(sizes)]
        self._num_slots = num_slots
        self._holders: dict[int, ReceiverRequest] = {}
        self.others: OtherLeases | None = None
        self.guard: AbstractContextManager[object] = nullcontext()

    def is_of_slots(self, pool: int) -> bool:
        """Whether the places of a pool are state slots only."""
        return all(of_slots for (_, of_slots), other in self.pools.items() if other == pool)

    def check(self, pages: Int64Array, slot: int | None, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a page or slot that is out of range, named twice, leased or quarantined.

        By this group, or by another one over the same memory. Of a layout without layer groups. operation: the call, to
        begin the error message with.
        """
        if not _are_free(pages, self._marks[PAGES]):
            self._complain(pages, PAGES, operation)
        if slot is not None:
            self._check_slot(slot, None, operation)
        if self.others is not None:
            self.others.check(pages, PAGES, operation)
            if slot is not None:
                self.others.check(np.array([slot], dtype=np.int64), self.pools[None, True], operation)

    def check_together(self, wanted: Sequence[Wanted], operation: str) -> None:
        """As `check`, for several layer groups of one request: no two of them may lease the same memory, either."""
        places: dict[int, list[Int64Array]] = {}
        for pages, slot, group in wanted:
            if slot is not None:
                self._check_slot(slot, group, operation)
                places.setdefault(self.pools[group, True], []).append(np.array([slot], dtype=np.int64))
            places.setdefault(self.pools[group, False], []).append(pages)
        for pool, parts in places.items():
            together = np.concatenate(parts)
            if not _are_free(together, self._marks[pool]):
                self._complain(together, pool, operation)
            if self.others is not None:
                self.others.check(together, pool, operation)

    def _check_slot(self, slot: int, group: str | None, operation: str) -> None:
        marks = self._marks[self.pools[group, True]]
        if slot >= self._num_slots:
            raise PageOutOfRange(f"{operation}: state_slot={slot} is outside this cache's [0, {self._num_slots})")
        if marks[slot]:
            raise PageOutOfRange(f"{operation}: state slot {slot} {self.held_by(int(marks[slot]), 'slots')}")

    def _complain(self, pages: Int64Array, pool: int, operation: str) -> None:
        marks = self._marks[pool]
        outside = pages[(pages < 0) | (pages >= len(marks))]
        if len(outside):
            raise PageOutOfRange(f"{operation}: page {int(outside[0])} is outside this cache's [0, {len(marks)})")
        values, counts = np.unique(pages, return_counts=True)
        if len(values) != len(pages):
            sharing = [group for (group, _), other in self.pools.items() if other == pool and group is not None]
            hint = f" (layer groups {', '.join(dict.fromkeys(sharing))} share their memory)" if len(sharing) > 1 else ""
            raise PageOutOfRange(
                f"{operation}: page {int(values[counts > 1][0])} is named twice; give each page once{hint}"
            )
        taken = pages[marks[pages] != 0]
        page = int(taken[0])
        raise PageOutOfRange(f"{operation}: page {page} {self.held_by(int(marks[page]), 'pages')}")

    def take(self, req: ReceiverRequest) -> None:
        """Leases the pages and the slot of ``req``, which `check` has accepted."""
        self._holders[req.generation] = req
        self._set(req, req.generation)

    def try_take(self, given: Int64Array, pages: Int64Array, slot: int | None, generation: int) -> bool:
        """`check` and `take` in one, without layer groups: leases ``pages``, to which it copies ``given``, and a slot.

        False, and nothing is leased, where `check` has something to say. Else the caller calls `hold` next.
        """
        if self.others is not None:
            return False
        if slot is None:
            return _copy_and_mark(given, pages, self._marks[PAGES], generation)
        slots = self._marks[self.pools[None, True]]
        if slot >= self._num_slots or slots[slot] or not _copy_and_mark(given, pages, self._marks[PAGES], generation):
            return False
        slots[slot] = generation
        return True

    def hold(self, req: ReceiverRequest) -> None:
        """What `try_take` has leased to this generation is of ``req``."""
        self._holders[req.generation] = req

    def free(self, req: ReceiverRequest) -> None:
        """Ends the leases of ``req``, unless they have ended."""
        if self._holders.pop(req.generation, None) is not None:
            self._set(req, 0)

    def _set(self, req: ReceiverRequest, generation: int) -> None:
        pool = PAGES if req.group is None else self.pools[req.group, False]
        _mark(req.pages, self._marks[pool], generation)
        if req.state_slot is not None:
            self._marks[self.pools[req.group, True]][req.state_slot] = generation

    def quarantined(self, *, slots: bool = False, group: str | None = None) -> dict[int, tuple[int, ...]]:
        """Page, or state slot -> ranks that may still write to it, for all that failed requests still lease.

        No ranks: only this rank itself still writes to it, unpacking a stage, or writers of another group. group: one
        layer group; None: all of them together.
        """
        pools = {pool for (name, kind), pool in self.pools.items() if kind == slots and group in (None, name)}
        found: dict[int, tuple[int, ...]] = {}
        if self.others is not None:
            for pool in sorted(pools):
                found |= dict.fromkeys(self.others.quarantined(pool), ())
        for req in self.failed():
            for pool, places in self._places(req):
                if pool in pools:
                    for place in places.tolist():
                        found[place] = tuple(dict.fromkeys((*found.get(place, ()), *req.pending_writers())))
        return found

    def _places(self, req: ReceiverRequest) -> Iterator[tuple[int, Int64Array]]:
        """What ``req`` leases: pools, and places in them."""
        yield self.pools[req.group, False], req.pages
        if req.state_slot is not None:
            yield self.pools[req.group, True], np.array([req.state_slot], dtype=np.int64)

    def failed(self) -> list[ReceiverRequest]:
        """The failed requests that still lease pages or a slot. May be called without the lock, as all that follow."""
        return [req for req in self.holders() if req.error is not None]

    def holders(self) -> list[ReceiverRequest]:
        """The requests that lease pages or a slot."""
        return list(self._holders.values())

    def pending_writers(self) -> set[int]:
        """Ranks whose writes may still land on pages or slots of failed requests."""
        return {rank for req in self.failed() for rank in req.pending_writers()}

    def marks(self, pool: int, *, failed: bool = False) -> Int64Array:
        """Place of a pool -> the generation that leases it, 0 if none. failed: leases of failed requests only."""
        if not failed:
            return self._marks[pool]
        marks = np.zeros(len(self._marks[pool]), dtype=np.int64)
        for req in self.failed():
            for other, places in self._places(req):
                if other == pool:
                    marks[places] = req.generation
        return marks

    def holder(self, generation: int) -> ReceiverRequest | None:
        """The request that leases pages under ``generation``; None if its leases have ended."""
        return self._holders.get(generation)

    def held_by(self, generation: int, others: str) -> str:
        """The end of an error message about a page or slot that is leased to ``generation``. others: pages or slots."""
        holder = self._holders.get(generation)
        if holder is None:  # of another group, whose lock is not held
            return "was leased a moment ago; try again"
        if holder.error is None:
            return f"is leased to request {holder.request!r}; wait for that request or cancel({holder.request!r})"
        return (
            f"is quarantined: ranks {list(holder.pending_writers())} may still write to it for the failed request "
            f"{holder.request!r}; use other {others}, or wait until cancel({holder.request!r}) completes"
        )
