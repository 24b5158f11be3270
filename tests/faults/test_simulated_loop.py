"""The resident loop under the seeded scheduler of `test_simulated`: turns of a few bytes, mailboxes of a few records.

The loop's functions are compiled here, as in production. Broken ones, which must be caught, run as plain Python in
processes of their own: `tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.broken_loops import BREAKS, MOMENTS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.sending.request import SenderRequest

SEEDS = range(100)  # thousands of shorter ones: test_campaign_loop
BATCH = 20


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean_run(seed)


@pytest.mark.parametrize("first", SEEDS[:40:BATCH])
def test_verbs_that_the_loop_cannot_do_come_in_between(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean_run(seed, verbs=(*DIRECT, "staged"))


@pytest.mark.parametrize("first", SEEDS[:40:BATCH])
def test_a_bad_network_alone_fails_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        scenario = clean_run(seed, benign=True, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end on the loop, and are taken back from it before and after they are sealed; else nothing is shown."""
    ended: list[str] = []
    real = Flows.take_back_send

    def take_back(self: Flows, req: SenderRequest) -> bool:
        moved, had = self.core.moved(req.flow or 0), len(req.running)
        sealed = real(self, req)
        ended.append("verdict" if req.ended else "sealed" if sealed else "copying" if moved and had else "idle")
        return sealed

    monkeypatch.setattr(Flows, "take_back_send", take_back)
    succeeded = 0
    for seed in range(40):
        succeeded += sum(receiving.work.is_success() for receiving in clean_run(seed).receivings)
    assert succeeded > 20
    assert {"sealed", "copying", "idle"} <= set(ended), ended


@pytest.mark.parametrize("seed", [5, 41])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    assert clean_run(seed).trace == clean_run(seed).trace


@pytest.mark.parametrize("seed", [5, 41, 77])
def test_plain_python_gives_the_same_run(seed: int) -> None:
    """So what is shown with the one is shown for the other."""
    done = plain("trace", str(seed))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean_run(seed).trace]


@pytest.mark.parametrize("name", sorted(BREAKS | MOMENTS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name)
    assert done.returncode == 0, done.stdout + done.stderr
