"""Which owner gets which stream, so that what one waits for holds up as few others as possible."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from torchkv.cuda.side_streams import StreamClaim, StreamPool


def test_what_one_owner_waits_for_holds_up_no_other_as_long_as_there_are_streams() -> None:
    pool = StreamPool(["a", "b"])
    first, others, second = pool.claim("r"), pool.claim("q"), pool.claim("r")
    assert first is not None
    assert others is not None
    assert second is not None
    assert [first.stream, others.stream, second.stream] == ["a", "b", "a"]
    assert pool.claim("s") is None
    pool.release(first)
    assert pool.claim("s") is None, "r has another claim"
    pool.release(second)
    claim = pool.claim("s")
    assert claim is not None
    assert claim.stream == "a"


def test_what_comes_out_of_order_waits_on_another_stream() -> None:
    """The later event may depend on the earlier transfer, as on a stream that waits for that transfer's end."""
    pool = StreamPool(["a", "b"])
    streams = []
    for number in (3, 5, 5, 4, 4, 6):
        claim = pool.claim("stream", number)
        streams.append(claim and claim.stream)
    assert streams == ["a", "a", "a", "b", "b", "a"]
    assert pool.claim("stream", 2) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), max_size=60))
def test_no_stream_has_claims_out_of_order_or_of_two_owners(calls: list[tuple[int, int, bool]]) -> None:
    pool = StreamPool(range(3))
    claims: list[StreamClaim[int]] = []
    for owner, order, ends in calls:
        if ends and claims:
            pool.release(claims.pop(order % len(claims)))
        elif (claim := pool.claim(owner, order)) is not None:
            claims.append(claim)
        for stream in range(3):
            here = [claim for claim in claims if claim.stream == stream]
            assert [claim.order for claim in here] == sorted(claim.order for claim in here)
            assert len({claim.owner for claim in here}) <= 1
