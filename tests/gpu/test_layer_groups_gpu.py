"""Layer groups between caches on GPUs: a page list for each, absent pages, groups that share one block of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.grouped_transfer import transfer


@needs_gpus(1)
@pytest.mark.parametrize("shared", [True, False], ids=["one block", "memory of their own"])
@pytest.mark.parametrize("path", [None, "slices", "staged"])
@pytest.mark.parametrize(
    ("writers", "readers"), [((0, 1), (2,)), ((0,), (2, 3)), ((0, 1), (2, 3))], ids=["2to1", "1to2", "2to2"]
)
def test_each_group_has_its_pages(
    writers: tuple[int, ...],
    readers: tuple[int, ...],
    path: str | None,
    shared: bool,
    gpu_ranks: Callable[[int], Ranks],
) -> None:
    gpu_ranks(4).run(transfer, writers, readers, shared, path, False, path is None, "cuda")


@needs_gpus(1)
def test_a_sender_that_knows_neither_receiver_nor_prefix(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(4).run(transfer, (0, 1), (2, 3), True, None, True, True, "cuda")
