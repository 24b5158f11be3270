"""Long spans go by the copy engines, scattered pages by a kernel; every byte is right, and no other is touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import READER, WRITER, gpu_group, held, needs_gpus, registered_cache
from tests.helpers.ranks.small_cache import meet, page_bytes
from torchkv import KVCache, KVProcessGroup
from torchkv.cuda import copy_engine

# 32 KiB a page: 256 of them, in a row, are 8 MiB. Two layers of keys and values are as many copies as go behind a gate.
BIG = {"num_layers": 2, "num_kv_heads": 8, "head_dim": 128}
NUM_PAGES, COUNT = 280, 256
PAGE_NBYTES = 32 * 1024

IN_A_ROW = "in a row"
SCATTERED = "scattered"

pytestmark = needs_gpus(1)


def choose(how: str, first: int) -> list[int]:
    if how == IN_A_ROW:
        return list(range(first, first + COUNT))
    return [int(page) for page in np.random.default_rng().permutation(NUM_PAGES)[:COUNT]]


def expect_bytes(kv: KVProcessGroup, cache: KVCache, before: torch.Tensor, pages: list[int]) -> None:
    """On the reader: ``pages`` hold what the writer sends now, and all others what they held ``before``."""
    sent = torch.empty_like(page_bytes(cache, pages))
    dist.recv(sent, WRITER, group=kv)
    others = [page for page in range(NUM_PAGES) if page not in pages]
    everything = before.view(-1, NUM_PAGES, PAGE_NBYTES)
    assert torch.equal(page_bytes(cache, pages), sent)
    assert torch.equal(page_bytes(cache, others), everything[:, others].ravel())
    assert not torch.equal(everything[:, pages].ravel(), sent)


def one_request(writer: str, reader: str, lane: str) -> None:
    with gpu_group() as kv:
        cache = registered_cache(kv, num_pages=NUM_PAGES, **BIG)
        before = page_bytes(cache, list(range(NUM_PAGES)))
        if kv.rank() == WRITER:
            pages = choose(writer, 3)
            assert kv.send_pages("r", pages, READER).wait(30)
            kv.finish("r", READER).wait(30)
            lanes = kv.explain(READER).lanes
            assert set(lanes) == {lane}
            assert lanes[lane].nbytes == 4 * COUNT * PAGE_NBYTES
            assert lanes[lane].spans == (4 if lane == "copy-engine" else 4 * COUNT)
            dist.send(page_bytes(cache, pages), READER, group=kv)
        else:
            pages = choose(reader, 7)
            rx = kv.recv_pages("r", pages, WRITER)
            rx.wait(30)
            assert rx.path == "direct"
            expect_bytes(kv, cache, before, pages)


@pytest.mark.skipif(copy_engine.available() is not None, reason=f"no batched copies: {copy_engine.available()}")
def test_pages_in_a_row_go_by_the_copy_engines(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(one_request, IN_A_ROW, IN_A_ROW, "copy-engine")


@pytest.mark.parametrize(("writer", "reader"), [(SCATTERED, IN_A_ROW), (IN_A_ROW, SCATTERED), (SCATTERED, SCATTERED)])
def test_scattered_pages_go_by_a_kernel(writer: str, reader: str, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(one_request, writer, reader, "view")


def gated_copies() -> None:
    """What is final only when the gate opens is what arrives, and nothing arrives before."""
    with gpu_group() as kv:
        cache = registered_cache(kv, num_pages=NUM_PAGES, **BIG)
        pages = choose(IN_A_ROW, 5)
        if kv.rank() == WRITER:
            kv.send_pages("loads what is needed", pages, READER)
            kv.finish("loads what is needed", READER).wait(30)
            meet(kv)
            final = torch.randint(0, 256, (cache.storages[0].numel(),), dtype=torch.uint8, device=cache.device)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                cache.storages[0].copy_(cache.storages[0].clone())  # loads the copy that is made behind the gate
            torch.cuda.synchronize()
            with held(stream) as (hold,):
                with torch.cuda.stream(stream):
                    cache.storages[0].copy_(final)
                    work = kv.send_pages("r", pages, READER)
                meet(kv)  # the reader looks
                meet(kv)
                assert not work.is_completed()
                hold.open()
                assert work.wait(30)
            kv.finish("r", READER).wait(30)
            assert set(kv.explain(READER).lanes) == {"copy-engine"}
            dist.send(page_bytes(cache, pages), READER, group=kv)
        else:
            kv.recv_pages("loads what is needed", pages, WRITER).wait(30)
            before = page_bytes(cache, list(range(NUM_PAGES)))
            meet(kv)
            rx = kv.recv_pages("r", pages, WRITER)
            meet(kv)
            assert torch.equal(page_bytes(cache, list(range(NUM_PAGES))), before)
            meet(kv)
            rx.wait(30)
            expect_bytes(kv, cache, before, pages)


@pytest.mark.skipif(copy_engine.available() is not None, reason=f"no batched copies: {copy_engine.available()}")
def test_copies_wait_for_their_gate(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(gated_copies)
