"""`staged_put` by the resident loops: into a ring that is mapped, and into one that is put to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.served import served_by_python
from tests.helpers.ranks.small_cache import meet, page_bytes, random_cache
from torchkv import KVProcessGroup, TransferCancelled
from torchkv.engine.work import KVWork

WRITER, READER = 0, 1
PATIENCE = 30
SOURCE, TARGET = [5, 2, 7, 0, 11], [3, 9, 1, 14, 6]
OTHERS = [page for page in range(16) if page not in TARGET]
LAYERS = 4
LANES: dict[str, dict[str, Any]] = {"memory": {}, "tcp": {"env": {"UCX_TLS": "tcp"}, "apart": True}}


@pytest.fixture(params=LANES)
def two(request: pytest.FixtureRequest, shared_ranks: Callable[..., Ranks]) -> Ranks:
    return shared_ranks(f"staged-{request.param}", 2, **LANES[request.param])


def write(kv: KVProcessGroup, request: str, dice: np.random.Generator, mixed: str) -> list[KVWork]:
    """Layer by layer, in chunks, in any order. mixed: which of the verbs come first, if not all are staged."""
    chunks = [(layer, first) for layer in range(LAYERS) for first in (0, 2)]
    dice.shuffle(chunks)
    works = []
    for number, (layer, first) in enumerate(chunks):
        pages = SOURCE[first : first + 2] if first == 0 else SOURCE[first:]
        staged = {"": True, "staged": number < 4, "else": number >= 4}[mixed]
        verb = kv.staged_put if staged else kv.send_slice
        works.append(verb(request, int(layer), pages, READER, start=int(first)))
    works.append(kv.finish(request, READER, aux=request.encode()))
    return works


def one_request(kv: KVProcessGroup, request: str, mixed: str) -> None:
    cache, dice = kv._verbs.cache, np.random.default_rng()
    assert cache is not None
    random_fill(cache, dice)
    canaries = page_bytes(cache, OTHERS)
    if kv.rank() == READER:
        rx = kv.recv_pages(request, TARGET, WRITER)
        rx.wait(PATIENCE)
        assert rx.aux == request.encode()
        assert mixed or rx.path == "staged"
        expected = torch.empty_like(page_bytes(cache, TARGET))
        dist.recv(expected, WRITER)
        assert torch.equal(page_bytes(cache, TARGET), expected)
        assert torch.equal(page_bytes(cache, OTHERS), canaries)
        return
    works = write(kv, request, dice, mixed)
    for work in works:
        work.wait(PATIENCE)
    assert sum(work.bytes for work in works) == page_bytes(cache, SOURCE).numel()
    assert mixed or {work.path for work in works[:-1]} == {"staged"}
    dist.send(page_bytes(cache, SOURCE), READER)


def staged_requests(mixed: str) -> None:
    """Python serves the first ones; then loops do, but for what follows a promise that all is staged."""
    with served_by_python() as served, kv_group(staging_recv=64 << 10, staging_send=64 << 10) as kv:
        kv.register(random_cache(num_layers=LAYERS))
        on_loop = 0
        for number in range(60):
            request = f"request {number}"
            meet(kv)
            one_request(kv, request, mixed)
            python = [any(op.request == request for op in served)]
            dist.broadcast_object_list(python, WRITER)
            on_loop = 0 if python[0] and mixed != "staged" else on_loop + 1
            if on_loop == 8:
                break
        assert on_loop == 8
        meet(kv)


@pytest.mark.parametrize("mixed", ["", "staged", "else"], ids=["all staged", "staged first", "staged last"])
def test_every_byte(mixed: str, two: Ranks) -> None:
    two.run(staged_requests, mixed)


def cancelled() -> None:
    """Amid pieces: nothing lands afterwards, and the next request finds the stage as usable."""
    with kv_group(staging_recv=16 << 10, staging_send=16 << 10) as kv:
        kv.register(random_cache(num_layers=LAYERS))
        cache = kv._verbs.cache
        assert cache is not None
        for number in range(12):
            request = f"request {number}"
            rx = kv.recv_pages(request, TARGET, WRITER) if kv.rank() == READER else None
            meet(kv)
            with suppress(TransferCancelled):  # the reader may be first
                for layer in range(LAYERS - 1 if rx is None else 0):
                    kv.staged_put(request, layer, SOURCE, READER)
            assert kv.cancel(request).wait(PATIENCE)
            assert kv.quarantined() == {}
            random_fill(cache, np.random.default_rng())
            everything = page_bytes(cache, [*range(16)])
            meet(kv)
            assert torch.equal(page_bytes(cache, [*range(16)]), everything)
            one_request(kv, f"next {number}", "")
        meet(kv)


def test_cancels(two: Ranks) -> None:
    two.run(cancelled)
