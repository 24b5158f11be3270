"""The operations of a channel, puts and flushes, and the pieces in which a put's bytes travel."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from torchkv.errors import KVError, TransferCancelled

__all__ = ["Flush", "Operation", "Piece", "Put", "Span", "cut"]

Span = tuple[int, int, int, int]  # source address, destination address, length, destination region

# Spans are cut in two only where a batch has few of them, or where they are long; the spans of a large batch land in
# random order anyway, and cutting them would only take time.
FEW_SPANS = 64
LONG_SPAN = 1 << 20


class Operation:
    """A pending put or flush. ``failed`` and ``done`` are set by its channel."""

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
        """A flush cannot be stopped: it touches no memory."""


class Put(Operation):
    """A put: posted window by window; each piece is read from the source and lands some time later.

    regions: the local regions it reads. unposted: spans not yet posted, last one first. unread: pieces posted and not
    yet read. flying: pieces posted that have neither landed nor been dropped.
    """

    def __init__(self, spans: list[Span], regions: frozenset[int]) -> None:
        super().__init__()
        self.regions = regions
        self.unposted = spans[::-1]
        self.unread = 0
        self.flying = 0

    def cancel(self) -> None:
        if not self.ended and self.unposted:
            self.fail(TransferCancelled(f"put stopped with {len(self.unposted)} spans not yet posted"))

    def fail(self, error: KVError) -> None:
        """Posts nothing more; done once all that was posted has landed or was dropped."""
        if not self.ended:
            self.failed = self.failed or error
        self.unposted.clear()
        self.settle()

    def settle(self) -> None:
        """Sets `ended`: after success when the source has been read, after failure when nothing can land any more."""
        if not self.unposted and not (self.flying if self.failed else self.unread):
            self.ended = True

    @property
    def landed(self) -> bool:
        return not self.unposted and not self.flying


class Flush(Operation):
    """Reached when every earlier put of the channel has landed; done when the acknowledgement is back."""

    def fail(self, error: KVError) -> None:
        if not self.ended:
            self.failed, self.ended = error, True


@dataclass(eq=False, slots=True)
class Piece:
    """Parts of spans that travel together. data: their bytes, from when they were read until they land."""

    put: Put
    parts: list[Span]
    data: list[bytes] = field(default_factory=list)


def cut(generator: random.Random, spans: list[Span], pieces: int) -> list[list[Span]]:
    """``spans`` in at most ``pieces`` lists, in random order; spans are cut in two where they are few or long."""
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
