"""One verdict of two ranks whose resident loops meet trouble in the middle of it.

The seeds of `test_simulated_loops` seldom hit these moments, so each is made here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.references.memory import snapshot
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.flows import core_of, full_speed, stall
from tests.helpers.simulation.requests import done, layout, seed, shadow
from torchkv.core.loop.codes import VOTED
from torchkv.engine.work import KVWork
from torchkv.errors import PageOutOfRange, PeerLost, TransferCancelled, TransferTimeout
from torchkv.options import Options

WRITER, LEADER, MEMBER = range(3)


def cluster(**options: float) -> Cluster:
    """One writer and an instance of two, all of whose pages are mapped, and loops of full speed."""
    places = [Place("p", layout()), Place("d", layout(0, 2)), Place("d", layout(1, 2))]
    made = Cluster(places, seed=seed(), views=True, options=Options(transport="loopback", **options))
    for rank in made.ranks:
        full_speed(rank)
    return made


def states(rank: Rank, state: int) -> int:
    return int((core_of(rank).world["receives"]["state"] == state).sum())  # type: ignore[call-overload]


def voted(rank: Rank) -> Callable[[], bool]:
    return lambda: states(rank, VOTED) == 1


def all_right(world: Cluster, works: list[KVWork]) -> bool:
    return world.run(done(*works), limit=5) and all(work.exception() is None for work in works)


def receive(world: Cluster, name: str = "r") -> list[KVWork]:
    """Of the leader and of the member."""
    return [world[rank].recv_pages(name, [3, 7], "p") for rank in (LEADER, MEMBER)]


def write(world: Cluster, name: str = "r") -> list[KVWork]:
    return [world[WRITER].send_pages(name, [9, 4], "d"), world[WRITER].finish(name, "d")]


def test_a_request_of_two_ranks_takes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    world = cluster()
    memories = [shadow(world[rank]) for rank in (LEADER, MEMBER)]
    before, source = [snapshot(world[rank]) for rank in (LEADER, MEMBER)], snapshot(world[WRITER])
    for rank in world.ranks:
        monkeypatch.setattr(rank.engine.messenger, "tell", lambda to, message: told.append(message))
    assert all_right(world, [*receive(world), *write(world)])
    for memory, pages in zip(memories, before, strict=True):
        memory.check_received("r", pages, [3, 7], {0: source}, {0: [9, 4]})
        assert memory.problems == []
    assert told == []


def test_nobody_succeeds_before_everybody_is_complete() -> None:
    world = cluster()
    go_on = stall(world[LEADER])
    works = [*receive(world), *write(world)]
    assert world.run(voted(world[MEMBER]), limit=1)
    assert not world.run(lambda: any(work.is_success() for work in works[:2]), limit=1)
    go_on()
    assert all_right(world, works)


@pytest.mark.parametrize("room", [True, False], ids=["its vote is told", "its vote finds no room"])
@pytest.mark.parametrize("stalled", [True, False], ids=["its leader stands still", "its leader goes on"])
def test_a_complete_rank_that_is_cancelled_gets_its_leaders_verdict(room: bool, stalled: bool) -> None:
    world = cluster()
    works = receive(world)
    world.run(limit=0.01)
    core_of(world[MEMBER]).world["window"] = 64 if room else 0
    go_on = stall(world[LEADER])
    works += write(world)
    assert world.run(voted(world[MEMBER]), limit=1)
    if not stalled:
        go_on()
    cancel = world[MEMBER].cancel("r")
    if stalled:
        assert world.run(works[1].is_completed, limit=5)
        assert isinstance(works[1].exception(), TransferCancelled)
        go_on()
    assert world.run(done(*works[:2], cancel), limit=5)
    assert type(works[0].exception()) is type(works[1].exception())


@pytest.mark.parametrize("room", [True, False], ids=["in the mailbox", "finds no room"])
def test_a_success_that_a_rank_has_not_heard_outlasts_its_cancel(room: bool) -> None:
    """The leader has succeeded. Whatever the member asks now, it succeeds too."""
    world = cluster()
    works = receive(world)
    world.run(limit=0.01)
    go_on = stall(world[LEADER])
    works += write(world)
    assert world.run(voted(world[MEMBER]), limit=1)
    if not room:
        core_of(world[LEADER]).world["window"] = 0
    wake = stall(world[MEMBER])
    go_on()
    assert world.run(works[0].is_success, limit=1)
    assert states(world[MEMBER], VOTED) == 1
    cancel = world[MEMBER].cancel("r")
    wake()
    assert world.run(done(cancel, works[1]), limit=5)
    assert works[1].is_success()
    core_of(world[LEADER]).world["window"] = 64
    assert all_right(world, works)


def test_a_post_that_finds_no_room_comes_before_its_end() -> None:
    world = cluster()
    world.run(limit=0.01)
    core_of(world[MEMBER]).world["window"] = 0
    works = receive(world)
    world.run(limit=0.01)
    world[MEMBER].cancel("r")
    assert world.run(done(*works), limit=1)
    assert all(isinstance(work.exception(), TransferCancelled) for work in works)


def test_a_refused_call_meets_the_call_that_was_made_with_it() -> None:
    """The next call is told of by the loop, and overtakes the message about the refused one."""
    world = cluster()
    first = world[LEADER].recv_pages("r", [3, 7], "p")
    with pytest.raises(PageOutOfRange):
        world[MEMBER].recv_pages("r", [3, 99], "p")
    second = world[MEMBER].recv_pages("r", [3, 7], "p")
    assert world.run(first.is_completed, limit=5)
    assert isinstance(first.exception(), PageOutOfRange)
    again = world[LEADER].recv_pages("r", [1, 5], "p")
    assert not world.run(second.is_completed, limit=1)
    assert all_right(world, [again, second, *write(world)])


def test_a_rank_that_never_posts_fails_the_one_that_is_complete() -> None:
    world = cluster(grant_timeout=2.0, timeout=1.0)
    rx = world[MEMBER].recv_pages("r", [3, 7], "p")
    world[WRITER].send_pages("r", [9, 4], MEMBER)
    world[WRITER].finish("r", MEMBER)
    assert world.run(voted(world[MEMBER]), limit=1)
    assert not world.run(rx.is_completed, limit=1.5)
    assert world.run(rx.is_completed, limit=5)
    assert isinstance(rx.exception(), TransferTimeout)
    assert "post it on every rank" in str(rx.exception())


def test_a_leader_that_dies_after_its_vote_fails_the_member() -> None:
    world = cluster()
    go_on = stall(world[MEMBER])
    works = [*receive(world), *write(world)]
    assert world.run(voted(world[LEADER]), limit=1)
    world.kill(LEADER)
    go_on()
    assert world.run(works[MEMBER - LEADER].is_completed, limit=20)
    assert isinstance(works[MEMBER - LEADER].exception(), PeerLost)


@pytest.mark.parametrize("has_voted", [False, True])
def test_a_member_that_dies_fails_the_leader_unless_it_has_voted(has_voted: bool) -> None:
    """Then its pages are complete, too, and the leader has all votes."""
    world = cluster()
    go_on = stall(world[LEADER])
    if not has_voted:
        stall(world[MEMBER])
    leads, *_ = [*receive(world), *write(world)]
    assert not has_voted or world.run(voted(world[MEMBER]), limit=1)
    world.kill(MEMBER)
    go_on()
    assert world.run(leads.is_completed, limit=20)
    assert leads.is_success() if has_voted else isinstance(leads.exception(), PeerLost)
