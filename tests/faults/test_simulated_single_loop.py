"""The runs of the resident loop in `test_simulated_loops` between single ranks, whose verbs are plain.

Nothing wakes their progress threads, so grants and first verbs pass each other, and a first verb may find a grant of
which the loop has told, from a mailbox or through a network, and which Python has not taken in.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulation.loop_runs import clean_run
from torchkv.engine.resident.plain_sends import PlainSends


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
    for seed in range(100):
        clean_run(seed, single=True, network=network)
    assert met.count(True) > (5 if network else 10)
    assert met.count(False) > 10
