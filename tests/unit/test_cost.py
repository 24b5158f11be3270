"""The choice between kernel and copy engines, on both sides of where they are equally fast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkv import cost

MIB = 1 << 20

# GB/s by bytes of a span, as measured.
MEASURED = {32 << 10: 52.2, 128 << 10: 151.9, 512 << 10: 277.4, 2 * MIB: 354.9, 8 * MIB: 380.3}


@pytest.mark.parametrize("span", MEASURED)
def test_the_constants_meet_what_was_measured(span: int) -> None:
    spans = 2048
    predicted = spans * span / cost.engine_seconds(spans=spans, nbytes=spans * span) / 1e9
    assert predicted == pytest.approx(MEASURED[span], rel=0.03)


@pytest.mark.parametrize(
    ("spans", "span", "rate"),
    [(1, 2, 192.8), (2, 2, 261.6), (4, 2, 312.1), (2, 4, 309.1), (2, 8, 338.9), (4, 8, 365.0)],
)
def test_the_constants_meet_what_few_spans_were_measured_at(spans: int, span: int, rate: float) -> None:
    nbytes = spans * span * MIB
    assert nbytes / cost.engine_seconds(spans=spans, nbytes=nbytes) / 1e9 == pytest.approx(rate, rel=0.06)


def test_one_layer_by_the_kernel_takes_what_was_measured() -> None:
    assert cost.kernel_seconds(nbytes=4 * MIB) == pytest.approx(13.3e-6, rel=0.03)


@pytest.mark.parametrize(("spans", "mib"), [(1, 13), (2, 15), (8, 27), (64, 137), (5000, 9780)])
def test_both_sides_of_the_crossover(spans: int, mib: int) -> None:
    assert cost.copy_engine_pays(spans=spans, nbytes=mib * MIB)
    assert not cost.copy_engine_pays(spans=spans, nbytes=mib * MIB * 9 // 10)
    assert not cost.copy_engine_pays(spans=spans, nbytes=0)


def test_it_is_the_average_that_counts() -> None:
    """Two short spans beside long ones do no harm; many do."""
    assert cost.copy_engine_pays(spans=2 + 2, nbytes=2 * (12 * MIB) + 2 * 512)
    assert not cost.copy_engine_pays(spans=2 + 20, nbytes=2 * (12 * MIB) + 20 * 512)


@pytest.mark.parametrize(
    ("pages", "runs"),
    [([7], 1), ([4, 5, 6], 1), ([4, 5, 7], 2), ([6, 5, 4], 3), ([4, 4], 2), ([0, 1, 9, 10, 3], 3)],
)
def test_runs(pages: list[int], runs: int) -> None:
    assert cost.count_runs(np.array(pages, dtype=np.int64)) == runs


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_runs_against_a_loop(pages: list[int]) -> None:
    runs = 0
    previous = None
    for page in pages:
        if previous is None or page != previous + 1:
            runs += 1
        previous = page
    assert cost.count_runs(np.array(pages, dtype=np.int64)) == runs
