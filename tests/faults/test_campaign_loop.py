"""Campaigns of the fault lab: the resident loop of ranks of one host.

``python -m torchkv.faultlab`` runs the same with any seeds, and repeats one schedule.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.campaigns import batches, run


@pytest.mark.parametrize(
    ("name", "batch"),
    batches("loop"),
    ids=lambda value: value if isinstance(value, str) else f"{value.start}:{value.stop}",
)
def test_nothing_breaks_in_short_schedules(name: str, batch: range) -> None:
    """Every call ends, received bytes are exact, no write lands on a page after its lease, nothing is left over."""
    tally = run(name, batch)
    again = [f"{text}: python -m torchkv.faultlab --case {name} --seed {seed}" for seed, text in tally.violations]
    assert not again, "\n".join(again)
    assert tally.faulty >= 0.98 * len(batch), "schedules without a fault show nothing"
    assert len(batch) / 20 < tally.succeeded < 0.9 * tally.receives
