"""Python's switch interval is lowered while a group needs that, and set back."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from torchkv.host.switch_interval import SWITCH_INTERVAL, ShortTurns


@pytest.fixture(autouse=True)
def found() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def interval(seconds: float) -> object:
    return pytest.approx(seconds, rel=0.02)  # kept in whole microseconds


@pytest.mark.parametrize("before", [0.005, 0.0001])
def test_it_is_lowered_and_set_back(before: float) -> None:
    sys.setswitchinterval(before)
    turns = ShortTurns()
    turns.end()
    assert sys.getswitchinterval() == interval(before)
    for _ in range(2):
        turns.begin()
        assert sys.getswitchinterval() == interval(min(before, SWITCH_INTERVAL))
    turns.end()
    turns.end()
    assert sys.getswitchinterval() == interval(before)


def test_the_last_of_several_groups_sets_it_back() -> None:
    sys.setswitchinterval(0.005)
    groups = [ShortTurns() for _ in range(3)]
    for group in groups[:2]:
        group.begin()
    for group in groups:
        assert sys.getswitchinterval() == interval(SWITCH_INTERVAL)
        group.end()
        if group is groups[1]:
            assert sys.getswitchinterval() == interval(0.005)
            group.begin()
    assert sys.getswitchinterval() == interval(SWITCH_INTERVAL)
    groups[1].end()


def test_what_somebody_else_has_set_meanwhile_stays() -> None:
    sys.setswitchinterval(0.005)
    turns = ShortTurns()
    turns.begin()
    sys.setswitchinterval(0.002)
    turns.end()
    assert sys.getswitchinterval() == interval(0.002)
