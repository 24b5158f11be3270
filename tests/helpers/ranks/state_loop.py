"""One rank's part of requests with states until resident loops serve some in a row: bytes against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.harness import kv_group
from tests.helpers.ranks.lane_transfer import own_device
from tests.helpers.ranks.served import loops_served, served_by_python
from tests.helpers.ranks.state_transfer import (
    AUX,
    NUM_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    PATIENCE,
    Sending,
    Setting,
    Truth,
    check,
    contents,
    full,
    own_cache,
    randomise,
)
from torchkv import Component, KVLayout, KVWork, State

__all__ = ["FLAT", "SETTINGS", "SSM", "requests", "tp"]

IN_A_ROW, MOST = 4, 60  # requests that the loops are to serve, and until they do
# Runs are long enough to be put through a network, but for those of ``conv`` where it is split.
SSM = State("ssm", (16, 64, 8), torch.float32, shard_dim=0, layers=(1, 2))
CONV = State("conv", (3, 1536), torch.bfloat16, shard_dim=1, shard_groups=(512, 512, 512), layers=(2,))
FLAT = State("flat", (5001,), torch.uint8, layers=(1, 2))


def layout(tp_rank: int = 0, tp_size: int = 1, **changes: Any) -> KVLayout:
    keys = [Component(name, 4, 256, torch.bfloat16, layers=(0, 1)) for name in ("k", "v")]
    settings = {"num_layers": 3, "page_size": PAGE_SIZE, "order": "HND", "states": (SSM, CONV, FLAT), **changes}
    return KVLayout(keys, tp_rank=tp_rank, tp_size=tp_size, **settings)


def tp(*ranks: int, **changes: Any) -> dict[int, KVLayout]:
    return {rank: layout(at, len(ranks), **changes) for at, rank in enumerate(ranks)}


SETTINGS = [
    Setting("1to1", tp(0), tp(2)),
    Setting("pp-1to2", tp(0), {2: layout(layers=[0, 1]), 3: layout(layers=[1, 2])}),  # layer 2 has state alone
    Setting("2to1", tp(0, 1), tp(2, order="NHD")),
    Setting("1to2", tp(0), tp(2, 3)),
]


def by_finish(one: Sending) -> list[KVWork]:
    return one.all_pages() + one.finish(one.slot)


def layer_by_layer(one: Sending) -> list[KVWork]:
    """Some before the pages, some behind them, one of them twice."""
    layers = [layer for layer in one.layers if layer]
    works = [one.kv.send_state(one.name, layers[0], one.slot, "decode"), *one.all_pages()]
    works += [one.kv.send_state(one.name, layer, one.slot, "decode") for layer in layers]
    return works + one.finish(None)


def alone(one: Sending) -> list[KVWork]:
    return one.finish(one.slot)


WAYS: list[tuple[Callable[[Sending], list[KVWork]], int]] = [(by_finish, 4), (layer_by_layer, 2), (alone, 0)]


def requests(setting: Setting, seed: int, options: dict[str, Any], *, device: str = "cpu") -> list[str]:
    """Requests until the loops have served some in a row. The paths of the last ones' bytes."""
    with served_by_python() as served, kv_group(**options) as kv:
        rank, place, rng, paths = kv.rank(), own_device(device), np.random.default_rng(), []
        mine = setting.layouts.get(rank)
        cache = None if mine is None else own_cache(mine, place, kv)
        kv.register(cache, instance=None if mine is None else "prefill" if rank in setting.writers else "decode")
        ready = 0
        for number in range(MOST):
            send, num_pages = WAYS[number % len(WAYS)]
            served.clear()
            dist.barrier(kv)
            if cache is not None and mine is not None:
                truth = Truth(mine, num_pages, seed + number)
                pages = [int(page) for page in rng.permutation(NUM_PAGES)[:num_pages]]
                slot = int(rng.integers(NUM_SLOTS))
                before = randomise(cache)
                if rank in setting.writers:
                    truth.put(cache, pages, slot)
                    before = contents(cache)
                    works = send(Sending(kv, f"r{number}", pages, slot, rng))
                    assert all(work.wait(PATIENCE) for work in works)
                    paths = [work.path for work in works if work.bytes]
                    assert all(map(torch.equal, contents(cache), before)), "a transfer changed its source"
                else:
                    rx = kv.recv_pages(f"r{number}", pages, "prefill", state_slot=slot)
                    assert rx.wait(PATIENCE)
                    assert rx.aux == AUX
                    assert rx.bytes >= full(mine, num_pages)
                    check(cache, before, truth, pages, slot)
            ready = ready + 1 if loops_served(kv, served) else 0
            if ready == IN_A_ROW:
                break
        assert ready == IN_A_ROW, f"rank {rank}: Python served {len(served)} ops of the last request"
        dist.barrier(kv)
    dist.barrier()  # a peer may still have this rank's cache mapped, which must outlive that
    return paths
