"""Sessions over a control channel: what any thread may send, and what is left to the progress thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchkv.control.messenger import WARNING_INTERVAL, ControlMessenger
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.layout.layout import KVLayout
from torchkv.protocol.messages import Alive, ControlFrame, Message, encode_frame

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


def group_map(rank: int) -> GroupMap:
    layout = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    common = {"layout": layout, "num_pages": 4, "num_slots": 0}
    return GroupMap(rank, [RankInfo(rank=r, incarnation=100 + r, instance=f"i{r}", **common) for r in range(3)])


def messenger(rank: int) -> tuple[ControlMessenger, FakeControl]:
    control: Any = FakeControl()
    return ControlMessenger(group_map(rank), KEY, control), control


def send_now(number: int) -> Message:
    return Alive(number, True)


def test_a_caller_sends_by_itself_and_nothing_is_left_to_the_driver() -> None:
    (mine, here), (theirs, there) = messenger(ME), messenger(PEER)
    mine.tell(PEER, send_now(7))
    mine.tell(OTHER, send_now(8))
    frames = mine.frames(0.0, {PEER})
    mine.send_now(frames)
    assert [rank for rank, _ in here.at_once] == [PEER]
    there.inbox = here.at_once[0][1]
    assert [theirs.accept(*each) for each in theirs.receive(-1)] == [[send_now(7)]]
    mine.send(mine.frames(0.0))
    assert [rank for rank, _ in here.sent] == [OTHER], "only what the caller had not taken"


def test_what_a_caller_could_not_send_the_driver_sends() -> None:
    (mine, here), (theirs, there) = messenger(ME), messenger(PEER)
    here.obliging = False
    mine.tell(PEER, send_now(1))
    mine.send_now(mine.frames(0.0, {PEER}))
    mine.tell(PEER, send_now(2))
    assert here.at_once == []
    mine.send(mine.frames(0.0))
    there.inbox = [data for _, frames in here.sent for data in frames]
    assert [m for each in theirs.receive(-1) for m in theirs.accept(*each)] == [send_now(1), send_now(2)]
    mine.send([])
    assert len(here.sent) == 2, "once"


def test_nothing_is_sent_to_a_dead_peer_not_even_acknowledgements() -> None:
    (mine, here), (theirs, there) = messenger(ME), messenger(PEER)
    theirs.tell(ME, send_now(1))
    theirs.send(theirs.frames(0.0))
    mine.tell(PEER, send_now(2))
    mine.mark_dead(PEER)
    mine.tell(PEER, send_now(3))
    here.inbox = there.sent[0][1]
    assert [m for each in mine.receive(-1) for m in mine.accept(*each)] == [send_now(1)], "its last words count"
    assert mine.frames(100.0) == []
    assert mine.next_poll == float("inf")


def test_what_came_before_its_sender_was_a_member_is_taken_in_then() -> None:
    (mine, here), (theirs, there) = messenger(ME), messenger(PEER)
    mine.remove(group_map(ME).info[PEER])
    theirs.tell(ME, send_now(1))
    theirs.tell(ME, send_now(2))
    theirs.send(theirs.frames(0.0))
    here.inbox = there.sent[0][1]
    assert mine.receive(-1) == []
    assert mine.next_poll == float("inf")
    mine.add(group_map(ME).info[PEER])
    assert mine.next_poll == 0.0
    assert [m for each in mine.receive(-1) for m in mine.accept(*each)] == [send_now(1), send_now(2)]
    assert mine.receive(-1) == []


def test_frames_that_are_no_good_are_counted() -> None:
    mine, here = messenger(ME)
    good = encode_frame(ControlFrame(PEER, 101, 100, 1, 0, send_now(1)), KEY)
    here.inbox = [
        b"short",
        encode_frame(ControlFrame(PEER, 101, 100, 1, 0, send_now(1)), b"x" * 32),
        encode_frame(ControlFrame(PEER, 999, 100, 1, 0, send_now(1)), KEY),  # not a member of this group
        encode_frame(ControlFrame(ME, 100, 100, 1, 0, send_now(1)), KEY),  # this rank has no session with itself
        good,
    ]
    assert [rank for rank, _ in mine.receive(-1)] == [PEER]
    assert mine.dropped == 4


def test_strangers_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    mine, here = messenger(ME)
    for _ in range(3):
        here.inbox = [b"short"] * 500
        assert mine.receive(-1) == []
        now[0] += 0.6 * WARNING_INTERVAL
    assert mine.dropped == 1500
    assert [record.args[1] for record in caplog.records] == [1, 1001], "one warning, and after a while another"


def test_it_knows_when_there_will_be_something_to_send() -> None:
    mine, _ = messenger(ME)
    assert mine.next_poll == float("inf")
    mine.tell(PEER, send_now(1))
    assert mine.next_poll == 0.0
    mine.send(mine.frames(5.0))
    assert 5.0 < mine.next_poll < float("inf"), "it will be sent again unless it is acknowledged"
    assert [rank for rank, _ in mine.frames(mine.next_poll)] == [PEER]
