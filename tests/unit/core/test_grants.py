"""Grants between two loops without threads: what is bound, what is left to Python, and hostile bodies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.notices import ended_ops, kinds
from tests.helpers.records import tell
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core import steering
from torchkv.core.device import NO_GATE
from torchkv.core.loop import mailbox
from torchkv.core.loop.codes import BOUND, GRANT, GRANTED, NEWS, OP_DONE, RECEIVED, SENT, STRAY, WAITING, WRITTEN
from torchkv.core.loop.events import emit, event_room
from torchkv.core.loop.grants import IDS_AT
from torchkv.core.loop.limits import MAX_FLOWS, MAX_GRANTED, MAX_PREFIX, UNPACKINGS
from torchkv.core.loop.state.peers import Grant
from torchkv.protocol.messages import name_hashes


@pytest.mark.parametrize("granted_first", [False, True])
@pytest.mark.parametrize("limits", [{}, {"turn": 1, "window": 2}], ids=["wide", "narrow"])
def test_a_request_that_waits(granted_first: bool, limits: dict[str, int]) -> None:
    """The grant may come before its ops are started, and before it is finished."""
    pair = Pair(**limits)
    flow = pair.receive(3)
    send = pair.wait()
    if granted_first:
        pair.grant(flow, [6, 1, 4])
        assert kinds(pair.run()[0]) == [BOUND]
    op = pair.start(send, [2, 7, 0])
    pair.writer.sends.finish(send, 3, b"aux")
    if not granted_first:
        assert pair.run() == ([], [])
        pair.grant(flow, [6, 1, 4])
    told, heard = pair.run()
    assert kinds(told) == ([OP_DONE, SENT] if granted_first else [BOUND, OP_DONE, SENT])
    assert kinds(heard) == [RECEIVED]
    assert pair.writer.sends.op_results([op]) == ([3 * 3 * PAGE], 9)
    peer_flow, generation, _, pages, slot = pair.writer.sends.bound(send)
    assert (peer_flow, generation, pages.tolist(), slot) == (flow, 1, [6, 1, 4], None)
    expected = np.full_like(pair.dst, 0xAB)
    expected[:, [6, 1, 4]] = pair.src[:, [2, 7, 0]]
    assert (pair.dst == expected).all()


def test_ops_begin_in_their_order() -> None:
    pair = Pair(turn=1)
    flow, send = pair.receive(3), pair.wait()
    ops = [pair.start(send, [page], start=page) for page in (0, 1, 2)]
    pair.grant(flow, [3, 4, 5])
    told, _ = pair.run()
    assert ended_ops(told) == ops


@pytest.mark.parametrize(
    ("wait", "granted"),
    [
        ({"name": "other"}, {}),
        ({"writers": 3}, {}),
        ({"max_page": 4}, {}),  # page 4 is none of the receiver's
        ({}, {"prefix_tokens": TOKENS}),
        ({}, {"pages": [1]}),  # fewer than were sent
        ({}, {"pages": [1, -1]}),
    ],
    ids=["name", "writers", "page", "prefix", "too few", "negative"],
)
def test_what_does_not_fit_is_left_to_python(wait: dict[str, object], granted: dict[str, object]) -> None:
    pair = Pair()
    flow, send = pair.receive(2), pair.wait(**wait)
    pair.start(send, [0, 1])
    pair.grant(flow, **{"pages": [1, 4], **granted})
    told, heard = pair.run()
    assert kinds(told) == [GRANTED]
    assert heard == []
    assert (pair.dst == 0xAB).all()
    assert pair.writer.world["sends"][send]["state"] == WAITING
    body = pair.writer.peers.granted(1, flow, 1)
    assert body is not None
    assert (body.name, body.pages.tolist()) == (b"name", granted.get("pages", [1, 4]))
    with pair.writer.runner.standing_still():
        pair.writer.settle()
        assert pair.writer.sends.take_back(send, []) is False
    assert not pair.writer.world["buckets"].any()


def meet(
    pair: Pair,
    pages: list[int],
    *,
    name: str = "name",
    writers: int = 1,
    max_page: int = 8,
    start: int = 0,
    prefixed: bool = False,
) -> Any:
    """A first verb that looks for its grant: the flow and the op, or None."""
    positions, given = np.arange(pair.layers, dtype=np.int64), np.array(pages, dtype=np.int64)
    how = (start, NO_GATE, 0)
    grant = {"hashes": name_hashes(name), "writers": writers, "prefixed": prefixed}
    num_pages = pair.src.shape[1]
    return pair.writer.sends.meet(
        pair.way(max_page), positions, given, given.copy(), num_pages, *how, **grant, serial=0, begun=0
    )


def hear(pair: Pair) -> None:
    """Both loops go on, and nobody takes what they tell."""
    while pair.writer.runner.step() | pair.reader.runner.step():
        pass


def leave(pair: Pair) -> None:
    """Python has seen what was told, and has left the grants."""
    assert kinds(pair.writer.events.take(leave_grants=True)) == []


@pytest.mark.parametrize("left", ["", "other", "other, name"])
@pytest.mark.parametrize("prefix", [0, 3 * TOKENS])
def test_a_first_verb_meets_its_grant(prefix: int, left: str) -> None:
    """The loop has told of it, and of another one; Python need not know any more of the first."""
    pair = Pair()
    flow, other = pair.receive(3), pair.receive(2, generation=2)
    pair.grant(other, [0, 2], name="other")
    hear(pair)
    if left == "other":
        leave(pair)
    pair.grant(flow, [6, 1, 4], prefix_tokens=prefix)
    hear(pair)
    if left == "other, name":
        leave(pair)
    met = meet(pair, [2, 7, 0], prefixed=True)
    assert met is not None
    send, op = met
    peer_flow, generation, behind, pages, _ = pair.writer.sends.bound(send)
    assert (peer_flow, generation, behind, pages.tolist()) == (flow, 1, prefix, [6, 1, 4])
    pair.writer.sends.finish(send, 3, b"aux")
    told, heard = pair.run()
    claimed = [] if left == "other, name" else [NEWS]
    assert kinds(told) == [GRANTED, *claimed, OP_DONE, SENT]
    assert pair.writer.peers.granted(1, *told[0].words[1:3]).name == b"other"
    assert kinds(heard) == [RECEIVED]
    assert pair.writer.sends.op_results([op]) == ([3 * 3 * PAGE], 9)
    expected = np.full_like(pair.dst, 0xAB)
    expected[:, [6, 1, 4]] = pair.src[:, [2, 7, 0]]
    assert (pair.dst == expected).all()
    assert meet(pair, [2, 7, 0]) is None  # a grant is for one request


@pytest.mark.parametrize(
    ("verb", "granted"),
    [
        ({"name": "nobody"}, {}),
        ({"writers": 3}, {}),
        ({"max_page": 4}, {}),  # page 4 is none of the receiver's
        ({}, {"prefix_tokens": TOKENS}),
        ({"prefixed": True}, {"prefix_tokens": -TOKENS}),
        ({"prefixed": True}, {"prefix_tokens": MAX_PREFIX + 1}),
        ({}, {"pages": [1]}),  # fewer than are sent
        ({"start": 1}, {}),
        ({}, {"pages": [1, -1]}),
        ({}, {"again": True}),
        ({}, {"ended": True}),
    ],
    ids=[
        "name",
        "writers",
        "page",
        "prefix",
        "negative prefix",
        "huge prefix",
        "too few",
        "start",
        "negative",
        "two of a name",
        "ended",
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_what_does_not_meet_is_left_to_python(verb: dict[str, Any], granted: dict[str, Any], left: bool) -> None:
    pair = Pair()
    granted = granted.copy()
    again, ended = granted.pop("again", False), granted.pop("ended", False)
    flow = pair.receive(2)
    pair.grant(flow, **{"pages": [1, 4], **granted})
    hear(pair)
    if left:
        leave(pair)
    if again:
        pair.grant(pair.receive(2, generation=2), [2, 3])
    hear(pair)
    if ended:  # the receiver has ended the request, and uses the slot for the next one
        pair.reader.receives.close(flow)
        pair.reader.receives.free(flow)
        later = pair.receive(2, generation=9)
        assert later == flow
        pair.grant(later, [5, 6])
    free = len(pair.writer.sends._free), len(pair.writer.sends._free_ops)
    assert meet(pair, [0, 1], **verb) is None
    assert (len(pair.writer.sends._free), len(pair.writer.sends._free_ops)) == free
    assert not pair.writer.world["sends"]["state"].any()  # type: ignore[call-overload]
    told, _ = pair.run()
    assert kinds(told) == [GRANTED] * (2 if again or ended else 1)
    assert (pair.dst == 0xAB).all()


def test_claimed_grants_make_room_for_others() -> None:
    """Also those that are claimed before earlier ones."""
    pair = Pair()
    names = [str(number) for number in range(4)]
    for number, name in enumerate(names, 1):
        pair.grant(pair.receive(1, generation=number), [number], name=name)
    hear(pair)
    leave(pair)
    world = pair.writer.world
    for name, head in (("1", 0), ("3", 0), ("0", 2), ("2", 4)):
        assert meet(pair, [0], name=name) is not None
        assert (world["unclaimed_head"], world["unclaimed_tail"]) == (head, 4)
    assert not pair.writer.events.has_unclaimed


def test_whose_grant_of_a_name_is_the_first() -> None:
    """Of those that Python has not taken in, and no verb has claimed."""
    pair = Pair()
    name, other = name_hashes("name"), name_hashes("other")
    assert pair.writer.sends.whose(name) is None
    for number in (1, 2):
        pair.grant(pair.receive(1, generation=number), [number], name="name")
        hear(pair)
        assert pair.writer.sends.whose(name) == 1
        if number == 1:
            leave(pair)
            assert pair.writer.sends.whose(name) == 1
    assert pair.writer.sends.whose(other) is None
    pair.writer.events.take()
    assert pair.writer.sends.whose(name) is None


def test_what_a_peer_has_granted_ends_with_it() -> None:
    """Another one may have its mailbox then."""
    pair = Pair()
    for number, name in enumerate(("left", "told"), 1):
        pair.grant(pair.receive(1, generation=number), [number], name=name)
        hear(pair)
        if name == "left":
            leave(pair)
    pair.writer.peers.disconnect(1)
    assert kinds(pair.writer.events.take()) == [NEWS]


def test_a_request_that_waits_makes_python_look_at_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not know of such grants any more."""
    pair = Pair()
    woken: list[int] = []
    monkeypatch.setattr(steering, "wake_driver", woken.append)
    pair.grant(pair.receive(1), [1])
    hear(pair)
    leave(pair)
    pair.writer.heed_grants(False)
    assert not woken
    pair.wait()
    assert len(woken) == 1
    pair.writer.heed_grants(True)
    assert len(woken) == 2


