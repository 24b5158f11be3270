"""Intervals against a plain set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchkv.protocol.coverage import Coverage

_SPAN = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(_SPAN, max_size=30), _SPAN)
def test_behaves_like_a_set(spans: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    coverage, model = Coverage(), set[int]()
    for lo, hi in spans:
        coverage.add(lo, hi)
        model |= set(range(lo, hi))
    assert {i for lo, hi in coverage for i in range(lo, hi)} == model
    assert coverage.end == (max(model) + 1 if model else 0)
    missing = [i for i in range(*asked) if i not in model]
    assert coverage.gap(*asked) == (missing[0] if missing else None)


@given(st.lists(_SPAN, max_size=30), st.randoms())
def test_order_and_repetition_change_nothing(spans: list[tuple[int, int]], random: object) -> None:
    first, second = Coverage(), Coverage()
    for span in spans:
        first.add(*span)
    again = spans + spans
    random.shuffle(again)  # type: ignore[attr-defined]
    for span in again:
        second.add(*span)
    assert list(first) == list(second)


@given(st.lists(_SPAN, max_size=30))
def test_intervals_stay_sorted_disjoint_and_merged(spans: list[tuple[int, int]]) -> None:
    coverage = Coverage()
    for span in spans:
        coverage.add(*span)
    flat = [edge for interval in coverage for edge in interval]
    assert flat == sorted(set(flat)), "touching intervals must have become one"
