"""`try_take` leases what `check` accepts and `take` leases, or nothing at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkv.errors import PageOutOfRange
from torchkv.protocol.receiving.leases import Leases

PAGES, SLOTS = 8, 3
Ids = list[int]


def leases() -> Leases:
    return Leases(num_pages=PAGES, num_slots=SLOTS)


def request(generation: int, pages: Ids, slot: int | None) -> Any:
    ids = np.array(pages, dtype=np.int64)
    return SimpleNamespace(request="r", generation=generation, pages=ids, group=None, state_slot=slot, error=None)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-2, PAGES + 1), max_size=5), st.none() | st.integers(0, SLOTS + 1)), max_size=6
    )
)
def test_both_ways_lease_the_same(wanted: list[tuple[Ids, int | None]]) -> None:
    slow, quick = leases(), leases()
    for generation, (pages, slot) in enumerate(wanted, 1):
        req = request(generation, pages, slot)
        try:
            slow.check(req.pages, slot, "recv_pages")
            slow.take(req)
            accepted = True
        except PageOutOfRange:
            accepted = False
        copied = np.full(len(pages), -7, dtype=np.int64)
        assert quick.try_take(req.pages, copied, slot, generation) == accepted
        if accepted:
            assert copied.tolist() == pages
            quick.hold(req)
        for pool in slow.pools.values():
            assert (slow.marks(pool) == quick.marks(pool)).all()
        assert slow.holders() == quick.holders()


def test_the_memory_may_be_the_caller_s_own() -> None:
    """A list of ids becomes an array that is leased as it is."""
    quick = leases()
    ids = np.array([3, 1, 3], dtype=np.int64)
    assert not quick.try_take(ids, ids, None, 4)
    assert not quick.marks(0).any()
    assert quick.try_take(ids[:2], ids[:2], None, 4)
    assert quick.marks(0).tolist() == [0, 4, 0, 4, 0, 0, 0, 0]


def test_pages_that_another_group_may_lease_are_left_to_check() -> None:
    quick = leases()
    quick.others = SimpleNamespace(check=pytest.fail)
    ids = np.array([1], dtype=np.int64)
    assert not quick.try_take(ids, ids, None, 4)
    assert not quick.marks(0).any()
