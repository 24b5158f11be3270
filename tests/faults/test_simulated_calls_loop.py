"""The runs of the resident loop in `test_simulated_loops` that write into a host's pages by system calls.

Puts are gathered, and there after a flush at last; the lanes carry no records, so loops need each other's mailboxes,
which they have in some seeds, and only within an instance in most.
"""

from __future__ import annotations

from functools import partial

from tests.helpers.simulation.loop_runs import clean_run

clean = partial(clean_run, network=True, system_calls=True)


def test_a_bad_network_alone_fails_nothing_and_loops_serve_what_mailboxes_reach() -> None:
    puts = {True: 0, False: 0}  # by whether loops of unlike instances have mailboxes
    for seed in range(20):
        scenario = clean(seed, benign=True)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)
        network = scenario.cluster.network
        assert network is not None
        puts[not scenario.cluster._apart] += network.puts
    assert puts[True] > 100
    assert puts[False] == 0, "their requests are Python's"
