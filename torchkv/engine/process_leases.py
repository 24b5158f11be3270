"""The leases of all groups of this process, by memory: they hold for every group there, and outlive their own.

A writer writes to memory, not to a group. The same bytes may be pages of two groups over one cache, or of a new group
over the cache of a destroyed one, with other page sizes even; and after `destroy` a cache may be freed, and its memory
used for something else. What a writer of one group may still write must stay alive, and out of the hands of all others.

    register --> JOINED --destroyed, all writers quiescent--> gone
                    |                                          ^
                    +--destroyed, some are not--> LEFT BEHIND -+ their processes have ended

* JOINED: `recv_pages` asks the other groups whose pages share bytes with its own. A group that has its memory alone has
  nobody to ask, and that costs one look at a flag.
* LEFT BEHIND: the leases, the cache's storages and the staging ring stay as long as a writer may write to them. Nobody
  speaks to its writers any more, so only the end of their processes proves something, and the transport must have been
  closed before: then nothing is on its way. The process of another host cannot be watched: such leases stay for ever.

No thread watches. What was left behind is looked at when a group joins, is destroyed, or asks for such a page.

Locks. An engine's lock may be held when the lock of `ProcessLeases` is taken, and with that only the locks of engines
that were left behind, under which no other lock is ever taken.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.cache import KVCache
from torchkv.errors import PageOutOfRange, TransferCancelled
from torchkv.host.processes import ProcessId, has_ended
from torchkv.layout.page_ranges import PageRange, meetings, pages_met
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.staging_credits import StagingCredits
from torchkv.staging.memory import StageMemory

__all__ = ["PROCESS", "GroupLeases", "ProcessLeases"]

log = logging.getLogger(__name__)

NAMED_PAGES = 16  # how many pages a warning names
BLIND = "it cannot see when those have ended"


class ProcessLeases:
    """What the groups of this process lease. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # re-entrant: `check` is called with the guard held, which is this lock
        self._joined: weakref.WeakSet[GroupLeases] = weakref.WeakSet()
        self._left_behind: list[GroupLeases] = []

    def join(self, group: GroupLeases) -> None:
        """From now on ``group`` and the groups whose pages share bytes with its own see each other's leases."""
        self.look()
        with self.lock:
            others = [other for other in (*self._joined, *self._left_behind) if group.meet(other)]
            self._joined.add(group)
        # Without the lock, because each takes its engine's. When it has it, no `recv_pages` that has not seen the other
        # group is under way, and the other group has not leased anything yet.
        for each in (group, *others) if others else ():
            each.share()

    def leave(self, group: GroupLeases, *, quarantined: bool) -> None:
        """``group`` was destroyed. quarantined: writers may still write to its memory."""
        with self.lock:
            self._joined.discard(group)
            if quarantined:
                self._left_behind.append(group)
        self.look()

    def look(self) -> None:
        """Ends the leases that were left behind whose writers have ended, and frees their memory. Any thread.

        To be called without any engine's lock, or with that of a group that was not destroyed.
        """
        if not self._left_behind:
            return
        with self.lock:
            self._left_behind = [group for group in self._left_behind if group.is_quarantined()]


PROCESS = ProcessLeases()
# A thread may hold the lock while another one forks, and the child could then never register.
os.register_at_fork(
    before=PROCESS.lock.acquire, after_in_parent=PROCESS.lock.release, after_in_child=PROCESS.lock.release
)


@dataclass(frozen=True, slots=True)
class _Hit:
    """A page, or slot, that shares bytes with ``theirs`` of another group, which leases it under ``generation``."""

    group: GroupLeases
    what: str
    theirs: str
    generation: int
    slots: bool  # whether it is a slot of the other group


