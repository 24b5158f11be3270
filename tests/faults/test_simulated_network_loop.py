"""The resident loop that puts through a network, under the seeded scheduler of `test_simulated`.

Puts land late, in pieces and in random order; records arrive while others are lost with their channel; the loops of the
two instances share mailboxes in some seeds, and none in most. Broken loops, which must be caught, run as plain Python:
`tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tests.helpers.simulation.broken_loops import NETWORK_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain
from torchkv.core.events import Notice
from torchkv.core.loop.codes import BOUND, GRANTED
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.notices import Notices
from torchkv.protocol.sending.request import SenderRequest

SEEDS = range(120)
BATCH = 20


clean = partial(clean_run, network=True)


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean(seed)


@pytest.mark.parametrize("first", [1080, 3240, 0, 20])
def test_verbs_that_the_loop_cannot_do_come_in_between(first: int) -> None:
    """Among them stages, whose writer promises to write to no page: not while its puts are under way (1095)."""
    for seed in range(first, first + BATCH):
        clean(seed, verbs=(*DIRECT, "staged"))


@pytest.mark.parametrize("first", SEEDS[:60:BATCH])
def test_a_bad_network_alone_fails_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        scenario = clean(seed, benign=True, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end on the loop, and are taken back from it while puts are under way; else nothing is shown.

    Grants come by the loop and bind there, or are left to Python; and they come again in messages, before and after.
    """
    ended: list[str] = []
    grants: Counter[str] = Counter()
    act, takes = Notices._act, Flows.takes_grant

    def acting(self: Notices, notice: Notice, now: float) -> None:
        if notice.kind in (BOUND, GRANTED):
            grants["bound" if notice.kind == BOUND else "left to Python"] += (
                notice.source not in self.core.peers._mapped
            )
        act(self, notice, now)

    def take_grant(self: Flows, rank: int, flow: int, generation: int) -> bool:
        new = takes(self, rank, flow, generation)
        grants["first in a message" if new else "again in a message"] += 1
        return new

    monkeypatch.setattr(Notices, "_act", acting)
    monkeypatch.setattr(Flows, "takes_grant", take_grant)
    real = Flows.take_back_send

    def take_back(self: Flows, req: SenderRequest) -> bool | None:
        sealed = real(self, req)
        landing = any(op.landed is not None for op in req.running)
        ended.append("sealed" if sealed else "landing" if landing else "idle")
        return sealed

    monkeypatch.setattr(Flows, "take_back_send", take_back)
    succeeded = puts = messages = 0
    for seed in range(60):
        scenario = clean(seed)
        succeeded += sum(receiving.work.is_success() for receiving in scenario.receivings)
        network = scenario.cluster.network
        assert network is not None
        puts, messages = puts + network.puts, messages + network.messages
    assert succeeded > 30
    assert puts > 500
    assert messages > 100
    assert {"sealed", "landing", "idle"} <= set(ended), ended
    assert grants["bound"] > 5
    assert grants["left to Python"] > 20
    assert grants["again in a message"] > 10
    assert grants["first in a message"] > 0


@pytest.mark.parametrize("seed", [5, 41])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    assert clean(seed).trace == clean(seed).trace


@pytest.mark.parametrize("seed", [5, 41, 77])
def test_plain_python_gives_the_same_run(seed: int) -> None:
    done = plain("trace", str(seed), "network")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean(seed).trace]


@pytest.mark.parametrize("name", sorted(NETWORK_BREAKS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "network")
    assert done.returncode == 0, done.stdout + done.stderr
