"""Grants that loops send through the network, step by step: what binds, once; what is in parts, and what lies."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the fake GPU knows its kernels by their parameters, which Triton tells")

from tests.helpers.apart import LAYERS, PAGES, TAGS, Apart
from tests.helpers.notices import kinds
from torchkv.core.device import NO_GATE
from torchkv.core.loop.codes import BOUND, CUT, GRANT, GRANTED, HELLO, NEWS, OP_DONE, RECEIVED, SENT
from torchkv.core.loop.grants import IDS_AT, NAME_AT
from torchkv.core.loop.limits import MAX_FLOWS, MAX_GRANTED, MESSAGE_NBYTES, RECORD_NBYTES
from torchkv.core.loop.mailbox import GRANT_SLOT
from torchkv.core.loop.state.world import GRANT_NBYTES
from torchkv.protocol.messages import name_hashes

EDGE = (MESSAGE_NBYTES - RECORD_NBYTES - IDS_AT) // 8  # page ids that fit into one message


def met(seed: int = 0, **limits: int) -> Apart:
    apart = Apart(seed, **limits)
    apart.meet()
    apart.run(20)  # the last answers
    return apart


def untold(apart: Apart, flow: int) -> list[int]:
    with apart.reader.runner.standing_still():
        apart.reader.settle()
        return apart.reader.receives.untold(flow)[0]


def told_in_a_message(apart: Apart, flow: int, generation: int) -> bool:
    """Python of the writer gets the grant in a message, too. Whether it is new."""
    with apart.writer.runner.standing_still():
        apart.writer.settle()
        return apart.writer.peers.takes_grant(1, flow, generation)


@pytest.mark.parametrize("granted_first", [False, True])
@pytest.mark.parametrize("part", [400, 1096, MESSAGE_NBYTES - RECORD_NBYTES])
def test_a_request_that_waits(granted_first: bool, part: int) -> None:
    """The grant may come before its ops are started. Every byte, in parts of any length."""
    apart = met(turn=300, part=part)
    flow, send = apart.receive(3), apart.wait()
    if granted_first:
        apart.grant(flow, [6, 1, 4])
        assert kinds(apart.run()[0]) == [BOUND]
    apart.start(send, [2, 7, 0])
    apart.writer.sends.finish(send, 3, b"aux")
    if not granted_first:
        assert apart.run(20) == ([], [])
        apart.grant(flow, [6, 1, 4])
    told, heard = apart.run()
    assert kinds(told) == ([OP_DONE, SENT] if granted_first else [BOUND, OP_DONE, SENT])
    assert kinds(heard) == [RECEIVED]
    peer_flow, generation, prefix, pages, _ = apart.writer.sends.bound(send)
    assert (peer_flow, generation, prefix, pages.tolist()) == (flow, 1, 0, [6, 1, 4])
    expected = torch.full_like(apart.dst, 0xAB)
    expected[:, [6, 1, 4]] = apart.src[:, [2, 7, 0]]
    assert torch.equal(apart.dst, expected)


@pytest.mark.parametrize("count", [1, EDGE - 1, EDGE, EDGE + 1, 5000, MAX_GRANTED])
def test_grants_of_many_pages(count: int) -> None:
    apart = met(count)
    ids = random.Random(count).choices(range(PAGES), k=count)
    flow, send = apart.receive(count), apart.wait("x" * 1024)
    apart.grant(flow, ids, "x" * 1024)
    assert kinds(apart.run(40)[0]) == [BOUND]
    assert apart.writer.sends.bound(send)[3].tolist() == ids


def test_a_grant_that_nobody_waits_for_is_left_to_python() -> None:
    apart = met(part=500)
    flow = apart.receive(3)
    apart.grant(flow, [6, 1, 4], "näme", prefix_tokens=32)
    told, _ = apart.run(20)
    assert kinds(told) == [GRANTED]
    body = apart.writer.peers.granted(1, flow, 1, network=True)
    assert body is not None
    assert (body.name, body.pages.tolist(), body.prefix_tokens) == ("näme".encode(), [6, 1, 4], 32)
    assert apart.writer.peers.granted(1, flow, 1) is None, "nothing is mapped"
    assert apart.writer.peers.granted(1, flow, 2, network=True) is None
    assert apart.writer.peers.granted(1, MAX_FLOWS, 1, network=True) is None


# ---------------------------------------------------------------- greetings


@pytest.mark.parametrize("seed", range(8))
def test_who_makes_its_lane_later_is_heard(seed: int) -> None:
    """What was sent before is lost, as nobody has its tag; grants wait for an answer."""
    apart = Apart(seed, reads=False)
    apart.run(seed)
    assert not apart.writer.peers.hears(1)
    apart.read()
    apart.meet()
    apart.wait()
    apart.grant(apart.receive(1), [1])
    assert kinds(apart.run(40)[0]) == [BOUND]


def test_greetings_end() -> None:
    apart = met()
    apart.run(20)
    messages = apart.network.messages
    apart.run(50)
    assert apart.network.messages == messages <= 6
    for _ in range(3):  # a peer that asks again is answered, once each time
        apart.message(apart.record(head=HELLO, lo=1))
        apart.run(10)
    assert apart.network.messages == messages + 3


def test_who_has_a_mailbox_is_not_greeted() -> None:
    """It may greet, because it has made its lane before it has mapped the mailbox. Their records stay in order."""
    apart = met()
    apart.reader.peers.connect(0, apart.writer.peers.descriptor())
    assert not apart.reader.peers.hears(0), "it reads no mailbox yet"
    apart.writer.peers.connect(1, apart.reader.peers.descriptor())
    assert apart.reader.peers.hears(0)
    messages = apart.network.messages
    for tag, to in ((TAGS[0], 0), (TAGS[1], 1)):
        apart.message(apart.record(head=HELLO, lo=1) + b"\x00" * 100, tag, to=to)
    apart.run(10)
    apart.wait()
    apart.grant(apart.receive(1), [1])
    assert kinds(apart.run(40)[0]) == [BOUND]
    assert apart.network.messages == messages


def test_a_greeting_to_a_broken_connection_is_forgotten() -> None:
    """Else the loop would never sleep again."""
    apart = Apart()
    apart.channels[0].lose("cut")
    apart.run(10)
    assert int(apart.writer.world["due_head"]) == int(apart.writer.world["due_tail"])
    assert not apart.writer.peers.hears(1)


def test_who_gets_long_messages_in_pieces_is_sent_none() -> None:
    apart = Apart()
    apart.network.pieces = 1.0
    apart.run(50)
    assert not apart.writer.peers.hears(1)
    assert not apart.reader.peers.hears(0)
    flow = apart.receive(1)
    apart.start(apart.send(flow, [1]), [2])
    assert kinds(apart.run()[0]) == [OP_DONE], "records are whole"


def test_a_grant_that_comes_in_pieces_is_missed_and_told_again() -> None:
    """Its receiver's Python takes everything back; another grant may be whole, and goes in a message all the same."""
    apart = met()
    apart.network.pieces = 1.0
    flow = apart.receive(1)
    apart.wait()
    apart.grant(flow, [1])
    told, heard = apart.run(60)
    assert told == []
    assert kinds(heard) == [CUT]
    assert untold(apart, flow) == [0]
    assert not apart.reader.peers.hears(0)
    apart.network.pieces = 0.0
    apart.message(apart.record(head=HELLO, hi=1))
    apart.run(10)
    assert not apart.reader.peers.hears(0), "not on this lane"
    assert apart.writer.peers.hears(1), "this is another direction"
    assert told_in_a_message(apart, flow, 1)


