"""The runs of the resident loop in `test_simulated_loops` that put through a network: what happens in them.

Puts land late, in pieces and in random order; records arrive while others are lost with their channel; the loops of the
two instances share mailboxes in some seeds, and none in most.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tests.helpers.simulation.loop_runs import DIRECT, clean_run
from torchkv.core.events import Notice
from torchkv.core.loop.codes import BOUND, GRANTED
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.notices import Notices
from torchkv.protocol.sending.request import SenderRequest

BATCH = 20

clean = partial(clean_run, network=True)


@pytest.mark.parametrize("first", [1080, 3240])
def test_verbs_that_the_loop_cannot_do_come_in_between(first: int) -> None:
    """Among them stages, whose writer promises to write to no page: not while its puts are under way (1095)."""
    for seed in range(first, first + BATCH):
        clean(seed, verbs=(*DIRECT, "staged"))


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
