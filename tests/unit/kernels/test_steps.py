"""The steps in which a pair's words are copied."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.kernels.steps import MOST, SIDE_BY_SIDE, Steps, steps_of
from torchkv.layout.plan_segment import StridedRuns

Places = list[tuple[int, int, int]]  # of each word: its place in the source, in the destination, and in a stage


def words(rows: StridedRuns, src_unit: int, dst_unit: int) -> Places:
    """All words of a pair, in the order of a stage."""
    found: Places = []
    for a in range(rows.n0):
        for b in range(rows.n1):
            for column in range(rows.run // dst_unit):
                src, dst = a * rows.s0 + b * rows.s1, a * rows.d0 + b * rows.d1
                found.append((src + column * src_unit, dst + column * dst_unit, len(found)))
    return found


def stepped(rows: StridedRuns, steps: Steps, src_unit: int, dst_unit: int) -> Places:
    """The same words, as a kernel finds them."""
    per_row = rows.run // dst_unit
    found: Places = []
    for step in range(steps.number):
        for a in range(steps.n0):
            for b in range(steps.n1):
                for column in range(steps.per_row):
                    src = a * rows.s0 + b * rows.s1 + column * src_unit + step * steps.src
                    dst = a * rows.d0 + b * rows.d1 + column * dst_unit + step * steps.dst
                    found.append((src, dst, (a * rows.n1 + b) * per_row + column + step * steps.words))
    return found


@st.composite
def rows(draw: st.DrawFn) -> tuple[StridedRuns, int, int]:
    counts = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
    src_unit, dst_unit = draw(st.sampled_from([(16, 16), (4, 4), (16, 8), (8, 16), (1, 1)]))
    n0, n1, per_row = draw(counts), draw(counts), draw(st.sampled_from([1, 3, 8, 32, 33, 64, 144]))
    inner = [per_row * unit + unit * draw(st.integers(0, 3)) for unit in (src_unit, dst_unit)]
    outer = [n1 * stride + draw(st.integers(0, 3)) * 16 for stride in inner]
    return StridedRuns(n0, outer[0], outer[1], n1, inner[0], inner[1], per_row * dst_unit), src_unit, dst_unit


@settings(max_examples=200, deadline=None)
@given(rows())
def test_all_steps_together_are_all_words(given: tuple[StridedRuns, int, int]) -> None:
    steps = steps_of(given[0], src_unit=given[1], dst_unit=given[2])
    assert 1 <= steps.number <= MOST
    assert sorted(stepped(given[0], steps, *given[1:])) == sorted(words(*given))


def of(n0: int, n1: int, per_row: int) -> Steps:
    return steps_of(StridedRuns(n0, 1 << 20, 1 << 20, n1, 1 << 16, 1 << 16, 16 * per_row), src_unit=16, dst_unit=16)


def test_a_warp_moves_what_lies_side_by_side() -> None:
    assert of(1, 1, 2048).number == MOST
    assert of(1, 16, 32) == Steps(MOST, 1, 2, 32, 2 << 16, 2 << 16, 64)
    assert of(1, 1, 4 * SIDE_BY_SIDE).number == 4
    assert of(1, 1, SIDE_BY_SIDE).number == of(1, 3, SIDE_BY_SIDE + 1).number == 1
    assert of(8, 1, SIDE_BY_SIDE) == Steps(MOST, 1, 1, SIDE_BY_SIDE, 1 << 20, 1 << 20, SIDE_BY_SIDE)
    assert of(1, 16, 4).number == 2, "of eight steps, none has 32 words side by side"


def test_fewer_steps_if_more_will_not_do() -> None:
    whole = StridedRuns(1, 0, 0, 1, 0, 0, 16 * 2048)
    few = steps_of(whole, src_unit=16, dst_unit=16, will_do=lambda steps: steps.words >= 1024)
    assert (few.number, few.words) == (2, 1024)
    assert steps_of(whole, src_unit=16, dst_unit=16, will_do=lambda steps: False).number == 1