def test_pieces_that_never_come_keep_nobody_else_waiting() -> None:
    """Their memory is not used again: long messages are missed, and records go on."""
    apart = met()
    real = apart.network._receive_later
    apart.network._receive_later = lambda *given: apart.network._request(_Never())
    apart.network.pieces = 1.0
    apart.message(b"\x00" * 500, TAGS[0], to=0)
    apart.writer.runner.step()
    apart.network._receive_later = real
    apart.network.pieces = 0.0
    apart.grant(apart.receive(1), [1])
    told, heard = apart.run(60)
    assert told == []
    assert set(kinds(heard)) == {CUT}
    flow = apart.receive(1, 2)
    apart.start(apart.send(flow, [1], 2), [2])
    assert kinds(apart.run()[0]) == [OP_DONE]


class _Never:
    done, error = False, None


# ---------------------------------------------------------------- once


def test_the_same_grant_in_a_message() -> None:
    """Whichever comes first is taken; it may be that the loop's has bound, or even ended, a request."""
    apart = met()
    flow, send = apart.receive(1), apart.wait()
    apart.grant(flow, [1])
    apart.run(40)
    assert not told_in_a_message(apart, flow, 1)
    assert told_in_a_message(apart, flow, 2)  # of the next request on this flow
    assert told_in_a_message(apart, flow + 1, 1)
    assert apart.writer.sends.bound(send)[:2] == (flow, 1)


