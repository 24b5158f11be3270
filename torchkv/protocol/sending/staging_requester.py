"""The sender's side of staging: asks for stages of receivers' rings, and the answers.

A stage, as its writer sees it; `staging_credits` is the receiver's side of the same exchange:

    ask --> unsent --at most MAX_ASKS at once--> sent --StageGrant--> granted --written and flushed: Staged--> forgotten
                                                  |
                                                  +--StageDenied--> denied: `granted` raises RingExhausted

Under each generation this rank has one policy (`_RingOnly`): to write to the ring only, which it promises with its
asks, or to write to the receiver's pages too. The promise lets the receiver free the pages of a failed request at once.
So it must be withdrawn, and the receiver must have confirmed that, before the first byte goes to a page.

    UNDECIDED --first ask--> YES --`go_direct`: Withdraw sent--> WITHDRAWING --Withdrawn received--> NO
        |                                                                                            ^
        +--`go_direct`: nothing was promised---------------------------------------------------------+
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torchkv.errors import ProtocolError, RingExhausted
from torchkv.protocol.messages import MAX_ASKS, STANDING, Message, StageAsk, Staged, StageDenied, StageGrant, Withdraw

__all__ = ["Span", "StagingRequester"]


class Span(NamedTuple):
    """Bytes [offset, offset + nbytes) of the receiver's ring."""

    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{tuple(self)} (offset, bytes)"


class _RingOnly(Enum):
    """Whether this rank has promised, under a generation, to write to the receiver's ring and not to its pages."""

    UNDECIDED = "undecided"
    YES = "promised"
    WITHDRAWING = "withdrawn, not confirmed"
    NO = "no promise"


@dataclass(eq=False, slots=True)
class _Ask:
    """A stage that was asked for: not answered, granted or denied."""

    nbytes: int
    least: int
    span: Span | None = None
    denied: str | None = None


@dataclass(eq=False, slots=True)
class _AskQueue:
    """The asks to one receiver under one generation. An ask is removed when its stage is written."""

    ring_only: _RingOnly = _RingOnly.UNDECIDED
    next_serial: int = 0
    unsent: deque[int] = field(default_factory=deque)  # serials of asks beyond `MAX_ASKS`, which are kept back
    unwritten: int = 0  # asks that were sent, and are neither denied nor written
    asks: dict[int, _Ask] = field(default_factory=dict)  # by serial


