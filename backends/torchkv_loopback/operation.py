"""Puts, flushes and signals of one channel, and the pieces into which a put falls on its way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from torchkv.errors import KVError, TransferCancelled

__all__ = ["Fence", "Operation", "Piece", "Put", "Span", "cut"]

Span = tuple[int, int, int, int]  # source address, destination address, length, destination region

# Cutting every span of a large batch would only cost time: there, whole spans already land in random order.
FEW_SPANS = 64
LONG_SPAN = 1 << 20


class Operation:
    """A pending put, flush or signal. ``failed`` and ``done`` are set by its channel."""

    def __init__(self) -> None:
        self.failed: KVError | None = None
        self.ended = False

    @property
    def done(self) -> bool:
        return self.ended

    @property
    def error(self) -> KVError | None:
        return self.failed

    def cancel(self) -> None:
        """Flushes and signals cannot be stopped: they touch nothing that a caller could want back."""


class Put(Operation):
    """Posted window by window; read from the source piece by piece; landed some time later."""

    def __init__(self, spans: list[Span], regions: frozenset[int]) -> None:
        super().__init__()
        self.regions = regions  # local ones, which must stay registered
        self.unposted = spans[::-1]  # taken from the end
        self.unread = 0
        self.flying = 0

    def cancel(self) -> None:
        if not self.ended and self.unposted:
            self.fail(TransferCancelled(f"put stopped with {len(self.unposted)} spans not yet posted"))

    def fail(self, error: KVError) -> None:
        """Posts nothing more; what was posted still has to land or vanish."""
        if not self.ended:
            self.failed = self.failed or error
        self.unposted.clear()
        self.settle()

    def settle(self) -> None:
        """A success ends when its source has been read, a failure when nothing of it can land any more."""
        if not self.unposted and not (self.flying if self.failed else self.unread):
            self.ended = True

    @property
    def landed(self) -> bool:
        return not self.unposted and not self.flying


class Fence(Operation):
    """A flush, or a signal if ``slot`` is given: reached when every earlier put of the channel has landed."""

    def __init__(self, slot: int | None = None, value: int = 0) -> None:
        super().__init__()
        self.slot = slot
        self.value = value

    def fail(self, error: KVError) -> None:
        if not self.ended:
            self.failed, self.ended = error, True


@dataclass(eq=False, slots=True)
class Piece:
    """Parts of spans that travel together. ``data`` is what they held when they were read."""

    put: Put
    parts: list[Span]
    data: list[bytes] = field(default_factory=list)


def cut(generator: random.Random, spans: list[Span], pieces: int) -> list[list[Span]]:
    """``spans`` in at most ``pieces`` parcels, in random order; few or long spans are themselves cut."""
    parts: list[Span] = []
    for src, dst, length, region in spans:
        if length > 1 and (len(spans) <= FEW_SPANS or length > LONG_SPAN):
            at = generator.randrange(1, length)
            parts += [(src, dst, at, region), (src + at, dst + at, length - at, region)]
        else:
            parts.append((src, dst, length, region))
    generator.shuffle(parts)
    size = max(1, -(-len(parts) // max(1, pieces)))
    return [parts[i : i + size] for i in range(0, len(parts), size)]
