"""Tests on real GPUs: all are marked ``gpu``, and skip with a reason where there are not enough of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.harness import Ranks

HERE = Path(__file__).parent
OPENING = 60.0  # seconds: ranks open GPUs, compile and load, perhaps beside many others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def _ranks() -> Iterator[dict[tuple[int, bool], Ranks]]:
    """By size and apart, the ranks that live now: one set at a time, as each rank holds a context on its GPU."""
    living: dict[tuple[int, bool], Ranks] = {}
    yield living
    for ranks in living.values():
        ranks.close()


@pytest.fixture
def gpu_ranks(_ranks: dict[tuple[int, bool], Ranks]) -> Callable[..., Ranks]:
    """``gpu_ranks(size, apart=False)``: a set that lives on for later tests of its kind, made anew after a failure."""

    def get(size: int, *, apart: bool = False) -> Ranks:
        if (size, apart) not in _ranks or _ranks[size, apart].broken:
            for other in list(_ranks):
                _ranks.pop(other).close()
            # Tests hold more streams at once than CUDA says that it has queues by default; others would wait for them.
            env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
            _ranks[size, apart] = Ranks(size, env=env, apart=apart, opening=OPENING)
        return _ranks[size, apart]

    return get
