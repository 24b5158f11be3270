"""Runs one host case in two processes: a writer, which takes the times, and a reader, which checks every byte."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.cases import Case
from torchkv.bench.check import count_wrong
from torchkv.bench.limits import Memcpy, serve_python_puts, time_python_puts
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.group.process_group import current_group

__all__ = ["Result", "fill", "run_case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table. Rates in 1e9 bytes/s, times in microseconds.

    nbytes, pages, layers: of one run. p50_us, p99_us: from the call of ``send_pages`` to its completion; post_us: until
    the call returned. lane: the lane that carried the most bytes. wrong: bytes, over all runs.
    """

    case: Case
    nbytes: int
    pages: int
    layers: int
    gbps: float
    limit_gbps: float
    p50_us: float
    p99_us: float
    post_us: float
    path: str
    lane: str
    wrong: int

    @property
    def ratio(self) -> float:
        return self.gbps / self.limit_gbps

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and (self.case.gate is None or self.ratio >= self.case.gate)


def run_case(case: Case, *, nbytes: int, repeats: int) -> Result:
    """Runs ``case`` in two fresh processes. nbytes: about what one run moves. repeats: timed runs.

    Raises ``KVError`` if a process fails.
    """
    environment = {} if case.tls is None else {"UCX_TLS": case.tls}
    measured, wrong = run_two(_write, _read, case, nbytes, repeats, environment=environment, path=case.path)
    return Result(case=case, wrong=wrong, **measured)


def _write(case: Case, nbytes: int, repeats: int) -> dict[str, Any]:
    layout, reader, num_pages = case.layouts(nbytes)
    cache = KVCache.empty(layout, num_pages, device="cpu")
    kv = current_group(None)
    kv.register(cache, instance="writer")
    pages = np.random.default_rng().permutation(num_pages)
    payload = 2 * len(layout.layers) * num_pages * reader.page_nbytes("k")
    memcpy = Memcpy(payload)
    seconds: list[float] = []
    copies: list[float] = []
    post: list[float] = []
    work = None
    for turn in range(repeats + 1):
        fill(cache, seed=turn)
        dist.broadcast(torch.from_numpy(pages), 0)
        copied = memcpy.seconds()
        dist.barrier()
        began = time.perf_counter()
        work = kv.send_pages(f"run{turn}", pages, 1)
        posted = time.perf_counter()
        work.wait()
        ended = time.perf_counter()
        kv.finish(f"run{turn}", 1).wait()
        if turn:  # the first run maps the peer's memory and faults it in
            seconds.append(ended - began)
            copies.append(copied)
            post.append(posted - began)
    assert work is not None
    if case.limit == "memcpy":
        limit = payload / statistics.median(copies) / 1e9
    else:
        limit = time_python_puts(reader.page_nbytes("k") // case.page_size)
    lanes = kv.explain(1).lanes
    return {
        "nbytes": payload,
        "pages": num_pages,
        "layers": len(layout.layers),
        "gbps": payload / statistics.median(seconds) / 1e9,
        "limit_gbps": limit,
        "p50_us": 1e6 * statistics.median(seconds),
        "p99_us": 1e6 * float(np.percentile(seconds, 99)),
        "post_us": 1e6 * statistics.median(post),
        "path": work.path,
        "lane": max(lanes, key=lambda lane: lanes[lane].nbytes),
    }


def _read(case: Case, nbytes: int, repeats: int) -> int:
    writer_layout, layout, num_pages = case.layouts(nbytes)
    cache = KVCache.empty(layout, num_pages, device="cpu")
    kv = current_group(None)
    kv.register(cache, instance="reader")
    source = KVCache.empty(writer_layout, num_pages, device="cpu")
    pages = np.random.default_rng().permutation(num_pages)
    sent = torch.zeros(num_pages, dtype=torch.int64)
    wrong = 0
    for turn in range(repeats + 1):
        for storage in cache.storages:
            storage.fill_(0xDD)
        rx = kv.recv_pages(f"run{turn}", pages, 0)
        dist.broadcast(sent, 0)
        dist.barrier()
        rx.wait()
        fill(source, seed=turn)
        wrong += count_wrong(source, cache, sent, torch.from_numpy(pages))
    if case.limit != "memcpy":
        serve_python_puts(layout.page_nbytes("k") // case.page_size)
    return wrong


def fill(cache: KVCache, *, seed: int) -> None:
    """Fills host memory with random bytes, which depend on ``seed`` alone: every process can compute them."""
    for number, storage in enumerate(cache.storages):
        generator = np.random.default_rng((seed, number))
        array = storage.numpy()
        array.view(np.uint64)[:] = generator.integers(0, 1 << 64, len(array) // 8, dtype=np.uint64)
