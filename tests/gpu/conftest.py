"""Tests on real GPUs: all are marked ``gpu``, and skip with a reason where there are not enough of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "group"))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).parent))

from harness import Ranks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def _ranks() -> Iterator[dict[int, Ranks]]:
    """By size, the ranks that live now: one set at a time, because each rank holds a context on its GPU."""
    living: dict[int, Ranks] = {}
    yield living
    for ranks in living.values():
        ranks.close()


@pytest.fixture
def gpu_ranks(_ranks: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """``gpu_ranks(size)``: a set that lives on for later tests of that size, made anew after a failure."""

    def get(size: int) -> Ranks:
        if size not in _ranks or _ranks[size].broken:
            for other in list(_ranks):
                _ranks.pop(other).close()
            # Streams beyond CUDA's default of 8 queues would wait for one another, held ones included.
            _ranks[size] = Ranks(size, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
        return _ranks[size]

    return get
