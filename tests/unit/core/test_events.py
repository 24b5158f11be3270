"""What the loop tells, as Python takes it: in its order, ops that end in a row at once, also around the ring's end."""

from __future__ import annotations

import pytest

from torchkv.core.events import Events, Notice
from torchkv.core.loop.codes import BOUND, GRANTED, NEWS, OP_DONE, SENT, STRAY
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import MAX_EVENTS, MAX_UNCLAIMED
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


def grant(runner: Runner, generation: int) -> None:
    runner.world["record"]["generation"] = generation
    emit(runner.world, GRANTED, 0, SLOT)


def told(events: Events, *, leave_grants: bool = False) -> list[int | tuple[int, int]]:
    """The kinds of what is taken, and the generations of grants."""
    notices = events.take(leave_grants=leave_grants)
    return [(each.source, each.words[2]) if each.kind == GRANTED else each.kind for each in notices]


@pytest.mark.parametrize("before", [0, MAX_UNCLAIMED - 1, 7 * MAX_UNCLAIMED - 2])
def test_grants_may_be_left(before: int) -> None:
    """Whoever takes them later takes them first; those that a verb has claimed are no more."""
    runner = Runner(0)
    events = Events(runner, {SLOT: RANK})
    runner.world["unclaimed_head"] = runner.world["unclaimed_tail"] = before
    grant(runner, 1)
    emit(runner.world, SENT, 9, SLOT)
    grant(runner, 2)
    grant(runner, 3)
    assert told(events, leave_grants=True) == [SENT]
    assert not events.pending
    assert events.has_unclaimed
    assert told(events, leave_grants=True) == []
    emit(runner.world, BOUND, 2, SLOT)
    grant(runner, 4)
    runner.world["unclaimed"][(before + 1) & (MAX_UNCLAIMED - 1)]["kind"] = NEWS
    assert told(events) == [(RANK, 1), (RANK, 3), BOUND, (RANK, 4)]
    assert not events.has_unclaimed
    assert told(events) == []


def test_grants_are_left_as_long_as_there_is_room() -> None:
    runner = Runner(0)
    events = Events(runner, {SLOT: RANK})
    for number in range(MAX_UNCLAIMED):
        grant(runner, number)
    assert told(events, leave_grants=True) == []
    grant(runner, MAX_UNCLAIMED)
    emit(runner.world, SENT, 9, SLOT)
    grant(runner, MAX_UNCLAIMED + 1)
    everything = [(RANK, number) for number in range(MAX_UNCLAIMED + 2)]
    assert told(events, leave_grants=True) == [*everything[:-1], SENT, everything[-1]]
    grant(runner, 0)
    assert told(events, leave_grants=True) == []
