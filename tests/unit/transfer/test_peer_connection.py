"""Which path a peer connection takes: direct where every page is mapped, else the cheapest path that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchkv import KVCache, KVLayout, TransportUnavailable
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.transfer.path_cost import Choice, choose
from torchkv.transfer.peer_connection import Costs, LocalPages, PeerConnection, StageTarget
from torchkv.transport import RemoteView

HOST = torch.device("cpu")
PAGES = 8
DEAR = Costs(descriptor=1.0, byte=0.0, pack=0.0)  # puts cost everything, staging costs nothing
CHEAP = Costs(descriptor=0.0, byte=0.0, pack=1.0)


def layout(**changes: Any) -> KVLayout:
    fields = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64, "page_size": 16, "dtype": torch.bfloat16}
    return KVLayout.gqa(**{**fields, **changes})


def cache_of(shape: KVLayout, gap: int = 0) -> KVCache:
    """gap: elements behind each page."""
    tensors: dict[str, list[torch.Tensor | None]] = {}
    for name in "kv":
        one = shape.page_shape(name)
        size = int(np.prod(one))
        pools = [torch.empty(PAGES, size + gap, dtype=torch.bfloat16)[:, :size] for _ in shape.layers]
        tensors[name] = [pool.unflatten(1, one) for pool in pools]
    return KVCache(shape, tensors)


class World:
    """Rank 0's caches, plan and connection to rank 1."""

    def __init__(
        self, reader: KVLayout, *, costs: Costs | None, views: bool = False, ring: int = 0, gap: int = 0
    ) -> None:
        mine, theirs = cache_of(layout()), cache_of(reader, gap)
        self.plan: PairPlan = compile_plan(0, {0: mine.layout}, reader)
        self.local = LocalPages(
            layout=mine.layout,
            device=HOST,
            num_pages=PAGES,
            placements=mine.placements,
            storage_ptrs=[storage.data_ptr() for storage in mine.storages],
            regions=list(range(len(mine.storages))),
        )
        self.connection = PeerConnection(
            rank=1,
            layout=reader,
            placements=theirs.placements,
            channel=object(),  # only whether there is one matters here
            views=[RemoteView(s.data_ptr(), s.nbytes, HOST) if views else None for s in theirs.storages],
            staging=StageTarget(0, ring) if ring else None,
            costs=costs,
        )

    def choose(self, *, runs: int | None = None, own: int = 1 << 20, num_pages: int = 4) -> Choice:
        return choose(
            self.plan,
            (0, 1),
            local=self.local,
            connection=self.connection,
            start=0,
            num_pages=num_pages,
            limit_tokens=PAGES * 16,
            runs=runs,
            ring=self.connection.ring(own),
        )


SLICES = layout(tp_size=2)


@pytest.mark.parametrize("costs", [DEAR, CHEAP])
def test_mapped_pages_take_the_direct_path_at_any_cost(costs: Costs) -> None:
    world = World(SLICES, costs=costs, views=True, ring=1 << 20)
    assert world.connection.path(forced=None, page_for_page=False) == "direct"


def test_pages_that_are_converted_are_staged_where_they_are_not_mapped_and_never_put() -> None:
    mapped, staged, bare = (
        World(SLICES, costs=CHEAP, views=v, ring=r).connection for v, r in ((True, 1), (False, 1), (False, 0))
    )
    converting: Any = {"page_for_page": True, "converts": True}
    assert mapped.path(forced=None, **converting) == mapped.path(forced="direct", **converting) == "direct"
    assert staged.path(forced=None, **converting) == mapped.path(forced="staged", **converting) == "staged"
    for puts in ("runs", "slices"):
        for connection in (mapped, staged, bare):
            assert connection.path(forced=puts, page_for_page=True) == puts
            with pytest.raises(TransportUnavailable, match=f"path '{puts}' to rank 1: it puts bytes as they are"):
                connection.path(forced=puts, **converting)
    assert bare.path(forced=None, page_for_page=True) == "runs"
    with pytest.raises(TransportUnavailable, match="no staging ring; pages that are converted"):
        bare.path(forced=None, **converting)


@pytest.mark.parametrize(
    ("reader", "costs", "path"),
    [(SLICES, DEAR, "staged"), (SLICES, CHEAP, "slices"), (layout(), DEAR, "staged"), (layout(), CHEAP, "runs")],
)
def test_the_measured_costs_of_the_connection_decide(reader: KVLayout, costs: Costs, path: str) -> None:
    assert World(reader, costs=costs, ring=1 << 20).choose().path == path


def test_a_mapped_ring_is_cheaper_by_the_put() -> None:
    costs = Costs(descriptor=0.0, byte=2e-6, pack=1e-6)
    put, mapped = (World(SLICES, costs=costs, views=views, ring=1 << 20).choose(own=1 << 20) for views in (False, True))
    assert put.staged is not None
    assert mapped.staged is not None
    assert put.staged - mapped.staged == pytest.approx(put.load.nbytes * 1e-6)


@pytest.mark.parametrize(
    ("ring", "own", "path"),
    [
        pytest.param(0, 1 << 20, "slices", id="the peer has no ring"),
        pytest.param(1 << 20, 0, "slices", id="nothing to send from"),
        pytest.param(1 << 20, 1 << 20, "staged", id="both"),
        # One page of a layer: keys and values of 16 tokens, 2 heads of 128 bytes.
        pytest.param(8191, 1 << 20, "slices", id="the peer's ring a byte too small"),
        pytest.param(1 << 20, 8191, "slices", id="this rank's ring a byte too small"),
        pytest.param(8192, 8192, "staged", id="just large enough"),
    ],
)
def test_staged_only_where_a_page_of_a_layer_fits_into_both_rings(ring: int, own: int, path: str) -> None:
    choice = World(SLICES, costs=DEAR, ring=ring).choose(own=own)
    assert choice.path == path
    assert (choice.staged is None) is (path == "slices")


def test_an_unmeasured_connection_assumes_costs() -> None:
    world = World(SLICES, costs=None, ring=1 << 20)
    assert world.choose().put > 0.0


@pytest.mark.parametrize(
    ("gap", "runs", "descriptors"),
    [
        pytest.param(0, None, 4, id="scattered"),
        pytest.param(0, 1, 1, id="in one run"),
        pytest.param(0, 3, 3, id="in three"),
        pytest.param(16, 1, 4, id="gaps between the peer's pages"),
    ],
)
def test_whole_pages_merge_where_they_touch(gap: int, runs: int | None, descriptors: int) -> None:
    load = World(layout(), costs=DEAR, gap=gap).choose(runs=runs).load
    assert load.descriptors == 2 * 2 * descriptors, "of two components and two layers"
    assert load.nbytes == 2 * 2 * 4 * 16 * 4 * 128


def test_slices_never_merge() -> None:
    assert World(SLICES, costs=DEAR).choose(runs=1).load.descriptors == 2 * 2 * 4 * 16


def test_calibrated_is_false_until_the_measurement_ends() -> None:
    connection = World(SLICES, costs=None).connection
    assert connection.calibrated(), "nothing is to be measured"

    def steps() -> Iterator[None]:
        yield
        yield
        connection.costs = DEAR

    connection.calibration = steps()
    assert [connection.calibrated() for _ in range(4)] == [False, False, True, True]
    assert connection.costs is DEAR
