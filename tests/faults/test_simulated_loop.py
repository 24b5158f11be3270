"""The runs of the resident loop in `test_simulated_loops` that copy into mapped host memory: what happens in them."""

from __future__ import annotations

import pytest

from tests.helpers.simulation.loop_runs import clean_run
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.sending.request import SenderRequest


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end on the loop, and are taken back from it before and after they are sealed; else nothing is shown."""
    ended: list[str] = []
    real = Flows.take_back_send

    def take_back(self: Flows, req: SenderRequest) -> bool:
        moved, had = self.core.sends.moved(req.flow or 0), len(req.running)
        sealed = real(self, req)
        ended.append("verdict" if req.ended else "sealed" if sealed else "copying" if moved and had else "idle")
        return sealed

    monkeypatch.setattr(Flows, "take_back_send", take_back)
    succeeded = 0
    for seed in range(40):
        succeeded += sum(receiving.work.is_success() for receiving in clean_run(seed).receivings)
    assert succeeded > 20
    assert {"sealed", "copying", "idle"} <= set(ended), ended
