"""One rank's part of requests that convert until resident loops serve some in a row: bytes against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.helpers.harness import kv_group
from tests.helpers.ranks.convert_cases import CONVERT_CASES, PARTLY
from tests.helpers.ranks.lane_transfer import (
    Case,
    Pool,
    check_reader,
    own_device,
    prepare,
    random_fill,
    tally,
    without_nan,
)
from tests.helpers.ranks.served import loops_served, served_by_python
from tests.helpers.ranks.small_cache import meet
from torchkv import KVProcessGroup

__all__ = ["CASES", "requests"]

IN_A_ROW, MOST = 3, 40  # requests that the loops are to serve, and until they do
CASES = [one for one in (*CONVERT_CASES, PARTLY) if not one.prefix]  # what lies behind a prefix is Python's


def send(kv: KVProcessGroup, case: Case, pool: Pool, name: str) -> list[int]:
    """Sends all of a pool's pages; the bytes of each verb."""
    edges = [round(i * len(pool.pages) / case.chunks) for i in range(case.chunks + 1)]
    works = []
    for lo, hi in itertools.pairwise(edges):
        if case.verb == "send_pages":
            works.append(kv.send_pages(name, pool.pages[lo:hi], "decode", start=lo))
            continue
        verb = kv.send_layer if case.verb == "send_layer" else kv.send_slice
        works += [verb(name, layer, pool.pages[lo:hi], "decode", start=lo) for layer in pool.cache.layout.layers]
    done = kv.finish(name, "decode")
    for work in (*works, done):
        assert work.wait(30)
    return [work.bytes for work in works]


def one_request(kv: KVProcessGroup, case: Case, pool: Pool | None, name: str) -> tuple[int, int]:
    """The bytes that this rank has sent, or received, by its works; and how many these should be at a reader."""
    rank, scales = kv.rank(), case.scales.get(kv.rank())
    mine, nbytes, expected, now = None, 0, 0, []
    if pool is not None and rank in case.readers:
        rx = kv.recv_pages(name, pool.pages, "prefill")
        assert rx.wait(30)
        nbytes, now = rx.bytes, pool.now()
    elif pool is not None:
        mine = pool.source()
        nbytes = sum(send(kv, case, pool, name))
        assert pool.holds(pool.before), "a transfer changed its source"
    everyone: list[Any] = [None] * kv.size()
    dist.all_gather_object(everyone, mine, group=kv)
    if pool is not None and rank in case.readers:
        sources = {r: source for r, source in enumerate(everyone) if source is not None}
        expected = check_reader(case, pool, now, sources, scales)
        assert nbytes == expected
    return nbytes, expected


def requests(case: Case, options: dict[str, Any], *, device: str = "cpu") -> tuple[int, int]:
    """Requests until the loops have served some in a row. Of the last: bytes that links carried, and of pages."""
    with served_by_python() as served, kv_group(**options) as kv:
        rank, place, rng = kv.rank(), own_device(device), np.random.default_rng()
        layout, pool, ready, carried = case.layouts.get(rank), None, 0, 0
        if layout is not None:
            pool = prepare(case, layout, rng, adopted=False, device=place, group=kv, scales=case.scales.get(rank))
        instance = "prefill" if rank in case.writers else "decode" if rank in case.readers else None
        kv.register(None if pool is None else pool.cache, instance=instance)
        expected = 0
        for number in range(MOST):
            if pool is not None:
                random_fill(pool.cache, rng)
                without_nan(pool.cache)
                pages = [int(page) for page in rng.permutation(pool.cache.num_pages)[: len(pool.pages)]]
                pool = replace(pool, pages=pages, before=pool.now())
            served.clear()
            peers = case.readers if rank in case.writers else ()
            before, _ = tally(kv.explain(reader).lanes for reader in peers)
            _, expected = one_request(kv, case, pool, f"r{number}")
            after, _ = tally(kv.explain(reader).lanes for reader in peers)
            carried = sum(after.values()) - sum(before.values())
            ready = ready + 1 if loops_served(kv, served) else 0
            if ready == IN_A_ROW:
                break
        assert ready == IN_A_ROW, f"rank {rank}: Python served {len(served)} ops of the last request"
        meet(kv)
    dist.barrier()  # a peer may still have this rank's cache mapped, which must outlive that
    return carried, expected
