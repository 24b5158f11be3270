"""Coverage against a plain set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchkv.protocol.coverage import Coverage, LayerCoverage

_SPAN = st.tuples(st.integers(0, 40), st.integers(0, 40))
_LAYERS = st.lists(st.integers(0, 5), max_size=8)  # in any order, some twice


def covered(spans: list[tuple[int, int]]) -> Coverage:
    coverage = Coverage()
    for span in spans:
        coverage = coverage.plus(*span)
    return coverage


@given(st.lists(_SPAN, max_size=30), _SPAN)
def test_behaves_like_a_set(spans: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    coverage, model = covered(spans), {i for span in spans for i in range(*span)}
    assert {i for lo, hi in coverage for i in range(lo, hi)} == model
    missing = [i for i in range(*asked) if i not in model]
    assert coverage.gap(*asked) == (missing[0] if missing else None)
    before = list(coverage)
    assert (coverage.plus(*asked) is coverage) == (not missing)
    assert list(coverage) == before, "it has changed"


@given(st.lists(_SPAN, max_size=30), st.randoms())
def test_order_and_repetition_change_nothing(spans: list[tuple[int, int]], random: object) -> None:
    again = spans + spans
    random.shuffle(again)  # type: ignore[attr-defined]
    assert list(covered(spans)) == list(covered(again))


@given(st.lists(_SPAN, max_size=30))
def test_intervals_stay_sorted_disjoint_and_merged(spans: list[tuple[int, int]]) -> None:
    flat = [edge for interval in covered(spans) for edge in interval]
    assert flat == sorted(set(flat)), "touching intervals must have become one"


@given(
    st.lists(st.tuples(_LAYERS, _SPAN), max_size=20),
    st.lists(st.tuples(st.sets(st.integers(0, 6), max_size=4).map(sorted), st.integers(0, 2)), max_size=6),
    st.lists(st.lists(_SPAN.filter(lambda span: span[0] < span[1]), max_size=4), min_size=3, max_size=3),
    st.integers(1, 5),
)
def test_layers_are_told_apart(
    added: list[tuple[list[int], tuple[int, int]]],
    owed: list[tuple[list[int], int]],
    lists: list[list[tuple[int, int]]],
    unit: int,
) -> None:
    """lists: of intervals, in units of ``unit``. Several layers owe one of them, as in a plan."""
    coverage, model = LayerCoverage(), set[tuple[int, int]]()
    for layers, (lo, hi) in added:
        coverage.add(layers, lo, hi)
        model |= {(layer, i) for layer in layers for i in range(lo, hi)}
    missing = [
        (layer, i // unit)
        for layers, which in owed
        for layer in layers
        for lo, hi in lists[which]
        for i in range(lo, hi)
        if (layer, i // unit) not in model
    ]
    found = coverage.first_gap(((layers, lists[which]) for layers, which in owed), unit=unit)
    assert found == min(missing, key=lambda gap: gap[0], default=None)
