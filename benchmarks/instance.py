"""A request from one rank to an instance of two, from its first verb until all three know that it has succeeded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.bench.check import count_wrong
from torchkv.bench.engine_loop import STEP_SECONDS
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_ranks
from torchkv.cache import KVCache
from torchkv.engine.work import KVWork
from torchkv.group.process_group import current_group
from torchkv.layout.layout import KVLayout

__all__ = ["run"]

SLOTS = 20  # requests of one page each, whose bytes are checked together
BATCHES = 8
WARM_UP = 20  # requests
POISON = 0xDD


def run() -> Iterator[Outcome]:
    for polled in (False, True):
        ranks = run_ranks([partial(_serve, rank) for rank in range(3)], polled)
        began, ended = np.array(ranks[0]["began"]), np.max([rank["ended"] for rank in ranks], axis=0)
        micros = (ended - began)[WARM_UP:] / 1e3
        p50, p99 = float(np.median(micros)), float(np.percentile(micros, 99))
        wrong = sum(rank["wrong"] for rank in ranks)
        how = "polled between steps of 200 us" if polled else "waited"
        line = f"instance: 2.1 MB in 32 layers to two ranks, {how}: p50 {p50:.0f} us, p99 {p99:.0f} us; #wrong {wrong}"
        row = {"instance": {"polled": polled, "p50_us": p50, "p99_us": p99}, "wrong": wrong, "passed": wrong == 0}
        yield Outcome(line=line, row=row, passed=wrong == 0, wrong=wrong)


def _cache(tp_rank: int, tp_size: int) -> KVCache:
    layout = KVLayout.gqa(
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype=torch.bfloat16,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    return KVCache.empty(layout, SLOTS, device="cpu")


def _serve(rank: int, polled: bool) -> dict[str, Any]:
    """Rank 0 writes, 1 and 2 receive. All processes of a host read one monotonic clock."""
    kv = current_group(None)
    cache, source = _cache(max(rank - 1, 0), 2 if rank else 1), _cache(0, 1)
    kv.register(cache, instance="reader" if rank else "writer")
    began: list[int] = []
    ended: list[int] = []
    wrong = 0
    for batch in range(BATCHES + 1):
        fill(source if rank else cache, seed=batch)
        for storage in cache.storages if rank else ():
            storage.fill_(POISON)
        for slot in range(SLOTS):
            name, page = f"{batch}.{slot}", np.array([slot])
            work = kv.recv_pages(name, page, "writer") if rank else None
            dist.barrier()
            began.append(time.monotonic_ns())
            if work is None:
                kv.send_pages(name, page, "reader")
                work = kv.finish(name, "reader")
            _end(work, polled)
            ended.append(time.monotonic_ns())
        if rank:
            everything = torch.arange(SLOTS)
            wrong += count_wrong(source, cache, everything, everything)
    return {"began": began, "ended": ended, "wrong": wrong}


def _end(work: KVWork, polled: bool) -> None:
    """Waits, or polls as the main thread of a serving engine does: it computes in Python, looks, and goes on."""
    while polled and not work.is_completed():
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
    work.wait()
