"""Signals: a small registered array of words into which peers put values.

A slot is 16 bytes, the value and its complement. A put is no atomic store: a reader may see half of it. It then
sees two words that do not belong together, and keeps to the value it knew.
"""

from __future__ import annotations

import numpy as np

from torchkv.transport import SIGNAL_SLOTS, Int64Array

__all__ = ["SIGNAL_NBYTES", "Mailbox"]

SIGNAL_NBYTES = 16
_OUTGOING = 256  # signals under way at once; more wait


class Mailbox:
    """Words 0..63: signals received. The rest: values on their way out, which must stay put until they are sent."""

    def __init__(self) -> None:
        self.words: Int64Array = np.zeros((SIGNAL_SLOTS + _OUTGOING, 2), dtype=np.int64)
        self.words[:, 1] = ~self.words[:, 0]
        self._known: Int64Array = np.zeros(SIGNAL_SLOTS, dtype=np.int64)
        self._free = list(range(SIGNAL_SLOTS, SIGNAL_SLOTS + _OUTGOING))

    @property
    def base(self) -> int:
        return int(self.words.ctypes.data)

    def read(self, slot: int) -> int:
        """The value last stored in ``slot``."""
        # The complement first: it is written last, so that a pair that fits is never an old value with a new mate.
        check = int(self.words[slot, 1])
        value = int(self.words[slot, 0])
        if value == ~check:
            self._known[slot] = value
        return int(self._known[slot])

    def acquire(self, value: int) -> int | None:
        """Writes ``value`` into an outgoing place and returns its index, or None while all are taken."""
        if not self._free:
            return None
        place = self._free.pop()
        self.words[place] = value, ~value
        return place

    def release(self, place: int) -> None:
        self._free.append(place)

    def address(self, place: int) -> int:
        """Of an outgoing place, or of a slot."""
        return self.base + place * SIGNAL_NBYTES