@pytest.mark.parametrize("parts_before", [0, 1, 2])
def test_a_message_that_overtakes_the_loops(parts_before: int) -> None:
    apart = met(part=500)
    flow, send = apart.receive(3), apart.wait()
    apart.grant(flow, [6, 1, 4])
    apart.reader.runner.step()
    inbox = apart.network.inboxes[apart.channels[0].node]
    while len(inbox) < 3:
        apart.world.advance(apart.world.now + 1e-4)
    later = [inbox.pop() for _ in range(3 - parts_before)]
    apart.writer.runner.step()
    assert told_in_a_message(apart, flow, 1)
    inbox.extend(reversed(later))
    assert apart.run(20) == ([], [])
    assert apart.writer.world["sends"][send]["next"] == 0
    assert apart.writer.peers.granted(1, flow, 1, network=True) is not None, "it has come, and binds nothing"


def test_whom_python_tells_again() -> None:
    """Writers of which nothing has come: they may not know of their grant. Nobody who never was told by the loop."""
    apart = met()
    flow = apart.receive(1)
    assert untold(apart, flow) == []
    apart.grant(flow, [1])
    assert untold(apart, flow) == [0], "it was not sent yet"
    apart.run(5)
    flow = apart.receive(1, 2)
    apart.grant(flow, [2])
    apart.run(20)
    assert untold(apart, flow) == [0], "it may not have arrived"
    apart.start(apart.send(flow, [2], 2), [3])
    apart.run()
    assert untold(apart, flow) == []


def test_a_grant_on_a_broken_connection_is_pythons() -> None:
    apart = met()
    flow = apart.receive(1)
    apart.channels[1].lose("cut")
    apart.grant(flow, [1])
    _, heard = apart.run(10)
    assert CUT in kinds(heard)
    assert not apart.reader.peers.hears(0)
    assert untold(apart, flow) == [0]


def test_a_grant_that_finds_no_room_for_all_of_it_waits() -> None:
    apart = met()
    apart.network.holding = True
    flows = [apart.receive(MAX_GRANTED, generation) for generation in range(1, 6)]
    for flow in flows:
        apart.wait(str(flow))
        apart.grant(flow, [1] * MAX_GRANTED, str(flow))
    told = apart.run(60)[0]
    assert 0 < len(told) < 5, "parts of the others would never be followed by the rest"
    apart.network.holding = False
    assert kinds(told + apart.run(200)[0]) == [BOUND] * 5


# ---------------------------------------------------------------- lies


def parts(
    pages: list[int], *, generation: int = 1, flow: int = 0, part: int = 500, slots: int = 0, **words: int
) -> list[bytes]:
    """The messages of an honest grant, and words that are not. slots: how many state slots it says to have."""
    hash0, hash1 = name_hashes("name")
    slot = np.zeros(GRANT_SLOT, dtype=np.uint8)
    slot[:GRANT_NBYTES].view(np.int64)[:] = generation, hash0, hash1, 1, 0, len(pages), 4, slots
    slot[NAME_AT : NAME_AT + 4] = list(b"name")
    slot[IDS_AT : IDS_AT + 8 * len(pages)].view(np.int64)[:] = pages
    end = IDS_AT + 8 * len(pages)
    record = {"head": GRANT, "flows": flow, "generation": generation, "hi": end, **words}
    made = []
    for at in range(0, end, part):
        head = Apart.record(**{**record, "lo": at + words.get("lo", 0)})
        made.append(head + slot[at : min(end, at + part)].tobytes())
    return made