def test_a_first_verb_finds_no_room() -> None:
    pair = Pair()
    pair.grant(pair.receive(1), [1])
    hear(pair)
    pair.writer.sends._free_ops.clear()
    assert meet(pair, [0]) is None
    assert kinds(pair.run()[0]) == [GRANTED]


def test_a_seal_that_does_not_fit_the_grant_is_left_to_python() -> None:
    pair = Pair()
    flow, send = pair.receive(3), pair.wait()
    pair.start(send, [0, 1])
    pair.writer.sends.finish(send, 2, b"")
    pair.grant(flow, [1, 4, 5])
    assert kinds(pair.run()[0]) == [GRANTED]


def test_a_grant_is_heard_although_kernels_have_to_make_room_for_what_came_before_it() -> None:
    """When Python has to know all that was told. What came before is heard in its turn."""
    pair = Pair()
    flow, send = pair.receive(2), pair.wait()
    tell(pair.reader, 0, head=WRITTEN)
    pair.grant(flow, [1, 4])
    while pair.reader.runner.step():
        pass
    world = pair.writer.world
    world["unpack_tail"] += UNPACKINGS
    with pair.writer.runner.standing_still():
        assert pair.writer.settle()
        assert kinds(pair.writer.events.take()) == [BOUND]
        world["unpack_tail"] -= UNPACKINGS
    op = pair.start(send, [2, 7])
    told, _ = pair.run()
    assert kinds(told) == [OP_DONE, STRAY]
    assert pair.writer.sends.op_results([op]) == ([2 * 3 * PAGE], 6)


