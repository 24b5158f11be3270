"""How long planning a transfer takes: descriptors of head slices, with numpy and with nested Python loops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import compile_plan

__all__ = ["PlanResult", "plan_rate", "run"]

REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Microseconds to compute ``descriptors`` descriptors."""

    descriptors: int
    numpy_us: float
    loops_us: float

    @property
    def ratio(self) -> float:
        """How many times faster numpy is."""
        return self.loops_us / self.numpy_us


def run(repeats: int) -> Iterator[Outcome]:
    """repeats: not used."""
    plan = plan_rate()
    line = (
        f"plan: {plan.descriptors} descriptors in {plan.numpy_us:.0f} us, nested Python loops {plan.loops_us:.0f} us: "
        f"{plan.ratio:.0f}x (gate 100x)"
    )
    yield Outcome(line=line, row={"plan": asdict(plan), "ratio": plan.ratio})


def plan_rate(num_pages: int = 8192) -> PlanResult:
    """For head slices of ``num_pages`` pages of 16 tokens, which make 16 descriptors a page.

    Checks that numpy and the loops give the same descriptors.
    """
    page_size = 16
    writer, reader = (
        KVLayout.gqa(
            num_layers=1,
            num_kv_heads=8,
            head_dim=128,
            page_size=page_size,
            dtype=torch.bfloat16,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        for tp_rank, tp_size in ((0, 1), (1, 4))
    )
    segment = compile_plan(0, {0: writer}, reader).segments[0]
    random = np.random.default_rng()
    src_pages, dst_pages = random.permutation(num_pages), random.permutation(num_pages)
    src_stride, dst_stride = writer.page_nbytes("k"), reader.page_nbytes("k")

    def fast() -> tuple[Int64Array, Int64Array, Int64Array]:
        pairs = page_pairs(
            segment,
            num_src_pages=num_pages,
            start=0,
            limit_tokens=num_pages * page_size,
            src_page_size=page_size,
            dst_page_size=page_size,
        )
        return expand(segment, *pair_offsets(segment, pairs, src_pages, dst_pages, src_stride, dst_stride))

    head_nbytes = 128 * torch.bfloat16.itemsize

    def slow(src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        found = []
        for src_page, dst_page in zip(src_ids, dst_ids, strict=True):
            for token in range(page_size):
                src = src_page * src_stride + (token * 8 + 2) * head_nbytes
                dst = dst_page * dst_stride + token * 2 * head_nbytes
                found.append((src, dst, 2 * head_nbytes))
        return found

    numpy_seconds: list[float] = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        got = fast()
        numpy_seconds.append(time.perf_counter() - began)
    lists = src_pages.tolist(), dst_pages.tolist()
    loop_seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        want = slow(*lists)
        loop_seconds.append(time.perf_counter() - began)
    assert not (np.stack(got, axis=1) != np.array(want)).any(), "the fast plan differs from the loops"
    return PlanResult(
        descriptors=len(got[0]),
        numpy_us=1e6 * statistics.median(numpy_seconds[1:]),
        loops_us=1e6 * statistics.median(loop_seconds),
    )