class StagingRequester:
    """All stages that this rank asks for. Not thread-safe: the caller holds a lock, and sends what is in ``outbox``."""

    def __init__(self) -> None:
        self.outbox: list[tuple[int, Message]] = []  # (rank, message), in order
        self._queues: dict[tuple[int, int], _AskQueue] = {}
        self.standing: dict[int, Span] = {}  # the standing stages that receivers have granted, for the resident loop

    # ---------------------------------------------------------------- calls of transfers

    def ask(self, dst: int, generation: int, *, nbytes: int, least: int) -> int:
        """Asks for a stage of ``nbytes`` bytes, or at least of ``least``. Returns its serial, its handle from now on.

        Any number of stages may be asked for: asks beyond `MAX_ASKS` are kept back here.
        """
        assert 1 <= least <= nbytes, f"a stage of {nbytes} bytes, at least {least}"
        queue = self._queues.setdefault((dst, generation), _AskQueue())
        if queue.ring_only is _RingOnly.UNDECIDED:
            queue.ring_only = _RingOnly.YES
        serial = queue.next_serial
        queue.next_serial += 1
        queue.asks[serial] = _Ask(nbytes, least)
        queue.unsent.append(serial)
        self._send_asks(dst, generation, queue)
        return serial

    def granted(self, dst: int, generation: int, serial: int) -> Span | None:
        """Where to write; None until the receiver has answered. Raises ``RingExhausted`` if it has denied the stage."""
        ask = self._queues[dst, generation].asks[serial]
        if ask.denied is not None:
            raise RingExhausted(f"the receiver gave no staging memory: {ask.denied}", retryable=True)
        return ask.span

    def staged(
        self,
        dst: int,
        generation: int,
        serial: int,
        *,
        layers: tuple[int, ...],
        start: int,
        num_pages: int,
        checked: bool,
        state: bool = False,
    ) -> None:
        """Tells the receiver that the granted stage is written and flushed: from now on the stage is the receiver's.

        layers, start, num_pages: what the stage holds; pages are this rank's, counted after the prefix. With 0 pages
        the stage is given back unused. checked: it holds their checksums too. state: it holds state.
        """
        queue = self._queues[dst, generation]
        ask = queue.asks.pop(serial)
        assert ask.span is not None, f"stage {serial} of rank {dst} generation {generation} is not granted"
        self.outbox.append((dst, Staged(generation, serial, list(layers), start, num_pages, checked, state)))
        queue.unwritten -= 1
        self._send_asks(dst, generation, queue)

    def promised(self, dst: int, generation: int) -> None:
        """The resident loop has promised the receiver to write to its ring only under this generation."""
        queue = self._queues.setdefault((dst, generation), _AskQueue())
        if queue.ring_only is _RingOnly.UNDECIDED:
            queue.ring_only = _RingOnly.YES

    def go_direct(self, dst: int, generation: int) -> bool:
        """Whether this rank may write to the receiver's pages under this generation.

        If it has promised not to, this withdraws the promise and returns False. Call again: it returns True once the
        receiver has confirmed the withdrawal.
        """
        queue = self._queues.setdefault((dst, generation), _AskQueue())
        if queue.ring_only is _RingOnly.UNDECIDED:
            queue.ring_only = _RingOnly.NO
        elif queue.ring_only is _RingOnly.YES:
            queue.ring_only = _RingOnly.WITHDRAWING
            self.outbox.append((dst, Withdraw(generation)))
        return queue.ring_only is _RingOnly.NO

    def forget(self, dst: int, generation: int) -> None:
        """Nothing more is written under this generation: drops its asks, and ignores answers that still come."""
        self._queues.pop((dst, generation), None)

    # ---------------------------------------------------------------- messages of receivers

    def on_grant(self, src: int, message: StageGrant, ring_nbytes: int) -> None:
        """The receiver has granted a stage. ring_nbytes: of its ring, as its peer metadata says.

        Raises ``ProtocolError`` for bytes outside the ring, for another size than was asked for, and for an answer that
        contradicts an earlier one.
        """
        if message.generation == STANDING:
            if not 0 < message.nbytes <= ring_nbytes - message.offset:
                raise ProtocolError(f"rank {src}: a standing stage outside its ring of {ring_nbytes} bytes")
            self.standing.setdefault(src, Span(message.offset, message.nbytes))
            return
        ask = self._sent_ask(src, message.generation, message.serial)
        if ask is None:
            return
        span = Span(message.offset, message.nbytes)
        where = f"rank {src}, generation {message.generation}: stage {message.serial} granted at {span}"
        if ask.denied is not None or ask.span not in (None, span):
            before = "denied" if ask.span is None else f"granted at {ask.span}"
            raise ProtocolError(f"{where}, but {before} before")
        if span.offset + span.nbytes > ring_nbytes:
            raise ProtocolError(f"{where}, outside the ring of {ring_nbytes} bytes")
        if not ask.least <= span.nbytes <= ask.nbytes:
            raise ProtocolError(f"{where}, but {ask.least} to {ask.nbytes} bytes were asked for")
        ask.span = span

    def on_denied(self, src: int, message: StageDenied, ring_nbytes: int) -> None:
        """The receiver has denied a stage. ring_nbytes: of its ring. Raises ``ProtocolError`` if it had granted it."""
        ask = self._sent_ask(src, message.generation, message.serial)
        if ask is None or ask.denied is not None:
            return
        if ask.span is not None:
            raise ProtocolError(
                f"rank {src}, generation {message.generation}: stage {message.serial} of its ring of {ring_nbytes} "
                f"bytes denied, but granted at {ask.span} before"
            )
        ask.denied = message.text
        queue = self._queues[src, message.generation]
        queue.unwritten -= 1
        self._send_asks(src, message.generation, queue)

    def on_withdrawn(self, src: int, generation: int) -> None:
        """The receiver has confirmed the withdrawal of this rank's promise."""
        queue = self._queues.get((src, generation))
        if queue is not None and queue.ring_only is _RingOnly.WITHDRAWING:
            queue.ring_only = _RingOnly.NO

    # ---------------------------------------------------------------- inside

    def _send_asks(self, dst: int, generation: int, queue: _AskQueue) -> None:
        while queue.unsent and queue.unwritten < MAX_ASKS:
            serial = queue.unsent.popleft()
            queue.unwritten += 1
            ask = queue.asks[serial]
            ring_only = queue.ring_only is _RingOnly.YES
            self.outbox.append((dst, StageAsk(generation, serial, ask.nbytes, ask.least, ring_only)))

    def _sent_ask(self, src: int, generation: int, serial: int) -> _Ask | None:
        """The ask that an answer is about; None if there is none, or it was not sent yet: such answers are ignored."""
        queue = self._queues.get((src, generation))
        if queue is None or (queue.unsent and serial >= queue.unsent[0]):
            return None
        return queue.asks.get(serial)
