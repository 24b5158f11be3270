"""By how much transfers slow down a large matmul on the sending GPU, and which part of that is due to the bytes moved.

Two controls separate the causes. Thread blocks that occupy as many multiprocessors and move nothing show what any
kernel of that size costs. Plain copies by the copy engines, which occupy no multiprocessor, show what the traffic costs
in power and memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.bench.check import count_wrong
from torchkv.bench.gpu import CASES, GpuCase, devices, fill, joined
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup
from torchkv.options import Options

__all__ = ["MatmulResult", "Slowdown", "run", "slowdowns"]

NAMES = ("pages of 16", "slices of 512 B")  # of the GPU cases: one whose pages are copied whole, one with head slices
MATMUL = 8192
MATMULS = 24
PAIRS = 5
SENDS = 120
WARPS = 8  # of a block that only occupies a multiprocessor; a block of the copy kernel has as many
BY_BYTES = 1.03  # gate, with the default number of blocks
COPY = 1 << 30
COPIES = 40  # of `COPY` bytes: a good 100 ms between two H200
# The idle kernels last a millisecond each, about as long as a send, and 100 ms together. One kernel of 100 ms would
# slow the matmul down more than many short ones: a matmul that starts all its blocks at once waits for the few blocks
# that found no free multiprocessor.
SPINS, HOLDS = 300_000, 100

# Waits for what was started beside the matmuls. Raises `KVError` if that ended before the matmuls did.
Finish: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Time of 8192^3 bf16 matmuls beside other work, over their time alone: medians of neighbouring runs.

    sends: beside torchkv's sends. idle_blocks: beside as many blocks that move nothing. copies: beside plain copies to
    the other GPU, at the link's rate. The latter two only with the default number of blocks.
    """

    sends: float
    idle_blocks: float | None = None
    copies: float | None = None

    @property
    def by_bytes(self) -> float | None:
        """The matmul's slowdown by moving bytes, without that by the multiprocessors that the blocks occupy."""
        return None if self.idle_blocks is None else self.sends / self.idle_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulResult:
    """A GPU case with one number of blocks. wrong: bytes of the pages that were sent beside the matmuls."""

    name: str
    blocks: int
    slowdown: Slowdown
    wrong: int

    @property
    def passed(self) -> bool:
        by_bytes = self.slowdown.by_bytes
        return self.wrong == 0 and (by_bytes is None or by_bytes <= BY_BYTES)


def run() -> Iterator[Outcome]:
    for case in (case for case in CASES if case.name in NAMES):
        for result in slowdowns(case):
            row = {"matmul": asdict(result), "wrong": result.wrong, "passed": result.passed}
            yield Outcome(line=_line(result), row=row, passed=result.passed, wrong=result.wrong)


def _line(r: MatmulResult) -> str:
    slow = r.slowdown
    line = f"{r.name}, {r.blocks} blocks: a matmul takes {slow.sends:.3f}x beside these sends"
    if slow.by_bytes is not None:
        line += (
            f", {slow.idle_blocks:.3f}x beside as many idle blocks: the bytes cost {slow.by_bytes:.3f}x "
            f"(gate {BY_BYTES:g}x with the default blocks); beside plain copies at the link's rate {slow.copies:.3f}x"
        )
    return f"{line}; #wrong {r.wrong}"


def slowdowns(case: GpuCase) -> list[MatmulResult]:
    """Measures in two fresh processes, once for each number of blocks that ``case`` names. Raises ``KVError``."""
    found, wrong = run_two(_write, _read, case)
    return [
        MatmulResult(name=case.name, blocks=blocks, slowdown=slow, wrong=bad)
        for blocks, slow, bad in zip(case.gates, found, wrong, strict=True)
    ]


def _write(case: GpuCase) -> list[Slowdown]:
    layout, _, num_pages = case.layouts()
    here, there = devices(0)
    pages = np.random.default_rng().permutation(num_pages)
    found = []
    for blocks in case.gates:
        with joined(case, blocks, layout, here) as (kv, cache):
            fill(cache, seed=blocks)
            dist.broadcast(torch.from_numpy(pages), 0)
            torch.cuda.synchronize()
            kv.send_pages("warm-up", pages, 1).wait()
            kv.finish("warm-up", 1).wait()
            found.append(_slowdown(kv, pages, blocks, here, there))
    return found