def test_a_loop_that_can_tell_no_more_says_so() -> None:
    """Python takes what it has told, and has it go on."""
    pair = Pair()
    flow, _ = pair.receive(2), pair.wait()
    pair.grant(flow, [1, 4])
    while pair.reader.runner.step():
        pass
    with pair.writer.runner.standing_still():
        while event_room(pair.writer.world):
            emit(pair.writer.world, NEWS, 0, 0)
        assert not pair.writer.settle()
        assert set(kinds(pair.writer.events.take())) == {NEWS}
        assert pair.writer.settle()
        assert kinds(pair.writer.events.take()) == [BOUND]


def test_each_name_meets_its_grant() -> None:
    """Many names, so that they share buckets; some are taken back, and the others still found."""
    pair = Pair(layers=1, pages=200)
    dice = random.Random()
    names = [f"request {i}" for i in range(200)]
    sends = {name: pair.wait(name=name) for name in names}
    for i, name in enumerate(names):
        pair.start(sends[name], [i])
    dice.shuffle(names)
    for name in names[100:]:
        with pair.writer.runner.standing_still():
            pair.writer.settle()
            pair.writer.sends.take_back(sends[name], [])
    for i, name in enumerate(names):
        pair.grant(pair.receive(1, generation=i + 1), [i], name=name)
        told, _ = pair.run()
        assert kinds(told) == ([BOUND, OP_DONE] if i < 100 else [GRANTED])
        if i < 100:
            assert told[0].index == sends[name]
    pages = [int(name.split()[1]) for name in names[:100]]
    assert (pair.dst[0, :100] == pair.src[0, pages]).all()
    assert (pair.dst[0, 100:] == 0xAB).all()


