"""What copies cost a large matmul that runs on the same GPU beside them, and what part of that is the copies' own.

Two controls tell the parts apart. Blocks that only hold their multiprocessors, and move nothing: what any kernel of so
many blocks costs. And copies of the copy engines, which hold none: what the traffic costs, in power and memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from torchkv.env import Options
from torchkv.errors import KVError
from torchkv.process_group import KVProcessGroup
from torchkv.transport import Int64Array

__all__ = ["Slowdown", "slowdown"]

MATMUL = 8192
MATMULS = 24
PAIRS = 5
SENDS = 120
WARPS = 8  # of a block that holds a multiprocessor; as many as a copy block has
BY_BYTES = 1.03  # at most, with the default number of blocks
COPY = 1 << 30
COPIES = 40  # of `COPY` bytes, a good 100 ms between two H200
# Each about as long as a send: one that lasted would be worse than many, as a matmul whose blocks are all there at once
# then waits for those that found no place.
SPINS, HOLDS = 300_000, 100  # a millisecond, and 100 ms

# Waits for what was started. Raises `KVError` if that ended before the matmuls did.
Finish: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Time of 8192^3 bf16 matmuls beside something, over their time alone: medians of neighbouring runs.

    sends: beside torchkv's sends. idle_blocks: beside as many blocks that do nothing. copies: beside plain copies to
    the other GPU, at the link's rate. The latter two only with the default number of blocks.
    """

    sends: float
    idle_blocks: float | None = None
    copies: float | None = None

    @property
    def by_bytes(self) -> float | None:
        """What moving bytes costs the matmul beyond the multiprocessors that the blocks hold."""
        return None if self.idle_blocks is None else self.sends / self.idle_blocks


def slowdown(kv: KVProcessGroup, pages: Int64Array, blocks: int, here: torch.device, there: torch.device) -> Slowdown:
    """Called on rank 0, with rank 1 receiving request ``beside``. ``there``: the other rank's GPU."""
    kv.prefix_tokens("beside", 1)
    source = torch.empty(COPY, dtype=torch.uint8, device=here)
    target = torch.empty(COPY, dtype=torch.uint8, device=there)
    scratch = torch.zeros(1, device=here)
    target.copy_(source)  # opens the way
    _hold[(1,)](scratch, 1, num_warps=WARPS)  # compiles it

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


# Without types, which Triton would take for its own.
@triton.jit
def _hold(out, spins):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    value = tl.load(out)
    for _ in range(spins):
        value = value * 1.0000001 + 0.5
    tl.store(out, value, mask=value < 0)


class _Ready:
    """Data that have long been there: without it a send would wait for the matmuls before it in the stream."""

    def query(self) -> bool:
        return True


def _finish(works: list[Any]) -> None:
    if works[-1].is_completed():
        raise KVError("the sends ended before the matmuls did: nothing was measured")
    for work in works:
        work.wait()


def _on_side_stream(device: torch.device, run: Callable[[], None]) -> Finish:
    stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        run()

    def finish() -> None:
        if stream.query():
            raise KVError("what runs beside the matmuls ended before they did: nothing was measured")
        stream.synchronize()

    return finish


def _ratio(device: torch.device, start: Callable[[], Finish]) -> float:
    """Alone and beside in turn, because the GPU's clock falls as it gets warm. Median of the ratios of neighbours."""
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
