"""Pages that processes of one host have not mapped, as engines bring them: the resident loop writes them itself.

That the bytes are right in every layout and order is `test_lanes`'s to show; here: that Python has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import adopted_cache, random_fill
from torchkv import KVLayout
from torchkv.engine.scheduler import TransferScheduler

LAYERS, PAGES = 3, 24


def transfers(page_size: int, path: str, served: bool, seed: int) -> None:
    """Rank 0 writes to rank 1, in two chunks of each layer, once in order and once not. served: whether by loops."""
    rank = dist.get_rank()
    layouts = [
        KVLayout.gqa(num_layers=LAYERS, num_kv_heads=4, head_dim=64, page_size=size, dtype=torch.int16)
        for size in (16, page_size)
    ]
    filled = adopted_cache(layouts[0], PAGES)
    random_fill(filled, np.random.default_rng(seed))
    cache = filled if rank == 0 else adopted_cache(layouts[1], PAGES)
    src, dst = np.random.default_rng(seed + 1).permutation(PAGES)[:8], np.arange(8 * 16 // page_size) + 3
    started = mock.patch.object(TransferScheduler, "start", autospec=True, side_effect=TransferScheduler.start)
    with kv_group([0, 1]) as kv, started as by_python:  # not the journal: Python may bind what the loop then writes
        kv.register(cache, instance=f"rank {rank}")
        for turn in range(2):
            name = str(turn)
            if rank == 1:
                work = kv.recv_pages(name, dst, 0)
                work.wait()
                assert work.path == path
                for component in "kv":
                    for given, got in zip(filled[component], cache[component], strict=True):
                        assert given is not None
                        assert got is not None
                        assert torch.equal(given[src].flatten(), got[dst].flatten())
                        got[dst] = -77
                continue
            chunks = [(0, src[:4]), (4, src[4:])][:: 1 - 2 * turn]
            works = [kv.send_slice(name, layer, ids, 1, start=at) for at, ids in chunks for layer in range(LAYERS)]
            works.append(kv.finish(name, 1))
            for work in works:
                work.wait()
            assert {work.path for work in works} == {path, "none"}
            assert by_python.called is not served


@pytest.mark.parametrize(("page_size", "path"), [(16, "runs"), (32, "slices")])
def test_the_loop_serves_pages_that_are_not_mapped(
    page_size: int, path: str, shared_ranks: Callable[..., Ranks]
) -> None:
    shared_ranks("two", 2).run(transfers, page_size, path, True, seed())


def test_python_serves_them_where_loops_have_no_mailboxes(shared_ranks: Callable[..., Ranks]) -> None:
    """As of containers that share processes, but not memory: system calls carry no records."""
    shared_ranks("apart", 2, apart=True).run(transfers, 16, "runs", False, seed())


def seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])
