"""Three ways to list the descriptors of a request's head slices: nested loops, a numpy outer sum, torchkv's planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.plan_segment import PlanSegment

__all__ = ["PLANNERS", "Descriptors", "SliceList"]

Descriptors = tuple[Int64Array, Int64Array, Int64Array]  # source offsets, destination offsets, lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceList:
    """What a planner is given for one layer and component. Strides: bytes from one page to the next."""

    segment: PlanSegment
    src_pages: Int64Array
    dst_pages: Int64Array
    src_stride: int
    dst_stride: int
    page_size: int


def loops(of: SliceList) -> Descriptors:
    """A Python loop over pages, and one over the tokens of each, as in SGLang before pull request 18163."""
    rows, segment = of.segment.rows, of.segment
    src, dst, lengths = [], [], []
    for src_page, dst_page in zip(of.src_pages.tolist(), of.dst_pages.tolist(), strict=True):
        src_at = src_page * of.src_stride + segment.src_base
        dst_at = dst_page * of.dst_stride + segment.dst_base
        for token in range(rows.n1):
            src.append(src_at + token * rows.s1)
            dst.append(dst_at + token * rows.d1)
            lengths.append(rows.run)
    # The transport takes arrays.
    return np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), np.array(lengths, dtype=np.int64)


def outer_sum(of: SliceList) -> Descriptors:
    """Offsets of pages plus offsets of tokens, as in that pull request."""
    rows, segment = of.segment.rows, of.segment
    tokens = np.arange(rows.n1, dtype=np.int64)
    src = (of.src_pages * of.src_stride + segment.src_base)[:, None] + tokens * rows.s1
    dst = (of.dst_pages * of.dst_stride + segment.dst_base)[:, None] + tokens * rows.d1
    return src.ravel(), dst.ravel(), np.full(src.size, rows.run, dtype=np.int64)


def compiled(of: SliceList) -> Descriptors:
    """What torchkv does, in compiled code."""
    pairs = page_pairs(
        of.segment,
        num_src_pages=len(of.src_pages),
        start=0,
        limit_tokens=len(of.dst_pages) * of.page_size,
        src_page_size=of.page_size,
        dst_page_size=of.page_size,
    )
    return expand(
        of.segment, *pair_offsets(of.segment, pairs, of.src_pages, of.dst_pages, of.src_stride, of.dst_stride)
    )


PLANNERS: dict[str, Callable[[SliceList], Descriptors]] = {"loops": loops, "numpy": outer_sum, "torchkv": compiled}
