"""The receiver's side of staging: who may write where in its ring, and in whose turn.

    ask --> waiting --in turn, when there is space--> GRANTED --Staged--> FILLED --scattered--> free
               |                                         |
            deadline: denied                          revoked: QUARANTINED --its writer is quiescent--> free

A stage may be called written early, while the writer's GPU is about to write it: then it is PROMISED, not FILLED, and
read only once its signal has risen. If that was not waited for to the end, it is quarantined too, until its writer is
quiescent. The signal word is the stage's for as long as the stage is taken, so a late signal meets nobody else.

A line is what one writer has asked for under one generation. Lines are served one stage a turn. The line whose turn it
is waits for its space, and the others wait with it: they would take that space away for ever. It is passed over only
while no stage of others that ends could help it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torchkv.errors import ProtocolError
from torchkv.staging import SIGNAL_STEP, Signal, Stage, StagingRing
from torchkv.wire import MAX_ASKS, Message, StageAsk, StageDenied, StageGrant, Withdraw, Withdrawn

__all__ = ["MAX_STAGES", "Owner", "StageKeeper"]

MAX_STAGES = 64  # of one line: granted, or written and not scattered yet
NAMED_OWNERS = 4  # in a denial
ADVICE = "raise Options.staging_recv (TORCHKV_STAGING_RECV) on the receiver"


class Owner(NamedTuple):
    """For whom a stage was taken."""

    src: int
    generation: int

    def __str__(self) -> str:
        return f"rank {self.src} generation {self.generation}"


class _State(Enum):
    GRANTED = "granted"
    FILLED = "filled"
    PROMISED = "promised"
    QUARANTINED = "quarantined"


@dataclass(eq=False, slots=True)
class _Held:
    """A stage that the ring gave out, how many of its bytes were granted, and the signal for it, if it has one."""

    stage: Stage
    nbytes: int
    signal: Signal | None
    state: _State = _State.GRANTED


@dataclass(frozen=True, slots=True)
class _Wait:
    """An ask that waits for its turn and for space."""

    serial: int
    nbytes: int
    least: int
    since: float


@dataclass(eq=False, slots=True)
class _Line:
    """What one writer has asked for under one generation, up to its quiescence."""

    owner: Owner
    promised: bool
    next_serial: int = 0
    waiting: deque[_Wait] = field(default_factory=deque)
    held: dict[int, _Held] = field(default_factory=dict)  # by serial
    served: float = float("-inf")  # when it last got a stage
    revoked: bool = False
    quiescent: bool = False

    @property
    def unwritten(self) -> int:
        return len(self.waiting) + sum(held.state is _State.GRANTED for held in self.held.values())


class StageKeeper:
    """The ring of this rank and its credits. Not thread-safe: the caller serialises, and drains ``outbox``.

    timeout: seconds that an ask may wait since its line last got a stage. signals: words behind the ring, all 0.
    """

    def __init__(self, ring: StagingRing, *, timeout: float, signals: int = 0) -> None:
        self.ring = ring
        self._words = deque(range(signals))  # those of no stage
        self._value = 0  # of the latest signal
        self.outbox: list[tuple[int, Message]] = []
        self._timeout = timeout
        self._lines: dict[int, dict[int, _Line]] = {}  # by generation, then by writer; none of them empty
        self._turn: dict[_Line, None] = {}  # the lines that wait, next one first
        self._now = float("-inf")

    # ---------------------------------------------------------------- what the writer says

    def ask(self, src: int, message: StageAsk, now: float) -> None:
        """Grants a stage now or later, or denies it. For a live generation, of which ``src`` is a live writer.

        A repeated ask changes nothing; if its stage is granted and not yet written, the grant is repeated too.
        Raises ``ProtocolError`` for an ask that no honest writer makes, with nothing changed.
        """
        self._now = now
        owner = Owner(src, message.generation)
        line = self._line(*owner)
        if line is not None and (line.revoked or line.quiescent):
            return
        if line is not None and message.serial < line.next_serial:
            self._repeat_grant(line, message.serial)
            return
        self._check(owner, message, line)
        if line is None:
            line = _Line(owner, message.only)
            self._lines.setdefault(owner.generation, {})[src] = line
        line.next_serial += 1
        if message.least > self.ring.capacity:
            self._deny(line, message.serial, _oversize(message, self.ring.capacity))
            return
        line.waiting.append(_Wait(message.serial, message.nbytes, message.least, now))
        self._turn.setdefault(line)
        self._serve()

    def fill(self, src: int, generation: int, serial: int) -> Stage | None:
        """The stage that its writer now calls written, once; None for one that is not, or no longer, its own.

        From now on the caller reads it, until `release`.
        """
        held = self._granted(src, generation, serial)
        if held is None:
            return None
        held.state = _State.FILLED
        return held.stage

    def promise(self, src: int, generation: int, serial: int) -> tuple[Stage, Signal] | None:
        """The same for one that its writer calls written early: the caller reads it once the signal has risen.

        None too for a stage that has no signal.
        """
        held = self._granted(src, generation, serial)
        if held is None or held.signal is None:
            return None
        held.state = _State.PROMISED
        return held.stage, held.signal

    def withdraw(self, src: int, message: Withdraw) -> None:
        """The writer is about to write directly. For a live generation: its pages are safe at quiescence only."""
        line = self._line(src, message.generation)
        if line is not None:
            line.promised = False
        self.outbox.append((src, Withdrawn(message.generation)))

    # ---------------------------------------------------------------- what the receiver says

    def release(self, src: int, generation: int, serial: int, now: float, *, written: bool = True) -> None:
        """The stage has been read, or was given back unused. Repeated, and for a quarantined one, it does nothing.

        written: False if its writer has promised to write it, and may still do so.
        """
        self._now = now
        line = self._line(src, generation)
        held = None if line is None else line.held.get(serial)
        if line is None or held is None or held.state is _State.QUARANTINED:
            return
        if not written and not line.quiescent:
            held.state = _State.QUARANTINED
            self.ring.quarantine(held.stage)
        else:
            self._free(line, serial)
            self._drop_if_over(line)
        self._serve()

    def revoke(self, generation: int) -> None:
        """Its receive has failed. What was granted and not written is quarantined; what is being read stays."""
        for line in self._lines.get(generation, {}).values():
            line.revoked = True
            self._stop_waiting(line)
            for held in line.held.values():
                if held.state is _State.GRANTED:
                    held.state = _State.QUARANTINED
                    self.ring.quarantine(held.stage)
        self._serve()

    def quiescent(self, src: int, generation: int, now: float) -> None:
        """``src`` writes nothing more under this generation: only what is being read stays, until its `release`."""
        self._now = now
        line = self._line(src, generation)
        if line is None:
            return
        line.quiescent = True
        self._stop_waiting(line)
        for serial, held in list(line.held.items()):
            if held.state in (_State.GRANTED, _State.QUARANTINED):
                self._free(line, serial)
        self._drop_if_over(line)
        self._serve()

    def gone(self, src: int, now: float) -> None:
        """The process of ``src`` has ended, and nothing of it is under way any more."""
        for generation in [generation for generation, lines in self._lines.items() if src in lines]:
            self.quiescent(src, generation, now)

    def tick(self, now: float) -> None:
        """Denies the asks that have waited too long."""
        self._now = now
        for line in list(self._turn):
            while line.waiting and now >= max(line.waiting[0].since, line.served) + self._timeout:
                wait = line.waiting.popleft()
                self._deny(line, wait.serial, self._crowded(wait))
            if not line.waiting:
                del self._turn[line]
        self._serve()

    def promised(self, src: int, generation: int) -> bool:
        """Whether ``src`` has promised to write through the ring only, and not withdrawn that."""
        line = self._line(src, generation)
        return line is not None and line.promised

    def waiting(self, generation: int) -> bool:
        """Whether some ask under this generation waits for a stage."""
        return any(line.waiting for line in self._lines.get(generation, {}).values())

    def holds(self, src: int, generation: int) -> bool:
        """Whether ``src`` has a stage under this generation: granted, being read or quarantined."""
        line = self._line(src, generation)
        return line is not None and bool(line.held)

    # ---------------------------------------------------------------- lines and turns

    def _line(self, src: int, generation: int) -> _Line | None:
        return self._lines.get(generation, {}).get(src)

    def _granted(self, src: int, generation: int, serial: int) -> _Held | None:
        line = self._line(src, generation)
        held = None if line is None else line.held.get(serial)
        return held if held is not None and held.state is _State.GRANTED else None

    def _free(self, line: _Line, serial: int) -> None:
        held = line.held.pop(serial)
        self.ring.release(held.stage)
        if held.signal is not None:
            self._words.append(held.signal.word)

    def _drop_if_over(self, line: _Line) -> None:
        if not line.quiescent or line.held:
            return
        src, generation = line.owner
        del self._lines[generation][src]
        if not self._lines[generation]:
            del self._lines[generation]

    def _stop_waiting(self, line: _Line) -> None:
        line.waiting.clear()
        self._turn.pop(line, None)

    def _next_line(self) -> _Line | None:
        """Whose turn it is: the first that would get a stage if all stages ended but the quarantined and its own."""
        for line in self._turn:
            if line.waiting[0].least <= self.ring.room and len(line.held) < MAX_STAGES:
                return line
        return None

    def _serve(self) -> None:
        while (line := self._next_line()) is not None:
            wait = line.waiting[0]
            # Room is a whole number of alignments, so the stage is never longer than that.
            nbytes = min(wait.nbytes, self.ring.room)
            stage = self.ring.allocate(nbytes, line.owner)
            if stage is None:
                return
            line.waiting.popleft()
            line.held[wait.serial] = _Held(stage, nbytes, self._next_signal())
            line.served = self._now
            del self._turn[line]
            if line.waiting:
                self._turn[line] = None
            self._tell_grant(line, wait.serial)

    def _next_signal(self) -> Signal | None:
        if not self._words:
            return None
        self._value += SIGNAL_STEP
        return Signal(self._words.popleft(), self._value)

    def _tell_grant(self, line: _Line, serial: int) -> None:
        held = line.held[serial]
        grant = StageGrant(line.owner.generation, serial, held.stage.offset, held.nbytes, *(held.signal or ()))
        self.outbox.append((line.owner.src, grant))

    def _repeat_grant(self, line: _Line, serial: int) -> None:
        if serial in line.held and line.held[serial].state is _State.GRANTED:
            self._tell_grant(line, serial)

    def _deny(self, line: _Line, serial: int, text: str) -> None:
        self.outbox.append((line.owner.src, StageDenied(line.owner.generation, serial, text)))

    # ---------------------------------------------------------------- refusals

    def _check(self, owner: Owner, message: StageAsk, line: _Line | None) -> None:
        next_serial = 0 if line is None else line.next_serial
        if message.serial != next_serial:
            raise ProtocolError(f"{owner}: asks for stage {message.serial}, but the next one is {next_serial}")
        if not 1 <= message.least <= message.nbytes:
            raise ProtocolError(
                f"{owner}: asks for a stage of {message.nbytes} bytes, at least {message.least}; "
                f"both must be positive, and the former no less"
            )
        if line is None:
            return
        if line.unwritten >= MAX_ASKS:
            raise ProtocolError(
                f"{owner}: asks for stage {message.serial} while {MAX_ASKS} are waiting or unwritten; write one first"
            )
        if message.only is not line.promised:
            raise ProtocolError(
                f"{owner}: asks for stage {message.serial} with only={message.only}, but its promise to write through "
                f"the ring only {'holds until it is withdrawn' if line.promised else 'was never made, or withdrawn'}"
            )

    def _crowded(self, wait: _Wait) -> str:
        ring = self.ring
        usage: Counter[str] = Counter()
        for stage in ring.stages:
            usage[str(stage.owner)] += stage.nbytes
        holders = ", ".join(f"{owner} ({nbytes} bytes)" for owner, nbytes in usage.most_common(NAMED_OWNERS))
        return (
            f"stage {wait.serial}, of {wait.least} to {wait.nbytes} bytes, waited {self._timeout:g} s for space: the "
            f"staging ring of {ring.capacity} bytes has {ring.in_use} in use, {ring.quarantined} of them quarantined "
            f"until the writers of failed requests are quiescent; held by {holders or 'nobody'}; "
            f"{ADVICE}, or send fewer requests at once"
        )


def _oversize(message: StageAsk, capacity: int) -> str:
    return (
        f"stage {message.serial} needs at least {message.least} bytes, and the staging ring has {capacity}; "
        f"{ADVICE}, or send on another path"
    )
