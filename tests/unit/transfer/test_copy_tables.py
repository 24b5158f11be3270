"""Which rows of a table are launched: all jobs of the verb's layers and no others, in as few launches as possible."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchkv.transfer.copy_tables import AddressGroup, job_ranges

UNUSED: Any = None  # the geometry is not looked at here


def group(layers: list[int]) -> AddressGroup:
    return AddressGroup(UNUSED, tuple(layers), torch.zeros(len(layers), 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], [(0, 4)]),
        ([0, 1, 2, 3], [1], [(1, 1)]),
        ([0, 1, 2, 3], [0, 2, 3], [(0, 1), (2, 2)]),
        ([0, 0, 1, 1], [1], [(2, 2)]),  # two components a layer
        ([0, 0, 1, 1, 2, 2], [0, 2], [(0, 2), (4, 2)]),
        ([4, 9, 60], [4, 9, 60], [(0, 3)]),  # neighbours in the table need not be in the model
        ([4, 9, 60], [5, 9, 61], [(1, 1)]),  # layers that only other groups have
        ([4, 9, 60], [], []),
        ([], [1], []),
    ],
)
def test_ranges(held: list[int], wanted: list[int], expected: list[tuple[int, int]]) -> None:
    assert group(held).ranges(wanted) == expected


@given(held=st.lists(st.integers(0, 12), max_size=30), wanted=st.sets(st.integers(0, 12)))
def test_ranges_hold_exactly_the_wanted_jobs(held: list[int], wanted: set[int]) -> None:
    made = group(sorted(held))
    ranges = made.ranges(sorted(wanted))
    covered = [job for first, count in ranges for job in range(first, first + count)]
    assert covered == [job for job, layer in enumerate(made.layers) if layer in wanted]
    for (first, count), (after, _) in itertools.pairwise(ranges):
        assert first + count < after, "neighbours were not joined"


@given(edges=st.lists(st.integers(0, 30), max_size=12).map(sorted), splits=st.sets(st.integers(0, 30)).map(sorted))
def test_launches_are_as_long_as_gaps_and_splits_allow(edges: list[int], splits: list[int]) -> None:
    """Jobs are ascending ranges, some of which touch, some of which are empty."""
    jobs = list(map(range, edges[::2], edges[1::2]))
    found = job_ranges(jobs, splits)
    assert [job for first, count in found for job in range(first, first + count)] == list(itertools.chain(*jobs))
    for first, count in found:
        assert count > 0
        assert not set(range(first + 1, first + count)) & set(splits), "two geometries in one launch"
    for (first, count), (after, _) in itertools.pairwise(found):
        assert first + count < after or after in splits, "neighbours were not joined"
