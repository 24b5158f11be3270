"""What a channel costs decides between puts and the staging ring: real ranks over TCP, with costs that are given."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import Case, Report, adopted_cache, check_reports, transfer
from tests.helpers.ranks.layout_cases import case, gqa
from tests.helpers.ranks.small_cache import NUM_PAGES, check_transfer, meet, small_layout
from torchkv.engine.joining import connector
from torchkv.transfer.peer_connection import Costs, PeerConnection

HOSTS = {"env": {"UCX_TLS": "tcp"}, "apart": True}
USUAL = Costs(descriptor=8e-6, byte=1 / 3e9, pack=1 / 6e9)
FREE_PUTS = Costs(descriptor=0.0, byte=1 / 3e9, pack=1 / 6e9)
FREE_STAGING = Costs(descriptor=10.0, byte=0.0, pack=0.0)
STEPS = 3


def given(costs: Costs) -> Callable[..., Iterator[None]]:
    """In place of `probe.calibration`."""

    def calibration(connection: PeerConnection, *_: Any) -> Iterator[None]:
        for _ in range(STEPS):
            yield
        connection.costs = costs

    return calibration


# 2 of 8 heads of 128: slices of 512 bytes, 2 x 3 x 256 of them. And 12 pages of 128 KiB.
MANY_SLICES = case(
    "many slices",
    {0: gqa(num_kv_heads=8, head_dim=128)},
    {2: gqa(num_kv_heads=8, head_dim=128, tp_rank=1, tp_size=4)},
    tokens=256,
)
FEW_PAGES = case(
    "few pages",
    {0: gqa(num_kv_heads=8, head_dim=128, page_size=64)},
    {2: gqa(num_kv_heads=8, head_dim=128, page_size=64)},
    tokens=128,
)


def moved(one: Case, costs: Costs, seed: int, adopted: bool, options: dict[str, Any]) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector, "calibration", given(costs))
        return transfer(one, adopted=adopted, seed=seed, **options)


@pytest.mark.parametrize(
    ("one", "costs", "options", "path"),
    [
        pytest.param(MANY_SLICES, USUAL, {}, "staged", id="many slices"),
        pytest.param(replace(MANY_SLICES, tokens=16), USUAL, {}, "slices", id="few slices"),
        pytest.param(replace(MANY_SLICES, verb="send_slice"), USUAL, {}, "staged", id="whatever the verb"),
        pytest.param(FEW_PAGES, USUAL, {}, "runs", id="few pages"),
        pytest.param(replace(FEW_PAGES, verb="send_layer"), FREE_STAGING, {}, "staged", id="pages, staging is free"),
        pytest.param(MANY_SLICES, FREE_PUTS, {}, "slices", id="many slices, puts are free"),
        pytest.param(MANY_SLICES, USUAL, {"staging_recv": 0}, "slices", id="no ring"),
        pytest.param(MANY_SLICES, USUAL, {"staging_send": 0}, "slices", id="no memory to send from"),
        # One page of a layer takes 16 KiB.
        pytest.param(MANY_SLICES, FREE_STAGING, {"staging_recv": 12 << 10}, "slices", id="ring too small"),
        pytest.param(MANY_SLICES, FREE_STAGING, {"staging_recv": 16 << 10}, "staged", id="ring just large enough"),
        pytest.param(MANY_SLICES, FREE_STAGING, {"path": "slices"}, "slices", id="forced"),
    ],
)
def test_the_cheaper_path_is_taken(
    one: Case, costs: Costs, options: dict[str, Any], path: str, shared_ranks: Callable[..., Ranks]
) -> None:
    reports = shared_ranks("hosts", 4, **HOSTS).run(moved, one, costs, secrets.randbits(64), True, options)
    check_reports(reports, one, ("tcp/",))
    assert reports[2].path == path


@pytest.mark.parametrize(
    ("adopted", "path"),
    [pytest.param(False, "direct", id="mapped pages"), pytest.param(True, "staged", id="not those")],
)
def test_a_mapped_ring_needs_no_memory_to_send_from_and_mapped_pages_no_ring(
    adopted: bool, path: str, four: Ranks
) -> None:
    reports = four.run(moved, MANY_SLICES, FREE_STAGING, secrets.randbits(64), adopted, {"staging_send": 0})
    check_reports(reports, MANY_SLICES, ("view",))
    assert reports[2].path == path


def explained() -> None:
    with pytest.MonkeyPatch.context() as patch, kv_group() as kv:
        patch.setattr(connector, "calibration", given(FREE_STAGING))
        kv.register(adopted_cache(small_layout(), NUM_PAGES))
        if kv.rank() == 0:
            engine, thread = kv._verbs.engine, kv._thread
            assert thread is not None
            first = engine.connections[1]
            assert first.costs == FREE_STAGING, "not measured by register"
            thread.call(lambda: engine.peers.drop_connection(first))  # as after a failure of its channel
        check_transfer(kv, 0, 1)
        if kv.rank() == 0:
            assert engine.connections[1] is not first
            assert engine.connections[1].costs == FREE_STAGING, "not measured when it was needed"
            seen = kv.explain(1)
            assert seen.path == "staged"
            assert seen.descriptor_us == 10e6
            assert "1024 tokens as 256 runs would take 2.56e+06 ms, staged 1.2" in seen.why
            assert seen.why in str(seen)
        meet(kv)
    dist.barrier()


def test_later_routes_are_measured_when_needed_and_explain_tells(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **HOSTS).run(explained)


def measured() -> dict[str, Any] | None:
    with kv_group() as kv:
        kv.register(adopted_cache(small_layout(), NUM_PAGES))
        seen = kv.explain(1).as_dict() if kv.rank() == 0 else None
        meet(kv)
    dist.barrier()
    return seen


def test_a_channel_is_measured(shared_ranks: Callable[..., Ranks]) -> None:
    seen = shared_ranks("hosts", 4, **HOSTS).run(measured)[0]
    for name in ("descriptor_us", "put_gbps", "pack_gbps"):
        assert seen[name] > 0.0, name
    assert seen["path"] in ("runs", "staged")
