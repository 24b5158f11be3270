"""Which words of the loop's state lie on cache lines of their own; and whether all that is due has its place."""

from __future__ import annotations

import pytest

from torchkv.core.loop.limits import DUE, LINE, MAX_FLOWS, MAX_PEERS, MAX_ROUNDS, MAX_WRITERS
from torchkv.core.loop.state.world import WORLD, word_at
from torchkv.core.runner import Runner

BY_CALLERS = ("command_tail", "event_head", "roused", "sleepers", "attending", "listeners")
BY_LOOP = ("command_head", "event_tail", "news", "granted")
AT_EVERY_STEP = ("lock", "steps", "seals", "flying", "queue_head", "queue_tail")
SELDOM = ("address", "bell", "spin", "network", "driving", "broken", "stop", "lanes")


@pytest.mark.parametrize(
    ("some", "others"),
    [
        (BY_CALLERS, BY_LOOP),
        (BY_CALLERS, AT_EVERY_STEP),
        (BY_CALLERS, SELDOM),
        (BY_LOOP, AT_EVERY_STEP),
        (BY_LOOP, SELDOM),
        (AT_EVERY_STEP, SELDOM),
    ],
)
def test_words_that_different_threads_write_share_no_line(some: tuple[str, ...], others: tuple[str, ...]) -> None:
    assert not {word_at(name) // LINE for name in some} & {word_at(name) // LINE for name in others}


def test_the_state_and_its_ops_begin_with_a_line() -> None:
    runner = Runner(0)
    assert runner.address % LINE == 0
    assert WORLD.fields is not None
    ops, at = WORLD.fields["ops"][:2]
    assert at % LINE == 0
    assert ops.base.itemsize % LINE == 0
    assert len(runner.words) * 8 == WORLD.itemsize


def test_all_messages_that_are_due_have_their_places() -> None:
    """Else the oldest is overwritten. Peers whose mailboxes are full are still owed VERDICTs of earlier receives."""
    sends, rounds, grants = MAX_FLOWS, MAX_ROUNDS, MAX_FLOWS * MAX_WRITERS
    to_leader, greetings_and_credits = 2 * MAX_FLOWS, 2 * MAX_PEERS
    verdicts = (MAX_PEERS - 1) * MAX_FLOWS
    assert sends + rounds + grants + to_leader + greetings_and_credits + verdicts <= DUE
    assert DUE & (DUE - 1) == 0
