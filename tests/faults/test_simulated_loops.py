"""The resident loop under the seeded scheduler of `test_simulated`: turns of a few bytes, mailboxes of a few records.

Every kind of run is asked the same. The loop's functions are compiled here, as in production. Broken ones, which must
be caught, run as plain Python in processes of their own: `tests.helpers.simulation.broken_loops`. That enough happens
in these runs is shown kind by kind, in the files test_simulated_*; thousands of shorter ones are in test_campaign_loop.
"""

from __future__ import annotations

import signal

import pytest

from tests.helpers.simulation.broken_loops import KINDS, MOMENTS
from tests.helpers.simulation.loop_runs import DIRECT, RUNS, clean_run
from tests.helpers.simulation.plain_python import plain

BATCH = 20
SEEDS = {"": 100, "network": 120, "staged": 120, "single": 100, "gpus apart": 80, "gpus staged": 80}  # else 60
# A loop that is broken in these ways may corrupt its process: some seeds kill it before any tells what is wrong.
MAY_CRASH = {"gpu"}


def batches(seeds: dict[str, int], usual: int) -> list[tuple[str, int]]:
    return [(kind, first) for kind in RUNS for first in range(0, seeds.get(kind, usual), BATCH)]


@pytest.mark.parametrize(("kind", "first"), batches(SEEDS, 60))
def test_nothing_breaks_under_faults(kind: str, first: int) -> None:
    """In a third of the runs verbs that the loop cannot do come in between."""
    for seed in range(first, first + BATCH):
        clean_run(seed, **RUNS[kind], verbs=DIRECT if seed % 3 else (*DIRECT, "staged"))


@pytest.mark.parametrize(("kind", "first"), batches({"": 40, "network": 60, "staged": 60}, 20))
def test_a_bad_network_alone_fails_nothing(kind: str, first: int) -> None:
    for seed in range(first, first + BATCH):
        verbs = (*DIRECT, "staged") if seed % 2 else DIRECT
        scenario = clean_run(seed, **RUNS[kind], benign=True, verbs=verbs)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


@pytest.mark.parametrize("seed", [5, 41])
@pytest.mark.parametrize("kind", RUNS)
def test_plain_python_gives_the_same_run(kind: str, seed: int) -> None:
    """So what is shown with the one is shown for the other, and equal seeds give equal runs."""
    done = plain("trace", str(seed), kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean_run(seed, **RUNS[kind]).trace]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, name) for kind, breaks in KINDS.items() for name in breaks), *(("", name) for name in MOMENTS)],
)
def test_broken_loops_are_caught(kind: str, name: str) -> None:
    done = plain("break", name, kind)
    crashed = kind in MAY_CRASH and done.returncode == -signal.SIGSEGV
    assert crashed or done.returncode == 0, done.stdout + done.stderr
