"""Races that broke other systems, or torchkv once, each reproduced in the simulated world."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torchkv_loopback import Faults

from tests.helpers.references.memory import guarded, page_bytes, snapshot
from tests.helpers.references.page_transfer import reference
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.requests import done, layout, seed, send, shadow
from torchkv.errors import PeerLost, ProtocolError, TransferCancelled
from torchkv.protocol.messages import Attest, Grant, Quiesced, Seal, Verdict, decode_frame
from torchkv.protocol.receiving.endings import ReceiveEndings

SLOW = Faults(min_delay=0.05, max_delay=0.4, survive=1.0)


def pair(faults: Faults = SLOW, *, instances: tuple[str, str] = ("p", "d"), sees_death: bool = True) -> Cluster:
    places = [Place(name, layout()) for name in instances]
    return Cluster(places, seed=seed(), faults=faults, sees_death=sees_death)


def two_writers() -> Cluster:
    """Ranks 0 and 1 hold one head each, rank 2 receives both."""
    places = [Place("p", layout(0, 2)), Place("p", layout(1, 2)), Place("d", layout())]
    return Cluster(places, seed=seed(), faults=SLOW)


def flying(cluster: Cluster) -> int:
    return sum(cluster.world.in_flight.values())


def assert_transfer(cluster: Cluster, writer: int, reader: int, name: str) -> None:
    """A new request succeeds, and every byte is right."""
    cluster.observers.clear()
    memory = {rank: shadow(cluster[rank]) for rank in (writer, reader)}
    free = [int(page) for page in memory[reader].free()[:2]]
    before, source = snapshot(cluster[reader]), snapshot(cluster[writer])
    rx = cluster[reader].recv_pages(name, free, writer)
    works = send(cluster[writer], [9, 4], reader, name)
    assert cluster.run(done(rx, *works), limit=20)
    assert rx.exception() is None
    memory[reader].check_received(name, before, free, {writer: source}, {writer: [9, 4]})
    assert memory[reader].problems == []


# -- the abort race ---------------------------------------------------------------------------------------------------


def _abort_race(cluster: Cluster) -> list[str]:
    """The receiver cancels while a paused writer's puts are in flight, and reuses the pages as soon as it may."""
    writer, reader = cluster[0], cluster[1]
    memory = guarded(cluster, 1)
    rx = reader.recv_pages("old", [3, 7, 1], 0)
    writer.send_pages("old", [0, 1, 2], 1)
    assert cluster.run(lambda: flying(cluster) > 0, limit=5)
    cluster.pause(0)
    cancel = reader.cancel("old")
    cluster.run(limit=0.001)
    assert isinstance(rx.exception(), TransferCancelled), "the call fails at once"
    if not cancel.is_completed():  # else the protocol is broken: nothing has proved the writer quiescent
        assert sorted(reader.quarantined()) == [1, 3, 7]
        assert rx.exception().pages_safe is False
    cluster.run(limit=0.5)
    cluster.resume(0)
    assert cluster.run(lambda: cancel.is_completed() and not flying(cluster), limit=20)
    cluster.run(limit=5)
    memory.check_free("afterwards")
    return memory.problems


def test_a_cancelled_requests_late_writes_never_reach_the_next_owner() -> None:
    cluster = pair()
    assert _abort_race(cluster) == []
    assert cluster[1].quarantined() == {}
    assert_transfer(cluster, 0, 1, "new")


def test_the_abort_race_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a receiver that frees pages at once, the next owner's bytes are destroyed."""

    def free_at_once(self: ReceiveEndings, req: object) -> None:
        self.end(req)

    monkeypatch.setattr(ReceiveEndings, "end_if_quiescent", free_at_once)
    problems = _abort_race(pair())
    assert problems
    assert all("free, but written to" in problem for problem in problems)


# -- lost and late messages -------------------------------------------------------------------------------------------


