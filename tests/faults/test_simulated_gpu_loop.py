"""The runs of the resident loop in `test_simulated_loops` with pages on GPUs: kernels land late, or are refused.

The GPU is `tests.helpers.fakes.loop_gpu`: a stream that runs when its turn comes, also while its process is paused.
"""

from __future__ import annotations

import math

import pytest

from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.loop_runs import clean_run
from tests.helpers.simulation.requests import layout
from tests.helpers.simulation.requests import seed as new_seed
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.sending.request import SenderRequest


def test_what_kernels_use_stays_until_they_have_ended() -> None:
    """Their receiver dies while they are under way: its memory stays mapped, and what they read by stays allocated."""
    cluster = Cluster([Place("p", layout()), Place("d", layout())], seed=new_seed(), views=True, gpu=True)
    cluster[1].recv_pages("r", [1, 2], 0)
    cluster._gpu_due[0] = math.inf
    cluster[0].send_pages("r", [5, 6], 1)
    assert cluster.run(lambda: bool(cluster.gpus[0].pending), limit=5)
    cluster.kill(1)
    cluster.run(limit=2)
    engine = cluster[0].engine
    assert engine.flows is not None
    assert 1 in engine.lost
    assert engine.peers.undrained == {1}
    assert engine.flows.routes.known
    assert not engine.connections[1].closed
    cluster._gpu_due[0] = 0.0
    assert cluster.run(lambda: not engine.peers.undrained, limit=5)
    assert engine.flows.routes.known == {}
    assert engine.connections[1].closed


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels copy, and requests are taken back while theirs are under way; else nothing is shown."""
    landing: list[str] = []
    real = Flows.take_back_send

    def take_back(self: Flows, req: SenderRequest) -> bool | None:
        running = list(req.running)
        sealed = real(self, req)
        landing.extend(req.request for op in running if op.landed is not None)
        return sealed

    monkeypatch.setattr(Flows, "take_back_send", take_back)
    runs = [clean_run(seed, gpu=True) for seed in range(80)]
    assert sum(receiving.work.is_success() for run in runs for receiving in run.receivings) > 20
    assert sum(gpu.log.count("launch") for run in runs for gpu in run.cluster.gpus.values()) > 100
    assert len(landing) > 10
