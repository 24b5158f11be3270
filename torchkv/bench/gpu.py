"""The GPU cases of the benchmark, and how one is run: by two processes with a GPU each.

The limit is the rate of plain copies of as many bytes between the same two GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.check import count_wrong
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

__all__ = [
    "CASES",
    "HEADS",
    "HEAD_DIM",
    "LAYERS",
    "TOKENS",
    "GpuCase",
    "GpuResult",
    "devices",
    "fill",
    "joined",
    "run_gpu_case",
]

LAYERS, TOKENS, HEADS, HEAD_DIM = 80, 4096, 8, 128
# Sent in a row, as sends of one request: this measures the rate of a busy link, without the latency of a single send.
BURST_BYTES = 20 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """80 layers x 4,096 tokens x 8 kv heads x 128 bf16 in shuffled pages; the reader holds ``heads_read`` of the heads.

    page_size: tokens of a page. gates: thread blocks of the copy kernel (``Options.sm_budget``) -> the least acceptable
    ratio to the copy, or None if the ratio is only reported; each entry is a run of its own. layers: how many move.
    path: the forced path, or None if the cost model chooses.
    """

    name: str
    page_size: int
    gates: dict[int, float | None]
    heads_read: int = HEADS
    layers: int = LAYERS
    transport: str = "ucx"
    path: str | None = None

    def layouts(self) -> tuple[KVLayout, KVLayout, int]:
        """The writer's layout, the reader's, and the number of pages."""
        return self._layout(1), self._layout(HEADS // self.heads_read), TOKENS // self.page_size

    def _layout(self, tp_size: int) -> KVLayout:
        return KVLayout.gqa(
            num_layers=self.layers,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            tp_size=tp_size,
        )


CASES = (
    GpuCase(name="pages of 16", page_size=16, gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None}),
    GpuCase(name="pages of 64", page_size=64, gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None}),
    GpuCase(
        name="slices of 512 B",
        page_size=16,
        heads_read=2,
        gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None},
    ),
    GpuCase(name="pages of 64, UCX put", page_size=64, gates={16: None}, path="runs", layers=8),
    GpuCase(
        name="slices, staged",
        page_size=16,
        heads_read=2,
        gates={132: 0.75, 64: None, 32: None, 16: 0.75},
        path="staged",
    ),
    GpuCase(name="pages of 64, NVSHMEM", page_size=64, gates={132: 0.90, 16: 0.80}, transport="nvshmem"),
    GpuCase(name="slices, NVSHMEM", page_size=16, heads_read=2, gates={132: 0.90, 16: 0.80}, transport="nvshmem"),
    GpuCase(
        name="slices, NVSHMEM staged", page_size=16, heads_read=2, gates={16: None}, path="staged", transport="nvshmem"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResult:
    """One row of the table. Rates in 1e9 bytes/s, times in microseconds.

    gbps: of sends in a row that move `BURST_BYTES`. limit_gbps: of plain copies of the same sizes in a row. p50_us,
    p99_us: of one send alone, from the call to its completion on the host. post_us: until the call returned. lane: the
    lane that carried the most bytes. wrong: bytes, over all runs.
    """

    case: GpuCase
    blocks: int
    nbytes: int
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
        gate = self.case.gates[self.blocks]
        return self.wrong == 0 and (gate is None or self.ratio >= gate)


def run_gpu_case(case: GpuCase, *, repeats: int) -> list[GpuResult]:
    """Runs ``case`` in two fresh processes, once for each number of blocks. Raises ``KVError``."""
    if not torch.cuda.is_available():
        raise KVError("the GPU benchmark needs at least one CUDA GPU")
    rows, wrong = run_two(_write, _read, case, repeats)
    return [GpuResult(case=case, wrong=bad, **row) for row, bad in zip(rows, wrong, strict=True)]


def _write(case: GpuCase, repeats: int) -> list[dict[str, Any]]:
    layout, reader, num_pages = case.layouts()
    payload = 2 * case.layers * num_pages * reader.page_nbytes("k")
    burst = 16 if case.path == "runs" else max(1, BURST_BYTES // payload)
    here, there = devices(0)
    pages = np.random.default_rng().permutation(num_pages)
    limit = _copy_rate(payload, burst, here, there)
    rows = []
    for blocks in case.gates:
        with joined(case, blocks, layout, here) as (kv, cache):
            fill(cache, seed=blocks)
            dist.broadcast(torch.from_numpy(pages), 0)
            seconds, bursts, post = [], [], []
            for turn in range(repeats + 1):
                request = f"run{turn}"
                kv.prefix_tokens(request, 1)
                torch.cuda.synchronize()
                began = time.perf_counter()
                work = kv.send_pages(request, pages, 1)
                posted = time.perf_counter()
                work.wait()
                alone_ended = time.perf_counter()
                for work in [kv.send_pages(request, pages, 1) for _ in range(burst)]:
                    work.wait()
                ended = time.perf_counter()
                kv.finish(request, 1).wait()
                if case.path == "staged":  # its sends complete in the ring; `finish` completes when all is in the pages
                    ended = time.perf_counter()
                if turn:  # not the first, which loads kernels and maps memory
                    seconds.append(alone_ended - began)
                    bursts.append((ended - alone_ended) / burst)
                    post.append(posted - began)
            lanes = kv.explain(1).lanes
            rows.append(
                {
                    "blocks": blocks,
                    "nbytes": payload,
                    "gbps": payload / statistics.median(bursts) / 1e9,
                    "limit_gbps": limit,
                    "p50_us": 1e6 * statistics.median(seconds),
                    "p99_us": 1e6 * float(np.percentile(seconds, 99)),
                    "post_us": 1e6 * statistics.median(post),
                    "path": work.path,
                    "lane": max(lanes, key=lambda lane: lanes[lane].nbytes),
                }
            )
    return rows


def _read(case: GpuCase, repeats: int) -> list[int]:
    writer_layout, layout, num_pages = case.layouts()
    here, _ = devices(1)
    wrong = []
    pages = np.random.default_rng().permutation(num_pages)
    sent = torch.zeros(num_pages, dtype=torch.int64)
    for blocks in case.gates:
        with joined(case, blocks, layout, here) as (kv, cache):
            dist.broadcast(sent, 0)
            source = KVCache.empty(writer_layout, num_pages, device=here)
            fill(source, seed=blocks)
            bad = 0
            for turn in range(repeats + 1):
                for storage in cache.storages:
                    storage.fill_(0xDD)
                torch.cuda.synchronize()
                kv.recv_pages(f"run{turn}", pages, 0).wait()
                bad += count_wrong(source, cache, sent.to(here), torch.from_numpy(pages).to(here))
            wrong.append(bad)
    return wrong


def devices(rank: int) -> tuple[torch.device, torch.device]:
    """This rank's GPU and the other rank's, which are one GPU where there is only one. Selects this rank's."""
    count = torch.cuda.device_count()
    here, there = torch.device("cuda", rank % count), torch.device("cuda", (rank + 1) % count)
    torch.cuda.set_device(here)
    return here, there


