"""The resident loop where layouts have states, under the seeded scheduler of `test_simulated`.

Broken loops: `tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.simulation.broken_loops import RUNS, STATES_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain
from torchkv.protocol.actions import SendOp
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest
from torchkv.protocol.sending.sender import Sender

WAYS = ["states", "states gpu", "states network", "states gpus apart"]
SEEDS = range(60)
BATCH = 20


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(way: str, first: int) -> None:
    for seed in range(first, first + BATCH):
        clean_run(seed, **RUNS[way], verbs=DIRECT if seed % 3 else (*DIRECT, "staged"))


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_network_alone_fails_nothing(way: str) -> None:
    for seed in SEEDS[:BATCH]:
        scenario = clean_run(seed, benign=True, **RUNS[way])
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


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
    for seed in SEEDS:
        clean_run(seed, **RUNS[way])
    assert seen["states"] > 30, seen
    assert seen["received"] > 5, seen
    assert seen["state alone"] > 1, seen


@pytest.mark.parametrize("way", WAYS)
def test_plain_python_gives_the_same_run(way: str) -> None:
    done = plain("trace", "5", way)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean_run(5, **RUNS[way]).trace]


@pytest.mark.parametrize("name", STATES_BREAKS)
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "states")
    assert done.returncode == 0, done.stdout + done.stderr
