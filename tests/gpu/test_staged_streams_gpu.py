"""Large staged verbs between GPUs: streamed through a small stage by two kernels that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from harness import Ranks
from rank_parts import gpu_group, needs_gpus
from small import meet, small_layout

from torchkv import KVCache, devicepack, devicepacker, stagedtransfer

TOKENS = 4096
# Of rank 0 and of rank 1: 64 MiB of 2,048 bytes a token and layer, differently arranged.
LAYOUTS = ({"page_size": 16}, {"page_size": 32, "order": "HND"})
MODEL = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 64}

pytestmark = needs_gpus(2)


@contextmanager
def patience(polls: int) -> Iterator[list[int]]:
    """Kernels of this rank give up after so many looks. Yields how many streams were begun, again and again counted."""
    real, begun = devicepack.PagePacker.gather, [0]
    usual = devicepacker.PATIENCE, stagedtransfer.LARGEST_CHUNK

    def gather(*args: Any, stream: Any = None, **settings: Any) -> None:
        begun[0] += stream is not None
        real(*args, stream=stream, **settings)

    devicepack.PagePacker.gather = gather  # type: ignore[method-assign, assignment]
    devicepacker.PATIENCE = polls
    if polls < usual[0]:  # and they have to wait: not all of a verb fits into the slots
        stagedtransfer.LARGEST_CHUNK = 64 << 10
    try:
        yield begun
    finally:
        devicepack.PagePacker.gather = real  # type: ignore[method-assign]
        devicepacker.PATIENCE, stagedtransfer.LARGEST_CHUNK = usual


def poison(cache: KVCache, pages: list[int], value: int) -> None:
    for name in ("k", "v"):
        for tensor in cache[name]:
            if tensor is not None:
                tensor[pages] = value


def bits(cache: KVCache, pages: list[int]) -> list[torch.Tensor]:
    return [tensor[pages].view(torch.uint8) for name in ("k", "v") for tensor in cache[name] if tensor is not None]


def stream(blocks: int, polls: int, writers: tuple[int, ...], signals: bool = True) -> None:
    """Staged and direct, the same bytes arrive, and beside them nothing changes.

    signals: whether streams may wait for those of a peer.
    """
    with patience(polls) as begun, gpu_group(sm_budget=blocks) as kv:
        me, other = kv.rank(), 1 - kv.rank()
        count = TOKENS // LAYOUTS[me]["page_size"]
        cache = KVCache.empty(small_layout(**MODEL, **LAYOUTS[me]), 4 * count, device="cuda", group=kv)
        for storage in cache.storages:
            storage.random_(0, 256)
        kv.register(cache)
        assert kv._engine.device.signals is signals
        shuffled = np.random.default_rng().permutation(4 * count).tolist()
        source, staged, direct, canaries = (shuffled[first : first + count] for first in range(0, 4 * count, count))
        before = [part.clone() for part in bits(cache, source + canaries)]
        verbs = 3 if polls > 1 else 10
        for turn in range(verbs):
            names = [f"staged {turn}", f"direct {turn}"]
            receives = []
            if other in writers:
                receives = [kv.recv_pages(*one, other) for one in zip(names, (staged, direct), strict=True)]
            if me in writers:
                kv.staged_put(names[0], None, source, other)
                kv.send_slice(names[1], None, source, other)
                for name in names:
                    kv.finish(name, other).wait(60)
            for receive in receives:
                receive.wait(60)
            if receives:
                assert all(torch.equal(*pair) for pair in zip(bits(cache, staged), bits(cache, direct), strict=True))
            poison(cache, staged, turn)
            meet(kv)
        assert all(torch.equal(*pair) for pair in zip(bits(cache, source + canaries), before, strict=True))
        if not signals:
            assert begun[0] == 0
        elif me in writers:
            # The first verb loads the kernels: direct routes do not get those of staging when they are made.
            assert begun[0] >= verbs - 1, "nothing was streamed"
            assert polls > 1 or begun[0] > verbs, "no kernel has lost its patience"


@pytest.mark.parametrize("blocks", [1, 16, 132])
@pytest.mark.parametrize("polls", [devicepacker.PATIENCE, 1], ids=["patient", "impatient"])
def test_every_byte(blocks: int, polls: int, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(stream, blocks, polls, (0,))


@pytest.mark.parametrize("polls", [devicepacker.PATIENCE, 1], ids=["patient", "impatient"])
def test_both_ways_at_once(polls: int, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(stream, 132, polls, (0, 1))


def test_where_streams_hold_each_other_up_no_gpu_waits_for_another() -> None:
    ranks = Ranks(2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    try:
        ranks.run(stream, 16, devicepacker.PATIENCE, (0, 1), False)
    finally:
        ranks.close()
