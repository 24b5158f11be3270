"""When the cost of watching counts as shown, and how it is made of rounds and launches."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.observed import ALIKE, GATE_RATE, GATE_US, PLAIN, WATCHED, Cost, _cost
from torchkv.bench.rivals.intervals import Interval


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.9, "met"),
        (-0.2, 0.8, "met"),
        (0.5, 1.1, "not shown"),  # it holds the gate
        (-0.6, 0.9, "not shown"),  # it is wider
        (1.01, 5.0, "missed"),
    ],
)
def test_a_gate_is_met_by_an_interval_below_it_that_is_no_wider(low: float, high: float, verdict: str) -> None:
    more = Interval(low, (low + high) / 2, high)
    cost = Cost(plain=10.0, more=more, control=Interval(0.0, 0.0, 0.0), gate=1.0)
    assert cost.verdict == verdict
    assert cost.passed == (verdict == "met")
    assert cost.told(" us").endswith(f": {verdict}")


@pytest.mark.parametrize("share", [False, True])
def test_a_launch_is_the_median_of_its_rounds_and_drift_falls_out(share: bool) -> None:
    """Of a round's turns the second is in the other order, so what grows with time adds as much to each group."""
    launches = []
    for launch in range(7):
        table = np.full((5, 2, 3), 100e-6)
        table[:, :, WATCHED] += (1 + launch) * 1e-6
        table[:, 0] += 1e-6 * np.array([0, 1, 2])
        table[:, 1] += 1e-6 * np.array([2, 1, 0])
        table[launch % 5, :, WATCHED] += 1.0  # a disturbed round
        launches.append(table)
    cost = _cost(launches, share=share)
    scale = 1 / 101 if share else 1.0
    assert cost.plain == pytest.approx(101)
    assert [cost.more.low, cost.more.median, cost.more.high] == pytest.approx([scale, 4 * scale, 7 * scale])
    assert cost.control.median == pytest.approx(0)
    assert cost.gate == (GATE_RATE if share else GATE_US)
    assert len({WATCHED, PLAIN, ALIKE}) == 3
