"""CPU time of torchkv's functions in a real process, and the control messages that it sends, while it runs."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchkv.control.messenger import ControlMessenger
from torchkv.engine.machines import Machines

__all__ = ["Profile"]

# What a simulated rank runs, too: see `torchkv.bench.scale.rank`. None of them calls another one.
_PROTOCOL: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ControlMessenger, ("receive", "accept", "frames", "send", "send_now")),
    (Machines, ("handle", "take_actions", "tick")),
)


class Profile:
    """Times functions of every thread of this process from now on, for good: for a process of a benchmark.

    nanoseconds: of CPU, by kind: ``protocol``, ``verbs`` (as far as the caller says so). told: messages, by kind.
    """

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        for owner, names in _PROTOCOL:
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))
        tell = ControlMessenger.tell

        def counted(messenger: ControlMessenger, rank: int, message: Any) -> None:
            self.told[type(message).__name__] += 1
            tell(messenger, rank, message)

        setattr(ControlMessenger, "tell", counted)  # noqa: B010 - mypy refuses to assign a method

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **given: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **given)
            finally:
                self.nanoseconds["protocol"] += time.thread_time_ns() - began

        return timed

    @contextmanager
    def verbs(self) -> Iterator[None]:
        began = time.thread_time_ns()
        yield
        self.nanoseconds["verbs"] += time.thread_time_ns() - began
