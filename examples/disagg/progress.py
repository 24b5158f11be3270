"""Lines with the seconds elapsed, so that a long run is seen to move."""

from __future__ import annotations

import time


class Progress:
    """Prints what a rank does with the seconds since ``start``; long loops at most once a second."""

    def __init__(self, label: str, *, quiet: bool) -> None:
        self._label = label
        self._quiet = quiet
        self.restart()

    def restart(self) -> None:
        """Count time from now."""
        self._start = self._last = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the last restart."""
        return time.perf_counter() - self._start

    def say(self, text: str) -> None:
        """Print ``text``, unless this rank is quiet."""
        if not self._quiet:
            print(f"[{self.seconds():7.2f} s] {self._label}: {text}", flush=True)

    def step(self, operation: str, done: int, total: int) -> None:
        """Print "what done of total": the first, the last, and one a second in between."""
        now = time.perf_counter()
        if done in (1, total) or now - self._last >= 1.0:
            self._last = now
            self.say(f"{operation} {done} of {total}")
