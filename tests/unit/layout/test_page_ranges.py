"""Pages of two tensors that share bytes are found, and only they, against a loop over all pairs of pages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.layout.page_ranges import PageRange, shared_pages


@st.composite
def ranges(draw: st.DrawFn, stride: int | None = None) -> PageRange:
    nbytes = draw(st.integers(1, 6))
    count = draw(st.integers(1, 8))
    if stride is None or stride < nbytes:
        stride = nbytes + draw(st.integers(0, 12))
    return PageRange(draw(st.integers(0, 60)), stride, nbytes, count)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PageRange, PageRange]:
    one = draw(ranges())
    return one, draw(ranges(stride=draw(st.sampled_from([None, one.stride]))))


def share(one: PageRange, i: int, other: PageRange, j: int) -> bool:
    a, b = one.start + i * one.stride, other.start + j * other.stride
    return a < b + other.nbytes and b < a + one.nbytes


@settings(max_examples=3000)
@given(pairs())
def test_against_all_pairs(pair: tuple[PageRange, PageRange]) -> None:
    one, other = pair
    found = shared_pages(one, other)
    if found is None:
        assert not any(share(one, i, other, j) for i in range(one.num_pages) for j in range(other.num_pages))
    else:
        assert 0 <= found[0] < one.num_pages
        assert 0 <= found[1] < other.num_pages
        assert share(one, found[0], other, found[1])


def test_many_pages_cost_little() -> None:
    """K and V in one tensor, page by page, and the same a byte off: with a million pages."""
    many = 1 << 20
    keys, values = PageRange(0, 8192, 4096, many), PageRange(4096, 8192, 4096, many)
    assert shared_pages(keys, values) is None
    assert shared_pages(keys, values._replace(start=4095)) == (0, 0)
    assert shared_pages(keys, values._replace(stride=8193, start=4096)) is not None
