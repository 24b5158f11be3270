"""The control channel's two ways, datagrams and ZeroMQ, in one process: every frame arrives, no wake-up is missed."""

from __future__ import annotations

import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from torchkv.control import channel
from torchkv.control.channel import RECEIVE_BURST, PeerState, ZmqControlChannel
from torchkv.control.unix_datagrams import MAX_DATAGRAM
from torchkv.host.processes import ProcessId, process_started, this_process
from torchkv.protocol.messages import MIN_FRAME

PATIENCE = 20.0
SHORT, LONG = 1, 2  # bits of `ControlChannel.fds`: datagrams, ZeroMQ
HELLO = b"hello".ljust(MIN_FRAME)
Pair = tuple[ZmqControlChannel, ZmqControlChannel]
Connect = Callable[[ProcessId], Pair]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[ZmqControlChannel] = []

    def pair(process: ProcessId) -> Pair:
        """Two channels; the first sends to the second, as rank 1, and takes it for a process on ``process``'s host."""
        made.extend(ZmqControlChannel(heartbeat=5.0) for _ in range(2))
        made[0].connect(1, made[1].endpoint, process)
        return made[0], made[1]

    yield pair
    for control in made:
        control.close()


def asynchronous() -> ProcessId:
    return msgspec.structs.replace(this_process(), host="another")


def readable(control: ZmqControlChannel) -> int:
    """Waits until something is readable; bit i is set if that is ``fds[i]``."""
    poller = select.poll()
    for fd in control.fds:
        poller.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(PATIENCE * 1000)}
    return sum(1 << i for i, fd in enumerate(control.fds) if fd in ready)


def gather(control: ZmqControlChannel, count: int, where: int = SHORT | LONG) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        assert control.unread or readable(control), f"{count - len(frames)} frames never came"
        frames += control.receive(where)
    return frames


def test_small_frames_go_the_short_way_and_large_ones_the_long_way(connect: Connect) -> None:
    one, other = connect(this_process())
    small, large = random.randbytes(MIN_FRAME), random.randbytes(MAX_DATAGRAM)
    one.send(1, [small])
    assert gather(other, 1, SHORT) == [small]
    one.send(1, [large])
    assert gather(other, 1, LONG) == [large]
    one.send(1, [small])
    assert other.receive(LONG) == [], "it looks only where it is told to"
    assert gather(other, 1, SHORT) == [small]


def test_to_another_host_there_is_one_way_only(connect: Connect) -> None:
    one, other = connect(asynchronous())
    assert not one.send_at_once(1, [b"x"])
    one.send(1, [b"first", b"second"])
    assert gather(other, 2) == [b"first", b"second"]


def test_what_the_short_way_refuses_goes_the_long_one(connect: Connect) -> None:
    one, other = connect(this_process())
    sent = [random.randbytes(100) for _ in range(300)]
    for frame in sent:  # the other end does not read meanwhile, so the datagram socket is soon full
        one.send(1, [frame])
    assert not one.send_at_once(1, [b"x"])
    assert sorted(gather(other, len(sent))) == sorted(sent)
    at_once = b"at once".ljust(MIN_FRAME)
    assert one.send_at_once(1, [at_once])
    assert gather(other, 1) == [at_once]


@pytest.mark.parametrize("long_way", [False, True])
def test_more_than_one_look_takes_is_not_forgotten(long_way: bool, connect: Connect) -> None:
    one, other = connect(asynchronous() if long_way else this_process())
    sent = [random.randbytes(MIN_FRAME) for _ in range(2 * RECEIVE_BURST + 10)]
    for frame in sent:
        one.send(1, [frame])
    assert sorted(gather(other, len(sent))) == sorted(sent)


@pytest.mark.parametrize("long_way", [False, True])
def test_sleep_ends_when_something_arrives_and_it_is_found_afterwards(long_way: bool, connect: Connect) -> None:
    """ZeroMQ's file descriptor signals each arrival once, and the poll in `sleep` may be what consumes the signal."""
    one, other = connect(asynchronous() if long_way else this_process())
    one.send(1, [HELLO])
    assert gather(other, 1) == [HELLO]  # connected
    for turn in range(50):
        frame = (b"%d" % turn).ljust(MIN_FRAME)
        thread = threading.Timer(0.002, one.send, (1, [frame]))
        thread.start()
        found: list[bytes] = []
        for _ in range(100):  # it may also return for another event
            other.sleep(PATIENCE, ())
            if found := other.receive(-1 if other.unread else SHORT):
                break
        assert found == [frame]
        thread.join()


def events_of(control: ZmqControlChannel, count: int) -> list[tuple[int, PeerState]]:
    found: list[tuple[int, PeerState]] = []
    until = time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < until, found
        control.sleep(0.05, ())
        found += [(event.rank, event.state) for event in control.events(time.monotonic())]
    return found


