"""One layer from GPU to GPU: device time of its copy kernel, and how long ``send_layer`` takes to return."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.bench.check import count_wrong
from torchkv.bench.gpu import devices, fill
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.kernels import copies as page_copies
from torchkv.layout.layout import KVLayout
from torchkv.transfer.copy_tables import BaseAddressTable

__all__ = ["LayerResult", "layer_cost", "run"]

LAYERS, PAGES = 32, 64  # 64 pages of 16 tokens x 8 heads x 128 bf16: 2 MiB of K and 2 MiB of V
ROUNDS = 12
IN_A_ROW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Microseconds.

    kernel_us, copy_us: device time of the layer's kernel, and of a plain copy of ``nbytes``, many in a row. post_us,
    post_p99_us: until ``send_layer`` returns, one layer right after the other; paced_us: with a millisecond between
    them. done_us: from the call to its completion on the host. wrong: bytes, over all rounds.
    """

    nbytes: int
    kernel_us: float
    copy_us: float
    post_us: float
    post_p99_us: float
    paced_us: float
    done_us: float
    wrong: int

    @property
    def ratio(self) -> float:
        return self.kernel_us / self.copy_us

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.ratio <= 2.0 and self.post_us <= 15.0


def run() -> Iterator[Outcome]:
    layer = layer_cost()
    line = (
        f"one layer of {layer.nbytes} B, K and V in shuffled pages: {layer.kernel_us:.1f} us of device time, the copy "
        f"{layer.copy_us:.1f} us: {layer.ratio:.2f}x (gate 2x); send_layer returns in p50 {layer.post_us:.1f} us "
        f"(gate 15 us), p99 {layer.post_p99_us:.1f} us, or p50 {layer.paced_us:.1f} us when a layer comes every "
        f"millisecond; done p50 {layer.done_us:.0f} us after the call; #wrong {layer.wrong}"
    )
    row = {"layer": asdict(layer), "ratio": layer.ratio, "passed": layer.passed}
    yield Outcome(line=line, row=row, passed=layer.passed, wrong=layer.wrong)


def layer_cost() -> LayerResult:
    """Measures in two fresh processes with a GPU each. Raises ``KVError``."""
    measured, wrong = run_two(_write, _read)
    return LayerResult(wrong=wrong, **measured)


def _layout() -> KVLayout:
    return KVLayout.gqa(num_layers=LAYERS, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)


def _cache(rank: int) -> tuple[KVProcessGroup, KVCache]:
    device, _ = devices(rank)
    kv = current_group(None)
    cache = KVCache.empty(_layout(), PAGES, device=device)
    kv.register(cache, instance=f"rank {rank}")
    return kv, cache


def _write() -> dict[str, Any]:
    kv, cache = _cache(0)
    pages = np.random.default_rng().permutation(PAGES)
    fill(cache, seed=1)
    dist.broadcast(torch.from_numpy(pages), 0)
    theirs = torch.zeros(PAGES, dtype=torch.int64)
    dist.broadcast(theirs, 1)
    row, paced, done = [], [], []
    for turn in range(ROUNDS):
        request = f"run{turn}"
        kv.prefix_tokens(request, 1)
        works = []
        for layer in range(LAYERS):
            began = time.perf_counter()
            works.append(kv.send_layer(request, layer, pages, 1))
            row.append(time.perf_counter() - began)
        for work in works:
            work.wait()
        for layer in range(LAYERS):  # the layers once more: sending a page twice is allowed and changes no byte
            time.sleep(0.001)
            began = time.perf_counter()
            work = kv.send_layer(request, layer, pages, 1)
            paced.append(time.perf_counter() - began)
            work.wait()
            done.append(time.perf_counter() - began)
        kernel, copy = _device_times(kv, pages, theirs) if turn == ROUNDS - 1 else (0.0, 0.0)
        kv.finish(request, 1).wait()
    row, paced, done = (
        times[2 * LAYERS :] for times in (row, paced, done)
    )  # the first two rounds load kernels and map memory
    return {
        "nbytes": 2 * PAGES * _layout().page_nbytes("k"),
        "kernel_us": kernel,
        "copy_us": copy,
        "post_us": 1e6 * statistics.median(row),
        "post_p99_us": 1e6 * float(np.percentile(row, 99)),
        "paced_us": 1e6 * statistics.median(paced),
        "done_us": 1e6 * statistics.median(done),
    }


def _read() -> int:
    kv, cache = _cache(1)
    sent = torch.zeros(PAGES, dtype=torch.int64)
    pages = np.random.default_rng().permutation(PAGES)
    dist.broadcast(sent, 0)
    dist.broadcast(torch.from_numpy(pages), 1)
    source = KVCache.empty(_layout(), PAGES, device=cache.device)
    fill(source, seed=1)
    wrong = 0
    for turn in range(ROUNDS):
        for storage in cache.storages:
            storage.fill_(0xDD)
        torch.cuda.synchronize()
        kv.recv_pages(f"run{turn}", pages, 0).wait()
        wrong += count_wrong(source, cache, sent.to(cache.device), torch.from_numpy(pages).to(cache.device))
    return wrong


def _device_times(kv: KVProcessGroup, pages: Int64Array, theirs: torch.Tensor) -> tuple[float, float]:
    """Microseconds of device time: of the kernel that copies layer 0 into granted pages, and of a plain copy.

    theirs: the granted page ids, int64 [pages].
    """
    assert kv._verbs is not None
    engine, thread = kv._verbs.engine, kv._thread
    assert thread is not None
    connection = thread.call(lambda: engine.connection(1))
    local = engine.scheduler._local
    assert local is not None
    table = BaseAddressTable(engine.group_map.plan(0, (0,), 1), local, connection)
    group = table.groups[0]
    (first, count), *_ = group.ranges([0])
    ours, granted = torch.from_numpy(pages).to(local.device), theirs.to(local.device)
    jobs = page_copies.CopyJobs(
        table=group.table,
        geometry=group.geometry,
        first_job=first,
        num_jobs=count,
        start=0,
        limit_tokens=PAGES * 16,
        errors=page_copies.error_words(),
        blocks=132,
    )

    def kernel() -> None:
        page_copies.copy_pages(jobs, ours, granted)

    size = 2 * PAGES * _layout().page_nbytes("k")
    here, there = devices(0)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for device in (here, there))
    target.copy_(source)  # the first copy enables peer access
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(IN_A_ROW):
                kernel()

    def copies() -> None:
        for _ in range(IN_A_ROW):
            target.copy_(source, non_blocking=True)

    with torch.cuda.stream(stream):
        return _time(graph.replay, stream), _time(copies, stream)


def _time(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Microseconds of one of the `IN_A_ROW` that ``run`` enqueues on ``stream``; the best of five runs."""
    best = float("inf")
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # so that the host has enqueued everything before the GPU starts on it
        began.record(stream)
        run()
        ended.record(stream)
        ended.synchronize()
        best = min(best, 1e3 * began.elapsed_time(ended) / IN_A_ROW)
    return best
