"""Two sessions over frames that are lost, duplicated and reordered."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.control.allowance import Allowance
from torchkv.control.session import ACK_DELAY, EARLY_NBYTES, FIRST_RETRY, LAST_RETRY, RESENT, WINDOW, Session
from torchkv.protocol.messages import Alive, ControlFrame, Grant, Message, message_nbytes

A, B = 111, 222


def both() -> tuple[Session, Session]:
    return Session(0, A, B), Session(1, B, A)


def message(number: int) -> Message:
    return Alive(number, True)


def numbers(messages: list[Message]) -> list[int]:
    return [m.generation for m in messages if isinstance(m, Alive)]


@given(st.integers(0, 1 << 32), st.floats(0.0, 0.6), st.floats(0.0, 0.5), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_every_message_once_and_in_order(seed: int, drop: float, double: float, there: int, back: int) -> None:
    chance = random.Random(seed)
    ends = both()
    totals = (there, back)
    sent = [0, 0]
    got: list[list[int]] = [[], []]
    air: list[tuple[int, ControlFrame]] = []  # (receiving end, frame)
    now = 0.0
    for _ in range(3000):
        for end in (0, 1):
            while sent[end] < totals[end] and chance.random() < 0.3:
                ends[end].send(message(sent[end]))
                sent[end] += 1
            for frame in ends[end].poll(now):
                copies = 1 + (chance.random() < double)
                air += [(1 - end, frame)] * sum(chance.random() >= drop for _ in range(copies))
        chance.shuffle(air)
        for _ in range(chance.randint(0, len(air))):
            end, frame = air.pop()
            got[end] += numbers(ends[end].receive(frame))
        now += chance.uniform(0.0, 0.4)
        if sent == list(totals) and ends[0].idle and ends[1].idle:
            break
    assert got == [list(range(back)), list(range(there))]
    assert ends[0].idle
    assert ends[1].idle


def test_frames_of_another_incarnation_are_dropped() -> None:
    one, other = both()
    one.send(message(1))
    (frame,) = one.poll(0.0)
    for stranger in (Session(1, B, A + 1), Session(1, B + 1, A)):
        assert stranger.receive(frame) == []
        assert stranger.poll(0.0) == [], "not even acknowledged"
    assert numbers(other.receive(frame)) == [1]


def acknowledgement(session: Session, now: float) -> ControlFrame:
    """The acknowledgement that ``session`` sends alone, because it has no message to send it with."""
    assert session.poll(now) == []
    (frame,) = session.poll(now + ACK_DELAY)
    assert frame.message is None
    return frame


def test_acknowledgements_that_cannot_be_are_ignored() -> None:
    one, other = both()
    for i in range(3):
        one.send(message(i))
    frames = one.poll(0.0)
    for ack in (4, 1 << 62):  # of numbers that were never given
        one.receive(ControlFrame(1, B, A, 0, ack, None))
        assert not one.idle
    for frame in frames:
        other.receive(frame)
    ack3 = acknowledgement(other, 0.0)
    one.receive(ControlFrame(1, B, A, 0, 1, None))
    one.receive(ControlFrame(1, B, A, 0, 0, None))  # stale: acknowledges less than is known already
    assert [f.seq for f in one.poll(10.0)] == [2, 3]
    one.receive(ack3)
    assert one.idle
    one.receive(ControlFrame(1, B, A, 0, 2, None))
    one.send(message(9))
    assert [f.seq for f in one.poll(10.0)] == [4]


def test_retries_slow_down_and_recover() -> None:
    one, other = both()
    one.send(message(0))
    (first,) = one.poll(0.0)
    times: list[float] = []
    now = 0.0
    while len(times) < 6:
        now = one.next_poll
        assert len(one.poll(now)) == 1
        times.append(now)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert gaps[0] == FIRST_RETRY
    assert all(b == min(2 * a, LAST_RETRY) for a, b in itertools.pairwise(gaps))
    other.receive(first)
    one.receive(acknowledgement(other, now))
    one.send(message(1))
    one.poll(now)
    assert one.next_poll == now + FIRST_RETRY


def test_a_peer_that_hangs_is_sent_a_few_again_and_catches_up_at_once() -> None:
    one, other = both()
    for number in range(1000):
        one.send(message(number))
    assert len(one.poll(0.0)) == 1000, "all are lost"
    for number in range(1000, 1010):
        one.send(message(number))
    now, sent, got = 0.0, 0, list[int]()
    for _ in range(10):
        now = max(now, one.next_poll)
        sent += len(one.poll(now))
    assert sent <= 10 * RESENT + 10, "the new ones once"
    began = now = one.next_poll
    while len(got) < 1010:
        frames = one.poll(now)
        assert frames, f"nothing follows after {len(got)}"
        for frame in frames:
            got += numbers(other.receive(frame))
        one.receive(ControlFrame(1, B, A, 0, len(got), None))
    assert now == began
    assert got == list(range(1010))
    assert one.idle


def test_nothing_is_sent_before_it_is_due() -> None:
    one, _ = both()
    one.send(message(0))
    assert len(one.poll(0.0)) == 1
    assert one.poll(FIRST_RETRY - 0.001) == []
    assert one.next_poll == FIRST_RETRY


def test_a_repeated_frame_is_acknowledged_again() -> None:
    """Its first acknowledgement was lost; without a second one the peer would send the frame again for ever."""
    one, other = both()
    one.send(message(0))
    (frame,) = one.poll(0.0)
    assert numbers(other.receive(frame)) == [0]
    assert acknowledgement(other, 0.0).ack == 1
    assert other.receive(frame) == []
    assert acknowledgement(other, 1.0).ack == 1
    assert other.poll(2.0) == []


def test_an_acknowledgement_waits_for_a_message_to_go_with() -> None:
    one, other = both()
    one.send(message(0))
    (frame,) = one.poll(0.0)
    other.receive(frame)
    assert not other.idle
    assert other.next_poll == 0.0
    assert other.poll(0.0) == []
    assert other.next_poll == ACK_DELAY
    other.send(message(1))
    (reply,) = other.poll(ACK_DELAY / 2)
    assert (reply.seq, reply.ack) == (1, 1)
    assert other.poll(ACK_DELAY) == []
    one.receive(reply)
    assert acknowledgement(one, 5.0).ack == 1
    assert one.idle


@pytest.mark.parametrize("seq", [WINDOW + 1, 1 << 63])
def test_frames_beyond_the_window_are_not_kept(seq: int) -> None:
    _, other = both()
    assert other.receive(ControlFrame(0, A, B, seq, 0, message(7))) == []
    assert other._early == {}


def test_more_than_a_window_gets_through() -> None:
    one, other = both()
    count = WINDOW + 500
    for i in range(count):
        one.send(message(i))
    got, now = [], 0.0
    for _ in range(10):
        for frame in one.poll(now):
            got += numbers(other.receive(frame))
        for frame in other.poll(now):
            one.receive(frame)
        now += LAST_RETRY
    assert got == list(range(count))
    assert one.idle


def large(number: int) -> Message:
    return Grant("r", number, 0, bytes(8 << 20), [0])


def test_what_comes_too_early_is_kept_up_to_a_number_of_bytes_and_the_rest_comes_again() -> None:
    one, other = both()
    count = 4 * EARLY_NBYTES // message_nbytes(large(0)) // 2
    for number in range(count):
        one.send(large(number))
    first, *rest = one.poll(0.0)
    for frame in reversed(rest):
        assert other.receive(frame) == []
    kept = other._allowance.kept
    assert EARLY_NBYTES // 2 < kept <= EARLY_NBYTES, "negative control: all of them are more"
    assert sum(message_nbytes(frame.message) for frame in rest if frame.message) > EARLY_NBYTES
    got = [m.generation for m in other.receive(first) if isinstance(m, Grant)]
    assert other._allowance.kept == kept, "those that are kept come behind some that were dropped"
    now = FIRST_RETRY
    while not one.idle:
        for frame in one.poll(now):
            got += [m.generation for m in other.receive(frame) if isinstance(m, Grant)]
        for frame in other.poll(now) + other.poll(now + ACK_DELAY):
            one.receive(frame)
        now += LAST_RETRY
    assert got == list(range(count))
    assert other._allowance.kept == 0


def test_sessions_share_a_number_of_bytes_and_each_gets_the_next_message_all_the_same() -> None:
    shared = Allowance(100)
    greedy, modest = (Session(1, B, peer, shared) for peer in (A, A + 1))
    for seq in range(2, 50):
        greedy.receive(ControlFrame(0, A, B, seq, 0, message(seq)))
    assert 90 < shared.kept <= 100
    assert modest.receive(ControlFrame(2, A + 1, B, 2, 0, message(1))) == []
    assert modest._early == {}
    assert numbers(modest.receive(ControlFrame(2, A + 1, B, 1, 0, message(0)))) == [0]
    assert numbers(modest.receive(ControlFrame(2, A + 1, B, 2, 0, message(1)))) == [1]
    greedy.close()
    greedy.close()
    assert shared.kept == 0


def test_a_message_that_comes_twice_counts_once() -> None:
    shared = Allowance(100)
    _, other = Session(0, A, B), Session(1, B, A, shared)
    for _ in range(2):
        other.receive(ControlFrame(0, A, B, 2, 0, message(2)))
    assert shared.kept == message_nbytes(message(2))
    assert numbers(other.receive(ControlFrame(0, A, B, 1, 0, message(1)))) == [1, 2]
    assert shared.kept == 0
