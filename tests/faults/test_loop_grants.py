"""Grants that meet trouble between two resident loops: one of them gets no processor, or its mailbox has no room.

And connections that break.

Through mailboxes, and through a network that carries them late.

The seeds of `test_simulated_loops` seldom hit these moments, so each is made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from torchkv_loopback.channel import LoopbackChannel

from tests.helpers.references.memory import snapshot
from tests.helpers.references.page_transfer import Pool
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.flows import core_of, full_speed, short_runs, stall
from tests.helpers.simulation.requests import done, layout, seed, send, shadow
from torchkv.core.loop.codes import NEWS
from torchkv.core.loop.events import emit, event_room
from torchkv.engine.resident.flows import Flows
from torchkv.engine.work import KVWork
from torchkv.errors import PageOutOfRange, PeerLost, ProtocolError, TransferCancelled
from torchkv.protocol.sending.sender import Sender

AUX = b"first token" * 5  # of two records


class Way:
    """How the loops of the present test reach each other."""

    network = False


@pytest.fixture(params=[False, True], ids=["mailboxes", "network"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Way, "network", request.param)
    with short_runs():
        yield


both_ways = pytest.mark.usefixtures("through")


def cluster(*sizes: tuple[str, int]) -> Cluster:
    """Instances (name, TP size), and loops of full speed. All pages are mapped, or those of no other instance are."""
    places = [Place(name, layout(rank, size)) for name, size in sizes for rank in range(size)]
    made = Cluster(places, seed=seed(), views=not Way.network, network=Way.network, apart=Way.network)
    for rank in made.ranks:
        full_speed(rank)
    if made.network is not None:
        made.network.pieces, made.network.slowness = 0.0, 1.0
        pairs = [(a, b) for a in made.ranks for b in made.ranks if a is not b]
        for a, b in pairs:
            a.engine.flows.routes.lane(b.rank, a.engine.connection(b.rank))
        assert made.run(lambda: all(core_of(a).peers.hears(b.rank) for a, b in pairs), limit=1)
    return made


def unchanged(before: Pool, rank: Rank) -> bool:
    now = snapshot(rank).tensors
    return all(bool((tensor == now[key]).all()) for key, tensor in before.tensors.items())


def _late_grant(world: Cluster) -> bool:
    """Whether pages that were given up before the writer's loop had heard of them stay as they are."""
    writer, reader = world[0], world[1]
    for rank in world.ranks:
        shadow(rank)  # random bytes
    works = send(writer, [0, 1, 2], 1, "old")
    go_on = stall(writer)
    reader.recv_pages("old", [3, 7, 1], 0)
    assert world.run(lambda: not _owes(reader), limit=1)
    cancel = reader.cancel("old")
    assert world.run(cancel.is_completed, limit=5)
    assert cancel.is_success()
    before = snapshot(reader)
    go_on()
    world.run(done(*works), limit=5)
    return unchanged(before, reader)


def _owes(rank: Rank) -> bool:
    world = core_of(rank).world
    return bool(world["command_tail"] != world["command_head"] or world["due_tail"] != world["due_head"])


@both_ways
def test_a_grant_that_the_writer_hears_after_its_end_binds_nothing() -> None:
    assert _late_grant(cluster(("p", 1), ("d", 1)))


