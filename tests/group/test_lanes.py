"""Every kind of layout over every lane between real processes, each proved by the counters of ``explain``."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks.lane_transfer import Case, Report, check_reports, transfer
from tests.helpers.ranks.layout_cases import CASES, case, gqa, tp


@dataclass(frozen=True)
class Lane:
    name: str
    prefixes: tuple[str, ...]  # of the lane's name in explain
    adopted: bool
    path: str | None
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


TCP = (("UCX_TLS", "tcp"),)
MEMORY = ("cma/", "posix/", "sysv/")
# Every case takes several pieces, and the rings go round; checksums too. A ring that is mapped needs no other.
SMALL_RINGS = (("staging_send", 10 << 10), ("staging_recv", 12 << 10), ("checksum", True))
LANES = [
    Lane("view", ("view",), adopted=False, path=None),
    Lane("put-memory", MEMORY, adopted=True, path="slices"),
    Lane("put-tcp", ("tcp/",), adopted=True, path="slices", env=TCP),
    Lane("staged-view", ("view",), adopted=False, path="staged", options=(("staging_send", 0), *SMALL_RINGS[1:])),
    Lane("staged-tcp", ("tcp/",), adopted=True, path="staged", env=TCP, options=SMALL_RINGS),
]


def run(ranks: Ranks, one: Case, lane: Lane) -> list[Report]:
    seed = secrets.randbits(64)
    function = functools.partial(transfer, adopted=lane.adopted, path=lane.path, seed=seed, **dict(lane.options))
    return ranks.run(function, one)


# The lane varies slowest, so that each set of ranks is made once.
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_layout_over_lane(one: Case, lane: Lane, shared_ranks: Callable[..., Ranks]) -> None:
    ranks = shared_ranks("hosts" if lane.env else "four", 4, env=dict(lane.env), apart=bool(lane.env))
    check_reports(run(ranks, one, lane), one, lane.prefixes)


@pytest.mark.parametrize("path", ["direct", "slices", "runs", "staged"])
def test_forced_path_is_taken(path: str, four: Ranks) -> None:
    lane = Lane(path, ("view",) if path in ("direct", "staged") else MEMORY, adopted=False, path=path)
    reports = run(four, CASES[0], lane)
    check_reports(reports, CASES[0], lane.prefixes)
    assert reports[2].path == path


def test_4to2(shared_ranks: Callable[..., Ranks]) -> None:
    writers = tp(gqa, (0, 1, 2, 3), num_kv_heads=8)
    readers = tp(gqa, (4, 5), num_kv_heads=8, page_size=64, order="HND")
    one = case("4to2", writers, readers, tokens=200, prefix=64, chunks=2, verb="send_slice")
    lane = LANES[1]
    check_reports(run(shared_ranks("six", 6), one, lane), one, lane.prefixes)
