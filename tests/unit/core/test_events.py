"""What the loop tells, as Python takes it: in its order, ops that end in a row at once, also around the ring's end."""

from __future__ import annotations

import pytest

from torchkv.core.events import Events, Notice
from torchkv.core.loop.codes import BOUND, OP_DONE, SENT, STRAY
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import MAX_EVENTS
from torchkv.core.loop.state.peers import Record
from torchkv.core.runner import Runner

SLOT, RANK = 3, 17


@pytest.mark.parametrize("before", [0, *range(MAX_EVENTS - 8, MAX_EVENTS + 1), 5 * MAX_EVENTS - 4])
def test_events_are_taken_in_order_and_once(before: int) -> None:
    runner = Runner(0)
    events = Events(runner, {SLOT: RANK})
    runner.world["event_head"] = runner.world["event_tail"] = before
    assert not events.pending
    assert events.take() == []
    words = list(range(1, len(Record.__annotations__)))
    for value, name in enumerate(Record.__annotations__, 1):
        runner.world["record"][name] = value  # type: ignore[literal-required]
    for kind, index in ((OP_DONE, 7), (OP_DONE, 5), (OP_DONE, 6), (STRAY, 0), (OP_DONE, 9), (SENT, 9), (BOUND, 2)):
        emit(runner.world, kind, index, SLOT)
    assert events.pending
    assert events.take() == [
        Notice(OP_DONE, 7, -1, [7, 5, 6]),
        Notice(STRAY, 0, RANK, words),
        Notice(OP_DONE, 9, -1, [9]),
        Notice(SENT, 9, -1, []),
        Notice(BOUND, 2, -1, []),
    ]
    assert not events.pending
    assert events.take() == []
    emit(runner.world, OP_DONE, 1, SLOT)  # nothing joins what was taken before
    assert events.take() == [Notice(OP_DONE, 1, -1, [1])]
