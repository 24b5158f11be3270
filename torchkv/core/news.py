"""How callers wait for what the resident loop, or Python, has completed."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torchkv.core import steering
from torchkv.core.loop.state.world import word_at
from torchkv.core.thread import attend

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["News"]

SLICE = 0.1  # seconds of one sleep of `News.wait`: then signals of Python are served

_NEWS, _LISTENERS, _TAIL, _HEAD = (word_at(name) // 8 for name in ("news", "listeners", "event_tail", "event_head"))


class News:
    """One loop's. Any thread."""

    def __init__(self, runner: Runner) -> None:
        self._words = runner.words
        self._address = runner.address
        self._attend = partial(attend, cast(Any, runner.memory))  # as a caller, where cores are few
        self._counting = threading.Lock()

    @property
    def count(self) -> int:
        """Changes when a request may have ended. Read it before looking whether what is awaited is there, then `wait`.

        Also with every other event, while a thread ``listens`` in `wait`.
        """
        return self._words[_NEWS]

    def wait(self, seen: int, seconds: float, *, listens: bool = False) -> None:
        """Waits, without the GIL, until ``count`` is not ``seen``, for so long or `SLICE` at most.

        Spins first, as the loop does; where cores are few it runs the loop instead. listens: for any event, not only
        for what may end a request. Returns at once if there is one that nobody has taken.
        """
        nanoseconds = int(min(seconds, SLICE) * 1e9)
        if not listens:
            self._wait(seen, nanoseconds)
            return
        self._listen(1)
        try:
            if self._words[_TAIL] == self._words[_HEAD]:
                self._wait(seen, nanoseconds)
        finally:
            self._listen(-1)

    def _wait(self, seen: int, nanoseconds: int) -> None:
        steering.rouse(self._address)  # what is awaited has to pass the loop first
        if not steering.spin_for_news(self._address, seen, nanoseconds) and not self._attend(seen, nanoseconds):
            steering.wait_news(self._address, seen, nanoseconds)

    def _listen(self, change: int) -> None:
        with self._counting:
            self._words[_LISTENERS] += change

    def add(self) -> None:
        """Changes ``count`` and wakes the threads in `wait`: Python has completed a call."""
        steering.wake_waiters(self._address)  # also if nobody sleeps yet: somebody may be about to