def test_whom_the_loop_has_not_told() -> None:
    pair = Pair(window=0)
    flow = pair.receive(1)
    pair.grant(flow, [1])
    pair.run()
    with pair.reader.runner.standing_still():
        pair.reader.settle()
        assert pair.reader.receives.untold(flow) == ([0], False)
        assert pair.reader.receives.untold(flow) == ([], False)
    pair.reader.world["window"] = 8
    assert pair.run() == ([], [])


def test_the_slot_of_an_ended_request_says_nothing() -> None:
    pair = Pair()
    flow = pair.receive(1)
    pair.grant(flow, [1])
    pair.run()
    assert pair.writer.peers.granted(1, flow, 2) is None
    assert pair.writer.peers.granted(1, -1, 1) is None
    assert pair.writer.peers.granted(1, MAX_FLOWS, 1) is None
    assert pair.writer.peers.granted(7, flow, 1) is None


WORDS = st.one_of(st.integers(-3, 12), st.integers(-(1 << 63), (1 << 63) - 1))


@settings(max_examples=200, deadline=None)
@given(
    words=st.dictionaries(st.sampled_from(sorted(Grant.__annotations__)), WORDS),
    ids=st.lists(WORDS, max_size=4),
    flow=st.one_of(st.integers(0, MAX_FLOWS + 2), st.integers(0, (1 << 63) - 1)),
)
def test_no_body_crashes_the_writer(words: dict[str, int], ids: list[int], flow: int) -> None:
    """Whatever a peer writes into its slot: it is bound with page ids that exist, or left to Python."""
    pair = Pair(layers=1)
    receive, send = pair.receive(2), pair.wait()
    pair.start(send, [0, 1])
    pair.grant(receive, [3, 5])
    pair.run()
    pair = pair_again(pair, receive, words, ids)
    tell(pair.reader, 0, head=GRANT, flows=flow, generation=words.get("generation", 1))
    told, _ = pair.run()
    for notice in told:
        assert notice.kind in (BOUND, GRANTED, OP_DONE)
        if notice.kind == GRANTED:
            pair.writer.peers.granted(1, flow & 0xFFFFFFFF, words.get("generation", 1))
    assert 0 <= int(pair.writer.world["sends"][send]["granted"]) <= MAX_GRANTED * TOKENS


def pair_again(pair: Pair, flow: int, words: dict[str, int], ids: list[int]) -> Pair:
    """The same slot with other words, and a fresh send that waits."""
    at = mailbox.GRANTS_AT + flow * mailbox.GRANT_SLOT
    slot = np.frombuffer(pair.reader.peers._bytes, np.int64, IDS_AT // 8 + len(ids), at)
    for number, name in enumerate(Grant.__annotations__):
        if name in words:
            slot[number] = words[name]
    slot[IDS_AT // 8 :] = ids
    pair.start(pair.wait(), [0, 1])
    return pair
