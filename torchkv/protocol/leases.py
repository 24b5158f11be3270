"""Leases: which request holds which page and state slot of this rank, until no write can land there any more.

A lease begins with `recv_pages` and ends when the request succeeds, or when it has failed and all its writers are
quiescent. A leased page is not granted again. The lease of a failed request is a quarantine: late writes may still
land.

The same memory may hold pages of several groups of this process. Each group has `Leases` of its own; those of the
others are asked through `OtherLeases`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import PageOutOfRange
from torchkv.host.jit import at_register, compiled_with_gil
from torchkv.protocol.receive_request import ReceiverRequest

__all__ = ["Leases", "OtherLeases", "warm_up"]


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


@at_register
def warm_up() -> None:
    """Compiles the loops above, or loads them from disk, so that the first request does not wait for it."""
    none = np.zeros(0, dtype=np.int64)
    _are_free(none, none)
    _mark(none, none, 0)


class OtherLeases(Protocol):
    """What other groups of this process, also destroyed ones, hold of the memory of one group's pages and slots."""

    def check(self, pages: Int64Array, slot: int | None, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a page or slot that shares bytes with what another group leases."""

    def quarantined(self, *, slots: bool) -> list[int]:
        """This group's pages, or ``slots``, that share bytes with what another group has in quarantine."""


class Leases:
    """The leases of one rank. num_pages, num_slots: of its cache.

    others: the leases of other groups on the same memory; None as long as this group has it alone. guard: held from
    `check` to `take`, so that no other group leases the same bytes in between.
    """

    def __init__(self, *, num_pages: int, num_slots: int) -> None:
        self._pages: Int64Array = np.zeros(num_pages, dtype=np.int64)  # page -> generation, 0 = free
        self._slots: dict[int, int] = {}
        self._num_slots = num_slots
        self._holders: dict[int, ReceiverRequest] = {}
        self.others: OtherLeases | None = None
        self.guard: AbstractContextManager[object] = nullcontext()

    def check(self, pages: Int64Array, slot: int | None, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a page or slot that is out of range, named twice, leased or quarantined.

        By this group, or by another one over the same memory. operation: the call, to begin the error message with.
        """
        if not _are_free(pages, self._pages):
            self._complain(pages, operation)
        if slot is not None and slot >= self._num_slots:
            raise PageOutOfRange(f"{operation}: state_slot={slot} is outside this cache's [0, {self._num_slots})")
        if slot in self._slots:
            raise PageOutOfRange(f"{operation}: state slot {slot} {self.held_by(self._slots[slot], 'slots')}")
        if self.others is not None:
            self.others.check(pages, slot, operation)

    def _complain(self, pages: Int64Array, operation: str) -> None:
        num_pages = len(self._pages)
        outside = pages[(pages < 0) | (pages >= num_pages)]
        if len(outside):
            raise PageOutOfRange(f"{operation}: page {int(outside[0])} is outside this cache's [0, {num_pages})")
        values, counts = np.unique(pages, return_counts=True)
        if len(values) != len(pages):
            raise PageOutOfRange(f"{operation}: page {int(values[counts > 1][0])} is named twice; give each page once")
        taken = pages[self._pages[pages] != 0]
        page = int(taken[0])
        raise PageOutOfRange(f"{operation}: page {page} {self.held_by(int(self._pages[page]), 'pages')}")

    def take(self, req: ReceiverRequest) -> None:
        """Leases the pages and the slot of ``req``, which `check` has accepted."""
        self._holders[req.generation] = req
        _mark(req.pages, self._pages, req.generation)
        if req.state_slot is not None:
            self._slots[req.state_slot] = req.generation

    def free(self, req: ReceiverRequest) -> None:
        """Ends the leases of ``req``."""
        del self._holders[req.generation]
        _mark(req.pages, self._pages, 0)
        if req.state_slot is not None:
            del self._slots[req.state_slot]

    def quarantined(self) -> dict[int, tuple[int, ...]]:
        """Page -> ranks that may still write to it, for every page that a failed request still leases.

        No ranks: only this rank itself still writes to it, unpacking a stage, or writers of another group.
        """
        mine = {int(page): req.pending_writers() for req in self.failed() for page in req.pages}
        return mine if self.others is None else dict.fromkeys(self.others.quarantined(slots=False), ()) | mine

    def quarantined_slots(self) -> dict[int, tuple[int, ...]]:
        """State slot -> ranks that may still write to it, for every slot that a failed request still leases."""
        mine = {req.state_slot: req.pending_writers() for req in self.failed() if req.state_slot is not None}
        return mine if self.others is None else dict.fromkeys(self.others.quarantined(slots=True), ()) | mine

    def failed(self) -> list[ReceiverRequest]:
        """The failed requests that still lease pages or a slot. May be called without the lock, as all that follow."""
        return [req for req in self.holders() if req.error is not None]

    def holders(self) -> list[ReceiverRequest]:
        """The requests that lease pages or a slot."""
        return list(self._holders.values())

    def pending_writers(self) -> set[int]:
        """Ranks whose writes may still land on pages or slots of failed requests."""
        return {rank for req in self.failed() for rank in req.pending_writers()}

    def marks(self, *, slots: bool, failed: bool) -> Int64Array:
        """Page, or slot -> the generation that leases it, 0 if none. failed: leases of failed requests only."""
        if not slots and not failed:
            return self._pages
        marks = np.zeros(self._num_slots if slots else len(self._pages), dtype=np.int64)
        for req in self.failed() if failed else self.holders():
            if not slots:
                marks[req.pages] = req.generation
            elif req.state_slot is not None:
                marks[req.state_slot] = req.generation
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