class GroupLeases:
    """The leases of one group, the memory that they are about, and those of other groups on the same memory.

    name: of the group, for messages. lock: guards ``receiver`` and ``credits``. processes: of the ranks, by rank. ring:
    the staging ring, if there is one.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        cache: KVCache,
        receiver: Receiver,
        credits: StagingCredits,
        lock: threading.Lock,
        processes: Mapping[int, ProcessId],
        ring: StageMemory | None,
        process: ProcessLeases = PROCESS,
    ) -> None:
        self.name = name
        self.destroyed = False
        self._rank = rank
        self._device = cache.device
        self._ranges = cache.pool_ranges()
        self._storages = list(cache.storages)
        self._ring = ring
        self._ring_memory: torch.Tensor | None = None  # of a ring that was left behind
        self._receiver = receiver
        self._credits = credits
        self._lock = lock
        self._processes = processes
        self._unseen: Collection[int] = ()  # ranks of which not even their end proves anything
        self._process = process
        # Other group -> (our pool, theirs) -> how the places of both lie to each other, for `pages_met`.
        self._met: weakref.WeakKeyDictionary[GroupLeases, dict[tuple[int, int], Int64Array]] = (
            weakref.WeakKeyDictionary()
        )
        process.join(self)

    # ------------------------------------------------------------------ joining

    def meet(self, other: GroupLeases) -> bool:
        """Whether pages or slots of both share bytes; then each knows the other. Under the process's lock."""
        if self._device != other._device:
            return False
        met = _meetings(self._ranges, other._ranges)
        if not met:
            return False
        self._met[other], other._met[self] = met, _meetings(other._ranges, self._ranges)
        return True

    def share(self) -> None:
        """From now on, this group asks the others before it leases a page."""
        with self._lock:
            if not self.destroyed:
                self._receiver.leases.others, self._receiver.leases.guard = self, self._process.lock

    # ------------------------------------------------------------------ what others lease: `OtherLeases`

    def check(self, places: Int64Array, pool: int, operation: str) -> None:
        """Raises ``PageOutOfRange`` for a place of ``pool`` that shares bytes with what another group leases."""
        with self._process.lock:
            hit = self._hit(places, pool)
            if hit is not None and hit.group.destroyed:
                self._process.look()
                hit = self._hit(places, pool)
            if hit is not None:
                raise PageOutOfRange(f"{operation}: {hit.what} {hit.group.held_by(hit)}")

    def quarantined(self, pool: int) -> list[int]:
        """The places of ``pool`` that share bytes with what another group has in quarantine."""
        mine = np.arange(len(self._receiver.leases.marks(pool)), dtype=np.int64)
        found = np.zeros(len(mine), dtype=np.bool_)
        with self._process.lock:
            self._process.look()
            for other, met in list(self._met.items()):
                for (ours, theirs), rows in met.items():
                    if ours == pool:
                        marks = other._receiver.leases.marks(theirs, failed=True)
                        found |= pages_met(mine, rows, marks) >= 0
        return [int(place) for place in np.flatnonzero(found)]

    def _hit(self, places: Int64Array, pool: int) -> _Hit | None:
        mine = self._receiver.leases.is_of_slots(pool)
        for other, met in list(self._met.items()):
            leases = other._receiver.leases
            for (ours, theirs), rows in met.items():
                if ours != pool:
                    continue
                marks = leases.marks(theirs)
                met_places = pages_met(places, rows, marks)
                if len(found := np.flatnonzero(met_places >= 0)):
                    place, their = int(places[found[0]]), int(met_places[found[0]])
                    slots = leases.is_of_slots(theirs)
                    return _Hit(other, _name(place, mine), _name(their, slots), int(marks[their]), slots)
        return None

    def held_by(self, hit: _Hit) -> str:
        """The end of an error message about a page that shares bytes with one of this group."""
        shares = f"shares bytes with {hit.theirs} of group {self.name!r}"
        leases = self._receiver.leases
        holder = leases.holder(hit.generation)
        if not self.destroyed or holder is None:
            where = f"also registered by this process, as rank {self._rank}"
            return f"{shares}, {where}; there it {leases.held_by(hit.generation, 'slots' if hit.slots else 'pages')}"
        writers = holder.pending_writers() or (self._rank,)
        advice = "end those processes" if self._sees_end(writers) else f"restart this process: {BLIND}"
        return (
            f"{shares}, which is destroyed, and is quarantined: {self._who(writers)} may still write to it for the "
            f"failed request {holder.request!r}; use other pages and slots (see quarantined()), or {advice}"
        )

    # ------------------------------------------------------------------ after the group

    def leave(self, *, unseen: Collection[int]) -> None:
        """The group is destroyed, its thread ends and its transport is closed.

        unseen: ranks of which not even the end of their process proves that nothing can land any more.
        """
        receiver, now = self._receiver, time.monotonic()
        with self._lock:
            self.destroyed = True
            self._unseen = unseen
            receiver.leases.others, receiver.leases.guard = None, nullcontext()
            error = TransferCancelled(f"group {self.name!r} was destroyed")
            for req in receiver.leases.holders():
                # The error that was raised knows the caller's frames, and the work its callbacks: all their memory.
                req.error, req.work, req.cancels = error, None, []
            if self._device.type == "cpu":  # what this rank copied itself, its ended threads did
                receiver.peer_dead(self._rank, now)
        if self._ring is not None:
            self._ring_memory = self._ring.tensor
        self._ring = None
        quarantined = self.is_quarantined()
        if quarantined:
            log.warning("rank %d: %s", self._rank, self._left_behind())
        self._process.leave(self, quarantined=quarantined)

    def is_quarantined(self) -> bool:
        """Whether a writer may still write to memory of this destroyed group. Frees what none can write to."""
        with self._lock:
            for rank in self._writers():
                if rank not in self._unseen and has_ended(self._processes[rank]):
                    self._receiver.peer_dead(rank, time.monotonic())
            pages, stages = bool(self._receiver.leases.holders()), bool(self._credits.writers())
        if not pages:
            self._storages.clear()
        if not stages and not any(map(self._credits.stands, self._receiver.leases.pending_writers())):
            self._ring_memory = None
        return pages or stages

    def _writers(self) -> set[int]:
        return self._receiver.leases.pending_writers() | self._credits.writers()

    def _left_behind(self) -> str:
        """What was left behind, for a warning."""
        leases = self._receiver.leases
        pages, slots = list(leases.quarantined()), list(leases.quarantined(slots=True))
        what = [f"{name} {_shortened(ids)}" for name, ids in (("pages", pages), ("state slots", slots)) if ids]
        nbytes = sum(storage.nbytes for storage in self._storages)
        if self._ring_memory is not None:
            what.append("stages of its staging ring")
            nbytes += self._ring_memory.untyped_storage().nbytes()
        writers = sorted(self._writers()) or [self._rank]
        until = "those processes have ended" if self._sees_end(writers) else f"this process ends: {BLIND}"
        return (
            f"group {self.name!r} was destroyed while {self._who(writers)} may still write to {', '.join(what)}: they "
            f"stay in quarantine, and {nbytes} bytes of its memory stay allocated, until {until}"
        )

    def _who(self, writers: Collection[int]) -> str:
        return ", ".join(f"rank {rank} (process {self._processes[rank].pid})" for rank in writers)

    def _sees_end(self, writers: Collection[int]) -> bool:
        """Whether it can be seen here when all of these ranks have ended."""
        return not any(rank in self._unseen or has_ended(self._processes[rank]) is None for rank in writers)


def _meetings(
    ours: Mapping[int, Sequence[PageRange]], theirs: Mapping[int, Sequence[PageRange]]
) -> dict[tuple[int, int], Int64Array]:
    """By our pool and theirs; without those of which no places share bytes."""
    found = {(mine, their): meetings(ours[mine], theirs[their]) for mine in ours for their in theirs}
    return {pools: rows for pools, rows in found.items() if len(rows)}


def _name(place: int, slot: bool) -> str:
    return f"state slot {place}" if slot else f"page {place}"


def _shortened(ids: list[int]) -> str:
    more = len(ids) - NAMED_PAGES
    return f"{ids[:NAMED_PAGES]}" + (f" and {more} more" if more > 0 else "")
