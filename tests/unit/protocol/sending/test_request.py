"""What a request's sender knows of what was sent: the quick answer against the slow one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchkv.protocol.actions import SendOp
from torchkv.protocol.sending.request import SenderRequest

_LAYERS = st.sets(st.integers(0, 3)).map(lambda layers: tuple(sorted(layers)))
_CHUNK = st.tuples(_LAYERS, st.integers(0, 2), st.integers(0, 3))


def sent(chunks: list[tuple[tuple[int, ...], int, int]]) -> SenderRequest:
    """chunks: layers, first page, number of pages of each verb."""
    req = SenderRequest("r", 1, "rank 1", 0.0)
    for layers, start, count in chunks:
        req.add_sent(SendOp("r", 1, {}, layers, start, count, None))
    return req


@given(st.lists(_CHUNK, max_size=6), _LAYERS)
def test_all_was_sent_only_if_no_page_is_missing(
    chunks: list[tuple[tuple[int, ...], int, int]], asked: tuple[int, ...]
) -> None:
    req = sent(chunks)
    if req.sent_all_of(asked):
        assert req.sent().first_gap([(asked, [(0, req.num_pages)])]) is None


@given(st.lists(_LAYERS, max_size=6), st.integers(1, 3), _LAYERS)
def test_verbs_that_send_all_pages_are_told_from_those_that_leave_out_a_layer(
    verbs: list[tuple[int, ...]], count: int, asked: tuple[int, ...]
) -> None:
    req = sent([(layers, 0, count) for layers in verbs])
    assert req.sent_all_of(asked) == (set(asked) <= {layer for layers in verbs for layer in layers})
    assert req.sent_all_of(asked) == (req.sent().first_gap([(asked, [(0, count)])]) is None)
