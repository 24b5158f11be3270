"""A group's memory goes with the last reference to it, not when Python happens to look for cycles."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.released import check_released
from tests.helpers.ranks.small_cache import NUM_PAGES, small_layout
from torchkv import KVCache, KVWork, ProtocolError

SOURCE, TARGET = [9, 2, 11], [1, 14, 3]


def transfer(kv: torchkv.KVProcessGroup, cache: KVCache, way: str) -> list[KVWork]:
    if kv.rank() != 0:
        received = kv.recv_pages("r", TARGET, 0)
        received.wait(30)
        return [received]
    if way == "pipeline":
        model = nn.Sequential(*(nn.Identity() for _ in cache.layout.layers))
        with torchkv.pipeline(model, kv, "r", SOURCE, 1, layers=list(model)) as sending:
            model(torch.zeros(1))
        works = sending.works
    elif way == "staged":
        works = [kv.staged_put("r", None, SOURCE, 1)]
    else:
        works = [kv.send_pages("r", SOURCE, 1)]
    works.append(kv.finish("r", 1))
    for work in works:
        work.wait(30)
    return works


def run_once(way: str, options: dict[str, Any]) -> tuple[list[weakref.ref[Any]], list[KVWork]]:
    """References to what holds memory, or leads there; and works that their caller keeps."""
    with kv_group(**options) as kv:
        cache = KVCache.empty(small_layout(), NUM_PAGES, device="cpu", group=kv)
        kv.register(cache)
        works = transfer(kv, cache, way)
        assert kv._verbs is not None
        staging = kv._registration._staging
        assert staging is not None
        kept = [
            cache,
            *cache.storages,
            kv,
            kv._verbs.engine,
            kv._verbs.engine.scheduler,
            staging.packer,
            kv._registration.transport,
        ]
        return [weakref.ref(one) for one in kept], works


def release(way: str, options: dict[str, Any]) -> None:
    works = check_released(lambda: run_once(way, options))
    assert all(work.is_success() for work in works)
    if dist.get_rank() != 0:
        with pytest.raises(ProtocolError, match="the group was destroyed"):
            works[0].wait_layer(0)


@pytest.mark.parametrize(
    ("way", "options"),
    [("direct", {}), ("put", {"path": "slices"}), ("staged", {}), ("staged", {"checksum": True}), ("pipeline", {})],
    ids=["direct", "put", "staged", "checksums", "pipeline"],
)
def test_a_destroyed_group_has_no_memory(way: str, options: dict[str, Any], shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2).run(release, way, options)