def test_a_grant_binds_nothing_after_its_end_although_the_writers_loop_can_tell_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its Python has not taken events for so long that the loop has stopped hearing records."""
    settle = Flows.settle

    def settle_behind_many_events(flows: Flows) -> None:
        with flows.core.runner.standing_still():
            while event_room(flows.core.world):
                emit(flows.core.world, NEWS, 0, 0)
        settle(flows)

    monkeypatch.setattr(Flows, "settle", settle_behind_many_events)
    assert _late_grant(cluster(("p", 1), ("d", 1)))


def test_the_writers_quiescence_is_what_protects_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flows, "settle", lambda self: None)
    assert not _late_grant(cluster(("p", 1), ("d", 1)))


class Late:
    """Messages of loops that the network keeps until `come`, whatever has become of their senders.

    src: the rank whose messages these are; None: of all.
    """

    def __init__(self, world: Cluster, src: int | None = None) -> None:
        assert world.network is not None
        self._network = world.network
        self._move = self._network._move
        self._node = None if src is None else world[src].node
        self._kept: list[LoopbackChannel] = []
        self._network._move = self._keep

    def _keep(self, channel: LoopbackChannel) -> None:
        if self._node in (None, channel.node):
            self._kept.append(channel)
        else:
            self._move(channel)

    def go_on(self) -> None:
        """They arrive now, but for those that are lost because their connection has broken."""
        self._network._move = self._move
        for channel in self._kept:
            self._network._links[channel][0].read()
            self._move(channel)

    def come(self) -> None:
        self._network._move = self._move
        for channel in self._kept:
            message = self._network._links[channel].popleft()
            message.read()
            assert message.data is not None
            inbox = self._network.inboxes.setdefault(channel._peer.node, deque())
            inbox.append((message.tag, message.data))


def _overtaken(world: Cluster, *, again: bool) -> bool:
    """Whether pages stay as they are that were given up before their grant came. again: the name is used again."""
    reader = world[1]
    for rank in world.ranks:
        shadow(rank)  # random bytes
    late = Late(world)
    works = send(world[0], [0, 1, 2], 1)
    reader.recv_pages("r", [3, 7, 1], 0)
    assert world.run(lambda: not _owes(reader), limit=1)
    cancel = reader.cancel("r")
    assert world.run(cancel.is_completed, limit=5)
    if again:
        world[0].cancel("r")
        works = send(world[0], [4, 5, 6], 1)  # other bytes
    before = snapshot(reader)
    late.come()
    world.run(done(*works), limit=5)
    assert again or all(isinstance(work.exception(), TransferCancelled) for work in works)
    return unchanged(before, reader)


@pytest.mark.parametrize("again", [False, True])
def test_a_grant_that_comes_after_the_message_of_its_end_binds_nothing(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        assert _overtaken(cluster(("p", 1), ("d", 1)), again=again)


def test_grants_that_were_told_twice_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "network", True)
    monkeypatch.setattr(Flows, "takes_grant", lambda self, rank, flow, generation: True)
    with short_runs():
        assert not _overtaken(cluster(("p", 1), ("d", 1)), again=True)


def test_a_grant_that_comes_after_the_end_of_its_receiver_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the next request of its name to anybody, and fail it."""
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 1), ("d", 1), ("e", 1))
        late = Late(world)
        world[1].recv_pages("r", [3], 0)
        assert world.run(lambda: not _owes(world[1]), limit=1)
        world.kill(1)
        monkeypatch.setattr(type(world[0].engine.peers), "_is_drained", lambda self, rank: False)  # yet
        assert world.run(lambda: world[0].engine.flows._dead == {1}, limit=5)
        late.come()
        world.run(limit=0.1)
        rx = world[2].recv_pages("r", [3], 0)
        work = world[0].send_pages("r", [5], None)
        world[0].finish("r", None)
        assert world.run(done(rx, work), limit=5)
        assert work.exception() is None


def test_a_request_cancelled_before_its_grant_was_told_fails_at_its_writers() -> None:
    """The mailboxes have no room. The grant and its end then come in messages, and in this order."""
    world = cluster(("p", 2), ("d", 1))
    reader = world[2]
    finishes = [send(world[rank], [0, 1], 2)[1] for rank in (0, 1)]
    core_of(reader).world["window"] = 0
    reader.recv_pages("r", [3, 7], "p")
    world.run(limit=0.01)
    assert _owes(reader)
    reader.cancel("r")
    assert world.run(done(*finishes), limit=1)
    assert all(isinstance(work.exception(), TransferCancelled) for work in finishes)
    assert not _owes(reader)


def test_one_of_two_writers_is_told_by_a_message() -> None:
    """The other has sent what Python must judge, so that the receiver's Python serves the request."""
    world = cluster(("p", 2), ("d", 1))
    memory, before = shadow(world[2]), snapshot(world[2])
    sources = {rank: snapshot(world[rank]) for rank in (0, 1)}
    reader = core_of(world[2])
    real = reader.world["peers"][1]["written"]
    reader.world["peers"][1]["written"] = real + 64  # as if its mailbox were full
    rx = world[2].recv_pages("r", [3, 7], "p")
    works = [world[0].staged_put("r", range(2), [0, 1], 2), world[0].finish("r", 2), *send(world[1], [0, 1], 2)]
    world.run(limit=0.05)
    reader.world["peers"][1]["written"] = real
    assert world.run(done(rx, *works), limit=5)
    assert rx.exception() is None
    memory.check_received("r", before, [3, 7], sources, {0: [0, 1], 1: [0, 1]})
    assert memory.problems == []


