"""Two processes, a GPU each: the direct path against the copy of as many bytes between the same two GPUs."""

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

from torchkv.bench.beside import BY_BYTES, Slowdown, slowdown
from torchkv.bench.check import count_wrong
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.env import Options
from torchkv.errors import KVError
from torchkv.layout import KVLayout
from torchkv.process_group import KVProcessGroup

__all__ = ["CASES", "GpuCase", "GpuResult", "devices", "fill", "run_gpu_case"]

LAYERS, TOKENS, HEADS, HEAD_DIM = 80, 4096, 8, 128
BURST_BYTES = 20 << 30  # in sends of one request, in a row: what a busy link carries, without the way to it


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """80 layers x 4,096 tokens x 8 kv heads x 128 bf16 in shuffled pages; the reader holds ``heads_read`` of them.

    gates: blocks of the copy kernel (``Options.sm_budget``) -> least ratio to the copy. matmul: also measure what the
    copies cost a large bf16 matmul on the same GPU. layers: how many move.
    """

    name: str
    page_size: int
    gates: dict[int, float | None]
    heads_read: int = HEADS
    layers: int = LAYERS
    transport: str = "ucx"
    path: str | None = None
    matmul: bool = False

    def layouts(self) -> tuple[KVLayout, KVLayout, int]:
        """Writer's layout, reader's layout, pages."""
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
    GpuCase(name="pages of 16", page_size=16, gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None}, matmul=True),
    GpuCase(name="pages of 64", page_size=64, gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None}),
    GpuCase(
        name="slices of 512 B",
        page_size=16,
        heads_read=2,
        gates={132: 0.90, 64: None, 32: None, 16: 0.80, 8: None},
        matmul=True,
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
    """One row. Rates in 1e9 bytes/s, times in microseconds. slowdown: of a matmul beside the copies.

    gbps: of sends in a row that move `BURST_BYTES`. p50_us, p99_us: of one send alone, from the call to its completion
    on the host. post_us: until the call of one returned.
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
    slowdown: Slowdown | None
    wrong: int

    @property
    def ratio(self) -> float:
        return self.gbps / self.limit_gbps

    @property
    def passed(self) -> bool:
        gate = self.case.gates[self.blocks]
        by_bytes = None if self.slowdown is None else self.slowdown.by_bytes
        return self.wrong == 0 and (gate is None or self.ratio >= gate) and (by_bytes is None or by_bytes <= BY_BYTES)


def run_gpu_case(case: GpuCase, *, repeats: int) -> list[GpuResult]:
    """Runs ``case`` in two fresh processes, with each number of blocks."""
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
        with _group(case, blocks, layout, num_pages, here) as (kv, cache):
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
                if case.path == "staged":  # those works end in the ring, the request in the pages
                    ended = time.perf_counter()
                if turn:  # the first run loads kernels and maps memory
                    seconds.append(alone_ended - began)
                    bursts.append((ended - alone_ended) / burst)
                    post.append(posted - began)
            slow = slowdown(kv, pages, blocks, here, there) if case.matmul else None
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
                    "slowdown": slow,
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
        with _group(case, blocks, layout, num_pages, here) as (kv, cache):
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
            if case.matmul:
                kv.recv_pages("beside", pages, 0).wait()
            wrong.append(bad)
    return wrong


def devices(rank: int) -> tuple[torch.device, torch.device]:
    """This rank's GPU and the other's; the same one, where there is only one."""
    count = torch.cuda.device_count()
    here, there = torch.device("cuda", rank % count), torch.device("cuda", (rank + 1) % count)
    torch.cuda.set_device(here)
    return here, there


@contextmanager
def _group(
    case: GpuCase, blocks: int, layout: KVLayout, num_pages: int, device: torch.device
) -> Iterator[tuple[KVProcessGroup, KVCache]]:
    options = Options(sm_budget=blocks, transport=case.transport, path=case.path)
    kv = dist.new_group(backend="torchkv", pg_options=options)
    assert isinstance(kv, KVProcessGroup)
    cache = KVCache.empty(layout, num_pages, device=device, group=kv)
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
    """The same random bytes for the same seed, on every GPU of one kind."""
    for number, storage in enumerate(cache.storages):
        generator = torch.Generator(storage.device).manual_seed(1000 * seed + number)
        storage.random_(0, 256, generator=generator)
