"""Leases: which request holds which page and state slot of this rank, until no write can land there any more.

A lease begins with `recv_pages` and ends when the request succeeds, or when it has failed and all its writers are
quiescent. A leased page is not granted again. The lease of a failed request is a quarantine: late writes may still
land.
"""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import PageOutOfRange
from torchkv.host.jit import at_register, compiled_with_gil
from torchkv.protocol.receive_request import ReceiverRequest

__all__ = ["Leases", "warm_up"]


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


class Leases:
    """The leases of one rank. num_pages, num_slots: of its cache."""

    def __init__(self, *, num_pages: int, num_slots: int) -> None:
        self._pages: Int64Array = np.zeros(num_pages, dtype=np.int64)  # page -> generation, 0 = free
        self._slots: dict[int, int] = {}
        self._num_slots = num_slots
        self._holders: dict[int, ReceiverRequest] = {}

    def check(self, pages: Int64Array, slot: int | None, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a page or slot that is out of range, named twice, leased or quarantined.

        operation: the call, to begin the error message with.
        """
        if not _are_free(pages, self._pages):
            self._complain(pages, operation)
        if slot is not None and slot >= self._num_slots:
            raise PageOutOfRange(f"{operation}: state_slot={slot} is outside this cache's [0, {self._num_slots})")
        if slot in self._slots:
            raise PageOutOfRange(f"{operation}: state slot {slot} {self._held_by(self._slots[slot], 'slots')}")

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
        raise PageOutOfRange(f"{operation}: page {page} {self._held_by(int(self._pages[page]), 'pages')}")

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

        No ranks: only this rank itself still writes to it, unpacking a stage.
        """
        return {int(page): req.pending_writers() for req in self._failed() for page in req.pages}

    def quarantined_slots(self) -> dict[int, tuple[int, ...]]:
        """State slot -> ranks that may still write to it, for every slot that a failed request still leases."""
        return {req.state_slot: req.pending_writers() for req in self._failed() if req.state_slot is not None}

    def _failed(self) -> list[ReceiverRequest]:
        return [req for req in self._holders.values() if req.error is not None]

    def _held_by(self, generation: int, others: str) -> str:
        """The end of an error message about a page or slot that is leased to ``generation``. others: pages or slots."""
        holder = self._holders[generation]
        if holder.error is None:
            return f"is leased to request {holder.request!r}; wait for that request or cancel({holder.request!r})"
        return (
            f"is quarantined: ranks {list(holder.pending_writers())} may still write to it for the failed request "
            f"{holder.request!r}; use other {others}, or wait until cancel({holder.request!r}) completes"
        )