@both_ways
def test_receivers_of_one_verb_hold_one_prefix() -> None:
    """Also if the loop has bound one of them already, or would soon."""
    for prefixed in (1, 2):
        world = cluster(("p", 1), ("d", 1), ("e", 1))
        for first in (prefixed, 3 - prefixed):
            work = world[0].send_pages(f"r{first}", [0, 1], (1, 2))
            for rank in (first, 3 - first):
                prefix = 4 if rank == prefixed else 0
                world[rank].recv_pages(f"r{first}", [3 + 2 * (first == 1), 7 + first], 0, prefix_tokens=prefix)
                world.run(limit=0.01)
            assert world.run(work.is_completed, limit=5)
            assert isinstance(work.exception(), ProtocolError)
            assert "unequal prefixes" in str(work.exception())


@both_ways
def test_a_grant_by_message_meets_the_request_that_waits_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flows, "grant", lambda self, req: False)
    world = cluster(("p", 1), ("d", 1))
    memory, before, source = shadow(world[1]), snapshot(world[1]), snapshot(world[0])
    works = send(world[0], [9, 4], 1)
    world.run(limit=0.01)
    rx = world[1].recv_pages("r", [3, 7], 0)
    assert world.run(done(rx, *works), limit=5)
    assert rx.exception() is None
    memory.check_received("r", before, [3, 7], {0: source}, {0: [9, 4]})
    assert memory.problems == []


@both_ways
@pytest.mark.parametrize("pages", [[3], [3, 7, 1]], ids=["too few", "too many"])
def test_pages_that_do_not_fit_are_refused_as_ever(pages: list[int]) -> None:
    world = cluster(("p", 1), ("d", 1))
    for rank in world.ranks:
        shadow(rank)  # random bytes
    works = send(world[0], [0, 1], 1)
    before = snapshot(world[1])
    rx = world[1].recv_pages("r", pages, 0)
    assert world.run(done(rx, *works), limit=5)
    assert works[1].exception() is not None
    assert rx.exception() is not None
    assert unchanged(before, world[1])


@both_ways
def test_many_names_at_once() -> None:
    """Requests that share buckets of the table, granted in another order than begun, some given up."""
    dice = np.random.default_rng()
    world = cluster(("p", 1), ("d", 1))
    for rank in world.ranks:
        core_of(rank).world["window"] = 3
    memory, before, source = shadow(world[1]), snapshot(world[1]), snapshot(world[0])
    names = [f"r{i}" for i in range(8)]
    works = {name: send(world[0], [i, i + 1], 1, name) for i, name in enumerate(names)}
    given_up = str(dice.choice(names))
    world[0].cancel(given_up)
    order = [str(name) for name in dice.permutation([name for name in names if name != given_up])]
    rxs = {name: world[1].recv_pages(name, [2 * i, 2 * i + 1], 0) for i, name in enumerate(order)}
    assert world.run(done(*rxs.values(), *(work for pair in works.values() for work in pair)), limit=5)
    for i, name in enumerate(order):
        assert rxs[name].exception() is None
        at = names.index(name)
        memory.check_received(name, before, [2 * i, 2 * i + 1], {0: source}, {0: [at, at + 1]})
    assert memory.problems == []


@both_ways
def test_a_grant_comes_while_a_verb_is_refused_by_the_loop() -> None:
    """The loop binds the request in the moment in which it is taken back for an op that the loop cannot do."""
    world = cluster(("p", 1), ("d", 1))
    memory, before, source = shadow(world[1]), snapshot(world[1]), snapshot(world[0])
    go_on = stall(world[0])
    rx = world[1].recv_pages("r", [3, 7], 0)
    assert world.run(lambda: not _owes(world[1]), limit=1)
    works = [world[0].staged_put("r", range(2), [9, 4], 1), world[0].finish("r", 1)]
    go_on()
    assert world.run(done(rx, *works), limit=5)
    assert rx.exception() is None
    memory.check_received("r", before, [3, 7], {0: source}, {0: [9, 4]})
    assert memory.problems == []


@both_ways
@pytest.mark.parametrize("refused", ["op", "pages", "aux"])
def test_a_grant_that_python_must_bind_comes_while_the_request_is_taken_back(refused: str) -> None:
    """Of a grant behind a prefix Python learns in the middle of taking the request back."""
    world = cluster(("p", 1), ("d", 1))
    memory, before, source = shadow(world[1]), snapshot(world[1]), snapshot(world[0])
    verbs = [lambda: world[0].send_pages("r", [9, 4], 1)]
    if refused == "op":
        verbs = [lambda: world[0].staged_put("r", range(2), [9, 4], 1)]
    elif refused == "pages":
        verbs = [lambda: world[0].send_pages("r", [4], 1, start=1), lambda: world[0].send_pages("r", [9], 1)]
    verbs.append(lambda: world[0].finish("r", 1, aux=bytes(300 if refused == "aux" else 3)))
    works: list[KVWork] = []
    go_on = stall(world[0])
    rx = world[1].recv_pages("r", [3, 7], 0, prefix_tokens=4)
    assert world.run(lambda: not _owes(world[1]), limit=1)
    for verb in verbs:
        works.append(verb())
    go_on()
    assert world.run(done(rx, *works), limit=5)
    assert rx.exception() is None
    memory.check_received("r", before, [3, 7], {0: source}, {0: [9, 4]})
    assert memory.problems == []


