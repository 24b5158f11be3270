"""What the resident loop tells Python: see `torchkv.core.loop.events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchkv.core.loop.codes import CUT, GRANTED, STRAY
from torchkv.core.loop.limits import MAX_EVENTS
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.world import word_at

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["Events", "Notice"]

_NO_WORDS: list[int] = []
_EVENT_WORDS = range(3, 3 + len(Record.__annotations__) - 1)  # of an event: its record, without ``seq``
_TAIL, _HEAD = word_at("event_tail") // 8, word_at("event_head") // 8


@dataclass(slots=True)
class Notice:
    """An event. index: of the op or flow. Of GRANTED, STRAY and CUT also source: the rank, and words: the record,
    without ``seq``."""

    kind: int
    index: int
    source: int
    words: list[int]


class Events:
    """Of one loop. ranks: of the loop's peers: see `LoopPeers`."""

    def __init__(self, runner: Runner, ranks: Mapping[int, int]) -> None:
        self._words = runner.words
        # A view in which Python reads words faster than in records, and faster in a memoryview than in an array.
        self._events = runner.memory["events"].view(np.int64).reshape(MAX_EVENTS, -1).data
        self._ranks = ranks

    @property
    def pending(self) -> bool:
        """Whether `take` would return any. Any thread, without the lock."""
        return bool(self._words[_TAIL] != self._words[_HEAD])

    def take(self) -> list[Notice]:
        """What has happened since the last call."""
        events = self._events
        head, tail = self._words[_HEAD], self._words[_TAIL]
        taken: list[Notice] = []
        for number in range(head, tail):
            at = number & (MAX_EVENTS - 1)
            kind = events[at, 0]
            if kind in (GRANTED, STRAY, CUT):
                words = [events[at, word] for word in _EVENT_WORDS]
                taken.append(Notice(kind, events[at, 1], self._ranks.get(events[at, 2], -1), words))
            else:  # its record says nothing
                taken.append(Notice(kind, events[at, 1], -1, _NO_WORDS))
        if taken:
            self._words[_HEAD] = tail
        return taken
