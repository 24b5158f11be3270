"""What the tests between ranks on GPUs share. Two ranks, a writer and a reader, on a GPU each or both on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import kv_group
from tests.helpers.ranks.lane_transfer import own_device, random_fill
from tests.helpers.ranks.small_cache import NUM_PAGES, check_transfer, small_layout
from torchkv import KVCache, KVProcessGroup
from torchkv.cuda.sync_words import HostReleasedWait, SyncWords

__all__ = [
    "PATHS",
    "READER",
    "WRITER",
    "all_bytes",
    "check_both_ways",
    "gpu_group",
    "held",
    "needs_gpus",
    "registered_cache",
]

WRITER, READER = range(2)

# Options of a group -> which way bytes go: a kernel stores them into the mapped pages, or UCX puts them.
PATHS = [pytest.param({}, id="direct"), pytest.param({"path": "slices"}, id="put")]


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA GPU{'s' * (count > 1)}, found {found}")


@contextmanager
def gpu_group(**options: Any) -> Iterator[KVProcessGroup]:
    """A group of all ranks, each with its GPU current. Caches must live until it has ended on every rank."""
    own_device("cuda")
    with kv_group(**options) as kv:
        yield kv
    dist.barrier()  # peers have unmapped this rank's cache


def registered_cache(kv: KVProcessGroup, *, num_pages: int = NUM_PAGES, **changes: Any) -> KVCache:
    """A cache of the small layout on this rank's GPU, random everywhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache = KVCache.empty(small_layout(**changes), num_pages, device=device, group=kv)
    random_fill(cache, np.random.default_rng())
    kv.register(cache)
    return cache


def all_bytes(mine: torch.Tensor) -> list[torch.Tensor]:
    """What each of the two ranks has given, in rank order. Both call it."""
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine)
    return every


def check_both_ways(kv: KVProcessGroup) -> None:
    """The group works: fresh bytes from either rank to the other."""
    check_transfer(kv, WRITER, READER)
    check_transfer(kv, READER, WRITER)


@contextmanager
def held(*streams: torch.cuda.Stream) -> Iterator[list[HostReleasedWait]]:
    """Stops ``streams`` here until the host opens what is yielded for each, or leaves.

    Every kernel that is to be launched meanwhile must have run before: a first launch loads it, and that waits for
    all streams, held ones too.
    """
    sync_words = SyncWords(streams[0].device)
    try:
        yield [sync_words.hold(stream) for stream in streams]
    finally:
        sync_words.close()
