"""What tests read from a sync word that a stream writes."""

from __future__ import annotations

from torchkv.cuda.sync_words import HostReleasedWait

__all__ = ["has_passed"]


def has_passed(hold: HostReleasedWait) -> bool:
    """Whether the stream has passed ``hold``: it then adds one to the word."""
    return hold._sync_words._pool.reached(hold._index, (hold._value + 1) & 0xFFFFFFFF)
