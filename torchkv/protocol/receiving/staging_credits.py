"""The receiver's side of staging: which writer may write to which bytes of this rank's staging ring.

A writer asks for a stage, is granted one, puts packed bytes into it, and says `Staged`; this rank unpacks the stage
into its pages and releases it. One stage:

    StageAsk --> pending --its turn, and space--> GRANTED --Staged--> WRITTEN --unpacked--> free
                    |                                |
             deadline: StageDenied            request failed
                                                     |
                                                     +--> QUARANTINED --its writer is quiescent--> free

* GRANTED: the writer may put into the stage. WRITTEN: it has, and this rank reads it.
* QUARANTINED: the stage is not read, but its writer may still put into it. It is free when the writer is
  *quiescent*: nothing that it wrote under this generation can land any more.

Invariant: bytes of the ring are granted to one writer at a time, and to the next one only when nothing of the last can
land on them any more.

**Turns.** A writer's asks under one generation form a queue. Queues are served round robin, one stage each. The queue
whose turn it is waits until its stage fits, and the others wait with it: if smaller asks went first, they could take
the space for ever. A queue is passed over only while the others cannot help it by releasing stages: its ask is larger
than the space between quarantined stages, or it holds `MAX_STAGES` stages itself.

**Ring only.** A writer may promise that it writes to the ring and not to pages under a generation. If the request
fails, its pages are then free at once. A writer that wants to write to pages after all withdraws the promise and waits
until that is confirmed (`Withdraw`, `Withdrawn`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torchkv.errors import ProtocolError
from torchkv.layout.stage_format import ALIGNMENT
from torchkv.protocol.messages import (
    MAX_ASKS,
    STANDING,
    Message,
    StageAsk,
    StageDenied,
    StageGrant,
    Withdraw,
    Withdrawn,
)
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing

__all__ = ["MAX_STAGES", "Owner", "StagingCredits"]

MAX_STAGES = 64  # stages of one queue that are not free yet
# Of a standing stage, by device type: bytes at most, and a part of the ring at most. A link between GPUs that have
# mapped each other's memory wants long pieces; else the writer keeps as many bytes of its send ring for each receiver.
STANDING_LIMITS = {"cpu": (4 << 20, 8), "cuda": (16 << 20, 8)}
MAPPED_LIMITS = {"cpu": (4 << 20, 8), "cuda": (128 << 20, 2)}
NAMED_OWNERS = 4  # how many owners of stages the text of a denial names
ADVICE = "raise Options.staging_recv (TORCHKV_STAGING_RECV) on the receiver"


class Owner(NamedTuple):
    """Whom a stage is allocated for: a writer, under one generation."""

    src: int
    generation: int

    def __str__(self) -> str:
        if self.generation == STANDING:
            return f"the standing stage of rank {self.src}"
        return f"rank {self.src} generation {self.generation}"


class _StageState(Enum):
    GRANTED = "granted"
    WRITTEN = "written"
    QUARANTINED = "quarantined"


@dataclass(eq=False, slots=True)
class _GrantedStage:
    """A stage that is not free. nbytes: how many of its bytes were granted."""

    stage: Stage
    nbytes: int
    state: _StageState = _StageState.GRANTED


@dataclass(frozen=True, slots=True)
class _PendingAsk:
    """An ask that waits for its turn and for space. nbytes, least: bytes wanted, and bytes that will do."""

    serial: int
    nbytes: int
    least: int
    asked_at: float


@dataclass(eq=False, slots=True)
class _WriterQueue:
    """The asks and stages of one writer under one generation. Kept until the writer is quiescent and has no stage."""

    owner: Owner
    ring_only: bool
    next_serial: int = 0
    pending: deque[_PendingAsk] = field(default_factory=deque)
    stages: dict[int, _GrantedStage] = field(default_factory=dict)  # by serial
    granted_at: float = float("-inf")  # when the last stage was granted
    revoked: bool = False
    quiescent: bool = False

    @property
    def unwritten(self) -> int:
        """Stages that were asked for and not yet written: at most `MAX_ASKS`."""
        return len(self.pending) + sum(entry.state is _StageState.GRANTED for entry in self.stages.values())


class StagingCredits:
    """Grants stages of this rank's ring. Not thread-safe: the caller holds a lock, and sends what is in ``outbox``.

    timeout: seconds that an ask may wait after it came or, if that is later, after the last grant to its queue.
    device: type of the memory. writers: how many ranks may want standing stages.
    """

    def __init__(
        self,
        ring: StagingRing,
        *,
        timeout: float,
        device: str = "cpu",
        writers: Callable[[], int] = lambda: 1,
    ) -> None:
        self.ring = ring
        self._device = device
        self._num_writers = writers
        self.outbox: list[tuple[int, Message]] = []  # (rank, message), in order
        self._timeout = timeout
        self._queues: dict[int, dict[int, _WriterQueue]] = {}  # by generation, then by writer; no inner dict is empty
        self._round_robin: dict[_WriterQueue, None] = {}  # the queues with pending asks, the next one first
        self._now = float("-inf")
        self._standing: dict[int, Stage] = {}  # by writer

    # ---------------------------------------------------------------- messages of writers

    def ask(self, src: int, message: StageAsk, now: float) -> None:
        """Grants a stage, now or later, or denies it. Only for a live request that ``src`` writes to.

        A repeated ask changes nothing; if its stage is granted and not yet written, the grant is sent again. Raises
        ``ProtocolError`` for an ask that breaks the protocol; then nothing changes.
        """
        self._now = now
        owner = Owner(src, message.generation)
        queue = self._queue_of(*owner)
        if queue is not None and (queue.revoked or queue.quiescent):
            return
        if queue is not None and message.serial < queue.next_serial:
            self._repeat_grant(queue, message.serial)
            return
        self._check(owner, message, queue)
        if queue is None:
            queue = self._queue(src, message.generation, ring_only=message.ring_only)
        queue.next_serial += 1
        if message.least > self.ring.capacity:
            self._deny(queue, message.serial, _too_large_text(message, self.ring.capacity))
            return
        queue.pending.append(_PendingAsk(message.serial, message.nbytes, message.least, now))
        self._round_robin.setdefault(queue)
        self._serve()

    def mark_written(self, src: int, generation: int, serial: int) -> Stage | None:
        """The writer has written this stage: returns it, and the caller reads it until `release`.

        None, with nothing changed, unless the stage is granted to this writer and not yet written.
        """
        entry = self._unwritten_stage(src, generation, serial)
        if entry is None:
            return None
        entry.state = _StageState.WRITTEN
        return entry.stage

    def withdraw(self, src: int, message: Withdraw) -> None:
        """The writer withdraws its promise to use the ring only: confirms that. Only for a live request.

        From now on, if the request fails, its pages are free only when this writer is quiescent.
        """
        self._queue(src, message.generation, ring_only=False).ring_only = False
        self.outbox.append((src, Withdrawn(message.generation)))

    # ---------------------------------------------------------------- calls of the receiver

    def promised(self, src: int, generation: int) -> None:
        """The resident loop of ``src`` has promised to write to the ring only under this generation.

        Nothing if that was withdrawn already: the promise may have come later, for it takes another way.
        """
        self._queue(src, generation, ring_only=True)

    def stand(self, src: int, *, mapped: bool) -> Stage | None:
        """The standing stage of a writer (`torchkv.core.loop.staging`), granted and told if there is none yet.

        mapped: whether it has mapped the ring. None where too few bytes are left.
        """
        if src not in self._standing:
            nbytes = self.standing_nbytes(src, mapped=mapped)
            stage = self.ring.allocate_for_long(nbytes, Owner(src, STANDING)) if nbytes else None
            if stage is None:
                return None
            self._standing[src] = stage
            self.outbox.append((src, StageGrant(STANDING, 0, stage.offset, stage.nbytes)))
        return self._standing[src]

    def standing_nbytes(self, src: int, *, mapped: bool) -> int:
        """Bytes of the standing stage of a writer, granted or not. mapped: see `stand`."""
        if src in self._standing:
            return self._standing[src].nbytes
        most, share = (MAPPED_LIMITS if mapped else STANDING_LIMITS)[self._device]
        share = max(share, 2 * self._num_writers())
        return min(most, self.ring.capacity // share) // ALIGNMENT * ALIGNMENT

    @property
    def standing(self) -> int:
        """Bytes of all standing stages."""
        return sum(stage.nbytes for stage in self._standing.values())

    def stands(self, src: int) -> bool:
        """Whether a writer has a standing stage."""
        return src in self._standing

    def release(self, src: int, generation: int, serial: int, now: float) -> None:
        """The stage has been read, or was given back unused, and is free. Nothing for a free or a quarantined one."""
        self._now = now
        queue = self._queue_of(src, generation)
        entry = None if queue is None else queue.stages.get(serial)
        if queue is None or entry is None or entry.state is _StageState.QUARANTINED:
            return
        self._free(queue, serial)
        self._drop_if_done(queue)
        self._serve()

    def revoke(self, generation: int) -> None:
        """The request has failed: drops its pending asks, and quarantines stages that are granted and not written.

        Stages that are being read stay until `release`.
        """
        for queue in self._queues.get(generation, {}).values():
            queue.revoked = True
            self._drop_pending(queue)
            for entry in queue.stages.values():
                if entry.state is _StageState.GRANTED:
                    entry.state = _StageState.QUARANTINED
                    self.ring.quarantine(entry.stage)
        self._serve()

    def mark_quiescent(self, src: int, generation: int, now: float) -> None:
        """Nothing that ``src`` wrote under this generation can land any more: frees its stages that are not being read.

        Those that are being read stay until `release`.
        """
        self._now = now
        queue = self._queue_of(src, generation)
        if queue is None:
            return
        queue.quiescent = True
        self._drop_pending(queue)
        for serial, entry in list(queue.stages.items()):
            if entry.state in (_StageState.GRANTED, _StageState.QUARANTINED):
                self._free(queue, serial)
        self._drop_if_done(queue)
        self._serve()

    def peer_dead(self, src: int, now: float) -> None:
        """The process of ``src`` has ended and all it wrote has landed: it is quiescent under every generation."""
        if (stage := self._standing.pop(src, None)) is not None:
            self.ring.release(stage)
            self._serve()
        for generation in [generation for generation, queues in self._queues.items() if src in queues]:
            self.mark_quiescent(src, generation, now)

    def tick(self, now: float) -> None:
        """Denies asks that have waited for ``timeout`` seconds."""
        self._now = now
        for queue in list(self._round_robin):
            while queue.pending and now >= max(queue.pending[0].asked_at, queue.granted_at) + self._timeout:
                ask = queue.pending.popleft()
                self._deny(queue, ask.serial, self._timeout_text(ask))
            if not queue.pending:
                del self._round_robin[queue]
        self._serve()

    def is_ring_only(self, src: int, generation: int) -> bool:
        """Whether ``src`` has promised to write to the ring only under this generation, and has not withdrawn that."""
        queue = self._queue_of(src, generation)
        return queue is not None and queue.ring_only

    def has_pending(self, generation: int) -> bool:
        """Whether some ask under this generation waits for a stage."""
        return any(queue.pending for queue in self._queues.get(generation, {}).values())

    def writers(self) -> set[int]:
        """Ranks that may still write to a stage, but for those that only stand: into these, pending writers write."""
        queues = [queue for queues in self._queues.values() for queue in queues.values()]
        return {queue.owner.src for queue in queues if queue.stages and not queue.quiescent}

    def holds(self, src: int, generation: int) -> bool:
        """Whether ``src`` has a stage under this generation that is not free."""
        queue = self._queue_of(src, generation)
        return queue is not None and bool(queue.stages)

    # ---------------------------------------------------------------- queues and turns

    def _queue(self, src: int, generation: int, *, ring_only: bool) -> _WriterQueue:
        """The writer's queue, made with this promise if there is none."""
        queues = self._queues.setdefault(generation, {})
        return queues.setdefault(src, _WriterQueue(Owner(src, generation), ring_only))

    def _queue_of(self, src: int, generation: int) -> _WriterQueue | None:
        return self._queues.get(generation, {}).get(src)

    def _unwritten_stage(self, src: int, generation: int, serial: int) -> _GrantedStage | None:
        queue = self._queue_of(src, generation)
        entry = None if queue is None else queue.stages.get(serial)
        return entry if entry is not None and entry.state is _StageState.GRANTED else None

    def _free(self, queue: _WriterQueue, serial: int) -> None:
        self.ring.release(queue.stages.pop(serial).stage)

    def _drop_if_done(self, queue: _WriterQueue) -> None:
        if not queue.quiescent or queue.stages:
            return
        src, generation = queue.owner
        del self._queues[generation][src]
        if not self._queues[generation]:
            del self._queues[generation]

    def _drop_pending(self, queue: _WriterQueue) -> None:
        queue.pending.clear()
        self._round_robin.pop(queue, None)

    def _next_queue(self) -> _WriterQueue | None:
        """The queue whose turn it is: the first whose ask fits once all stages but the quarantined are released."""
        for queue in self._round_robin:
            if queue.pending[0].least <= self.ring.largest_possible and len(queue.stages) < MAX_STAGES:
                return queue
        return None

    def _serve(self) -> None:
        while (queue := self._next_queue()) is not None:
            ask = queue.pending[0]
            # largest_possible is a multiple of the alignment, so the allocated stage is no longer than that.
            nbytes = min(ask.nbytes, self.ring.largest_possible)
            stage = self.ring.allocate(nbytes, queue.owner)
            if stage is None:
                return
            queue.pending.popleft()
            queue.stages[ask.serial] = _GrantedStage(stage, nbytes)
            queue.granted_at = self._now
            del self._round_robin[queue]
            if queue.pending:
                self._round_robin[queue] = None
            self._tell_grant(queue, ask.serial)

    def _tell_grant(self, queue: _WriterQueue, serial: int) -> None:
        entry = queue.stages[serial]
        grant = StageGrant(queue.owner.generation, serial, entry.stage.offset, entry.nbytes)
        self.outbox.append((queue.owner.src, grant))

    def _repeat_grant(self, queue: _WriterQueue, serial: int) -> None:
        if serial in queue.stages and queue.stages[serial].state is _StageState.GRANTED:
            self._tell_grant(queue, serial)

    def _deny(self, queue: _WriterQueue, serial: int, text: str) -> None:
        self.outbox.append((queue.owner.src, StageDenied(queue.owner.generation, serial, text)))

    # ---------------------------------------------------------------- refusals

    def _check(self, owner: Owner, message: StageAsk, queue: _WriterQueue | None) -> None:
        next_serial = 0 if queue is None else queue.next_serial
        if message.serial != next_serial:
            raise ProtocolError(f"{owner}: asks for stage {message.serial}, but the next one is {next_serial}")
        if not 1 <= message.least <= message.nbytes:
            raise ProtocolError(
                f"{owner}: asks for a stage of {message.nbytes} bytes, at least {message.least}; "
                f"both must be positive, and the second no more than the first"
            )
        if queue is None:
            return
        if queue.unwritten >= MAX_ASKS:
            raise ProtocolError(
                f"{owner}: asks for stage {message.serial} while {MAX_ASKS} are waiting or unwritten; write one first"
            )
        if message.ring_only is not queue.ring_only:
            known = "holds until it is withdrawn" if queue.ring_only else "was never made, or withdrawn"
            raise ProtocolError(
                f"{owner}: asks for stage {message.serial} with ring_only={message.ring_only}, but its promise to "
                f"write through the ring only {known}"
            )

    def _timeout_text(self, ask: _PendingAsk) -> str:
        ring = self.ring
        usage: Counter[str] = Counter()
        for stage in ring.stages:
            usage[str(stage.owner)] += stage.nbytes
        holders = ", ".join(f"{owner} ({nbytes} bytes)" for owner, nbytes in usage.most_common(NAMED_OWNERS))
        return (
            f"stage {ask.serial}, of {ask.least} to {ask.nbytes} bytes, waited {self._timeout:g} s for space: the "
            f"staging ring of {ring.capacity} bytes has {ring.in_use} in use, {ring.quarantined} of them quarantined "
            f"until the writers of failed requests are quiescent; held by {holders or 'no writer'}; "
            f"{ADVICE}, or send fewer requests at once"
        )


def _too_large_text(message: StageAsk, capacity: int) -> str:
    return (
        f"stage {message.serial} needs at least {message.least} bytes, and the staging ring has {capacity}; "
        f"{ADVICE}, or send on another path"
    )