@both_ways
def test_a_page_outside_a_grant_that_only_the_loop_knows() -> None:
    """The verb is accepted, because Python has not heard of the grant; then it fails, and nothing else is harmed."""
    world = cluster(("p", 1), ("d", 1))
    for rank in world.ranks:
        shadow(rank)  # random bytes
    first = world[0].send_pages("r", [9], 1)
    rx = world[1].recv_pages("r", [3], 0)
    for _ in range(4):
        for rank in world.ranks:
            core_of(rank).runner.step()
    before = snapshot(world[1])
    outside = world[0].send_pages("r", [4], "d", start=1)
    assert world.run(done(first, rx, outside), limit=5)
    assert isinstance(outside.exception(), PageOutOfRange)
    assert isinstance(rx.exception(), PageOutOfRange)
    assert unchanged(before, world[1])


def test_a_plain_verb_knows_of_a_grant_that_the_loop_has_bound() -> None:
    """So it refuses a page outside the grant at once, and the request goes on."""
    world = cluster(("p", 1), ("d", 1))
    first = world[0].send_pages("r", [9], 1)
    rx = world[1].recv_pages("r", [3], 0)
    for _ in range(4):
        for rank in world.ranks:
            core_of(rank).runner.step()
    with pytest.raises(PageOutOfRange, match="outside the grant"):
        world[0].send_pages("r", [4], 1, start=1)
    finished = world[0].finish("r", 1)
    assert world.run(done(first, rx, finished), limit=5)
    assert rx.is_success()


def test_a_quarantine_may_outlive_the_loop() -> None:
    """As that of a destroyed group does, until its writer's process has ended."""
    world = cluster(("p", 1), ("d", 1))
    send(world[0], [0, 1], 1)
    world.pause(0)
    rx = world[1].recv_pages("r", [3, 7], 0)
    world[1].cancel("r")
    world.run(limit=0.1)
    assert not rx.is_success()
    assert set(world[1].quarantined()) == {3, 7}
    world[1].engine.leave(world.world.now)
    world[1].engine.receiver.peer_dead(0, world.world.now)
    assert world[1].quarantined() == {}


def test_a_verdict_that_was_on_its_way_when_its_connection_broke_is_told_by_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as the receiver notices. It knows of no request any more that it could take back."""
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 1), ("d", 1))
        works = send(world[0], [0, 1, 2], 1)
        rx = world[1].recv_pages("r", [3, 7, 1], 0)
        assert world.run(rx.is_completed, limit=5)
        assert not works[-1].is_completed()
        world.world.faults = replace(world.world.faults, survive=0.0)
        world.sever(1, 0)
        world[1].recv_pages("another", [4], 0)
        assert world.run(done(*works), limit=5)
        assert [work.exception() for work in (rx, *works)] == [None, None, None]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_what_a_writer_has_told_over_a_connection_that_then_broke_is_told_by_messages(
    finished: bool, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages that have arrived, and of the end of the request, once the writer notices; twice is as good as once."""
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 1), ("d", 1))
        writer, reader = world[0], world[1]
        checks = [shadow(writer), shadow(reader)]  # random bytes
        before = snapshot(reader)
        rx = reader.recv_pages("r", [3, 7, 1], 0)
        world.run(limit=0.05)
        late = Late(world)
        works = [writer.send_pages("r", [0, 1, 2], 1, layers=None if finished else 0)]
        if finished:
            works.append(writer.finish("r", 1, aux=AUX))
        assert world.run(works[0].is_completed, limit=5)
        world.run(limit=0.05)  # the seal, too, is on its way
        world.world.faults = replace(world.world.faults, survive=1.0 - lost)
        world.sever(0, 1)
        late.go_on()
        # This fails, because it begins on the broken connection.
        another = [reader.recv_pages("another", [4], 0), *send(writer, [5], 1, "another")]
        assert world.run(done(*another), limit=5)
        if not finished:
            works += [writer.send_layer("r", 1, [0, 1, 2], 1), writer.finish("r", 1, aux=AUX)]
        assert world.run(done(rx, *works), limit=5)
        assert [work.exception() for work in (rx, *works)] == [None] * (1 + len(works))
        assert (rx.aux, rx.bytes) == (AUX, 2 * 3 * 2 * reader.cache.layout.page_nbytes("k"))  # each byte counts once
        checks[1].check_received("r", before, [3, 7, 1], {0: snapshot(writer)}, {0: [0, 1, 2]})
        assert not checks[1].problems


