"""The layout cases of ``test_lanes`` in one process: the real engines over a simulated network with delays."""

from __future__ import annotations

import pytest

from tests.helpers.ranks.convert_cases import CONVERT_CASES, staged
from tests.helpers.ranks.lane_transfer import Case, check_reports
from tests.helpers.ranks.layout_cases import CASES
from tests.helpers.simulation.layout_cases import PUTS, VIEWS, Lane, run


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", [PUTS, VIEWS], ids=lambda lane: lane.name)
def test_layout_over_loopback(one: Case, lane: Lane) -> None:
    reports, cluster = run(one, lane)
    check_reports(reports, one, (lane.name,))
    assert cluster.put is (lane is PUTS), "the counters name one lane, the network saw another"
    assert not any(cluster.world.in_flight.values())
    for reader in one.readers:
        assert (reports[reader].path == "direct") is (lane is VIEWS)


@pytest.mark.parametrize("one", CONVERT_CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", [PUTS, VIEWS], ids=lambda lane: lane.name)
def test_conversions_over_loopback(one: Case, lane: Lane) -> None:
    """Without a view they are staged, although puts would cost less."""
    reports, cluster = run(one, lane)
    check_reports(reports, staged(one) if lane is PUTS else one, (lane.name,))
    assert not any(cluster.world.in_flight.values())
    assert {reports[reader].path for reader in one.readers} == {"staged" if lane is PUTS else "direct"}


@pytest.mark.parametrize(("taken", "claimed"), [(PUTS, VIEWS), (VIEWS, PUTS)], ids=["puts", "views"])
def test_the_other_lane_is_told_apart(taken: Lane, claimed: Lane) -> None:
    """Negative control of the proof by counters."""
    reports, _ = run(CASES[0], taken)
    with pytest.raises(AssertionError, match=claimed.name):
        check_reports(reports, CASES[0], (claimed.name,))
