"""Campaigns of the fault lab: the resident loop. Half of all, in a file of their own: two workers share them.

``python -m torchkv.faultlab`` runs the same with any seeds, and repeats one schedule.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.campaigns import LOOP, batches, check


@pytest.mark.parametrize(
    ("name", "batch"),
    batches(*LOOP),
    ids=lambda value: value if isinstance(value, str) else f"{value.start}:{value.stop}",
)
def test_nothing_breaks_in_short_schedules(name: str, batch: range) -> None:
    """Every call ends, received bytes are exact, no write lands on a page after its lease, nothing is left over."""
    check(name, batch)
