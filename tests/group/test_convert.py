"""Pages that change their dtype on their way, between real processes: every byte against the reference."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks.convert_cases import CONVERT_CASES, PARTLY, staged
from tests.helpers.ranks.lane_transfer import Case, Report, check_reports, transfer

SMALL_RINGS = {"staging_send": 10 << 10, "staging_recv": 12 << 10, "checksum": True}
TCP = {"env": {"UCX_TLS": "tcp"}, "apart": True}


def run(ranks: Ranks, one: Case, *, adopted: bool, **options: Any) -> list[Report]:
    function = functools.partial(transfer, adopted=adopted, seed=secrets.randbits(64), **options)
    return ranks.run(function, one)


@pytest.mark.parametrize("one", [*CONVERT_CASES, PARTLY], ids=lambda one: one.name)
def test_direct_over_shared_memory(one: Case, four: Ranks) -> None:
    reports = run(four, one, adopted=False)
    check_reports(reports, one, ("view",))
    assert {reports[reader].path for reader in one.readers} == {"direct"}


@pytest.mark.parametrize("one", CONVERT_CASES, ids=lambda one: one.name)
def test_staged_into_a_mapped_ring(one: Case, four: Ranks) -> None:
    reports = run(four, one, adopted=False, path="staged", staging_send=0, staging_recv=12 << 10)
    check_reports(reports, staged(one), ("view",))


@pytest.mark.parametrize("one", CONVERT_CASES, ids=lambda one: one.name)
def test_staged_over_tcp_with_checksums(one: Case, shared_ranks: Callable[..., Ranks]) -> None:
    """No path is forced: of those over puts, only staging can convert."""
    reports = run(shared_ranks("hosts", 4, **TCP), one, adopted=True, **SMALL_RINGS)
    check_reports(reports, staged(one), ("tcp/",))
    assert {reports[reader].path for reader in one.readers} == {"staged"}