@contextmanager
def joined(
    case: GpuCase, blocks: int, layout: KVLayout, device: torch.device
) -> Iterator[tuple[KVProcessGroup, KVCache]]:
    """A group of both ranks for ``case``, and this rank's cache on ``device``, registered with it."""
    options = Options(sm_budget=blocks, transport=case.transport, path=case.path)
    kv = dist.new_group(backend="torchkv", pg_options=options)
    assert isinstance(kv, KVProcessGroup)
    cache = KVCache.empty(layout, TOKENS // case.page_size, device=device, group=kv)
    kv.register(cache, instance=f"rank {kv.rank()}")
    yield kv, cache
    dist.barrier()
    dist.destroy_process_group(kv)


def _copy_rate(nbytes: int, burst: int, here: torch.device, there: torch.device) -> float:
    """GB/s of ``burst`` plain copies of ``nbytes`` each from GPU to GPU: the limit."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=here)
    target = torch.empty(nbytes, dtype=torch.uint8, device=there)
    seconds = []
    for _ in range(8):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began.record()
        for _ in range(burst):
            target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3 / burst)
    rate: float = nbytes / statistics.median(seconds) / 1e9
    return rate


def fill(cache: KVCache, *, seed: int) -> None:
    """Fills device memory with random bytes, which depend on ``seed`` alone on GPUs of one model."""
    for number, storage in enumerate(cache.storages):
        generator = torch.Generator(storage.device).manual_seed(1000 * seed + number)
        storage.random_(0, 256, generator=generator)
