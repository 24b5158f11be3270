"""The runs of the resident loop in `test_simulated_loops` that pack pages of GPUs for a network, and unpack them.

Kernels do, which end some time after they were launched, and the GPU's driver breaks now and then.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.loop_runs import clean_run, note_staged
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest

clean = partial(clean_run, gpu=True, network=True, staged=True)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are packed and unpacked to their end, and are taken back at either side while kernels are under way."""
    seen, landed = note_staged(monkeypatch), Receiver.landed

    def on_landed(self: Receiver, req: ReceiverRequest) -> None:
        seen["landed"] += 1
        landed(self, req)

    monkeypatch.setattr(Receiver, "landed", on_landed)
    for seed in range(60):
        scenario = clean(seed)
        seen["launched"] += sum(gpu.log.count("launch") for gpu in scenario.cluster.gpus.values())
    assert min(seen[what] for what in ("received", "taken back with bytes", "landing")) > 5, seen
    assert seen["landed"] > 1, seen
    assert seen["launched"] > 200, seen
