"""Every kind of layout over every lane between real processes, each proved by the counters of ``explain``."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import Ranks
from lane_cases import Case, Report, transfer

from torchkv import Component, KVLayout

BF16 = torch.bfloat16


def gqa(**changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": BF16, **changes}
    return KVLayout.gqa(**settings)


def mla(**changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "latent_dim": 24, "rope_dim": 8, "page_size": 16, "dtype": BF16, **changes}
    return KVLayout.mla(**settings)


def mixed(**changes: Any) -> KVLayout:
    """Components of unlike kinds: a sharded one, an unsharded index in some layers, a draft layer."""
    return KVLayout(
        [
            Component("k", 4, 8, torch.float16),
            Component("v", 4, 12, torch.float8_e4m3fn, layers=(0, 1, 2)),
            Component("index", 1, 20, torch.uint8, sharded=False, layers=(1, 3)),
        ],
        **{"num_layers": 3, "page_size": 16, "layers": (0, 1, 2, 3), **changes},
    )


def tp(make: Callable[..., KVLayout], ranks: tuple[int, ...], **changes: Any) -> dict[int, KVLayout]:
    """One layout a rank, sharded over ``ranks``."""
    return {rank: make(tp_rank=at, tp_size=len(ranks), **changes) for at, rank in enumerate(ranks)}


def case(name: str, writers: Mapping[int, KVLayout], readers: Mapping[int, KVLayout], **settings: Any) -> Case:
    return Case(
        **{
            "name": name,
            "layouts": {**writers, **readers},
            "writers": tuple(writers),
            "readers": tuple(readers),
            "tokens": 96,
            **settings,
        }
    )


PP = {"num_layers": 15, "num_kv_heads": 2, "head_dim": 4}
CASES = [
    case("1to1-layer", tp(gqa, (0,)), tp(gqa, (2,)), verb="send_layer", chunks=2),
    case(
        "1to1-contiguous-fp32", tp(gqa, (0,), dtype=torch.float32), tp(gqa, (2,), dtype=torch.float32), contiguous=True
    ),
    case("2to2-layer-prefix", tp(gqa, (0, 1)), tp(gqa, (2, 3)), verb="send_layer", prefix=48),
    case("2to1-slice", tp(gqa, (0, 1)), tp(gqa, (2,)), verb="send_slice", chunks=3),
    case("1to2-fp8", tp(gqa, (0,), dtype=torch.float8_e5m2), tp(gqa, (2, 3), dtype=torch.float8_e5m2)),
    case("replicated-writers", tp(gqa, (0, 1), num_kv_heads=1), tp(gqa, (2,), num_kv_heads=1), chunks=2),
    case("replicated-readers", tp(gqa, (0,), num_kv_heads=1), tp(gqa, (2, 3), num_kv_heads=1)),
    case("mla-striped", tp(mla, (0, 1)), tp(mla, (2,)), verb="send_layer"),
    case("mla-striped-16to64", tp(mla, (0, 1)), tp(mla, (2,), page_size=64), tokens=272, verb="send_slice"),
    case("unlike-kv-HNDtoNHD", tp(gqa, (0,), v_head_dim=5, order="HND"), tp(gqa, (2,), v_head_dim=5)),
    case("2to1-NHDtoHND", tp(gqa, (0, 1)), tp(gqa, (2,), order="HND"), verb="send_slice"),
    case("16to64-partial", tp(gqa, (0,)), tp(gqa, (2,), page_size=64), tokens=80, chunks=2),
    case("64to16-clipped", tp(gqa, (0,), page_size=64), tp(gqa, (2,)), tokens=80, prefix=64),
    case("1to16", tp(gqa, (0,), page_size=1, head_dim=4), tp(gqa, (2,), head_dim=4), tokens=37, prefix=16),
    case("16to1-2to1", tp(gqa, (0, 1)), tp(gqa, (2,), page_size=1), tokens=40),
    case("pp-15to7+8", tp(gqa, (0,), **PP), {2: gqa(**PP, layers=range(7)), 3: gqa(**PP, layers=range(7, 15))}),
    case("pp-7+8to15", {0: gqa(**PP, layers=range(7)), 1: gqa(**PP, layers=range(7, 15))}, tp(gqa, (2,), **PP)),
    case("mixed-components-2to1", tp(mixed, (0, 1)), tp(mixed, (2,), order="HND"), verb="send_slice", chunks=2),
    case("uint8-one-token", tp(gqa, (0,), dtype=torch.uint8), tp(gqa, (3,), dtype=torch.uint8), tokens=1),
]


@dataclass(frozen=True)
class Lane:
    name: str
    prefixes: tuple[str, ...]  # of the lane's name in explain
    adopted: bool
    path: str | None
    env: tuple[tuple[str, str], ...] = ()


TCP = (("UCX_TLS", "tcp"),)
LANES = [
    Lane("view", ("view",), adopted=False, path=None),
    Lane("put-memory", ("cma/", "posix/", "sysv/"), adopted=True, path=None),
    Lane("put-tcp", ("tcp/",), adopted=True, path=None, env=TCP),
]


def run(ranks: Ranks, one: Case, lane: Lane) -> list[Report]:
    function = functools.partial(transfer, adopted=lane.adopted, path=lane.path, seed=secrets.randbits(64))
    return ranks.run(function, one)


def check(reports: list[Report], one: Case, lane: Lane) -> None:
    total = sum(reports[reader].expected for reader in one.readers)
    assert total > 0
    lanes = {name for report in reports for name in report.lanes}
    assert lanes, "nobody wrote anything"
    assert all(name.startswith(lane.prefixes) for name in lanes), lanes
    assert sum(sum(report.lanes.values()) for report in reports) == total
    assert sum(report.spans for report in reports) > 0
    for reader in one.readers:
        assert reports[reader].received == reports[reader].expected
    assert sum(report.sent for report in reports) == total


# The lane varies slowest, so that each set of ranks is made once.
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_layout_over_lane(one: Case, lane: Lane, shared_ranks: Callable[..., Ranks]) -> None:
    name = "tcp" if lane.env else "four"
    check(run(shared_ranks(name, 4, env=dict(lane.env)), one, lane), one, lane)


@pytest.mark.parametrize("path", ["direct", "slices", "runs"])
def test_forced_path_is_taken(path: str, four: Ranks) -> None:
    lane = Lane(path, ("view",) if path == "direct" else ("cma/", "posix/", "sysv/"), adopted=False, path=path)
    reports = run(four, CASES[0], lane)
    check(reports, CASES[0], lane)
    assert reports[2].path == path


def test_4to2(shared_ranks: Callable[..., Ranks]) -> None:
    writers = tp(gqa, (0, 1, 2, 3), num_kv_heads=8)
    readers = tp(gqa, (4, 5), num_kv_heads=8, page_size=64, order="HND")
    one = case("4to2", writers, readers, tokens=200, prefix=64, chunks=2, verb="send_slice")
    lane = LANES[1]
    check(run(shared_ranks("six", 6), one, lane), one, lane)
