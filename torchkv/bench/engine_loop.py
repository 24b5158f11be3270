"""The loop of a serving engine: its main thread computes in Python, polls its requests, and goes on.

What a transport costs there is not what it costs in a benchmark that only waits: whatever it does on a Python thread
competes with the engine for the GIL. So a step here is a fixed amount of pure Python, and how much longer it takes than
alone is what the transport has cost its caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["RESTING", "STEP_SECONDS", "Loop", "Pending", "Times", "busy_thread", "compute", "steps_alone"]

STEP_SECONDS = 200e-6
RESTING = 40  # steps of a rest
SPIN = 20  # additions between two looks at the clock when steps are calibrated


class Pending(Protocol):
    """One request on its way."""

    def advance(self) -> bool:
        """Does what the engine's next step allows, such as sending one layer. Whether there is more to do."""

    def done(self) -> bool:
        """Whether the request has ended well. Raises its error."""

    def wait(self) -> None:
        """Blocks until it has."""


def steps_alone(rounds: int = 200) -> tuple[int, float]:
    """Additions that fill `STEP_SECONDS`, and the seconds that they take on this thread when nothing else runs."""
    count = 0
    until = time.perf_counter() + rounds * STEP_SECONDS
    while time.perf_counter() < until:
        compute(SPIN)
        count += SPIN
    size = max(1, count // rounds)
    best = sorted(_timed(size) for _ in range(rounds))
    return size, best[rounds // 2]


def compute(count: int) -> int:
    """A step: so many additions in Python."""
    total = 0
    for number in range(count):
        total += number
    return total


def _timed(count: int) -> float:
    began = time.perf_counter()
    compute(count)
    return time.perf_counter() - began


@contextmanager
def busy_thread(*, on: bool) -> Iterator[None]:
    """A second thread that does nothing but run Python, as a tokenizer or a scheduler does."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            compute(1000)

    thread = threading.Thread(target=run, name="busy", daemon=True)
    if on:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if on:
            thread.join()


@dataclass(slots=True)
class Times:
    """Seconds.

    requests: each one's, from its first verb to its verdict. rounds: of each `Loop.run`. resting: of each `Loop.rest`,
    the median of its steps. lost: of all steps, beyond those of the latest rest.
    """

    requests: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    resting: list[float] = field(default_factory=list)
    steps: int = 0
    lost: float = 0.0


class Loop:
    """Runs requests ``flight`` at a time. ``begin(n)`` starts request n: its first verb is called there.

    polled: a step of Python between any two looks at the requests; else the thread waits for them and does nothing.
    """

    def __init__(self, begin: Callable[[int], Pending], *, flight: int, polled: bool) -> None:
        self._begin = begin
        self._flight = flight
        self._polled = polled
        self._size, self._alone = steps_alone() if polled else (0, 0.0)
        self.times = Times()

    def rest(self) -> None:
        """Steps with nothing in flight: what a step takes where the other process's loop runs, too."""
        if self._polled:
            self._alone = sorted(_timed(self._size) for _ in range(RESTING))[RESTING // 2]
            self.times.resting.append(self._alone)

    def run(self, first: int, count: int) -> None:
        """Requests first .. first + count - 1; their times are added to ``times``."""
        numbers = iter(range(first, first + count))
        pending: dict[Pending, float] = {}
        began = time.perf_counter()
        while self._fill(pending, numbers):
            if self._polled:
                self.step()
                for request in list(pending):
                    if not request.advance() and request.done():
                        self._ended(pending, request)
                continue
            for request in pending:
                while request.advance():
                    pass
            for request in list(pending):
                request.wait()
                self._ended(pending, request)
        self.times.rounds.append(time.perf_counter() - began)

    def _fill(self, pending: dict[Pending, float], numbers: Iterator[int]) -> bool:
        """Begins requests until enough are in flight. Whether any is."""
        while len(pending) < self._flight and (number := next(numbers, None)) is not None:
            began = time.perf_counter()
            pending[self._begin(number)] = began
        return bool(pending)

    def _ended(self, pending: dict[Pending, float], request: Pending) -> None:
        self.times.requests.append(time.perf_counter() - pending.pop(request))

    def step(self) -> None:
        """The engine's own work."""
        self.times.lost += _timed(self._size) - self._alone
        self.times.steps += 1
