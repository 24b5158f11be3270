"""The runs of the resident loop in `test_simulated_loops` that put pages of GPUs through a network, as between hosts.

Ops also wait for events that the loop asks the GPU's driver about, and that driver breaks now and then.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.flows import short_runs
from tests.helpers.simulation.loop_runs import clean_run
from tests.helpers.simulation.requests import layout
from tests.helpers.simulation.requests import seed as new_seed
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.sending.request import SenderRequest

clean = partial(clean_run, gpu=True, network=True)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops ask for events, and put; requests are taken back while they wait, and while puts are under way."""
    ended: list[str] = []
    real = Flows.take_back_send

    def take_back(self: Flows, req: SenderRequest) -> bool | None:
        gated = req.flow is not None and self.core.sends.gated(req.flow) > 0 and self.core.sends.moved(req.flow) == 0
        sealed = real(self, req)
        landing = any(op.landed is not None for op in req.running)
        ended.append("landing" if landing else "gated" if gated else "else")
        return sealed

    monkeypatch.setattr(Flows, "take_back_send", take_back)
    succeeded = puts = asked = launched = 0
    for seed in range(60):
        scenario = clean(seed)
        succeeded += sum(receiving.work.is_success() for receiving in scenario.receivings)
        assert scenario.cluster.network is not None
        puts += scenario.cluster.network.puts
        asked += sum(gpu.log.count("query") for gpu in scenario.cluster.gpus.values())
        launched += sum(gpu.log.count("launch") for gpu in scenario.cluster.gpus.values())
    assert succeeded > 30
    assert puts > 500
    assert asked > 50
    assert launched == 0
    assert ended.count("landing") > 3
    assert ended.count("gated") > 1


def test_what_was_put_and_has_arrived_is_not_waited_for_as_a_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts have numbers, and so have launches: a send that is taken back must not take one for the other."""
    with short_runs():
        cluster = Cluster([Place("p", layout()), Place("d", layout())], seed=new_seed(), gpu=True, network=True)
        writer = cluster[0]
        flows = writer.engine.flows
        assert flows is not None
        cluster[1].recv_pages("r", [1, 2, 3], 0)
        cluster.run(limit=2)
        writer.send_pages("r", [5, 6, 7], 1)
        while not any(flows.core.sends.flying(index) for index in flows._ops):
            flows.core.runner.step()
        (req,) = flows._sends.values()
        monkeypatch.setattr(flows.core.sends, "put", lambda index: 0)  # as if a flush had said so
        flows.take_back_send(req)
        assert [op.landed for op in req.running] == [None]
