"""What was sent is taken back while its request stays open, so that its source is free. In a simulated world."""

from __future__ import annotations

import random

import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.flows import Gate
from tests.helpers.simulation.requests import done, layout, seed, shadow
from torchkv.engine.work import KVWork
from torchkv.errors import ProtocolError, TransferCancelled
from torchkv.options import Options

SOON = 20.0  # virtual seconds
OPTIONS = Options(transport="loopback", timeout=100.0, grant_timeout=100.0)

served_by = pytest.mark.parametrize("views", [False, True], ids=["python", "loop"])
receiver_is = pytest.mark.parametrize("dst", ["d", None], ids=["named", "anybody"])


def cluster(readers: int = 1, *, views: bool, faults: Faults | None = None) -> Cluster:
    places = [Place("p", layout(), 64), *(Place("d", layout(rank, readers), 64) for rank in range(readers))]
    world = Cluster(places, seed=seed(), views=views, faults=faults, options=OPTIONS)
    for rank in world.ranks:
        shadow(rank)  # random bytes everywhere
    return world


def poison(rank: Rank, pages: list[int]) -> None:
    for tensors in (rank.cache["k"], rank.cache["v"]):
        for tensor in tensors:
            tensor[pages] = -7


def nothing_left(world: Cluster) -> None:
    sender = world[0].engine.sender
    assert (sender.requests.by_key, sender.requests.queued_pages, sender.requests.addressed) == ({}, 0, {})


def finish(world: Cluster, dst: str | None, received: list[KVWork], pages: list[int]) -> None:
    p = world[0]
    works = [p.send_pages("r", pages, dst), p.finish("r", dst), *received]
    assert world.run(done(*works), limit=SOON)
    assert [work.exception() for work in works] == [None] * len(works)
    for layer in (0, 1):
        mine = p.cache["k"][layer][pages]
        theirs = torch.cat([rank.cache["k"][layer][[3, 4]] for rank in world.ranks[1:]], dim=2)
        assert torch.equal(mine, theirs)
    nothing_left(world)


@served_by
@receiver_is
@pytest.mark.parametrize("readers", [1, 2])
def test_what_waits_for_its_grant_is_taken_back(readers: int, dst: str | None, views: bool) -> None:
    world = cluster(readers, views=views)
    p, ds = world[0], world.ranks[1:]
    works = [p.send_pages("r", [1, 2], dst, layers=layer) for layer in (0, 1)]
    world.run(limit=0.1)
    assert world.run(p.withdraw("r").is_completed, limit=SOON)
    assert {type(work.exception()) for work in works} == {TransferCancelled}
    assert "send it again" in str(works[0].exception())
    poison(p, [1, 2])
    finish(world, dst, [d.recv_pages("r", [3, 4], "p") for d in ds], [5, 6])


@served_by
@receiver_is
@pytest.mark.parametrize("readers", [1, 2])
def test_what_waits_for_its_event_is_taken_back(readers: int, dst: str | None, views: bool) -> None:
    world = cluster(readers, views=views)
    p, ds = world[0], world.ranks[1:]
    received = [d.recv_pages("r", [3, 4], "p") for d in ds]
    gate = Gate(p.clock, 5.0)
    works = [p.send_pages("r", [1, 2], dst, layers=layer, event=gate) for layer in (0, 1)]
    world.run(limit=1.0)
    withdrawn = p.withdraw("r")
    assert world.run(withdrawn.is_completed, limit=2.0), "it does not wait for the event"
    poison(p, [1, 2])
    assert {type(work.exception()) for work in works} == {TransferCancelled}
    world.run(limit=6.0)
    assert not any(rx.is_completed() for rx in received)
    finish(world, dst, received, [5, 6])


@served_by
def test_what_is_under_way_ends_first(views: bool) -> None:
    """At any moment of a transfer: once the withdrawal is complete, nothing of the source arrives any more."""
    for delay in [random.uniform(0.0, 0.05) for _ in range(15)]:
        world = cluster(2, views=views, faults=Faults(min_delay=1e-3, max_delay=2e-2, pieces=5, window=2))
        p, ds = world[0], world.ranks[1:]
        received = [d.recv_pages("r", [3, 4], "p") for d in ds]
        world.run(limit=0.1)
        works = [p.send_slice("r", layer, [1, 2], "d") for layer in (0, 1)]
        world.run(limit=delay)
        withdrawn = p.withdraw("r")
        assert world.run(done(withdrawn, *works), limit=SOON)
        assert withdrawn.is_success()
        assert {type(work.exception()) for work in works} <= {TransferCancelled, type(None)}
        poison(p, [1, 2])
        # Without its grant it might be granted no pages.
        assert world.run(lambda p=p: p.granted("r", "d") == 0, limit=SOON)
        with pytest.raises(ProtocolError, match=r"layer 0 page 0|nothing was sent"):
            p.finish("r", "d")  # everything is to be sent again
        finish(world, "d", received, [5, 6])


@served_by
def test_a_withdrawn_request_may_be_cancelled(views: bool) -> None:
    world = cluster(views=views, faults=Faults(min_delay=1e-3, max_delay=2e-2, pieces=5, window=2))
    p, d = world.ranks
    rx = d.recv_pages("r", [3, 4], "p")
    world.run(limit=0.1)
    work = p.send_pages("r", [1, 2], "d")
    withdrawn, cancelled = p.withdraw("r"), p.cancel("r")
    assert world.run(done(withdrawn, cancelled, work, rx), limit=SOON)
    assert isinstance(rx.exception(), TransferCancelled)
    assert world.run(lambda: not d.quarantined(), limit=SOON)
    nothing_left(world)


def test_what_is_finished_or_unknown() -> None:
    world = cluster(views=False)
    p = world[0]
    assert p.withdraw("nobody knows it").is_success()
    p.send_pages("r", [1], "d")
    p.finish("r", "d")
    with pytest.raises(ProtocolError, match="cancel it instead"):
        p.withdraw("r")