class Tap:
    """Records every frame that is sent, and loses those that it is told to."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[tuple[int, int, bytes]] = []
        self.lose: Callable[[object], bool] = lambda message: False
        self._key = cluster[0].engine.messenger._key
        self.world_send = cluster.world.send
        cluster.world.send = self._send

    def _send(self, src: int, dst: int, data: bytes) -> None:
        self.seen.append((src, dst, data))
        if not self.lose(decode_frame(data, self._key).message):
            self.world_send(src, dst, data)

    def count(self, kind: type) -> int:
        return sum(isinstance(decode_frame(data, self._key).message, kind) for _, _, data in self.seen)


def test_the_posting_thread_sends_the_grant() -> None:
    """If the control channel refuses that, the driver sends them. All come in the order of the calls."""
    cluster = pair()
    tap = Tap(cluster)
    names = [f"r{i}" for i in range(60)]
    for name in names:
        cluster[1].recv_pages(name, [], 0)
    assert 0 < tap.count(Grant) < len(names)
    assert cluster.run(lambda: len(cluster[0].grants()) == len(names), limit=20)
    assert [grant.request for grant in cluster[0].grants()] == names


@pytest.mark.parametrize("kind", [Quiesced, Verdict, Attest, Seal])
def test_lost_messages_are_sent_again(kind: type) -> None:
    cluster = pair()
    tap = Tap(cluster)
    left = [3]

    def lose(message: object) -> bool:
        if isinstance(message, kind) and left[0]:
            left[0] -= 1
            return True
        return False

    tap.lose = lose
    rx = cluster[1].recv_pages("r", [1, 2], 0)
    works = send(cluster[0], [5, 6], 1)
    if kind is Quiesced:
        assert cluster.run(lambda: flying(cluster) > 0, limit=5)
        cancel = cluster[1].cancel("r")
        assert cluster.run(done(cancel, rx), limit=20)
        assert cluster[1].quarantined() == {}
    else:
        assert cluster.run(done(rx, *works), limit=20)
        assert rx.exception() is None
    assert left == [0], "the test lost nothing"
    assert tap.count(kind) >= 4


def test_repeated_and_late_frames_change_nothing() -> None:
    """Every frame of a finished request arrives again, in any order, while the next request is under way."""
    cluster = two_writers()
    tap = Tap(cluster)
    memory = guarded(cluster, 2)
    first = cluster[2].recv_pages("r", [1, 2], [0, 1])
    works = [work for writer in (0, 1) for work in send(cluster[writer], [5, 6], 2)]
    assert cluster.run(done(first, *works), limit=20)
    assert tap.count(Seal) >= 2
    old = tap.seen.copy()
    random.shuffle(old)
    second = cluster[2].recv_pages("r", [3, 4], [0, 1])
    for frame in old:
        tap.world_send(*frame)
    cluster.run(limit=2)
    assert not second.is_completed(), "messages of an earlier life completed this one"
    works = [work for writer in (0, 1) for work in send(cluster[writer], [7, 8], 2)]
    assert cluster.run(done(second, *works), limit=20)
    assert second.exception() is None
    cluster.run(limit=2)
    memory.check_free("afterwards")
    assert memory.problems == []


def test_frames_of_an_earlier_process_are_dropped() -> None:
    """A rank restarts under the same names and key; frames of its former process arrive late."""
    secret = random.SystemRandom().randbytes(32)
    places = [Place("p", layout()), Place("d", layout())]
    old = Cluster(places, seed=seed(), faults=SLOW, secret=secret)
    tap = Tap(old)
    rx = old[1].recv_pages("r", [1, 2], 0)
    works = send(old[0], [5, 6], 1)
    assert old.run(done(rx, *works), limit=20)
    old.kill(0)
    old.kill(1)
    sent = tap.seen.copy()
    new = Cluster(places, world=old.world, secret=secret)
    second = new[1].recv_pages("r", [1, 2], 0)
    for src, dst, data in sent:
        tap.world_send(new[src].node, new[dst].node, data)
    new.run(limit=2)
    assert not second.is_completed()
    assert [(each.request, each.dst) for each in new[0].grants()] == [("r", 1)]
    works = send(new[0], [5, 6], 1)
    assert new.run(done(second, *works), limit=20)
    assert second.exception() is None


def test_frames_with_another_key_are_dropped() -> None:
    old, new = pair(), pair()
    tap = Tap(old)
    rx = old[1].recv_pages("r", [1, 2], 0)
    assert old.run(done(rx, *send(old[0], [5, 6], 1)), limit=20)
    second = new[1].recv_pages("r", [1, 2], 0)
    for frame in tap.seen:
        new.world.send(*frame)
    new.run(limit=2)
    assert not second.is_completed()
    assert new[0].engine.messenger.dropped + new[1].engine.messenger.dropped == len(tap.seen)


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sees_death", [True, False])
def test_a_writer_killed_half_way(sees_death: bool) -> None:
    """Its last pieces may still land: the pages are free only after those, or never if the death cannot be seen."""
    cluster = pair(sees_death=sees_death)
    memory = shadow(cluster[1])
    rx = cluster[1].recv_pages("r", [3, 7, 1], 0)
    cluster[0].send_pages("r", [0, 1, 2], 1)
    assert cluster.run(lambda: flying(cluster) > 0, limit=5)
    cluster.run(limit=0.06)
    cluster.kill(0)
    assert flying(cluster) > 0
    free_at: list[int] = []

    def watch(rank: Rank) -> None:
        if memory.released():
            free_at.append(flying(cluster))
            memory.reuse([3, 7, 1])

    cluster.observers.append(watch)
    assert cluster.run(done(rx), limit=5)
    assert isinstance(rx.exception(), PeerLost)
    cluster.run(limit=10)
    assert free_at == ([0] if sees_death else [])
    assert cluster[1].quarantined().keys() == (set() if sees_death else {3, 7, 1})
    memory.check_free("afterwards")
    assert memory.problems == []


def _dead_writer_is_drained_first(cluster: Cluster) -> None:
    memory = guarded(cluster, 1)
    rx = cluster[1].recv_pages("r", [3, 7, 1], 0)
    cluster[0].send_pages("r", [0, 1, 2], 1)
    assert cluster.run(lambda: cluster.world.in_flight[0, 1] > 0, limit=5)
    cluster.run(limit=0.4)  # some pieces have left the writer, few have landed
    cluster.kill(0)
    assert cluster.run(done(rx), limit=5)
    cluster.run(limit=10)
    assert cluster[1].quarantined() == {}
    memory.check_free("afterwards")
    assert memory.problems == []


@pytest.mark.parametrize("attempt", range(8))
def test_a_broken_route_does_not_hide_what_a_dead_peer_still_writes(attempt: int) -> None:
    """The receiver was sending to that peer too, so its own channel breaks while the peer's pieces are in flight."""
    cluster = pair(Faults(min_delay=0.01, max_delay=1.0, survive=1.0))
    back = cluster[0].recv_pages("back", [11], 1)
    cluster[1].send_pages("back", [14], 0)
    _dead_writer_is_drained_first(cluster)
    assert not back.is_completed()


