"""The staged path for every layout in one process: put into a ring over a simulated network, or stored into it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks.lane_transfer import Case, check_reports
from tests.helpers.ranks.layout_cases import CASES
from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.layout_cases import MILD, PUTS, RANKS, VIEWS, Lane, Pooled, run
from torchkv.options import Options


class Staged(Pooled):
    """Small rings, so that every case takes several pieces; every transfer is staged, mapped rings with no other."""

    def __init__(self, case: Case, pools: Any, *, seed: int, views: bool) -> None:
        self._pools = pools
        self.put = False
        instances = {**dict.fromkeys(case.writers, "prefill"), **dict.fromkeys(case.readers, "decode")}
        places = [Place(instances.get(rank, f"rank{rank}"), None) for rank in range(RANKS)]
        own = 0 if views else 10 << 10
        options = Options(transport="loopback", staging_send=own, staging_recv=12 << 10, checksum=seed % 2 == 0)
        options = options if options.checksum else Options(**{**vars(options), "path": "staged"})
        Cluster.__init__(self, places, seed=seed, faults=MILD, options=options, views=views, lag=True)
        self.observers.append(self._note_puts)


@pytest.mark.parametrize("lane", [PUTS, VIEWS], ids=lambda lane: lane.name)
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_layout_staged_over_loopback(one: Case, lane: Lane) -> None:
    reports, cluster = run(one, lane, Staged)
    check_reports(reports, one, (lane.name,))
    assert cluster.put is (lane is PUTS)
    for reader in one.readers:
        assert reports[reader].path == "staged"
        credits = cluster[reader].engine.credits
        assert credits.ring.in_use == credits.standing
    for rank in range(RANKS):
        staging = cluster[rank].engine.staging
        assert staging is None or staging.sending.ring.in_use == 0
