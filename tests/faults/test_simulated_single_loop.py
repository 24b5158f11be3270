"""The resident loop between single ranks, whose verbs are plain, while nothing wakes their progress threads.

So grants and first verbs pass each other, and a first verb may find a grant of which the loop has told, from a mailbox
or through a network, and which Python has not taken in. Broken loops run as plain Python in processes of their own, as
in `test_simulated_loop`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulation.broken_loops import SINGLE_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain
from torchkv.engine.resident.plain_sends import PlainSends

BATCH = 25


@pytest.mark.parametrize("first", range(0, 100, BATCH))
@pytest.mark.parametrize("network", [False, True])
def test_nothing_breaks_under_faults(network: bool, first: int) -> None:
    for seed in range(first, first + BATCH):
        clean_run(seed, single=True, network=network)


@pytest.mark.parametrize("first", range(0, 50, BATCH))
def test_a_bad_network_alone_fails_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        scenario = clean_run(seed, single=True, benign=True, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


@pytest.mark.parametrize("network", [False, True])
def test_the_runs_are_worth_their_time(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First verbs meet grants, and find none."""
    met: list[bool] = []
    real = PlainSends.meet

    def meet(self: PlainSends, *call: Any) -> object:
        found = real(self, *call)
        met.append(found is not None)
        return found

    monkeypatch.setattr(PlainSends, "meet", meet)
    for seed in range(60):
        clean_run(seed, single=True, network=network)
    assert met.count(True) > (5 if network else 10)
    assert met.count(False) > 10


@pytest.mark.parametrize("name", sorted(SINGLE_BREAKS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "single")
    assert done.returncode == 0, done.stdout + done.stderr
