"""A destroyed group's memory on a GPU goes with the last reference to it, as on hosts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import WRITER, gpu_group, needs_gpus, registered_cache
from tests.helpers.ranks.released import check_released

SOURCE, TARGET = [9, 2, 11], [1, 14, 3]

pytestmark = needs_gpus(1)


def run_once(staged: bool) -> tuple[list[weakref.ref[Any]], None]:
    """References to what holds memory, or leads there."""
    with gpu_group() as kv:
        cache = registered_cache(kv)
        if kv.rank() == WRITER:
            (kv.staged_put if staged else kv.send_slice)("r", None, SOURCE, 1 - WRITER)
            kv.finish("r", 1 - WRITER).wait(30)
        else:
            received = kv.recv_pages("r", TARGET, WRITER)
            received.wait_stream()
            received.wait(30)
        torch.cuda.synchronize()
        engine = kv._verbs.engine
        kept = [cache, *cache.storages, kv, engine, engine.scheduler, engine.gpu, kv._registration._staging.packer]
        return [weakref.ref(one) for one in kept], None


def release(staged: bool) -> None:
    check_released(lambda: run_once(staged))


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_destroyed_group_has_no_memory(staged: bool, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(release, staged)
