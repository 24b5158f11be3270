"""Pages of two tensors that share bytes are found, and only they, against a loop over all pairs of pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.layout.page_ranges import PageRange, meetings, pages_met, shared_pages


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


@st.composite
def caches(draw: st.DrawFn) -> list[PageRange]:
    """Ranges of equally many pages, as the layers of one cache are."""
    count = draw(st.integers(1, 8))
    return [one._replace(num_pages=count) for one in draw(st.lists(ranges(), min_size=1, max_size=3))]


@settings(max_examples=1000)
@given(caches(), caches(), st.data())
def test_pages_that_meet_marked_ones(ours: list[PageRange], theirs: list[PageRange], data: st.DataObject) -> None:
    marked = data.draw(st.lists(st.booleans(), min_size=theirs[0].num_pages, max_size=theirs[0].num_pages))
    pages = np.array(data.draw(st.permutations(range(ours[0].num_pages))), dtype=np.int64)
    found = pages_met(pages, meetings(ours, theirs), np.array(marked, dtype=np.int64))
    for page, met in zip(pages.tolist(), found.tolist(), strict=True):
        all_met = {j for a in ours for b in theirs for j in range(b.num_pages) if marked[j] and share(a, page, b, j)}
        assert met in all_met if all_met else met == -1


def test_layers_that_lie_alike_are_one_case() -> None:
    cache = [PageRange(layer << 20, 4096, 4096, 64) for layer in range(100)]
    assert meetings(cache, cache).tolist() == [[0, 4096, 4096, 4096, 4096, 64]]
    assert len(meetings(cache, [one._replace(start=one.start + (1 << 30)) for one in cache])) == 0


def test_many_pages_cost_little() -> None:
    """K and V in one tensor, page by page, and the same a byte off: with a million pages."""
    many = 1 << 20
    keys, values = PageRange(0, 8192, 4096, many), PageRange(4096, 8192, 4096, many)
    assert shared_pages(keys, values) is None
    assert shared_pages(keys, values._replace(start=4095)) == (0, 0)
    assert shared_pages(keys, values._replace(stride=8193, start=4096)) is not None
