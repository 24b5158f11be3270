"""Standing stages that find no room: Python stages, and that is said once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from torchkv.engine.resident.standing_stages import StandingStages
from torchkv.protocol.sending.staging_requester import Span


def stages(**parts: Any) -> StandingStages:
    given: dict[str, Any] = {
        "staging": SimpleNamespace(receiving=object()),
        "credits": SimpleNamespace(stands=lambda rank: False, stand=lambda rank, mapped: None),
        "requester": SimpleNamespace(standing={}),
        "connection": lambda rank: None,
        "lane": lambda rank, connection: None,
    }
    core: Any = SimpleNamespace(rank=0)
    return StandingStages(core, **{**given, **parts})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_receiver_without_room_says_so_once_of_each_writer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = stages()
    assert [made._grant(rank) for rank in (1, 2, 1)] == [False] * 3
    assert said(caplog) == [
        f"rank 0: requests of rank {rank} that are to be staged go through Python: no room for a standing stage; "
        "raise Options.staging_recv"
        for rank in (1, 2)
    ]


def test_a_writer_without_room_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    region = SimpleNamespace(region=0)
    ring = SimpleNamespace(allocate_for_long=lambda nbytes, owner: None)
    lane = SimpleNamespace(is_driven=True, native=SimpleNamespace(local_keys=[1], remote_keys=[1]))
    made = stages(
        staging=SimpleNamespace(sending=SimpleNamespace(take=lambda: region, ring=ring)),
        requester=SimpleNamespace(standing={1: Span(0, 4096)}),
        connection=lambda rank: SimpleNamespace(staging=SimpleNamespace(region=0), staging_view=None),
        lane=lambda rank, connection: lane,
    )
    made.take()
    made.take()
    assert not made.uses(1)
    assert said(caplog) == [
        "rank 0: requests to rank 1 that are to be staged go through Python: no room for a standing stage; "
        "raise Options.staging_send"
    ]
