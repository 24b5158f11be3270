"""Sessions over a control channel: who may send what, and what becomes of what a caller could not send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchkv.layout import KVLayout
from torchkv.roster import Member, Roster
from torchkv.talk import Talk
from torchkv.wire import Alive, Frame, Message, encode_frame

KEY = b"k" * 32
ME, PEER, OTHER = range(3)


class FakeControl:
    def __init__(self) -> None:
        self.obliging = True
        self.sent: list[tuple[int, list[bytes]]] = []
        self.at_once: list[tuple[int, list[bytes]]] = []
        self.inbox: list[bytes] = []

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        self.sent.append((rank, list(frames)))

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        if self.obliging:
            self.at_once.append((rank, list(frames)))
        return self.obliging

    def receive(self, readable: int = -1) -> list[bytes]:
        frames, self.inbox = self.inbox, []
        return frames


def roster(rank: int) -> Roster:
    layout = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    common = {"layout": layout, "num_pages": 4, "num_slots": 0}
    return Roster(rank, [Member(rank=r, incarnation=100 + r, instance=f"i{r}", **common) for r in range(3)])


def talk(rank: int) -> tuple[Talk, FakeControl]:
    control: Any = FakeControl()
    return Talk(roster(rank), KEY, control), control


def say(number: int) -> Message:
    return Alive(number, True)


def test_a_caller_sends_by_itself_and_nothing_is_left_to_the_driver() -> None:
    (mine, here), (theirs, there) = talk(ME), talk(PEER)
    mine.tell(PEER, say(7))
    mine.tell(OTHER, say(8))
    frames = mine.frames(0.0, {PEER})
    mine.say(frames)
    assert [rank for rank, _ in here.at_once] == [PEER]
    there.inbox = here.at_once[0][1]
    assert [theirs.accept(frame) for frame in theirs.hear(-1)] == [[say(7)]]
    mine.send(mine.frames(0.0))
    assert [rank for rank, _ in here.sent] == [OTHER], "only what the caller had not taken"


def test_what_a_caller_could_not_send_the_driver_sends() -> None:
    (mine, here), (theirs, there) = talk(ME), talk(PEER)
    here.obliging = False
    mine.tell(PEER, say(1))
    mine.say(mine.frames(0.0, {PEER}))
    mine.tell(PEER, say(2))
    assert here.at_once == []
    mine.send(mine.frames(0.0))
    there.inbox = [data for _, frames in here.sent for data in frames]
    assert [m for frame in theirs.hear(-1) for m in theirs.accept(frame)] == [say(1), say(2)]
    mine.send([])
    assert len(here.sent) == 2, "once"


def test_nothing_is_said_to_the_dead_nor_acknowledged() -> None:
    (mine, here), (theirs, there) = talk(ME), talk(PEER)
    theirs.tell(ME, say(1))
    theirs.send(theirs.frames(0.0))
    mine.tell(PEER, say(2))
    mine.silence(PEER)
    mine.tell(PEER, say(3))
    here.inbox = there.sent[0][1]
    assert [m for frame in mine.hear(-1) for m in mine.accept(frame)] == [say(1)], "its last words count"
    assert mine.frames(100.0) == []
    assert mine.next_poll == float("inf")


def test_frames_that_are_no_good_are_counted() -> None:
    mine, here = talk(ME)
    good = encode_frame(Frame(PEER, 101, 100, 1, 0, say(1)), KEY)
    here.inbox = [
        b"short",
        encode_frame(Frame(PEER, 101, 100, 1, 0, say(1)), b"x" * 32),
        encode_frame(Frame(9, 101, 100, 1, 0, say(1)), KEY),  # no rank of this group
        encode_frame(Frame(ME, 100, 100, 1, 0, say(1)), KEY),  # this rank does not talk to itself
        good,
    ]
    assert [frame.source for frame in mine.hear(-1)] == [PEER]
    assert mine.dropped == 4


def test_it_knows_when_there_will_be_something_to_send() -> None:
    mine, _ = talk(ME)
    assert mine.next_poll == float("inf")
    mine.tell(PEER, say(1))
    assert mine.next_poll == 0.0
    mine.send(mine.frames(5.0))
    assert 5.0 < mine.next_poll < float("inf"), "it will be sent again unless it is acknowledged"
    assert [rank for rank, _ in mine.frames(mine.next_poll)] == [PEER]
