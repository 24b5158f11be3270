"""What the progress thread asks about peers while callers' threads go on."""

from __future__ import annotations

import pytest

from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.requests import layout
from torchkv.protocol.sending.open_sends import OpenSends


def test_callers_may_begin_requests_while_a_dead_rank_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anything is under way there is asked of a mapping that verbs change, so under the lock."""
    locked: list[bool] = []
    cluster = Cluster([Place("p", layout()), Place("d", layout())], seed=1, views=True, sees_death=True)
    engine, real = cluster[0].engine, OpenSends.is_drained

    def is_drained(self: OpenSends, rank: int) -> bool:
        locked.append(engine.lock.locked())
        return real(self, rank)

    monkeypatch.setattr(OpenSends, "is_drained", is_drained)
    cluster[0].send_pages("r", [5, 6], 1)
    cluster.run(limit=0.1)
    cluster.kill(1)
    assert cluster.run(lambda: bool(engine.lost) and not engine.peers.undrained, limit=20)
    assert locked
    assert all(locked)
