"""Sessions over a control channel: what any thread may send, and what is left to the progress thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchkv.control.greeting import GREETING
from torchkv.control.messenger import (
    MAX_ALL_EARLY_NBYTES,
    MAX_EARLY,
    MAX_EARLY_NBYTES,
    MAX_GREETINGS,
    MAX_GREETINGS_NBYTES,
    WARNING_INTERVAL,
    ControlMessenger,
)
from torchkv.control.session import FIRST_RETRY, Session
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.layout.layout import KVLayout
from torchkv.protocol.messages import MAX_FRAME, Alive, ControlFrame, Grant, Message, encode_frame

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


def early_frame(incarnation: int, seq: int, nbytes: int) -> bytes:
    """Of a rank that is no member here, or not yet."""
    grant = Grant("r", seq, 0, bytes(nbytes), [0])
    return encode_frame(ControlFrame(PEER, incarnation, 100, seq, 0, grant), KEY)


def test_a_rank_that_is_no_member_yet_fills_no_memory() -> None:
    mine, here = messenger(ME)
    mine.remove(group_map(ME).info[PEER])
    here.inbox = [early_frame(101, seq, MAX_FRAME // 4) for seq in range(1, 9)]
    mine.receive(-1)
    assert MAX_EARLY_NBYTES // 2 < sum(nbytes for _, nbytes in mine._early) <= MAX_EARLY_NBYTES
    mine.add(group_map(ME).info[PEER])
    assert [m.generation for each in mine.receive(-1) for m in mine.accept(*each) if isinstance(m, Grant)] == [1, 2, 3]
    assert not mine._early, "taken in, so not kept"


def test_ranks_that_are_no_members_yet_fill_no_memory_together() -> None:
    mine, here = messenger(ME)
    for incarnation in range(1000, 1010):
        here.inbox = [early_frame(incarnation, 1, MAX_FRAME - (1 << 20))]
        mine.receive(-1)
    kept = sum(nbytes for _, nbytes in mine._early)
    assert MAX_ALL_EARLY_NBYTES // 2 < kept <= MAX_ALL_EARLY_NBYTES
    assert mine._early[-1][0].incarnation == 1009, "the latest stay"
    for incarnation in range(2000, 2000 + 2 * MAX_EARLY):
        here.inbox = [early_frame(incarnation, 1, 8)]
        mine.receive(-1)
    assert len(mine._early) == MAX_EARLY


@pytest.mark.parametrize(("nbytes", "most"), [(8, MAX_GREETINGS), (MAX_GREETINGS_NBYTES // 4, 3)])
def test_greetings_fill_no_memory(nbytes: int, most: int, caplog: pytest.LogCaptureFixture) -> None:
    mine, here = messenger(ME)
    for again in (1, 2):
        here.inbox = [GREETING + bytes(nbytes)] * (most + 2)
        assert mine.receive(-1) == []
        assert len(mine.take_greetings()) == most, "and when they have been taken there is room again"
        assert mine.dropped == 2 * again
    assert "no room for one more greeting" in caplog.text


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


def test_a_step_polls_only_the_sessions_that_have_something_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many peers still owe an acknowledgement."""
    mine, _ = messenger(ME)
    peers = range(3, 203)
    for rank in peers:
        mine.add(RankInfo(rank=rank, incarnation=rank, instance="i", layout=None, num_pages=0, num_slots=0))
        mine.tell(rank, send_now(1))
    now = 10.0
    assert len(mine.frames(now)) == len(peers)
    polls: list[float] = []
    poll = Session.poll
    monkeypatch.setattr(Session, "poll", lambda self, now: (polls.append(now), poll(self, now))[1])
    for step in range(50):
        mine.tell(PEER, send_now(step))
        assert [rank for rank, _ in mine.frames(now)] == [PEER]
    assert len(polls) == 50
    assert mine.next_poll == now + FIRST_RETRY
    assert len(mine.frames(now + FIRST_RETRY)) == len(peers) + 1, "nobody has acknowledged anything"


def test_a_session_has_few_timers() -> None:
    (mine, here), (theirs, there) = messenger(ME), messenger(PEER)
    now = 0.0
    for number in range(1000):
        now += 0.01
        mine.tell(PEER, send_now(number))
        mine.send(mine.frames(now))
        there.inbox = [data for _, frames in here.sent for data in frames]
        here.sent.clear()
        assert [m for each in theirs.receive(-1) for m in theirs.accept(*each)] == [send_now(number)]
        theirs.send(theirs.frames(now))
        here.inbox = [data for _, frames in there.sent for data in frames]
        there.sent.clear()
        for each in mine.receive(-1):
            mine.accept(*each)
    assert len(mine._timers) < 10
    assert len(theirs._timers) < 10
    assert mine.repeats == 0