def without(number: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda made: made[:number] + made[number + 1 :]


HUGE = 1 << 62
LIES: dict[str, Callable[[], list[bytes]]] = {
    "no first part": lambda: without(0)(parts([6, 1, 4])),
    "no second part": lambda: without(1)(parts([6, 1, 4])),
    "no last part": lambda: without(2)(parts([6, 1, 4])),
    "parts out of order": lambda: parts([6, 1, 4])[::-1],
    "parts of two generations": lambda: parts([6, 1, 4])[:2] + parts([6, 1, 4], generation=2)[2:],
    "parts of two flows": lambda: parts([6, 1, 4])[:2] + parts([6, 1, 4], flow=1)[2:],
    "more than there is": lambda: parts([6, 1, 4], hi=IDS_AT + 16),
    "less than there is": lambda: parts([6, 1, 4], hi=IDS_AT + 32),
    "an end before the ids": lambda: parts([6, 1, 4], hi=IDS_AT),
    "a negative end": lambda: parts([6, 1, 4], hi=-HUGE * 2),
    "an end behind the slot": lambda: parts([6, 1, 4], hi=GRANT_SLOT + 8),
    "a huge end": lambda: parts([6, 1, 4], hi=HUGE * 2 - 1),
    "a huge place": lambda: parts([6, 1, 4], lo=HUGE),
    "a negative place": lambda: parts([6, 1, 4], lo=-HUGE),
    "a flow that there is not": lambda: parts([6, 1, 4], flow=MAX_FLOWS),
    "a negative flow": lambda: parts([6, 1, 4], flow=-1),
    "a flow of more bits": lambda: parts([6, 1, 4], flow=1 << 32),
    "a page that there is not": lambda: parts([6, PAGES, 4]),
    "a negative page": lambda: parts([6, -1, 4]),
    "no record": lambda: [b"\x05" * 65],
    "a record and nothing": lambda: [each[:RECORD_NBYTES] for each in parts([6, 1, 4])],
    "more than a message": lambda: parts([6] * 600, part=MESSAGE_NBYTES),
    "a slot that there is not": lambda: parts([6, 1, 4], slots=1),
    "slots without end": lambda: parts([6, 1, 4], slots=HUGE),
    "less than no slot": lambda: parts([6, 1, 4], slots=-1, hi=IDS_AT + 16),
    "two slots": lambda: parts([6, 1, 4], slots=2, hi=IDS_AT + 40),
    "no generation": lambda: parts([6, 1, 4], generation=0),
    "a negative generation": lambda: parts([6, 1, 4], generation=-1),
}


@pytest.mark.parametrize("lie", LIES)
def test_grants_that_lie_bind_nothing(lie: str) -> None:
    apart = met()
    send = apart.wait()
    for data in LIES[lie]():
        apart.message(data, TAGS[0], to=0)
        apart.writer.runner.step()
    told = apart.run(10)[0]
    assert kinds(told) in ([], [GRANTED])
    for notice in told:  # Python looks at what lies there
        apart.writer.peers.granted(1, notice.words[1], notice.words[2], network=True)
    assert int(apart.writer.world["sends"][send]["generation"]) == 0
    flow = apart.receive(1, 3)
    apart.grant(flow, [2])
    assert kinds(apart.run(40)[0]) == [BOUND], "the next grant of the peer finds its request"


def test_a_grant_with_the_tag_of_nobody() -> None:
    apart = met()
    apart.wait()
    for tag in (0, TAGS[1], -1):
        for data in parts([6, 1, 4]):
            apart.message(data, tag, to=0)
    assert apart.run(10)[0] == []


@pytest.mark.parametrize("seed", range(30))
def test_noise(seed: int) -> None:
    """Messages of random words and lengths change nothing beyond the slots that are their sender's."""
    dice = random.Random(seed)
    apart = met(seed)
    apart.wait()
    words = [0, 1, -1, 8, IDS_AT, GRANT_SLOT, MAX_FLOWS - 1, MAX_FLOWS, 1 << 62, -(1 << 63)]
    for _ in range(300):
        record = {name: dice.choice(words) for name in ("flows", "generation", "lo", "hi", "nbytes", "spare")}
        head = dice.choice([GRANT, GRANT, HELLO, dice.getrandbits(8)])
        data = Apart.record(head=head, **record) + dice.randbytes(dice.choice([0, 1, 64, 500, 1984, 5000]))
        apart.message(data, TAGS[0], to=0)
        apart.writer.runner.step()
    for notice in apart.run(10)[0]:
        if notice.kind == GRANTED:
            apart.writer.peers.granted(1, notice.words[1], notice.words[2], network=True)
    assert (apart.dst == 0xAB).all()


def test_a_peer_that_goes_takes_its_grants_along() -> None:
    apart = met()
    apart.receive(1)
    apart.grant(0, [1])
    apart.run(20)
    apart.writer.peers.disconnect(1)
    assert apart.writer.peers.granted(1, 0, 1, network=True) is None


def hear(apart: Apart) -> None:
    """Both loops go on, and nobody takes what they tell."""
    for _ in range(60):
        apart.step()


def first_verb(apart: Apart, pages: list[int], name: str = "name") -> tuple[int, int] | None:
    """A verb that begins a request, and looks for its grant: the flow and the op, or None."""
    positions, given = np.arange(LAYERS, dtype=np.int64), np.array(pages, dtype=np.int64)
    how = (given, given.copy(), PAGES, 0, NO_GATE, 0)
    grant = {"hashes": name_hashes(name), "writers": 1, "prefixed": True}
    return apart.writer.sends.meet(apart.way(), positions, *how, **grant, serial=0, begun=0)


@pytest.mark.parametrize("part", [400, MESSAGE_NBYTES - RECORD_NBYTES])
def test_a_first_verb_meets_a_grant_that_came_through_the_network(part: int) -> None:
    """Python need not take it in, and whatever tells it again binds nothing."""
    apart = met(part=part)
    flow, other = apart.receive(3), apart.receive(1, generation=2)
    apart.grant(other, [8], "other")
    apart.grant(flow, [6, 1, 4])
    hear(apart)
    assert first_verb(apart, [2, 7, 0], "name of nothing") is None
    begun = first_verb(apart, [2, 7, 0])
    assert begun is not None
    send, _ = begun
    assert not told_in_a_message(apart, flow, 1)
    assert first_verb(apart, [2, 7, 0]) is None, "it is bound"
    apart.writer.sends.finish(send, 3, b"")
    told, heard = apart.run()
    assert kinds(told) == [GRANTED, NEWS, OP_DONE, SENT]
    assert kinds(heard) == [RECEIVED]
    assert apart.writer.sends.bound(send)[:2] == (flow, 1)
    expected = torch.full_like(apart.dst, 0xAB)
    expected[:, [6, 1, 4]] = apart.src[:, [2, 7, 0]]
    assert torch.equal(apart.dst, expected)


def test_a_first_verb_leaves_a_grant_that_a_later_one_has_overwritten() -> None:
    apart = met()
    apart.grant(apart.receive(1), [6])
    hear(apart)
    body = apart.writer.peers._arrivals[1][MAX_FLOWS:]
    generation = body.reshape(MAX_FLOWS, -1)[:, 0]
    assert generation.sum() == 1
    generation[generation == 1] = 2  # of which the record is still to come
    assert first_verb(apart, [2]) is None
    assert kinds(apart.writer.events.take()) == [GRANTED]
    assert (apart.dst == 0xAB).all()
