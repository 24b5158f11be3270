"""Page ids that the caller keeps on a GPU: read in stream order, checked where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import PATHS, READER, WRITER, check_both_ways, gpu_group, needs_gpus, registered_cache
from tests.helpers.ranks.small_cache import NUM_PAGES, meet, page_bytes
from torchkv import KVError, PageOutOfRange

SOURCE, TARGET = [9, 2, 11, 4], [1, 14, 3, 8]
ALL_PAGES = list(range(NUM_PAGES))


def others(pages: list[int]) -> list[int]:
    return [page for page in ALL_PAGES if page not in pages]


def ids_on_gpu(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The ids are computed on a stream that is still busy when the call is made."""
    with gpu_group(**options) as kv:
        cache = registered_cache(kv)
        if kv.rank() == WRITER:
            below = torch.tensor(SOURCE, device=cache.device) - 1
            torch.cuda._sleep(100_000_000)
            ids = (below + 1).to(dtype)
            assert kv.send_pages("r", ids, READER).wait(30)
            kv.finish("r", READER).wait(30)
            dist.send(page_bytes(cache, SOURCE), READER, group=kv)
        else:
            canaries, poison = page_bytes(cache, others(TARGET)), page_bytes(cache, TARGET)
            rx = kv.recv_pages("r", torch.tensor(TARGET, device=cache.device, dtype=dtype), WRITER)
            rx.wait(30)
            expected = torch.empty_like(poison)
            dist.recv(expected, WRITER, group=kv)
            assert torch.equal(page_bytes(cache, TARGET), expected)
            assert torch.equal(page_bytes(cache, others(TARGET)), canaries)
            assert not torch.equal(poison, expected)


@needs_gpus(1)
@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_page_ids_on_the_gpu(dtype: torch.dtype, options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(ids_on_gpu, dtype, options)


def wrong_ids_on_gpu(bad: int, options: dict[str, Any]) -> None:
    """The work fails, and the request; nothing outside the granted pages is touched, and the group goes on."""
    granted = TARGET[:3]
    with gpu_group(**options) as kv:
        cache = registered_cache(kv)
        kept = ALL_PAGES if kv.rank() == WRITER else others(granted)
        before = page_bytes(cache, kept)
        if kv.rank() == WRITER:
            work = kv.send_pages("r", torch.tensor([9, bad, 11], device=cache.device), READER)
            with pytest.raises(PageOutOfRange, match=rf"'r'.*page {bad} "):
                work.wait(30)
            with pytest.raises(PageOutOfRange):
                kv.finish("r", READER)
            kv.cancel("r").wait(30)
        else:
            with pytest.raises(PageOutOfRange, match=f"page {bad} "):
                kv.recv_pages("mine", torch.tensor([1, bad], device=cache.device), WRITER)
            rx = kv.recv_pages("r", granted, WRITER)
            with pytest.raises(KVError, match="'r'"):
                rx.wait(30)
            kv.cancel("r").wait(30)
            assert kv.quarantined() == {}
        assert torch.equal(page_bytes(cache, kept), before)
        meet(kv)
        check_both_ways(kv)


@needs_gpus(1)
@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("bad", [NUM_PAGES, -1, 1 << 30], ids=["one-beyond", "negative", "far-beyond"])
def test_wrong_page_ids_on_the_gpu(bad: int, options: dict[str, Any], gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(wrong_ids_on_gpu, bad, options)
