"""The control channel's two ways, in one process: small frames go short, everything arrives, no news is missed."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from torchkv.control import RECEIVE_BURST, ZmqControl
from torchkv.hostlane import MAX_DATAGRAM
from torchkv.processes import ProcessId, this_process

PATIENCE = 20.0
SHORT, LONG = 1, 2  # bits of the two ways
Pair = tuple[ZmqControl, ZmqControl]
Connect = Callable[[ProcessId], Pair]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[ZmqControl] = []

    def pair(process: ProcessId) -> Pair:
        """The first one can send to the other, as rank 1, which it takes for a process of ``process``'s host."""
        made.extend(ZmqControl(heartbeat=5.0) for _ in range(2))
        made[0].connect(1, made[1].endpoint, process)
        return made[0], made[1]

    yield pair
    for control in made:
        control.close()


def elsewhere() -> ProcessId:
    return msgspec.structs.replace(this_process(), host="another")


def readable(control: ZmqControl) -> int:
    """Waits for news; a bit for each of ``fds``."""
    poller = select.poll()
    for fd in control.fds:
        poller.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(PATIENCE * 1000)}
    return sum(1 << i for i, fd in enumerate(control.fds) if fd in ready)


def gather(control: ZmqControl, count: int, where: int = SHORT | LONG) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        assert control.unread or readable(control), f"{count - len(frames)} frames never came"
        frames += control.receive(where)
    return frames


def test_small_frames_go_the_short_way_and_large_ones_the_long_way(connect: Connect) -> None:
    one, other = connect(this_process())
    small, large = random.randbytes(50), random.randbytes(MAX_DATAGRAM)
    one.send(1, [small])
    assert gather(other, 1, SHORT) == [small]
    one.send(1, [large])
    assert gather(other, 1, LONG) == [large]
    one.send(1, [small])
    assert other.receive(LONG) == [], "it looks only where it is told to"
    assert gather(other, 1, SHORT) == [small]


def test_to_another_host_there_is_one_way_only(connect: Connect) -> None:
    one, other = connect(elsewhere())
    assert not one.send_at_once(1, [b"x"])
    one.send(1, [b"first", b"second"])
    assert gather(other, 2) == [b"first", b"second"]


def test_what_the_short_way_refuses_goes_the_long_one(connect: Connect) -> None:
    one, other = connect(this_process())
    sent = [random.randbytes(100) for _ in range(300)]
    for frame in sent:  # nobody reads meanwhile, so it is soon full
        one.send(1, [frame])
    assert not one.send_at_once(1, [b"x"])
    assert sorted(gather(other, len(sent))) == sorted(sent)
    assert one.send_at_once(1, [b"at once"])
    assert gather(other, 1) == [b"at once"]


@pytest.mark.parametrize("long_way", [False, True])
def test_more_than_one_look_takes_is_not_forgotten(long_way: bool, connect: Connect) -> None:
    one, other = connect(elsewhere() if long_way else this_process())
    sent = [random.randbytes(40) for _ in range(2 * RECEIVE_BURST + 10)]
    for frame in sent:
        one.send(1, [frame])
    assert sorted(gather(other, len(sent))) == sorted(sent)


@pytest.mark.parametrize("long_way", [False, True])
def test_sleep_ends_when_something_arrives_and_it_is_found_afterwards(long_way: bool, connect: Connect) -> None:
    """ZeroMQ's file descriptor tells each piece of news once, and its poller may be who hears it."""
    one, other = connect(elsewhere() if long_way else this_process())
    one.send(1, [b"hello"])
    assert gather(other, 1) == [b"hello"]  # connected
    for turn in range(50):
        frame = b"%d" % turn
        thread = threading.Timer(0.002, one.send, (1, [frame]))
        thread.start()
        found: list[bytes] = []
        for _ in range(100):  # it may also end for other news
            other.sleep(PATIENCE, ())
            if found := other.receive(-1 if other.unread else SHORT):
                break
        assert found == [frame]
        thread.join()
