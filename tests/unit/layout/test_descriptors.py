"""Descriptors: page pairs, merging of adjacent rows, seals, and planning at scale."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.references.page_transfer import gqa, one_segment
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.pair_plan import compile_plan, first_page_outside, seal_matches
from torchkv.layout.plan_segment import PlanSegment, StridedRuns

# Runs and descriptors


def descriptors(src_pages: list[int], dst_pages: list[int], **strides: int) -> list[tuple[int, int, int]]:
    segment = one_segment(gqa(), gqa())
    pairs = page_pairs(
        segment,
        num_src_pages=len(src_pages),
        start=0,
        limit_tokens=4 * len(dst_pages),
        src_page_size=4,
        dst_page_size=4,
    )
    src, dst = strides.get("src", 64), strides.get("dst", 64)
    ids = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
    spans = expand(segment, *pair_offsets(segment, pairs, *ids, src, dst))
    assert all(array.dtype == np.int64 for array in spans)
    return list(zip(*(array.tolist() for array in spans), strict=True))


def test_trap_runs_split_where_either_side_breaks() -> None:
    assert descriptors([4, 5, 6], [1, 2, 3]) == [(256, 64, 192)]
    assert descriptors([4, 5, 6], [1, 2, 9]) == [(256, 64, 128), (384, 576, 64)]
    assert descriptors([4, 5, 9], [1, 2, 3]) == [(256, 64, 128), (576, 192, 64)]
    assert descriptors([4, 5, 9, 10], [1, 7, 8, 9]) == [(256, 64, 64), (320, 448, 64), (576, 512, 128)]
    assert descriptors([6, 5, 4], [3, 2, 1]) == [(384, 192, 64), (320, 128, 64), (256, 64, 64)]
    assert descriptors([4, 5], [1, 2], src=65) == [(260, 64, 64), (325, 128, 64)], "a gap between pages is no run"


def test_trap_empty_lists_give_no_spans() -> None:
    assert descriptors([], []) == []
    assert descriptors([], [1, 2]) == []
    assert descriptors([1, 2], []) == []
    segment = one_segment(gqa(0, 2), gqa())
    none = np.zeros(0, np.int64)
    assert [len(array) for array in expand(segment, none, none)] == [0, 0, 0]


def test_a_clipped_chunk_keeps_only_what_the_grant_has() -> None:
    """Sender pages of 16 tokens into a grant of 5 pages of 4 tokens: only 4 tokens of the second page are sent."""
    segment = one_segment(gqa(page_size=16), gqa(page_size=4))
    pairs = page_pairs(segment, num_src_pages=1, start=1, limit_tokens=20, src_page_size=16, dst_page_size=4)
    assert pairs.src_index.tolist() == [0]
    assert pairs.src_token.tolist() == [0]
    assert pairs.dst_index.tolist() == [4]
    assert len(pairs) == 1


def test_rows_whose_seams_touch_are_merged() -> None:
    """With some page strides, the last row of a pair and the first row of the next pair are adjacent on both sides."""
    segment = replace(one_segment(gqa(1, 2), gqa()), rows=StridedRuns(1, 0, 0, 2, 10, 20, 8))
    src, dst, length = expand(segment, np.array([0, 18, 90]), np.array([0, 28, 56]))
    assert list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)) == [
        (0, 0, 8),
        (10, 20, 16),
        (28, 48, 8),
        (90, 56, 8),
        (100, 76, 8),
    ]


# Seals


def test_seals() -> None:
    assert seal_matches(5, 16, 5, 16)
    assert not seal_matches(5, 16, 6, 16)
    assert not seal_matches(6, 16, 5, 16)
    assert seal_matches(4, 16, 1, 64)
    assert seal_matches(1, 16, 1, 64)
    assert not seal_matches(0, 16, 1, 64)
    assert not seal_matches(8, 16, 1, 64)
    assert seal_matches(7, 16, 1, 64)
    assert seal_matches(1, 64, 2, 16)
    assert not seal_matches(2, 64, 4, 16)
    assert seal_matches(0, 16, 0, 64)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 8), st.integers(0, 64))
def test_first_page_outside(start: int, count: int, page_size: int, tokens: int) -> None:
    outside = [page for page in range(start, start + count) if page * page_size >= tokens]
    assert first_page_outside(start, count, page_size, tokens) == (outside[0] if outside else None)


# Planning at scale


def nested_loops(
    segment: PlanSegment, src_pages: list[int], dst_pages: list[int], strides: tuple[int, int]
) -> tuple[list[int], list[int], list[int]]:
    """The simplest program: one descriptor for each row of each page."""
    src, dst, length = [], [], []
    rows = segment.rows
    for src_page, dst_page in zip(src_pages, dst_pages, strict=True):
        for row in range(rows.n1):
            src.append(src_page * strides[0] + segment.src_base + row * rows.s1)
            dst.append(dst_page * strides[1] + segment.dst_base + row * rows.d1)
            length.append(rows.run)
    return src, dst, length


def test_131072_descriptors_equal_the_nested_loops(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how much faster planning is than nested Python loops; asserts only that the results are equal."""
    wide = {"num_layers": 80, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    writers = {rank: gqa(rank, 4, **wide) for rank in range(4)}
    segment = compile_plan(2, writers, gqa(1, 2, **wide)).segments[0]
    rng, pages, strides = np.random.default_rng(), 131072 // 16, (8192, 16384)
    src_pages, dst_pages = rng.permutation(pages), rng.permutation(pages)

    def vectorised() -> tuple[np.ndarray, ...]:
        pairs = page_pairs(
            segment, num_src_pages=pages, start=0, limit_tokens=pages * 16, src_page_size=16, dst_page_size=16
        )
        return expand(segment, *pair_offsets(segment, pairs, src_pages, dst_pages, *strides))

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    as_lists = src_pages.tolist(), dst_pages.tolist()
    slow = statistics.median(seconds(lambda: nested_loops(segment, *as_lists, strides)) for _ in range(3))
    fast = statistics.median(seconds(vectorised) for _ in range(25))
    with capsys.disabled():
        print(
            f"\nplanning {pages * 16} descriptors: nested loops {slow * 1e3:.1f} ms, "
            f"numpy {fast * 1e3:.2f} ms, {slow / fast:.0f} times faster"
        )
    expected = nested_loops(segment, *as_lists, strides)
    for got, wanted in zip(vectorised(), expected, strict=True):
        assert len(got) == 131072
        assert got.tolist() == wanted
