"""Which request holds which page and state slot of this rank, until nothing can land on them any more."""

from __future__ import annotations

import numpy as np

from torchkv.compiled import compiled_with_gil
from torchkv.errors import PageOutOfRange
from torchkv.protocol.receive import Receive
from torchkv.transport import Int64Array

__all__ = ["Leases", "warm_up"]


@compiled_with_gil
def _are_free(pages: Int64Array, leases: Int64Array) -> bool:
    """Whether all pages are in range, named once and not leased. For a moment it marks those it has seen."""
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


def warm_up() -> None:
    """Compiles, or loads from disk, what the first request would otherwise wait for."""
    none = np.zeros(0, dtype=np.int64)
    _are_free(none, none)
    _mark(none, none, 0)


class Leases:
    """Pages and slots by `Receive`: of live requests, and of failed ones until they are quiescent."""

    def __init__(self, *, num_pages: int, num_slots: int) -> None:
        self._pages: Int64Array = np.zeros(num_pages, dtype=np.int64)  # page -> generation, 0 = free
        self._slots: dict[int, int] = {}
        self._num_slots = num_slots
        self._holders: dict[int, Receive] = {}

    def check(self, pages: Int64Array, slot: int | None, what: str) -> None:
        """Raises ``PageOutOfRange`` for what is out of range, named twice, leased or quarantined."""
        if not _are_free(pages, self._pages):
            self._complain(pages, what)
        if slot is not None and slot >= self._num_slots:
            raise PageOutOfRange(f"{what}: state_slot={slot} is outside this cache's [0, {self._num_slots})")
        if slot in self._slots:
            raise PageOutOfRange(f"{what}: state slot {slot} {self._held_by(self._slots[slot], 'slots')}")

    def _complain(self, pages: Int64Array, what: str) -> None:
        num_pages = len(self._pages)
        outside = pages[(pages < 0) | (pages >= num_pages)]
        if len(outside):
            raise PageOutOfRange(f"{what}: page {int(outside[0])} is outside this cache's [0, {num_pages})")
        values, counts = np.unique(pages, return_counts=True)
        if len(values) != len(pages):
            raise PageOutOfRange(f"{what}: page {int(values[counts > 1][0])} is named twice; give each page once")
        taken = pages[self._pages[pages] != 0]
        page = int(taken[0])
        raise PageOutOfRange(f"{what}: page {page} {self._held_by(int(self._pages[page]), 'pages')}")

    def take(self, receive: Receive) -> None:
        """Leases what `check` has accepted."""
        self._holders[receive.generation] = receive
        _mark(receive.pages, self._pages, receive.generation)
        if receive.state_slot is not None:
            self._slots[receive.state_slot] = receive.generation

    def free(self, receive: Receive) -> None:
        del self._holders[receive.generation]
        _mark(receive.pages, self._pages, 0)
        if receive.state_slot is not None:
            del self._slots[receive.state_slot]

    def quarantined(self) -> dict[int, tuple[int, ...]]:
        """Page -> ranks that may still write to it, for every page of a failed request."""
        return {int(page): receive.pending_writers() for receive in self._failed() for page in receive.pages}

    def quarantined_slots(self) -> dict[int, tuple[int, ...]]:
        """The same for state slots."""
        return {
            receive.state_slot: receive.pending_writers()
            for receive in self._failed()
            if receive.state_slot is not None
        }

    def _failed(self) -> list[Receive]:
        return [receive for receive in self._holders.values() if receive.error is not None]

    def _held_by(self, generation: int, others: str) -> str:
        """What is to be said of a page or slot that this generation holds."""
        holder = self._holders[generation]
        if holder.error is None:
            return f"is leased to request {holder.request!r}; wait for that request or cancel({holder.request!r})"
        return (
            f"is quarantined: ranks {list(holder.pending_writers())} may still write to it for the failed request "
            f"{holder.request!r}; use other {others}, or wait until cancel({holder.request!r}) completes"
        )
