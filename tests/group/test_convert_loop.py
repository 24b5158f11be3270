"""Pages in host memory that resident loops convert on their way: every byte against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks.convert_cases import staged
from tests.helpers.ranks.convert_loop import CASES, requests
from tests.helpers.ranks.lane_transfer import Case

HOSTS = {"env": {"UCX_TLS": "tcp"}, "apart": True}


def check(ranks: Ranks, case: Case, share: float, **options: Any) -> None:
    """share: of the bytes of the receiver's pages, how many cross the link."""
    found = ranks.run(requests, case, options)
    assert sum(carried for carried, _ in found) == share * sum(expected for _, expected in found) > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_into_pages_that_are_mapped(case: Case, shared_ranks: Callable[..., Ranks]) -> None:
    check(shared_ranks("four", 4), case, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_staged_into_a_ring_that_is_mapped(case: Case, shared_ranks: Callable[..., Ranks]) -> None:
    check(shared_ranks("four", 4), case, staged(case).link_share, path="staged")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_staged_through_a_network(case: Case, shared_ranks: Callable[..., Ranks]) -> None:
    check(shared_ranks("hosts", 4, **HOSTS), case, staged(case).link_share)
