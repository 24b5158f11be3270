"""The runs of the resident loop in `test_simulated_loops` between a rank and one or two, whose verbs are plain.

Nothing wakes their progress threads, so grants and first verbs pass each other, and a first verb may find a grant of
which the loop has told, from a mailbox or through a network, and which Python has not taken in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers.simulation.loop_runs import clean_run
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.group.plain.sending import PlainSending


@pytest.mark.parametrize("network", [False, True])
def test_the_runs_are_worth_their_time(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First verbs, and those that ask for the prefix, meet grants, and find none."""
    met: dict[str, list[bool]] = {"meet": [], "bind": []}
    claimed = 0  # of grants that Python had left to the verb

    def noting(name: str) -> Callable[..., object]:
        real = getattr(PlainSends, name)

        def call(self: PlainSends, *given: Any) -> object:
            nonlocal claimed
            left = self._core.world["unclaimed"]["kind"].copy()  # type: ignore[call-overload]
            found = real(self, *given)
            met[name].append(found is not None)
            claimed += np.any(self._core.world["unclaimed"]["kind"] != left)  # type: ignore[call-overload]
            return found

        return call

    for name in met:
        monkeypatch.setattr(PlainSends, name, noting(name))
    for seed in range(150):
        clean_run(seed, readers=1, network=network)
    for name, found in met.items():
        assert found.count(True) > (5 if network else 10), name
        assert found.count(False) > 10, name
    assert claimed > 5


@pytest.mark.parametrize("network", [False, True])
def test_the_runs_with_two_readers_are_worth_their_time(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First verbs to both meet their grants, or one of them, or such as they cannot begin under."""
    begun, addressed, released = [], [], 0
    address, begin_all, release = PlainSending._address, PlainSending._begin_all, PlainSending._release

    def addressing(self: PlainSending, request: str) -> tuple[int, ...]:
        ranks = address(self, request)
        addressed.append(len(ranks))
        return ranks

    def beginning(self: PlainSending, grants: Any, reqs: Any, ops: Any, flows: list[int]) -> Any:
        started = begin_all(self, grants, reqs, ops, flows)
        if flows:
            begun.append(bool(started))
        return started

    def releasing(self: PlainSending, grants: list[Any]) -> None:
        nonlocal released
        released += bool(grants)
        release(self, grants)

    monkeypatch.setattr(PlainSending, "_address", addressing)
    monkeypatch.setattr(PlainSending, "_begin_all", beginning)
    monkeypatch.setattr(PlainSending, "_release", releasing)
    for seed in range(120):
        clean_run(seed, readers=2, network=network)
    assert begun.count(True) > 2
    assert begun.count(False) > 1
    assert released > begun.count(False), "grants of one of two alone were there"
    assert addressed.count(1) > 2
    assert addressed.count(2) > 2
