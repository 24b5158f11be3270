"""What a process does for the first time does not wait for streams that wait for it: `register` loads all kernels.

Else a progress thread that loads one waits for the very stream that it is to let go, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import (
    READER,
    WRITER,
    all_bytes,
    check_both_ways,
    gpu_group,
    needs_gpus,
    registered_cache,
)
from tests.helpers.ranks.small_cache import meet, page_bytes
from tests.helpers.waiting import until
from torchkv import KVCache, KVProcessGroup, TransferTimeout
from torchkv.engine.joining import registration
from torchkv.staging.cuda_pack import CudaPackLauncher

SOURCE, TARGET, CANARIES = [9, 2, 11, 4], [1, 14, 3, 8], [0, 5, 15]
LARGE = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 128, "page_size": 512}  # 64 MiB are sent

pytestmark = needs_gpus(1)


@pytest.fixture
def new_ranks() -> Iterator[Ranks]:
    """Processes that have not loaded anything yet, with the hardware queues that CUDA has by default."""
    ranks = Ranks(2)
    try:
        yield ranks
    finally:
        ranks.close()


def send(staged: bool, request: str, pages: list[int] | torch.Tensor, kv: KVProcessGroup) -> None:
    other = 1 - kv.rank()
    if staged:
        kv.staged_put(request, None, pages, other)
    else:
        kv.send_slice(request, None, pages, other)
    kv.finish(request, other).wait(20)


@contextmanager
def gathers() -> Iterator[list[CudaPackLauncher]]:
    """What has packed each piece of this rank."""
    real, seen = CudaPackLauncher.gather, []

    def gather(launcher: CudaPackLauncher, *args: Any) -> None:
        seen.append(launcher)
        real(launcher, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaPackLauncher, "gather", gather)
        yield seen


def both_ways(staged: bool, options: dict[str, Any], model: dict[str, Any], ids_on_gpu: bool) -> None:
    """Before anything was ever sent, each rank's default stream waits for what the other will send."""
    if options.get("checksum") == "rank 0":
        options = {"checksum": dist.get_rank() == 0}
    with gathers() as gathered, gpu_group(timeout=10, **options) as kv:
        me, other = kv.rank(), 1 - kv.rank()
        cache = registered_cache(kv, **model)
        theirs = all_bytes(page_bytes(cache, SOURCE))[other]
        canaries = page_bytes(cache, CANARIES)
        beside = torch.cuda.Stream()
        pages: Any = torch.tensor(SOURCE, device=cache.device) if ids_on_gpu else SOURCE
        torch.cuda.synchronize()
        rx = kv.recv_pages(f"from {other}", TARGET, other)
        rx.wait_stream()
        meet(kv)
        with torch.cuda.stream(beside):
            send(staged, f"from {me}", pages, kv)
        rx.wait(20)
        torch.cuda.synchronize()
        assert torch.equal(page_bytes(cache, TARGET), theirs)
        assert torch.equal(page_bytes(cache, CANARIES), canaries)
        assert bool(gathered) == staged


WAYS = [
    pytest.param(False, {}, {}, id="direct"),
    pytest.param(False, {"path": "slices"}, {}, id="put"),
    pytest.param(True, {}, {}, id="staged"),
    pytest.param(True, {}, LARGE, id="staged-large"),
    pytest.param(True, {"checksum": True}, {}, id="checksums"),
    pytest.param(True, {"checksum": "rank 0"}, {}, id="checksums-of-one"),
]


@pytest.mark.parametrize("ids_on_gpu", [False, True], ids=["ids-on-host", "ids-on-gpu"])
@pytest.mark.parametrize(("staged", "options", "model"), WAYS)
def test_the_first_transfer_ends_though_both_default_streams_wait_for_it(
    staged: bool, options: dict[str, Any], model: dict[str, Any], ids_on_gpu: bool, new_ranks: Ranks
) -> None:
    new_ranks.run(both_ways, staged, options, model, ids_on_gpu)


def nothing_loaded_for_a_receive() -> None:
    with pytest.MonkeyPatch.context() as patch, gpu_group(timeout=2) as kv:
        patch.setattr(registration, "prepare_to_receive", lambda engine, rank: None)
        cache = registered_cache(kv)
        canaries = page_bytes(cache, CANARIES)
        rx = None
        if kv.rank() == READER:
            rx = kv.recv_pages("r", TARGET, WRITER)
            rx.wait_stream()
        meet(kv)
        if rx is None:
            kv.staged_put("r", None, SOURCE, READER)
            with pytest.raises(TransferTimeout):
                kv.finish("r", READER).wait(20)
        else:
            with pytest.raises(TransferTimeout):
                rx.wait(20)
            torch.cuda.synchronize()
        kv.cancel("r").wait(20)
        assert kv.quarantined() == {}
        assert torch.equal(page_bytes(cache, CANARIES), canaries)
        check_both_ways(kv)
        meet(kv)
        again(kv, cache)


def again(kv: KVProcessGroup, cache: KVCache) -> None:
    """Staged, with a host that waits: now kernels can be loaded."""
    theirs = all_bytes(page_bytes(cache, SOURCE))[WRITER]
    if kv.rank() == READER:
        kv.recv_pages("again", TARGET, WRITER).wait(20)
        assert torch.equal(page_bytes(cache, TARGET), theirs)
    else:
        send(True, "again", SOURCE, kv)


def test_a_stream_that_waits_for_what_cannot_be_loaded_is_let_go_when_time_is_up(new_ranks: Ranks) -> None:
    new_ranks.run(nothing_loaded_for_a_receive)


def nothing_loaded_for_a_send() -> None:
    with pytest.MonkeyPatch.context() as patch, gpu_group() as kv:
        patch.setattr(registration, "prepare_to_send", lambda engine, rank: None)
        cache = registered_cache(kv)
        me, other = kv.rank(), 1 - kv.rank()
        theirs = all_bytes(page_bytes(cache, SOURCE))[other]
        beside = torch.cuda.Stream()
        rx = kv.recv_pages(f"from {other}", TARGET, other)
        if me == READER:
            rx.wait_stream()  # so that its own send has to wait
        meet(kv)
        with torch.cuda.stream(beside):
            work = kv.send_slice(f"from {me}", None, SOURCE, other)
            if me == READER:
                until(lambda: kv._verbs.engine.scheduler.gated, "the send waits")
                assert not work.is_completed()
            meet(kv)
            if me == WRITER:
                assert not rx.is_completed()
            done = kv.finish(f"from {me}", other)
        done.wait(20)
        rx.wait(20)
        torch.cuda.synchronize()
        assert torch.equal(page_bytes(cache, TARGET), theirs)


def test_a_send_that_needs_a_kernel_goes_when_no_stream_waits_any_more(new_ranks: Ranks) -> None:
    new_ranks.run(nothing_loaded_for_a_send)