def test_aux_that_comes_in_records_after_it_was_told_again_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 2), ("d", 1))
        rx = world[2].recv_pages("r", [3, 7, 1], "p")
        world.run(limit=0.05)
        late = Late(world, 0)
        works = send(world[0], [0, 1, 2], 2, aux=AUX)
        assert world.run(works[0].is_completed, limit=5)
        world.run(limit=0.05)
        world.sever(0, 2)
        broken = [world[0].send_pages("another", [5], 2), world[2].recv_pages("another", [4], "p")]
        assert world.run(done(*broken), limit=5)
        late.come()
        assert not rx.is_completed()
        works += send(world[1], [0, 1, 2], 2)
        assert world.run(done(rx, *works), limit=5)
        assert [work.exception() for work in (rx, *works)] == [None] * 5
        assert rx.aux == AUX


@pytest.mark.parametrize(("finished", "as_if_put"), [(False, False), (True, False), (True, True)])
def test_what_was_staged_is_not_told_again(finished: bool, as_if_put: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not arrived before the receiver has unpacked it, which it does when it has the record. So it is lost."""
    monkeypatch.setattr(Way, "network", True)
    if as_if_put:
        copied = Sender.copied
        monkeypatch.setattr(
            Sender, "copied", lambda self, req, ops, nbytes, path, now: copied(self, req, ops, nbytes, "runs", now)
        )
    with short_runs():
        world = cluster(("p", 1), ("d", 1))
        writer, reader = world[0], world[1]
        for _ in range(3):  # until the receiver has granted a standing stage
            works = [reader.recv_pages("r", [4], 0), writer.staged_put("r", None, [5], 1), writer.finish("r", 1)]
            assert world.run(done(*works), limit=5)
        checks = [shadow(writer), shadow(reader)]  # random bytes
        before = snapshot(reader)
        rx = reader.recv_pages("r", [3, 7, 1], 0)
        world.run(limit=0.05)
        late = Late(world)
        works = [writer.staged_put("r", None, [0, 1, 2], 1)]
        if finished:
            works.append(writer.finish("r", 1))
        assert world.run(works[0].is_completed, limit=1)
        world.run(limit=0.05)
        world.world.faults = replace(world.world.faults, survive=0.0)
        world.sever(0, 1)
        late.go_on()
        another = [reader.recv_pages("another", [4], 0), *send(writer, [5], 1, "another")]
        assert world.run(done(*another), limit=2)
        assert world.run(done(*works, rx), limit=2)
        checks[1].check_received("r", before, [3, 7, 1], {0: snapshot(writer)}, {0: [0, 1, 2]})
        assert checks[1].problems, "the pages are as they were"
        assert isinstance(rx.exception(), PeerLost) != as_if_put


def test_a_lane_that_has_failed_while_nothing_was_sent_serves_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a record. Python makes another one, which serves the loop."""
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 1), ("d", 1))
        core = core_of(world[0])
        first = core.peers.lane(1)
        for number in range(5):
            if number == 3:
                core.world["peers"][core.peers.slots[1]]["failed"] = -1
            works = [*send(world[0], [0, 1, 2], 1), world[1].recv_pages("r", [3, 7, 1], 0)]
            assert world.run(done(*works), limit=5)
            assert [work.exception() for work in works] == [None, None, None]
            world.run(limit=0.1)
        assert core.peers.lane(1) not in (None, first)


def test_the_loop_tells_of_ops_whose_connection_python_has_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of Python's has found it broken."""
    monkeypatch.setattr(Way, "network", True)
    with short_runs():
        world = cluster(("p", 1), ("d", 1))
        writer, core = world[0].engine, core_of(world[0])
        rx = world[1].recv_pages("r", [3, 7, 1], 0)
        world.run(limit=0.05)
        works = send(world[0], [0, 1, 2], 1)
        for _ in range(10_000):
            if core.events.pending:
                break
            for rank in world.ranks:
                core_of(rank).runner.step()
            world.world.advance(world.world.now + 1e-4)
        assert core.events.pending
        writer.peers.drop_connection(writer.connections[1])
        assert world.run(done(rx, *works), limit=5)
        assert [work.exception() for work in (rx, *works)] == [None, None, None]