def test_who_has_the_address_of_another_peer_takes_its_place() -> None:
    here, there = (ZmqControlChannel(heartbeat=0.05) for _ in range(2))
    try:
        here.connect(1, there.endpoint, asynchronous())
        here.send(1, [HELLO])
        gather(there, 1)
        here.connect(2, there.endpoint, asynchronous())
        assert events_of(here, 1) == [(1, PeerState.LOST)]
        here.send(2, [HELLO])
        gather(there, 1)
        here.disconnect(1)
        here.send(2, [HELLO])
        assert gather(there, 1) == [HELLO], "the connection with the address is the other one's, too"
        assert here.events(time.monotonic() + 1.0) == []
    finally:
        here.close()
        there.close()


def test_of_two_peers_in_one_process_one_is_forgotten_and_the_other_dies() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = msgspec.structs.replace(this_process(), pid=child.pid, started=process_started(child.pid))
    here, *there = (ZmqControlChannel(heartbeat=5.0) for _ in range(4))
    try:
        for rank, control in enumerate(there):
            here.connect(rank, control.endpoint, process)
        here.disconnect(1)
        child.kill()
        assert sorted(events_of(here, 2)) == [(0, PeerState.DEAD), (2, PeerState.DEAD)]
        here.disconnect(0)
        here.disconnect(2)
    finally:
        for control in (here, *there):
            control.close()
        child.kill()
        child.communicate()


def test_a_peer_that_takes_in_nothing_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "QUEUE_LIMIT", 10)
    here, full, free = (ZmqControlChannel(heartbeat=5.0) for _ in range(3))
    try:
        for rank, control in enumerate((full, free)):
            here.connect(rank, control.endpoint, asynchronous())
        long = HELLO.ljust(1 << 20)
        for _ in range(200):  # far more than the sockets' buffers hold
            here.send(0, [long])
        here.send(1, [HELLO])
        assert gather(free, 1) == [HELLO]
        here.disconnect(0)  # its queue is not waited for
    finally:
        began = time.monotonic()
        here.close()
        full.close()
        free.close()
    assert time.monotonic() - began < PATIENCE


def connections(control: ZmqControlChannel) -> int:
    """How many connections with others have been made from ``control``."""
    return sum(peer.connected for peer in control._peers.values())


def test_an_idle_peer_of_this_host_needs_no_connection() -> None:
    here, there, far = (ZmqControlChannel(heartbeat=5.0) for _ in range(3))
    try:
        here.connect(1, there.endpoint, this_process(), idle=True)
        here.connect(2, far.endpoint, asynchronous(), idle=True)
        assert connections(here) == 1, "whether one of another host lives shows by its answers only"
        here.send(1, [HELLO])
        assert gather(there, 1, SHORT) == [HELLO]
        for _ in range(2000):  # more than its socket takes
            here.send(1, [HELLO])
        assert connections(here) == 1
        while there.receive(SHORT):
            continue
        long = HELLO.ljust(MAX_DATAGRAM + 1)
        here.send(1, [long])
        assert gather(there, 1, LONG) == [long]
        assert connections(here) == 2
        here.disconnect(1)
        here.disconnect(2)
    finally:
        for control in (here, there, far):
            control.close()


def test_a_peer_that_is_roused_and_hangs_is_lost_and_found_when_it_answers() -> None:
    child = subprocess.Popen([sys.executable, "-c", _HANGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    here = ZmqControlChannel(heartbeat=0.2, secret=_SECRET)
    try:
        endpoint = child.stdout.readline().decode().strip()
        process = msgspec.structs.replace(this_process(), pid=child.pid, started=process_started(child.pid))
        here.connect(1, endpoint, process, idle=True)
        child.send_signal(signal.SIGSTOP)
        here.rouse(1)
        here.rouse(1)
        assert events_of(here, 1) == [(1, PeerState.LOST)]
        child.send_signal(signal.SIGCONT)
        assert events_of(here, 1) == [(1, PeerState.FOUND)]
        child.kill()
        assert events_of(here, 1) == [(1, PeerState.DEAD)]
    finally:
        child.kill()
        child.communicate()
        here.close()


_SECRET = b"s" * 32
_HANGS = f"""
from torchkv.control.channel import ZmqControlChannel
control = ZmqControlChannel(heartbeat=0.2, secret={_SECRET!r})
print(control.endpoint, flush=True)
input()
"""


def test_peers_that_do_nothing_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when events are asked for nor before sleeping, however many there are; the one that ends is."""
    judged: list[int] = []
    judge = ZmqControlChannel._judge
    monkeypatch.setattr(
        ZmqControlChannel, "_judge", lambda self, peer, now: (judged.append(peer.rank), judge(self, peer, now))[1]
    )
    control = ZmqControlChannel(heartbeat=5.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ended = ProcessId(this_process().host, other.pid, process_started(other.pid))
        for rank in range(1, 100):
            control.connect(rank, "tcp://127.0.0.1:9 nobody", ended if rank == 50 else this_process(), idle=True)
        for number in range(10):
            assert control.events(float(number)) == []
            control.sleep(0.0, ())
        assert judged == []
        other.kill()
    assert events_of(control, 1) == [(50, PeerState.DEAD)]
    assert set(judged) == {50}
    assert not control._unsettled
    control.close()
