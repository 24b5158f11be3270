"""The resident loop that writes into a host's pages by system calls, under the seeded scheduler of `test_simulated`.

Puts are gathered, and there after a flush at last; the lanes carry no records, so loops need each other's mailboxes,
which they have in some seeds, and only within an instance in most. Broken loops, which must be caught, run as plain
Python: `tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.broken_loops import CALLS_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain

SEEDS = range(60)
BATCH = 20

clean = partial(clean_run, network=True, system_calls=True)


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean(seed, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)


def test_a_bad_network_alone_fails_nothing_and_loops_serve_what_mailboxes_reach() -> None:
    puts = {True: 0, False: 0}  # by whether loops of unlike instances have mailboxes
    for seed in SEEDS[:BATCH]:
        scenario = clean(seed, benign=True)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)
        network = scenario.cluster.network
        assert network is not None
        puts[not scenario.cluster._apart] += network.puts
    assert puts[True] > 100
    assert puts[False] == 0, "their requests are Python's"


@pytest.mark.parametrize("seed", [6, 8])
def test_plain_python_gives_the_same_run(seed: int) -> None:
    done = plain("trace", str(seed), "calls")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean(seed).trace]


@pytest.mark.parametrize("name", sorted(CALLS_BREAKS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "calls")
    assert done.returncode == 0, done.stdout + done.stderr
