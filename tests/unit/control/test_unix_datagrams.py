"""Unix datagrams between processes of one host: frames arrive as they were sent, or are refused."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkv.control import unix_datagrams
from torchkv.control.unix_datagrams import BURST, MAX_DATAGRAM, UnixDatagramChannel
from torchkv.protocol.messages import MIN_FRAME

PEER = 3
GOOD, AGAIN = b"good".ljust(MIN_FRAME), b"again".ljust(MIN_FRAME)
OVERHEAD = 4  # bytes before each frame
Pair = tuple[UnixDatagramChannel, UnixDatagramChannel]


@pytest.fixture
def channels() -> Iterator[Pair]:
    unix_datagrams.warm_up()
    one, other = UnixDatagramChannel(), UnixDatagramChannel()
    one.open(PEER, other.name)
    yield one, other
    one.close()
    other.close()


def everything(channel: UnixDatagramChannel) -> list[bytes]:
    frames, more = channel.receive()
    while more:
        rest, more = channel.receive()
        frames += rest
    return frames


def test_frames_arrive_as_they_were_sent(channels: Pair) -> None:
    one, other = channels
    dice = random.Random()
    for _ in range(20):
        sent = [
            [dice.randbytes(dice.choice([MIN_FRAME, 57, 1000, 9000])) for _ in range(dice.randint(1, 3))]
            for _ in range(5)
        ]
        for frames in sent:
            assert one.send(PEER, frames)
        assert everything(other) == [frame for frames in sent for frame in frames]
        assert everything(other) == []
    assert everything(one) == []


def test_the_largest_datagram_arrives_and_a_larger_one_is_refused(
    channels: Pair,
) -> None:
    one, other = channels
    largest = random.randbytes(MAX_DATAGRAM - OVERHEAD)
    assert one.send(PEER, [largest])
    assert not one.send(PEER, [largest + b"x"])
    assert not one.send(PEER, [largest[:-1], b"x"])
    assert everything(other) == [largest]


def test_a_peer_that_does_not_read_refuses_for_a_while(
    channels: Pair,
) -> None:
    one, other = channels
    sent = []
    for _ in range(10_000):
        frame = random.randbytes(100)
        if not one.send(PEER, [frame]):
            break
        sent.append(frame)
    else:
        pytest.fail("a peer that reads nothing took everything")
    assert everything(other) == sent
    assert one.send(PEER, [AGAIN])
    assert everything(other) == [AGAIN]


def test_what_does_not_fit_into_one_look_comes_with_the_next(
    channels: Pair,
) -> None:
    one, other = channels
    senders = [one, UnixDatagramChannel(), UnixDatagramChannel()]
    sent = set()
    for sender in senders:
        sender.open(PEER, other.name)
        while sender.send(PEER, [frame := random.randbytes(MAX_DATAGRAM - OVERHEAD)]):
            sent.add(frame)
    assert len(sent) * MAX_DATAGRAM > BURST * 4096, "this fits into one look: the test tests nothing"
    frames, more = other.receive()
    assert more
    assert set(frames) < sent
    assert set(frames) | set(everything(other)) == sent
    for sender in senders[1:]:
        sender.close()


def test_a_peer_that_is_gone_or_was_never_there(channels: Pair) -> None:
    one, other = channels
    assert not one.send(PEER + 1, [b"this rank was not opened"])
    other.close()
    assert not one.send(PEER, [b"x"])
    one.open(PEER, "torchkv-of-another-network-namespace")
    assert not one.send(PEER, [b"x"])
    assert not one.send(PEER, [b"x"]), "and it is not asked again"


def test_strangers_bytes_are_frames_or_nothing(channels: Pair) -> None:
    """Any process that learns the name can send to it. Datagrams that are no sequence of frames are dropped."""
    one, other = channels
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    whole = struct.pack("<I", MIN_FRAME) + GOOD
    short = struct.pack("<I", MIN_FRAME - 1) + GOOD[1:]
    others = (b"", b"abc", b"\xff\xff\xff\xff", b"\x05\0\0\0abcd", b"\x03\0\0\0abcde", os.urandom(200))
    for garbage in (bytes(MAX_DATAGRAM), whole + short, *others):
        stranger.sendto(garbage, b"\0" + other.name.encode())
        assert one.send(PEER, [GOOD])
        assert everything(other) == [GOOD]
    stranger.close()


@given(st.binary(max_size=64))
def test_no_datagram_yields_more_than_it_holds(data: bytes) -> None:
    frames = unix_datagrams._frames(memoryview(data))
    assert frames == [] or sum(len(frame) + OVERHEAD for frame in frames) == len(data)


def test_it_is_not_inherited_and_leaves_no_file(channels: Pair) -> None:
    one, other = channels
    assert not os.get_inheritable(one.fd)
    assert one._socket.getsockname() == b"\0" + one.name.encode()
    assert one.name != other.name
