"""Campaigns of the fault lab besides the resident loop's, and what all of them are worth.

``python -m torchkv.faultlab`` runs the same with any seeds, and repeats one schedule.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.campaigns import CAMPAIGNS, LOOP, batches, check


@pytest.mark.parametrize(
    ("name", "batch"),
    batches(*(CAMPAIGNS.keys() - LOOP)),
    ids=lambda value: value if isinstance(value, str) else f"{value.start}:{value.stop}",
)
def test_nothing_breaks_in_short_schedules(name: str, batch: range) -> None:
    """Every call ends, received bytes are exact, no write lands on a page after its lease, nothing is left over."""
    check(name, batch)


def test_every_change_passes_ten_thousand_schedules() -> None:
    assert 0.98 * sum(campaign.schedules for campaign in CAMPAIGNS.values()) >= 10_000