@pytest.mark.parametrize("attempt", range(8))
def test_a_dead_peer_of_the_same_instance_is_drained_too(attempt: int) -> None:
    """Between ranks of one instance registration makes no connection."""
    cluster = pair(Faults(min_delay=0.01, max_delay=1.0, survive=1.0), instances=("one", "one"))
    assert 0 not in cluster[1].engine.connections
    _dead_writer_is_drained_first(cluster)


def test_nothing_is_sent_to_a_dead_peer() -> None:
    """Messages that a dead peer never acknowledged are not sent again for ever."""
    cluster = pair()
    tap = Tap(cluster)
    cluster[0].send_pages("r", [0, 1, 2], 1)
    cluster.kill(1)
    rx = cluster[0].recv_pages("back", [3], 1)
    assert cluster.run(done(rx), limit=5)
    assert isinstance(rx.exception(), PeerLost)
    cluster.run(limit=1)
    before = len(tap.seen)
    assert before > 0
    cluster[0].cancel("r")
    cluster[0].cancel("back")
    cluster.run(limit=20)
    assert len(tap.seen) == before


def test_one_of_two_writers_fails_and_the_other_is_waited_for() -> None:
    """The request fails at once, but its pages stay leased until the other, healthy writer has drained as well."""
    cluster = two_writers()
    memory = guarded(cluster, 2)
    rx = cluster[2].recv_pages("r", [3, 1], [0, 1])
    for writer in (0, 1):
        cluster[writer].send_pages("r", [0, 1], 2)
    assert cluster.run(lambda: cluster.world.in_flight[0, 2] > 0 and cluster.world.in_flight[1, 2] > 0, limit=5)
    cluster.partition(2, 1)
    cluster.partition(1, 2)  # writer 1's pieces wait in the network
    cluster[0].cancel("r")
    assert cluster.run(done(rx), limit=3)
    assert isinstance(rx.exception(), TransferCancelled)
    cluster.run(limit=3)
    assert cluster[2].quarantined() == {3: (1,), 1: (1,)}
    cluster.heal(1, 2)
    cluster.heal(2, 1)
    assert cluster.run(lambda: not cluster[2].quarantined(), limit=20)
    assert flying(cluster) == 0
    cluster.run(limit=3)
    memory.check_free("afterwards")
    assert memory.problems == []


