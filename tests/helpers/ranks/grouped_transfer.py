"""What the tests of layer groups between real ranks share: caches, page lists, and a transfer that is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.harness import kv_group
from tests.helpers.layer_groups import GROUPS, Views, check_received, hybrid, shared_cache, views
from tests.helpers.ranks.lane_transfer import own_device
from torchkv import KVCache, KVLayout, KVProcessGroup

__all__ = ["ABSENT", "AUX", "COUNT", "NUM_PAGES", "PREFIX", "check", "copied", "filled", "some_lists", "transfer"]

NUM_PAGES = 32
COUNT, PREFIX = 6, 8  # pages of four tokens; tokens
ABSENT = {"full": 0, "near": 4, "far": 3}  # the most that windows of 5 and 9 tokens allow, of six pages
AUX = b"first token: 42"

Make = Callable[..., KVCache]


def filled(make: Make, layout: KVLayout, device: str = "cpu") -> KVCache:
    cache = make(layout, NUM_PAGES, device=device)
    for storage in cache.storages:
        storage.random_(0, 256)
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return cache


def copied(cache: KVCache) -> Views:
    return {key: array.copy() for key, array in views(cache).items()}


def some_lists(absent: dict[str, int]) -> dict[str, list[int]]:
    """Page lists of which no two name the same page, as engines give them that share one block among groups."""
    ids = iter(np.random.default_rng().permutation(NUM_PAGES).tolist())
    return {group: [-1] * absent[group] + [next(ids) for _ in range(COUNT - absent[group])] for group in GROUPS}


def check(kv: KVProcessGroup, cache: KVCache | None, lists: Any, before: Views | None) -> None:
    """All ranks: tells the sources, and compares what a receiver got with the slow reference. before: of receivers."""
    mine = None if cache is None or before is not None else (cache.layout, copied(cache), lists)
    everyone: list[Any] = [None] * kv.size()
    dist.all_gather_object(everyone, mine, group=kv)
    if cache is None or before is None:
        return
    sources = {rank: source for rank, source in enumerate(everyone) if source is not None}
    assert check_received(cache, before, lists, sources) == []
    held = {page for ids in lists.values() for page in ids}
    for key, array in views(cache).items():  # canaries: what the request does not name keeps its bytes
        group = cache.layout.component(key[0]).group
        mine_too = held if len(set(cache.pools.values())) < 6 else set(lists[group])
        rest = [page for page in range(NUM_PAGES) if page not in mine_too]
        assert np.array_equal(array[rest], before[key][rest])
    wrong = {group: [page if page == -1 else (page + 1) % NUM_PAGES for page in ids] for group, ids in lists.items()}
    assert check_received(cache, before, wrong, sources)  # negative control


def transfer(
    writers: tuple[int, ...],
    readers: tuple[int, ...],
    shared: bool,
    path: str | None,
    anybody: bool,
    prompt: bool,
    device_type: str = "cpu",
) -> None:
    """A request between the writers' instance and the readers', in which each layer group has its pages.

    shared: whether all groups share one block of memory. anybody: whether writers know no receiver. prompt: whether
    they count pages from the prompt.
    """
    make: Make = shared_cache if shared else KVCache.empty
    device = str(own_device(device_type))
    with kv_group(path=path) as kv:
        rank, cache = kv.rank(), None
        side = writers if rank in writers else readers
        if rank in side:
            order = "HND" if rank in readers and path != "runs" else "NHD"
            cache = filled(make, hybrid(tp_rank=side.index(rank), tp_size=len(side), order=order), device)
        kv.register(cache, instance="prefill" if rank in writers else "decode" if rank in readers else None)
        lists = None if cache is None else some_lists(ABSENT if rank in readers else {**ABSENT, "near": 2})
        before = None
        if rank in readers:
            before = copied(cache)
            rx = kv.recv_pages("r", lists, "prefill", prefix_tokens=PREFIX)
            for layer in range(6):
                rx.wait_layer(layer, 30)
            rx.wait(30)
            assert rx.aux == AUX
            assert kv.quarantined() == {}
        elif rank in writers:
            dst = None if anybody else "decode"
            where = {"start": PREFIX // 4, "origin": "prompt"} if prompt else {}
            if not prompt:
                assert kv.prefix_tokens("r", dst) == PREFIX == kv.granted("r", dst)
            works = [
                kv.send_slice("r", [0, 3], lists["near"], dst, **where),
                kv.send_slice("r", [2, 1, 4, 5], lists, dst, **where),
                kv.finish("r", dst, aux=AUX),
            ]
            for work in works:
                assert work.wait(30)
        check(kv, cache, lists, before)
