"""The runs of the resident loop in `test_simulated_loops` between pages of unlike dtypes: how they go.

Into mapped pages, and staged through a network, in host memory and on GPUs.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.loop_runs import RUNS, clean_run
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.receiving.request import ReceiverRequest

WAYS = ["converts", "converts staged", "converts gpu", "converts gpus staged"]


@pytest.mark.parametrize("way", WAYS)
def test_the_runs_are_worth_their_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are received by loops, by the path that is meant; else nothing is shown."""
    paths: list[str] = []
    leave = Flows._leave

    def left(self: Flows, req: ReceiverRequest, *, whole: bool = False) -> int:
        nbytes = leave(self, req, whole=whole)
        if whole and nbytes:
            paths.append(req.loop_path)
        return nbytes

    monkeypatch.setattr(Flows, "_leave", left)
    for seed in range(40):
        clean_run(seed, **RUNS[way])
    wanted = "staged" if way.endswith("staged") else "direct"
    assert len(paths) > 10, paths
    assert set(paths) == {wanted}
