"""Which jobs of a table a verb's layers are: every layer's, no other's, in as few ranges as there are gaps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchkv.jobs import JobGroup

UNUSED: Any = None  # geometry and slab are not looked at here


def group(layers: list[int]) -> JobGroup:
    addresses = torch.zeros(len(layers), 2, dtype=torch.int64)
    return JobGroup(UNUSED, UNUSED, tuple(layers), addresses.numpy(), addresses)


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
