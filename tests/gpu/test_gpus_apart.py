"""Pages of GPUs that are not mapped, which the resident loop puts, or packs and unpacks, as between hosts.

UCX has no network for GPU memory on one host. So the loop is let put over CUDA IPC, which it leaves to Python
otherwise, because there each put takes microseconds: what is shown is that its puts are exact and gated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import READER, WRITER, all_bytes, gpu_group, needs_gpus, registered_cache
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.served import put_by_the_loop
from tests.helpers.ranks.small_cache import check_transfer, meet, page_bytes
from torchkv import KVCache, KVProcessGroup
from torchkv.errors import TransferCancelled

LAYERS = 6
MODEL = {"num_layers": LAYERS, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}  # runs of 32 KiB
HEADS = 2  # that the reader holds of the writer's 8, where it holds some: runs of 512 bytes, which are packed
SOURCE, TARGET, CANARIES = [9, 2, 11, 4], [1, 14, 3, 8], [0, 5, 15]
REQUESTS = 5
LONG = 40_000_000  # cycles of a GPU, about 20 ms

pytestmark = needs_gpus(1)


@pytest.fixture
def apart() -> Iterator[Ranks]:
    ranks = Ranks(2, apart=True)
    try:
        yield ranks
    finally:
        ranks.close()


def rewrite(cache: KVCache, fresh: KVCache, layer: int) -> None:
    """Enqueues that a layer gets other bytes, after a while."""
    torch.cuda._sleep(LONG)
    for component in "kv":
        cache[component][layer].copy_(fresh[component][layer], non_blocking=True)


def write(kv: KVProcessGroup, cache: KVCache, request: str, *, path: str = "runs", share: int = 1) -> None:
    """path: empty for any. share: the reader holds one of so many heads."""
    fresh = KVCache.empty(cache.layout, cache.num_pages, device=cache.device)
    random_fill(fresh, np.random.default_rng())
    torch.cuda.synchronize()
    works = []
    for layer in range(LAYERS):
        rewrite(cache, fresh, layer)
        send = kv.send_layer if share == 1 else kv.send_slice
        works.append(send(request, layer, SOURCE, READER))
    works.append(kv.finish(request, READER))
    assert works[-1].wait(30)
    assert not path or {work.path for work in works[:-1]} == {path}
    assert sum(work.bytes for work in works) == page_bytes(cache, SOURCE).numel() // share


def gated_layers() -> None:
    with put_by_the_loop() as served, gpu_group(timeout=20) as kv:
        cache = registered_cache(kv, **MODEL)
        for number in range(REQUESTS):
            random_fill(cache, np.random.default_rng())
            canaries = page_bytes(cache, CANARIES)
            request = f"request {number}"
            rx = kv.recv_pages(request, TARGET, WRITER) if kv.rank() == READER else None
            meet(kv)
            if rx is None:
                write(kv, cache, request)
            else:
                rx.wait(30)
            torch.cuda.synchronize()
            sent = all_bytes(page_bytes(cache, SOURCE))[WRITER]
            if kv.rank() == READER:
                assert torch.equal(page_bytes(cache, TARGET), sent)
            assert torch.equal(page_bytes(cache, CANARIES), canaries) or kv.rank() == WRITER
        assert served == []
        meet(kv)


def cancelled_in_the_middle() -> None:
    with put_by_the_loop(), gpu_group(timeout=20) as kv:
        cache = registered_cache(kv, **MODEL)
        rx = kv.recv_pages("r", TARGET, WRITER) if kv.rank() == READER else None
        meet(kv)
        if rx is None:
            for layer in range(LAYERS):
                torch.cuda._sleep(LONG)
                kv.send_layer("r", layer, SOURCE, READER)
            kv.cancel("r").wait(20)
        else:
            with pytest.raises(TransferCancelled):
                rx.wait(20)
            kv.cancel("r").wait(20)
            assert kv.quarantined() == {}
            random_fill(cache, np.random.default_rng())  # the pages are the caller's again
        everything = page_bytes(cache, [*range(cache.num_pages)])
        meet(kv)
        torch.cuda.synchronize()
        assert torch.equal(page_bytes(cache, [*range(cache.num_pages)]), everything)
        meet(kv)


def sliced_cache(kv: KVProcessGroup) -> KVCache:
    """The writer holds all heads, the reader the second `HEADS` of them."""
    heads = MODEL["num_kv_heads"]
    return registered_cache(kv, **MODEL | ({"tp_rank": 1, "tp_size": heads // HEADS} if kv.rank() == READER else {}))


def held_heads(cache: KVCache, pages: list[int]) -> torch.Tensor:
    """The bytes of the heads that the reader holds, whichever rank's ``cache`` it is."""
    parts = []
    for component in "kv":
        for layer in range(LAYERS):
            tensor = cache[component][layer][pages]
            parts.append(tensor if tensor.shape[2] == HEADS else tensor[:, :, HEADS : 2 * HEADS])
    return torch.stack(parts).contiguous().cpu().view(torch.uint8).flatten()