def test_a_broken_channel_is_replaced_and_the_writer_never_called_quiescent() -> None:
    cluster = pair()
    rx = cluster[1].recv_pages("r", [3, 1], 0)
    cluster[0].send_pages("r", [0, 1], 1)
    assert cluster.run(lambda: flying(cluster) > 0, limit=5)
    cluster.sever(0, 1)
    assert cluster.run(done(rx), limit=10)
    cluster[0].cancel("r")
    cluster.run(limit=5)
    assert cluster[1].quarantined() == {3: (0,), 1: (0,)}
    assert_transfer(cluster, 0, 1, "next")


# -- callers ----------------------------------------------------------------------------------------------------------


def test_a_futures_callback_may_call_verbs() -> None:
    """Callbacks run on the progress thread: if it held the engine's lock, a verb in one would deadlock."""
    cluster = pair()
    rx = cluster[1].recv_pages("r", [1, 2], 0)
    locked: list[bool] = []
    rx.get_future().add_done_callback(lambda future: locked.append(cluster[1].engine.lock.locked()))
    assert cluster.run(done(rx, *send(cluster[0], [5, 6], 1)), limit=20)
    assert locked == [False]


def test_a_failed_request_leaves_the_group_usable() -> None:
    cluster = pair()
    rx = cluster[1].recv_pages("r", [1, 2], 0)
    sent, finished = send(cluster[0], [5, 6], 1, aux=b"token")
    cluster[0].cancel("r")
    assert cluster.run(done(rx, sent, finished), limit=20)
    assert isinstance(rx.exception(), TransferCancelled)
    assert isinstance(finished.exception(), TransferCancelled)
    cluster.run(limit=1)
    assert_transfer(cluster, 0, 1, "r")


def test_two_readers_disagree_on_the_prefix() -> None:
    places = [Place("p", layout()), Place("d", layout(0, 2)), Place("d", layout(1, 2))]
    cluster = Cluster(places, seed=seed(), faults=SLOW)
    one = cluster[1].recv_pages("r", [1], "p", prefix_tokens=4)
    other = cluster[2].recv_pages("r", [1], "p", prefix_tokens=8)
    assert cluster.run(done(one, other), limit=20)
    assert isinstance(one.exception(), ProtocolError)
    assert isinstance(other.exception(), ProtocolError)
    assert "prefix_tokens 4 and 8" in str(other.exception())


def test_the_reference_notices_a_wrong_byte() -> None:
    """Negative control of the byte comparison that these tests use: one wrong byte is noticed."""
    cluster = pair()
    memory = shadow(cluster[1])
    before, source = snapshot(cluster[1]), snapshot(cluster[0])
    rx = cluster[1].recv_pages("r", [1, 2], 0)
    assert cluster.run(done(rx, *send(cluster[0], [5, 6], 1)), limit=20)
    want = reference({0: source}, {0: [5, 6]}, before, [1, 2])
    assert (want.tensors["k", 0][1] != before.tensors["k", 0][1]).any()
    page_bytes(cluster[1])["k", 0][1, 5] ^= 1
    memory.check_received("r", before, [1, 2], {0: source}, {0: [5, 6]})
    assert memory.problems == ["r on rank 1: 1 wrong bytes in ('k', 0)"]
