"""The sender's side of staging: asks for stages of a receiver's ring, and what became of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torchkv.errors import ProtocolError, RingExhausted
from torchkv.staging import Signal, Stream
from torchkv.wire import MAX_ASKS, Message, StageAsk, Staged, StageDenied, StageGrant, Withdraw

__all__ = ["Span", "StageClient"]


class Span(NamedTuple):
    """Bytes [offset, offset + nbytes) of the receiver's ring. signal: with which they may be called written early."""

    offset: int
    nbytes: int
    signal: Signal | None = None

    def __str__(self) -> str:
        return f"{self[:2]} (offset, bytes)"


class _Promise(Enum):
    """To write through the ring only."""

    OPEN = "not decided"
    MADE = "made"
    LEAVING = "withdrawn, the receiver has not confirmed it"
    NONE = "not made, or withdrawn"


@dataclass(eq=False, slots=True)
class _Ask:
    nbytes: int
    least: int
    span: Span | None = None
    denied: str | None = None


@dataclass(eq=False, slots=True)
class _Line:
    """What was asked of one receiver under one generation. Asks leave it when their stage is written."""

    promise: _Promise = _Promise.OPEN
    next_serial: int = 0
    unsent: deque[int] = field(default_factory=deque)  # the receiver takes only so many at once
    unwritten: int = 0  # sent, and neither denied nor written
    asks: dict[int, _Ask] = field(default_factory=dict)  # by serial


class StageClient:
    """All stages that this rank asks for. Not thread-safe: the caller serialises, and drains ``outbox``."""

    def __init__(self) -> None:
        self.outbox: list[tuple[int, Message]] = []
        self._lines: dict[tuple[int, int], _Line] = {}

    # ---------------------------------------------------------------- the caller's calls

    def ask(self, dst: int, generation: int, *, nbytes: int, least: int) -> int:
        """Asks for a stage of ``nbytes``, or at least of ``least``; returns its serial, the handle from now on.

        Any number may be asked for: those beyond what the receiver takes at once are kept until it does.
        """
        assert 1 <= least <= nbytes, f"a stage of {nbytes} bytes, at least {least}"
        line = self._lines.setdefault((dst, generation), _Line())
        if line.promise is _Promise.OPEN:
            line.promise = _Promise.MADE
        serial = line.next_serial
        line.next_serial += 1
        line.asks[serial] = _Ask(nbytes, least)
        line.unsent.append(serial)
        self._send_asks(dst, generation, line)
        return serial

    def granted(self, dst: int, generation: int, serial: int) -> Span | None:
        """Where to write, or None as long as that is open. Raises ``RingExhausted`` if the receiver has denied it."""
        ask = self._lines[dst, generation].asks[serial]
        if ask.denied is not None:
            raise RingExhausted(f"rank {dst} gave no staging memory: {ask.denied}", retryable=True)
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
        early: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """The granted stage is written and flushed, or with ``num_pages`` 0 given back; it is no longer ours.

        early: it is being written, and its signal comes behind that. stream: the piece passes through it like that.
        """
        line = self._lines[dst, generation]
        ask = line.asks.pop(serial)
        assert ask.span is not None, f"stage {serial} of rank {dst} generation {generation} is not granted"
        assert not early or ask.span.signal is not None, f"stage {serial} of rank {dst} has no signal"
        how = (checked, state, early, *(stream or ()))
        self.outbox.append((dst, Staged(generation, serial, list(layers), start, num_pages, *how)))
        line.unwritten -= 1
        self._send_asks(dst, generation, line)

    def go_direct(self, dst: int, generation: int) -> bool:
        """Whether bytes may now be written past the ring. If a promise stands against it, this withdraws it.

        Then it returns False until the receiver has confirmed that; ask again.
        """
        line = self._lines.setdefault((dst, generation), _Line())
        if line.promise is _Promise.OPEN:
            line.promise = _Promise.NONE
        elif line.promise is _Promise.MADE:
            line.promise = _Promise.LEAVING
            self.outbox.append((dst, Withdraw(generation)))
        return line.promise is _Promise.NONE

    def forget(self, dst: int, generation: int) -> None:
        """Nothing more is written under this generation; what still comes about it is ignored."""
        self._lines.pop((dst, generation), None)

    # ---------------------------------------------------------------- what the receiver says

    def on_grant(self, src: int, message: StageGrant, ring_nbytes: int, signals: int = 0) -> None:
        """Raises ``ProtocolError`` for a span that was not asked for or lies outside the ring of ``ring_nbytes``.

        signals: words behind that ring.
        """
        ask = self._sent_ask(src, message.generation, message.serial)
        if ask is None:
            return
        signal = Signal(message.word, message.value) if message.value else None
        span = Span(message.offset, message.nbytes, signal)
        where = f"rank {src}, generation {message.generation}: stage {message.serial} granted at {span}"
        if ask.denied is not None or ask.span not in (None, span):
            before = "denied" if ask.span is None else f"granted at {ask.span} with {ask.span.signal}"
            raise ProtocolError(f"{where} with {signal}, but {before} before")
        if span.offset + span.nbytes > ring_nbytes:
            raise ProtocolError(f"{where}, outside the ring of {ring_nbytes} bytes")
        if not ask.least <= span.nbytes <= ask.nbytes:
            raise ProtocolError(f"{where}, but {ask.least} to {ask.nbytes} bytes were asked for")
        if signal is not None and signal.word >= signals:
            raise ProtocolError(f"{where} with {signal}, but its ring has {signals} signal words")
        ask.span = span

    def on_denied(self, src: int, message: StageDenied, ring_nbytes: int) -> None:
        """Raises ``ProtocolError`` if the stage was granted before. ``ring_nbytes``: what the receiver's card says."""
        ask = self._sent_ask(src, message.generation, message.serial)
        if ask is None or ask.denied is not None:
            return
        if ask.span is not None:
            raise ProtocolError(
                f"rank {src}, generation {message.generation}: stage {message.serial} of its ring of {ring_nbytes} "
                f"bytes denied, but granted at {ask.span} before"
            )
        ask.denied = message.text
        line = self._lines[src, message.generation]
        line.unwritten -= 1
        self._send_asks(src, message.generation, line)

    def on_withdrawn(self, src: int, generation: int) -> None:
        line = self._lines.get((src, generation))
        if line is not None and line.promise is _Promise.LEAVING:
            line.promise = _Promise.NONE

    # ---------------------------------------------------------------- inside

    def _send_asks(self, dst: int, generation: int, line: _Line) -> None:
        while line.unsent and line.unwritten < MAX_ASKS:
            serial = line.unsent.popleft()
            line.unwritten += 1
            ask = line.asks[serial]
            only = line.promise is _Promise.MADE
            self.outbox.append((dst, StageAsk(generation, serial, ask.nbytes, ask.least, only)))

    def _sent_ask(self, src: int, generation: int, serial: int) -> _Ask | None:
        """The ask that a reply is about, or None: what is late or was never asked changes nothing."""
        line = self._lines.get((src, generation))
        if line is None or (line.unsent and serial >= line.unsent[0]):
            return None
        return line.asks.get(serial)
