"""Requests that one side says no to before it has begun: the other side is told at once. In a simulated world."""

from __future__ import annotations

import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.requests import done, layout, seed, send
from torchkv.errors import ProtocolError, TransferCancelled
from torchkv.options import Options

SOON = 20.0  # virtual seconds
OPTIONS = Options(transport="loopback", timeout=100.0, grant_timeout=100.0)

served_by = pytest.mark.parametrize("views", [False, True], ids=["python", "loop"])


def cluster(*sizes: tuple[str, int], views: bool, faults: Faults | None = None) -> Cluster:
    places = [Place(name, layout(rank, size)) for name, size in sizes for rank in range(size)]
    return Cluster(places, seed=seed(), views=views, faults=faults, options=OPTIONS)


def exchange(world: Cluster) -> None:
    """A request of the same name now works as any other."""
    sent, rx = send(world[0], [1, 2], 1), world[1].recv_pages("r", [3, 4], 0)
    assert world.run(done(*sent, rx), limit=SOON)
    assert [work.exception() for work in (*sent, rx)] == [None] * (len(sent) + 1)


@served_by
@pytest.mark.parametrize("first", ["verbs", "refusal"])
def test_what_the_receiver_refuses_fails_at_its_sender(first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    sender, receiver = world.ranks
    if first == "verbs":
        works = send(sender, [0, 1], 1)
        world.run(limit=0.1)
        receiver.refuse("r", 0)
        assert world.run(done(*works), limit=SOON)
        assert {type(work.exception()) for work in works} == {TransferCancelled}
        assert "refused by its receiver, rank 1" in str(works[0].exception())
    else:
        receiver.refuse("r", 0)
        world.run(limit=1.0)
        with pytest.raises(TransferCancelled, match="refused by its receiver"):
            sender.send_pages("r", [0, 1], 1)
    with pytest.raises(TransferCancelled):
        sender.finish("r", 1)
    assert world.run(sender.cancel("r").is_completed, limit=SOON)
    exchange(world)


@served_by
@pytest.mark.parametrize("first", ["posted", "cancelled"])
def test_what_its_sender_will_never_begin_fails_at_the_receiver(first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    sender, receiver = world.ranks
    if first == "posted":
        rx = receiver.recv_pages("r", [3, 4], 0)
        world.run(limit=0.1)
    assert sender.cancel("r", decline=True).is_success()
    if first == "cancelled":
        world.run(limit=0.1)
        rx = receiver.recv_pages("r", [3, 4], 0)
    assert world.run(done(rx), limit=SOON)
    assert isinstance(rx.exception(), TransferCancelled)
    assert world.run(lambda: receiver.quarantined() == {}, limit=SOON)
    exchange(world)


@served_by
def test_both_sides_may_say_no(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    sender, receiver = world.ranks
    for order in ([0, 1], [1, 0]):
        for side in order:
            if side == 0:
                sender.cancel("r", decline=True)
            else:
                receiver.refuse("r", 0)
            world.run(limit=0.1)
        exchange(world)


@served_by
def test_all_ranks_of_an_instance_are_told(views: bool) -> None:
    """Two writers, two readers; one reader refuses."""
    world = cluster(("p", 2), ("d", 2), views=views)
    works = [work for rank in (0, 1) for work in send(world[rank], [0, 1], "d")]
    posted = world[2].recv_pages("r", [3, 4], "p")
    world.run(limit=0.1)
    world[3].refuse("r", "p")
    assert world.run(done(posted, *works), limit=SOON)
    assert all(work.exception() is not None for work in (posted, *works[1::2]))
    assert isinstance(posted.exception(), TransferCancelled)


def test_who_has_granted_cannot_refuse() -> None:
    world = cluster(("p", 1), ("d", 1), views=False)
    rx = world[1].recv_pages("r", [3], 0)
    with pytest.raises(ProtocolError, match="cancel it instead"):
        world[1].refuse("r", 0)
    send(world[0], [1], 1)
    assert world.run(done(rx), limit=SOON)
    assert rx.is_success()


@served_by
def test_a_request_that_has_begun_is_cancelled_as_ever(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    works = send(world[0], [0, 1], 1)
    assert world.run(world[0].cancel("r", decline=True).is_completed, limit=SOON)
    assert {type(work.exception()) for work in works} == {TransferCancelled}
    rx = world[1].recv_pages("r", [3, 4], 0)
    assert world.run(done(rx), limit=SOON)
    assert isinstance(rx.exception(), TransferCancelled)


@served_by
def test_lost_and_doubled_messages_change_nothing(views: bool) -> None:
    faults = Faults(min_delay=1e-4, max_delay=2e-2, drop=0.3, duplicate=0.3)
    world = cluster(("p", 1), ("d", 1), views=views, faults=faults)
    works = [send(world[0], [0], 1, f"r{i}") for i in range(20)]
    world.run(limit=0.1)
    for i in range(0, 20, 2):
        world[1].refuse(f"r{i}", 0)
    rest = [world[1].recv_pages(f"r{i}", [i // 2], 0) for i in range(1, 20, 2)]
    assert world.run(done(*rest, *(work for each in works for work in each)), limit=SOON)
    assert all(rx.is_success() for rx in rest)
    for i, each in enumerate(works):
        assert all((work.exception() is None) == bool(i % 2) for work in each)


@served_by
def test_granted_tells_the_prefix_and_never_blocks(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    sender, receiver = world.ranks
    assert sender.granted("r", 1) is None
    world.run(limit=0.1)
    assert sender.granted("r", 1) is None
    size = receiver.cache.layout.page_size
    rx = receiver.recv_pages("r", [3, 4], 0, prefix_tokens=size)
    assert world.run(lambda: sender.granted("r", 1) == size, limit=SOON)
    sent = [sender.send_pages("r", [5, 6], 1), sender.finish("r", 1)]
    assert world.run(done(rx, *sent), limit=SOON)
    assert rx.is_success()
    assert torch.equal(receiver.cache["k"][0][3], sender.cache["k"][0][5])
    receiver.refuse("q", 0)
    world.run(limit=1.0)
    with pytest.raises(TransferCancelled, match="refused"):
        sender.granted("q", 1)


def test_granted_before_the_first_verb_finds_a_grant_that_is_there() -> None:
    world = cluster(("p", 1), ("d", 1), views=True)
    world[1].recv_pages("r", [3, 4], 0)
    assert world.run(lambda: world[0].granted("r", "d") == 0, limit=SOON)