def _read(case: GpuCase) -> list[int]:
    writer_layout, layout, num_pages = case.layouts()
    here, _ = devices(1)
    pages = np.random.default_rng().permutation(num_pages)
    sent = torch.zeros(num_pages, dtype=torch.int64)
    wrong = []
    for blocks in case.gates:
        with joined(case, blocks, layout, here) as (kv, cache):
            dist.broadcast(sent, 0)
            kv.recv_pages("warm-up", pages, 0).wait()
            for storage in cache.storages:
                storage.fill_(0xDD)
            torch.cuda.synchronize()
            kv.recv_pages("beside", pages, 0).wait()
            source = KVCache.empty(writer_layout, num_pages, device=here)
            fill(source, seed=blocks)
            wrong.append(count_wrong(source, cache, sent.to(here), torch.from_numpy(pages).to(here)))
    return wrong


def _slowdown(kv: KVProcessGroup, pages: Int64Array, blocks: int, here: torch.device, there: torch.device) -> Slowdown:
    """Called on rank 0, with rank 1 receiving request ``beside``. ``there``: the other rank's GPU."""
    kv.prefix_tokens("beside", 1)
    source = torch.empty(COPY, dtype=torch.uint8, device=here)
    target = torch.empty(COPY, dtype=torch.uint8, device=there)
    scratch = torch.zeros(1, device=here)
    target.copy_(source)  # the first copy enables peer access
    _hold[(1,)](scratch, 1, num_warps=WARPS)  # the first launch compiles it

    def copy() -> None:
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)

    def spin() -> None:
        for _ in range(HOLDS):
            _hold[(blocks,)](scratch, SPINS, num_warps=WARPS)

    def send() -> Finish:
        works = [kv.send_pages("beside", pages, 1, event=_Ready()) for _ in range(SENDS)]
        while not works[0].is_completed():
            time.sleep(0.0001)
        return lambda: _finish(works)

    result = Slowdown(sends=_ratio(here, send))
    if blocks == Options().sm_budget:
        result = replace(
            result,
            idle_blocks=_ratio(here, lambda: _on_side_stream(here, spin)),
            copies=_ratio(here, lambda: _on_side_stream(here, copy)),
        )
    kv.finish("beside", 1).wait()
    return result


# Without annotations: Triton gives them a meaning of its own.
@triton.jit
def _hold(out, spins):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    value = tl.load(out)
    for _ in range(spins):
        value = value * 1.0000001 + 0.5
    tl.store(out, value, mask=value < 0)


class _Ready:
    """An event that has already happened. Without one, a send waits for the matmuls before it in the current stream."""

    def query(self) -> bool:
        return True


def _finish(works: list[Any]) -> None:
    if works[-1].is_completed():
        raise KVError("the sends ended before the matmuls did, so nothing was measured; raise SENDS")
    for work in works:
        work.wait()


def _on_side_stream(device: torch.device, run: Callable[[], None]) -> Finish:
    stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        run()

    def finish() -> None:
        if stream.query():
            raise KVError(
                "the work beside the matmuls ended before they did, so nothing was measured; raise COPIES or HOLDS"
            )
        stream.synchronize()

    return finish


def _ratio(device: torch.device, start: Callable[[], Finish]) -> float:
    """Matmul time beside what ``start`` starts, over matmul time alone: median of the ratios of neighbouring runs.

    Runs alone and beside take turns, because the GPU's clock falls as it gets warm.
    """
    ratios = []
    for _ in range(PAIRS):
        alone, _ = _matmul_seconds(device, lambda: lambda: None)
        beside, finish = _matmul_seconds(device, start)
        finish()
        ratios.append(beside / alone)
    return statistics.median(ratios)


def _matmul_seconds(device: torch.device, start: Callable[[], Finish]) -> tuple[float, Finish]:
    """Seconds of `MATMULS` large bf16 matmuls, and what ``start()``, called after the warm-up, returned."""
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(8):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    finish = start()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(MATMULS):
        torch.mm(a, b, out=out)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3, finish
