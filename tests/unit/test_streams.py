"""Who has which stream, so that what one waits for holds up few others."""

from __future__ import annotations

from torchkv.streams import StreamPool

ME, OTHER = object(), object()


def test_what_one_tenant_waits_for_holds_up_no_other_as_long_as_there_are_streams() -> None:
    pool = StreamPool(["a", "b"])
    assert [pool.claim(ME, "r"), pool.claim(OTHER, "r"), pool.claim(ME, "r")] == ["a", "b", "a"]
    assert pool.claim(ME, "s") is None
    pool.release("a", ME, "r")
    assert pool.claim(ME, "s") is None, "there was more for r"
    pool.release("a", OTHER, "r")
    pool.release("elsewhere", ME, "r")
    assert pool.claim(ME, "s") is None, "neither was there"
    pool.release("a", ME, "r")
    assert pool.claim(ME, "s") == "a"


def test_a_tenant_that_hangs_keeps_its_stream_to_itself_as_long_as_it_can() -> None:
    pool = StreamPool(["a", "b"])
    assert [pool.share(ME, "hangs"), pool.share(ME, "hangs")] == ["a", "a"]
    for turn in range(5):  # however much others have to do at once
        for number in range(turn):
            assert pool.share(ME, number) == "b"
        assert pool.share(ME, "hangs") == "a"
        for number in range(turn):
            pool.release("b", ME, number)
    assert pool.share(ME, "hangs, too") == "b"
    assert pool.share(ME, "third") == "b", "that has waited less long"


def test_an_owner_that_leaves_takes_all_its_tenants_with_it() -> None:
    pool = StreamPool(["a", "b", "c"])
    assert [pool.claim(ME, "r"), pool.claim(OTHER, "r"), pool.claim(ME, "s")] == ["a", "b", "c"]
    pool.leave(ME)
    assert [pool.claim(OTHER, one) for one in ("r", "s", "t", "u")] == ["b", "a", "c", None]
