"""Runs of the resident loop in the simulation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.helpers.simulation.scenario import Scenario
from tests.helpers.simulation.state_flows import some_states
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest

__all__ = ["DIRECT", "RUNS", "clean_run", "loop_scenario", "note_staged"]

DIRECT = ("layer", "slice", "pages")  # the verbs that the loop can do

RUNS: dict[str, dict[str, Any]] = {  # what `loop_scenario` is given, by kind
    "": {},
    "gpu": {"gpu": True},
    "network": {"network": True},
    "gpus apart": {"gpu": True, "network": True},
    "gpus staged": {"gpu": True, "network": True, "staged": True},
    "calls": {"network": True, "system_calls": True},
    "staged": {"network": True, "staged": True},
    "single": {"readers": 1},
    "single network": {"readers": 1, "network": True},
    "two readers": {"readers": 2},
    "converts": {"converts": True},
    "states": {"stateful": True},
    "states gpu": {"stateful": True, "gpu": True},
    "states network": {"stateful": True, "network": True},
    "states gpus apart": {"stateful": True, "gpu": True, "network": True},
    "converts staged": {"converts": True, "network": True, "staged": True},
    "converts gpu": {"converts": True, "gpu": True},
    "converts gpus staged": {"converts": True, "gpu": True, "network": True, "staged": True},
}


def loop_scenario(
    seed: int,
    *,
    benign: bool = False,
    verbs: tuple[str, ...] = DIRECT,
    gpu: bool = False,
    network: bool = False,
    system_calls: bool = False,
    staged: bool = False,
    readers: int = 0,
    converts: bool = False,
    stateful: bool = False,
) -> Scenario:
    """A run in which loops serve what they can; see `Scenario`. In most there is no state, but if ``stateful`` in all.

    readers: of one sender, or in the other direction senders: see `Scenario`; 0: any number of both.
    """
    states = some_states(seed) if stateful else () if seed % 4 or readers else None
    return Scenario(
        seed,
        benign=benign,
        verbs=verbs,
        loop=True,
        gpu=gpu,
        network=network,
        system_calls=system_calls,
        staged=staged,
        states=states,
        readers=readers,
        converts=converts,
    )


def clean_run(seed: int, **given: Any) -> Scenario:
    """Performs `loop_scenario`, in which every property must hold."""
    print(f"seed {seed}")
    scenario = loop_scenario(seed, **given)
    problems = scenario.run()
    assert not problems, f"seed {seed}: {problems}"
    assert not any(gpu.bad_ids for gpu in scenario.cluster.gpus.values()), f"seed {seed}: kernels got bad page ids"
    return scenario


def note_staged(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts receives of which pieces have come, by how they left the loop, and sends whose pieces still land then."""
    seen: Counter[str] = Counter()
    received, take_back = Flows._leave, Flows.take_back_send

    def leave(self: Flows, req: ReceiverRequest, *, whole: bool = False) -> int:
        nbytes = received(self, req, whole=whole)
        if req.loop_path == "staged" and nbytes:
            seen["received" if whole else "taken back with bytes"] += 1
        return nbytes

    def taking_back(self: Flows, req: SenderRequest) -> bool | None:
        sealed = take_back(self, req)
        seen["landing"] += req.landing is not None
        return sealed

    patch.setattr(Flows, "_leave", leave)
    patch.setattr(Flows, "take_back_send", taking_back)
    return seen