def packed_layers() -> None:
    """The first request may come before the standing stage is there: Python may serve it."""
    with put_by_the_loop() as served, gpu_group(timeout=20) as kv:
        cache = sliced_cache(kv)
        for number in range(REQUESTS):
            random_fill(cache, np.random.default_rng())
            canaries = page_bytes(cache, CANARIES)
            request = f"request {number}"
            rx = kv.recv_pages(request, TARGET, WRITER) if kv.rank() == READER else None
            meet(kv)
            if rx is None:
                write(kv, cache, request, path="staged" if number else "", share=MODEL["num_kv_heads"] // HEADS)
            else:
                rx.wait(30)
            torch.cuda.synchronize()
            sent = all_bytes(held_heads(cache, SOURCE))[WRITER]
            if kv.rank() == READER:
                assert torch.equal(held_heads(cache, TARGET), sent)
            assert torch.equal(page_bytes(cache, CANARIES), canaries) or kv.rank() == WRITER
            if number == 0:
                served.clear()
            meet(kv)
        assert served == []
        flows = kv._verbs.engine.flows
        assert flows is not None
        world = flows.core.world
        assert int(world["unpack_tail"] if kv.rank() == READER else world["posted"]) > 0
        meet(kv)


def cancelled_while_it_is_packed() -> None:
    with put_by_the_loop(), gpu_group(timeout=20) as kv:
        cache = sliced_cache(kv)
        for number in range(4):  # the first one stages by Python
            request = f"request {number}"
            rx = kv.recv_pages(request, TARGET, WRITER) if kv.rank() == READER else None
            meet(kv)
            if rx is None:
                for layer in range(LAYERS):
                    if layer % 2:
                        torch.cuda._sleep(LONG)
                    kv.send_slice(request, layer, SOURCE, READER)
                kv.cancel(request).wait(20)
            else:
                with pytest.raises(TransferCancelled):
                    rx.wait(20)
                kv.cancel(request).wait(20)
                assert kv.quarantined() == {}
                random_fill(cache, np.random.default_rng())  # the pages are the caller's again
            everything = page_bytes(cache, [*range(cache.num_pages)])
            meet(kv)
            torch.cuda.synchronize()
            assert torch.equal(page_bytes(cache, [*range(cache.num_pages)]), everything)
            meet(kv)


def left_to_python() -> None:
    """Nothing is patched but the note of what Python serves."""
    with put_by_the_loop(over_cuda_ipc=False) as served, gpu_group(timeout=20) as kv:
        cache = registered_cache(kv, **MODEL)
        check_transfer(kv, WRITER, READER)
        assert bool(served) == (kv.rank() == WRITER)
        assert cache.device.type == "cuda"
        meet(kv)


def test_puts_over_cuda_ipc_are_left_to_python(apart: Ranks) -> None:
    apart.run(left_to_python)


def test_layers_are_put_once_the_gpu_has_written_them(apart: Ranks) -> None:
    apart.run(gated_layers)


def test_nothing_lands_after_a_cancel(apart: Ranks) -> None:
    apart.run(cancelled_in_the_middle)


def test_slices_are_packed_and_unpacked_once_the_gpu_has_written_them(apart: Ranks) -> None:
    apart.run(packed_layers)


def test_nothing_is_unpacked_after_a_cancel(apart: Ranks) -> None:
    apart.run(cancelled_while_it_is_packed)
