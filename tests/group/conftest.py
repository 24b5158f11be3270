"""Sets of ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.harness import Ranks


@pytest.fixture(scope="session")
def _shared() -> Iterator[dict[str, Ranks]]:
    """By name, the ranks that live now. One set at a time: idle processes are cheap, but not free."""
    living: dict[str, Ranks] = {}
    yield living
    for ranks in living.values():
        ranks.close()


@pytest.fixture
def shared_ranks(_shared: dict[str, Ranks]) -> Callable[..., Ranks]:
    """``shared_ranks(name, size, env=...)``: a set that lives on for later tests, made anew after a failure."""

    def get(name: str, size: int, **options: Any) -> Ranks:
        if name in _shared and _shared[name].broken:
            _shared.pop(name).close()
        if name not in _shared:
            for other in list(_shared):
                _shared.pop(other).close()
            _shared[name] = Ranks(size, **options)
        return _shared[name]

    return get


@pytest.fixture
def four(shared_ranks: Callable[..., Ranks]) -> Ranks:
    """Four ranks with UCX's own choice of lanes."""
    return shared_ranks("four", 4)
