"""How callers wait for what the resident loop, or Python, has completed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchkv.core import posting
from torchkv.core.loop.state.world import word_at

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["News"]

SLICE = 0.1  # seconds of one sleep of `News.wait`: then signals of Python are served

_NEWS, _SLEEPERS = word_at("news") // 8, word_at("sleepers") // 8


class News:
    """One loop's. Any thread."""

    def __init__(self, runner: Runner) -> None:
        self._words = runner.words
        self._address = runner.address
        self._counting = threading.Lock()

    @property
    def count(self) -> int:
        """Changes with each event. Read it before looking whether what is awaited is there, then `wait`."""
        return self._words[_NEWS]

    def wait(self, seen: int, seconds: float) -> None:
        """Waits, without the GIL, until ``count`` is not ``seen``, for so long or `SLICE` at most.

        Spins first, as the loop does: not where cores are few.
        """
        nanoseconds = int(min(seconds, SLICE) * 1e9)
        if posting.spin_for_news(self._address, seen, nanoseconds):
            return
        with self._counting:
            self._words[_SLEEPERS] += 1
        try:
            posting.wait_news(self._address, seen, nanoseconds)
        finally:
            with self._counting:
                self._words[_SLEEPERS] -= 1

    def add(self) -> None:
        """Changes ``count`` and wakes the threads in `wait`: Python has completed a call."""
        posting.wake_waiters(self._address)  # also if nobody sleeps yet: somebody may be about to
