"""What the resident loop tells Python: see `torchkv.core.loop.events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.core.loop.codes import CUT, GRANTED, OP_DONE, STRAY
from torchkv.core.loop.limits import MAX_EVENTS, MAX_UNCLAIMED
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.world import word_at

if TYPE_CHECKING:
    from torchkv.core.runner import Runner

__all__ = ["Events", "Notice"]

_NO_WORDS: list[int] = []
_EVENT_WORDS = range(3, 3 + len(Record.__annotations__) - 1)  # of an event: its record, without ``seq``
_TAIL, _HEAD = word_at("event_tail") // 8, word_at("event_head") // 8
_UNCLAIMED_TAIL, _UNCLAIMED_HEAD = word_at("unclaimed_tail") // 8, word_at("unclaimed_head") // 8


@dataclass(slots=True)
class Notice:
    """An event, or several OP_DONE in a row.

    index: of the flow, of OP_DONE of the first op. words: of OP_DONE, the indices of all these ops, in the order in
    which they have ended; of GRANTED, STRAY and CUT the record, without ``seq``. source: of these three, the rank.
    """

    kind: int
    index: int
    source: int
    words: list[int]


class Events:
    """Of one loop. ranks: of the loop's peers: see `LoopPeers`."""

    def __init__(self, runner: Runner, ranks: Mapping[int, int]) -> None:
        self._words = runner.words
        # Views in which Python reads words faster than in records, and faster in a memoryview than in an array.
        events = runner.memory["events"].view(np.int64).reshape(MAX_EVENTS, -1)
        self._rows, self._unclaimed = events, runner.memory["unclaimed"].view(np.int64).reshape(MAX_UNCLAIMED, -1)
        self._kinds, self._indices, self._events = events[:, 0].data, events[:, 1].data, events.data
        self._ranks = ranks

    @property
    def pending(self) -> bool:
        """Whether `take` would return any. Any thread, without the lock."""
        return bool(self._words[_TAIL] != self._words[_HEAD])

    @property
    def has_unclaimed(self) -> bool:
        """Whether `take` has left grants."""
        return bool(self._words[_UNCLAIMED_TAIL] != self._words[_UNCLAIMED_HEAD])

    def take(self, *, leave_grants: bool = False) -> list[Notice]:
        """What has happened since the last call.

        leave_grants: they are left for the verbs that begin their requests (see `grants.meet`), as long as there is
        room. Without it those that are left come first.
        """
        head, tail = self._words[_HEAD], self._words[_TAIL]
        leave_grants = leave_grants and self._has_room(tail - head)
        taken: list[Notice] = [] if leave_grants else self._claim()
        if head == tail:
            return taken
        ended: list[int] | None = None  # the ops of the latest notice, which the next one may join
        kinds, indices = self._ring(self._kinds, head, tail), self._ring(self._indices, head, tail)
        for number, kind, index in zip(range(head, tail), kinds, indices, strict=True):
            if kind == OP_DONE:  # first, because layer by layer there are many
                if ended is None:
                    ended = []
                    taken.append(Notice(kind, index, -1, ended))
                ended.append(index)
                continue
            ended = None
            if kind == GRANTED and leave_grants:
                self._leave(self._rows[number & (MAX_EVENTS - 1)])
            elif kind in (GRANTED, STRAY, CUT):  # of others the record says nothing
                taken.append(self._with_record(self._events, number & (MAX_EVENTS - 1)))
            else:
                taken.append(Notice(kind, index, -1, _NO_WORDS))
        self._words[_HEAD] = tail
        return taken

    def _with_record(self, events: memoryview, at: int) -> Notice:
        words = [events[at, word] for word in _EVENT_WORDS]
        return Notice(events[at, 0], events[at, 1], self._ranks.get(events[at, 2], -1), words)

    def _has_room(self, count: int) -> bool:
        return self._words[_UNCLAIMED_TAIL] - self._words[_UNCLAIMED_HEAD] + count <= MAX_UNCLAIMED

    def _leave(self, event: Int64Array) -> None:
        tail = self._words[_UNCLAIMED_TAIL]
        self._unclaimed[tail & (MAX_UNCLAIMED - 1)] = event
        self._words[_UNCLAIMED_TAIL] = tail + 1

    def _claim(self) -> list[Notice]:
        """What `take` has left, and no verb has claimed."""
        head, tail = self._words[_UNCLAIMED_HEAD], self._words[_UNCLAIMED_TAIL]
        self._words[_UNCLAIMED_HEAD] = tail
        left = [number & (MAX_UNCLAIMED - 1) for number in range(head, tail)]
        return [self._with_record(self._unclaimed.data, at) for at in left if self._unclaimed[at, 0] == GRANTED]

    @staticmethod
    def _ring(words: memoryview, head: int, tail: int) -> list[int]:
        """One word of each event."""
        first = head & (MAX_EVENTS - 1)
        values: list[int] = words[first : first + tail - head].tolist()
        missing = tail - head - len(values)  # they lie at the beginning
        return values + words[:missing].tolist() if missing else values
