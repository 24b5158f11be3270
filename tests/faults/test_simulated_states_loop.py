"""The runs of the resident loop in `test_simulated_loops` where layouts have states: what happens in them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.simulation.loop_runs import RUNS, clean_run
from torchkv.protocol.actions import SendOp
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender

WAYS = ["states", "states gpu", "states network", "states gpus apart"]


@pytest.mark.parametrize("way", WAYS)
def test_the_runs_are_worth_their_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops copy states, and receive requests to their end: with pages, and with state alone."""
    seen: Counter[str] = Counter()
    copied, received = Sender.copied, Receiver.received

    def on_copied(
        self: Sender, req: SenderRequest, ops: list[SendOp], nbytes: list[int], path: str, now: float
    ) -> None:
        seen["states"] += sum(op.state for op in ops)
        copied(self, req, ops, nbytes, path, now)

    def on_received(self: Receiver, req: ReceiverRequest, nbytes: int, now: float) -> None:
        if req.state_slot is not None:
            seen["received" if len(req.pages) else "state alone"] += 1
        received(self, req, nbytes, now)

    monkeypatch.setattr(Sender, "copied", on_copied)
    monkeypatch.setattr(Receiver, "received", on_received)
    for seed in range(60):
        clean_run(seed, **RUNS[way])
    assert seen["states"] > 30, seen
    assert seen["received"] > 5, seen
    assert seen["state alone"] > 1, seen
