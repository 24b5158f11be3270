"""Cancelling what a GPU is about to do, or is doing: a kernel on its way cannot be called back, so cancel waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import (
    PATHS,
    READER,
    WRITER,
    check_both_ways,
    gpu_group,
    held,
    needs_gpus,
    registered_cache,
)
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.small_cache import NUM_PAGES, Never, meet, page_bytes
from torchkv import KVCache, KVProcessGroup, KVWork, TransferCancelled, TransferTimeout

WAYS = [*PATHS, pytest.param({"path": "staged"}, id="staged")]
SOURCE, TARGET = [9, 2, 11, 4], [1, 14, 3, 8]
# A pool that takes a while to send with one thread block: 256 MiB.
BIG = {"num_layers": 16, "num_kv_heads": 8, "head_dim": 128}
BIG_PAGES = list(range(256))

pytestmark = needs_gpus(1)


def nothing_lands_any_more(kv: KVProcessGroup, cache: KVCache, quiet: KVWork) -> None:
    """On the reader, whose cancel is ``quiet``: what its pages hold then is what they hold when the writer is idle."""
    quiet.wait(30)
    assert kv.quarantined() == {}
    pages = list(range(cache.num_pages))
    frozen = page_bytes(cache, pages)
    meet(kv)  # every stream of the writer has come to its end
    assert torch.equal(page_bytes(cache, pages), frozen)


def writer_is_idle(kv: KVProcessGroup) -> None:
    torch.cuda.synchronize()
    meet(kv)


def load_kernels(kv: KVProcessGroup, cache: KVCache) -> None:
    """And poisons the reader's pages."""
    check_both_ways(kv)
    for layer in cache.layout.layers if kv.rank() == WRITER else ():
        kv.send_layer("warm-up", layer, SOURCE, READER)
    if kv.rank() == WRITER:
        kv.finish("warm-up", READER).wait(30)
    else:
        kv.recv_pages("warm-up", TARGET, WRITER).wait(30)
        random_fill(cache, np.random.default_rng())


def cancel_gated(canceller: int, options: dict[str, Any]) -> None:
    """Once cancel says that nothing can land any more, nothing does, also when the gate opens only then."""
    with gpu_group(**options) as kv:
        cache = registered_cache(kv)
        load_kernels(kv, cache)
        if kv.rank() == WRITER:
            kv.send_layer("r", 0, SOURCE, READER).wait(30)  # granted
            stream = torch.cuda.Stream()
            with held(stream) as (hold,):
                with torch.cuda.stream(stream):
                    gated = kv.send_layer("r", 1, SOURCE, READER)
                meet(kv)
                if canceller == WRITER:
                    kv.cancel("r")
                meet(kv)  # the reader has seen the failure, and perhaps that nothing can land
                hold.open()
                with pytest.raises(TransferCancelled, match="'r'"):
                    gated.wait(30)
                kv.cancel("r").wait(30)
            writer_is_idle(kv)
        else:
            rx = kv.recv_pages("r", TARGET, WRITER)
            rx.wait_layer(0, 30)
            meet(kv)
            if canceller == READER:
                kv.cancel("r")
            with pytest.raises(TransferCancelled, match="'r'"):
                rx.wait(30)
            quiet, signalled = kv.cancel("r"), None
            try:
                quiet.wait(0.2)
                signalled = page_bytes(cache, list(range(NUM_PAGES)))
            except TransferTimeout:  # the writer's kernel is enqueued, and waits for the gate
                assert set(kv.quarantined()) == set(TARGET)
            meet(kv)
            nothing_lands_any_more(kv, cache, quiet)
            if signalled is not None:
                assert torch.equal(page_bytes(cache, list(range(NUM_PAGES))), signalled)
        check_both_ways(kv)


@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("canceller", [WRITER, READER], ids=["writer", "reader"])
def test_cancel_while_gated(canceller: int, options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(cancel_gated, canceller, options)


def cancel_moving(canceller: int, options: dict[str, Any]) -> None:
    """Layers are on their way, the first has arrived; one never will, so that the request cannot end before."""
    with gpu_group(sm_budget=1, **options) as kv:
        cache = registered_cache(kv, num_pages=len(BIG_PAGES), **BIG)
        if kv.rank() == WRITER:
            *moving, last = cache.layout.layers
            works = [kv.send_layer("r", layer, BIG_PAGES, READER) for layer in moving]
            works.append(kv.send_layer("r", last, BIG_PAGES, READER, event=Never()))
            works[0].wait(30)
            if canceller == WRITER:
                kv.cancel("r").wait(30)
            with pytest.raises(TransferCancelled, match="'r'"):
                works[-1].wait(30)
            kv.cancel("r").wait(30)
            assert all(work.is_completed() for work in works)
            writer_is_idle(kv)
        else:
            rx = kv.recv_pages("r", BIG_PAGES, WRITER)
            if canceller == READER:  # a writer that has cancelled may have failed the receive by now
                rx.wait_layer(0, 30)
                kv.cancel("r")
            with pytest.raises(TransferCancelled, match="'r'"):
                rx.wait(30)
            nothing_lands_any_more(kv, cache, kv.cancel("r"))
        check_both_ways(kv)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("canceller", [WRITER, READER], ids=["writer", "reader"])
def test_cancel_while_moving(canceller: int, options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(cancel_moving, canceller, options)
