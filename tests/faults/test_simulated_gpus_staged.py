"""The resident loop whose kernels pack pages of GPUs for a network, and unpack them, under the seeded scheduler.

As `test_simulated_staged_loop`, where kernels end some time after they were launched, and the GPU's driver breaks now
and then. Broken loops run as plain Python in processes of their own.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.broken_loops import GPUS_STAGED_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, note_staged, plain
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest

BATCH = 20

clean = partial(clean_run, gpu=True, network=True, staged=True)


@pytest.mark.parametrize("first", range(0, 80, BATCH))
def test_nothing_breaks_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean(seed, verbs=DIRECT if seed % 3 else (*DIRECT, "staged"))


@pytest.mark.parametrize("first", range(0, 40, BATCH))
def test_a_bad_network_alone_fails_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        scenario = clean(seed, benign=True, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


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


@pytest.mark.parametrize("seed", [5, 41])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    assert clean(seed).trace == clean(seed).trace


@pytest.mark.parametrize("name", sorted(GPUS_STAGED_BREAKS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "gpus staged")
    assert done.returncode == 0, done.stdout + done.stderr
