"""What needs one process only: planning, and the cost of posting a verb."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchkv.layout import KVLayout
from torchkv.plan import compile_plan, expand, page_pairs, pair_offsets
from torchkv.transport import Int64Array

__all__ = ["PlanResult", "plan_rate"]

REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Planning ``descriptors`` descriptors, in microseconds, against nested Python loops over the same."""

    descriptors: int
    numpy_us: float
    loops_us: float

    @property
    def ratio(self) -> float:
        return self.loops_us / self.numpy_us


def plan_rate(num_pages: int = 8192) -> PlanResult:
    """Head slices of ``num_pages`` pages of 16 tokens: 16 descriptors a page. Checks that both agree."""
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
    slab = compile_plan(0, {0: writer}, reader).slabs[0]
    random = np.random.default_rng()
    src_pages, dst_pages = random.permutation(num_pages), random.permutation(num_pages)
    src_stride, dst_stride = writer.page_nbytes("k"), reader.page_nbytes("k")

    def fast() -> tuple[Int64Array, Int64Array, Int64Array]:
        pairs = page_pairs(
            slab,
            num_src_pages=num_pages,
            start=0,
            limit_tokens=num_pages * page_size,
            src_page_size=page_size,
            dst_page_size=page_size,
        )
        return expand(slab, *pair_offsets(slab, pairs, src_pages, dst_pages, src_stride, dst_stride))

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
