"""The runs of the resident loop in `test_simulated_loops` between single ranks, whose verbs are plain.

Nothing wakes their progress threads, so grants and first verbs pass each other, and a first verb may find a grant of
which the loop has told, from a mailbox or through a network, and which Python has not taken in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.simulation.loop_runs import clean_run
from torchkv.engine.resident.plain_sends import PlainSends


@pytest.mark.parametrize("network", [False, True])
def test_the_runs_are_worth_their_time(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First verbs, and those that ask for the prefix, meet grants, and find none."""
    met: dict[str, list[bool]] = {"meet": [], "bind": []}

    def noting(name: str) -> Callable[..., object]:
        real = getattr(PlainSends, name)

        def call(self: PlainSends, *given: Any) -> object:
            found = real(self, *given)
            met[name].append(found is not None)
            return found

        return call

    for name in met:
        monkeypatch.setattr(PlainSends, name, noting(name))
    for seed in range(150):
        clean_run(seed, single=True, network=network)
    for name, found in met.items():
        assert found.count(True) > (5 if network else 10), name
        assert found.count(False) > 10, name
