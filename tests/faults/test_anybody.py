"""Requests to whoever grants them, and pages counted from the prompt: what senders do not know. A simulated world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.requests import done, layout, seed, shadow
from torchkv.engine.source_pages import SourcePages
from torchkv.engine.work import KVWork
from torchkv.errors import LayoutMismatch, PageOutOfRange, PeerLost, ProtocolError, TransferCancelled, TransferTimeout
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

SOON = 20.0  # virtual seconds
OPTIONS = Options(transport="loopback", timeout=100.0, grant_timeout=100.0, heartbeat=0.2)
PAGE = 4  # tokens

served_by = pytest.mark.parametrize("views", [False, True], ids=["python", "loop"])
verbs_come = pytest.mark.parametrize("first", ["verbs", "grant"])


def cluster(*sizes: tuple[str, int], views: bool, faults: Faults | None = None, options: Options = OPTIONS) -> Cluster:
    places = [Place(name, layout(rank, size), 64) for name, size in sizes for rank in range(size)]
    world = Cluster(places, seed=seed(), views=views, faults=faults, options=options)
    for rank in world.ranks:
        shadow(rank)  # random bytes everywhere
    return world


def send(rank: Rank, pages: list[int], name: str = "r", **where: object) -> list[KVWork]:
    """One verb a layer, and the finish, to anybody."""
    works = [rank.send_layer(name, layer, pages, None, **where) for layer in rank.cache.layout.layers]
    return [*works, rank.finish(name, None, aux=b"token")]


def check(src: Rank, src_pages: Sequence[int], dst: Rank, dst_pages: Sequence[int]) -> None:
    for name in ("k", "v"):
        for mine, theirs in zip(src.cache[name], dst.cache[name], strict=True):
            np.testing.assert_array_equal(mine[list(src_pages)], theirs[list(dst_pages)])


def succeed(world: Cluster, *works: KVWork) -> None:
    assert world.run(done(*works), limit=SOON)
    assert [work.exception() for work in works] == [None] * len(works)


def nothing_left(world: Cluster) -> None:
    for rank in world.ranks:
        sender = rank.engine.sender
        assert (sender.requests.by_key, sender.requests.addressed, sender.requests.queued_pages) == ({}, {}, 0)
        assert sender.grants.unmet._grants == sender.grants.unmet._revocations == sender.grants.unmet._refusals == {}
        assert sender.grants.unmet._exemptions == {}


@served_by
@verbs_come
def test_whoever_grants_first_is_sent_the_request(first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), ("e", 1), views=views)
    p, d, e = world.ranks
    for one, name in ((d, "r"), (e, "q"), (e, "r"), (d, "r")):  # the name again: for another receiver this time
        if first == "verbs":
            works = send(p, [1, 2], name)
            world.run(limit=0.1)
            assert not any(work.is_completed() for work in works)
            rx = one.recv_pages(name, [3, 4], "p")
        else:
            rx = one.recv_pages(name, [3, 4], "p")
            world.run(limit=0.1)
            works = send(p, [1, 2], name)
        succeed(world, rx, *works)
        assert rx.aux == b"token"
        check(p, [1, 2], one, [3, 4])
    nothing_left(world)


@served_by
def test_the_second_to_grant_waits_for_a_request_of_its_own(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), ("e", 1), views=views)
    p, d, e = world.ranks
    works = send(p, [1])
    first = d.recv_pages("r", [3], "p")
    succeed(world, first, *works)
    second = e.recv_pages("r", [5], "p")
    world.run(limit=1.0)
    assert not second.is_completed()
    succeed(world, second, *send(p, [2]))
    check(p, [1], d, [3])
    check(p, [2], e, [5])
    nothing_left(world)


def test_an_instance_that_is_still_busy_with_the_name_is_waited_for() -> None:
    """One of its ranks has told its verdict of an earlier request, and grants again; that of the other is delayed."""
    world = cluster(("p", 1), ("d", 2), views=False)
    p, d0, d1 = world.ranks
    received = [d.recv_pages("r", [3], "p") for d in (d0, d1)]
    assert world.run(lambda: p.granted("r", "d") == 0, limit=SOON)
    world.partition(2, 0)
    earlier = [p.send_pages("r", [1], "d"), p.finish("r", "d")]
    assert world.run(done(*received), limit=SOON)
    received += [d.recv_pages("r", [4], "p") for d in (d0, d1)]
    world.run(limit=0.3)
    assert [dst for _, dst in p.engine.sender.requests.by_key] == [2]
    works = [p.send_pages("r", [2], None), p.finish("r", None)]
    world.run(limit=0.3)
    assert not any(work.is_completed() for work in works)
    world.heal(2, 0)
    succeed(world, *earlier, *works, *received)
    nothing_left(world)


@served_by
@verbs_come
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_all_ranks_of_both_instances_take_part(first: str, writers: int, readers: int, views: bool) -> None:
    world = cluster(("p", writers), ("d", readers), views=views)
    ps, ds = world.ranks[:writers], world.ranks[writers:]

    def begin() -> list[KVWork]:
        return [work for p in ps for work in (p.send_slice("r", None, [1, 2], None), p.finish("r", None))]

    works = begin() if first == "verbs" else []
    posted = [d.recv_pages("r", [3, 4], "p") for d in ds[:1]]
    world.run(limit=0.2)  # one rank grants before the others
    works = works or begin()
    posted += [d.recv_pages("r", [3, 4], "p") for d in ds[1:]]
    succeed(world, *posted, *works)
    heads = [torch.cat([rank.cache["k"][0][[1, 2]] for rank in ps], dim=2)]
    heads += [torch.cat([rank.cache["k"][0][[3, 4]] for rank in ds], dim=2)]
    assert torch.equal(*heads)
    nothing_left(world)


@served_by
@verbs_come
@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_what_the_receiver_holds_is_left_out_of_the_prompt(held: int, first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    p, d = world.ranks
    before = d.cache["k"][0].clone()

    def begin() -> list[KVWork]:
        chunks = [p.send_pages("r", [1, 2], None, start=0, origin="prompt")]
        chunks.append(p.send_pages("r", [3], None, start=2, origin="prompt"))
        return [*chunks, p.finish("r", None)]

    works = begin() if first == "verbs" else []
    world.run(limit=0.1)
    rx = d.recv_pages("r", [7, 8, 9][held:], "p", prefix_tokens=held * PAGE)
    if first == "grant":
        assert world.run(lambda: p.granted("r", None) == held * PAGE, limit=SOON)
        works = begin()
    succeed(world, rx, *works)
    check(p, [1, 2, 3][held:], d, [7, 8, 9][held:])
    assert torch.equal(d.cache["k"][0][:7], before[:7])
    assert works[0].bytes == max(2 - held, 0) * 2 * 2 * PAGE * 2 * 4 * 2  # k and v, layers, tokens, heads, dim, int16
    nothing_left(world)


def test_held_pages_that_are_sent_all_the_same_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the pages keep their order, and the first one that is needed is not the first one sent."""
    monkeypatch.setattr(SourcePages, "behind", lambda self, held: self)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        test_what_the_receiver_holds_is_left_out_of_the_prompt(1, "verbs", views=False)


@served_by
def test_a_named_receiver_s_prefix_may_be_unknown_too_and_two_may_hold_unlike_ones(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), ("e", 1), views=views)
    p, d, e = world.ranks
    works = [p.send_pages("r", [1, 2, 3], [1, 2], origin="prompt"), p.finish("r", [1, 2])]
    received = [d.recv_pages("r", [5, 6], 0, prefix_tokens=PAGE), e.recv_pages("r", [7], 0, prefix_tokens=2 * PAGE)]
    succeed(world, *works, *received)
    check(p, [2, 3], d, [5, 6])
    check(p, [3], e, [7])


@served_by
def test_pages_beyond_the_prompt_that_was_granted_fail(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    p, d = world.ranks
    late = p.send_pages("r", [1, 2, 3], None, origin="prompt")
    rx = d.recv_pages("r", [5], "p", prefix_tokens=PAGE)
    assert world.run(done(late, rx), limit=SOON)
    assert isinstance(late.exception(), PageOutOfRange)
    with pytest.raises(PageOutOfRange):
        p.send_pages("r", [1], None)
    assert world.run(p.cancel("r").is_completed, limit=SOON)
    rx = d.recv_pages("r", [6], "p", prefix_tokens=PAGE)
    assert world.run(lambda: p.granted("r", None) == PAGE, limit=SOON)
    with pytest.raises(PageOutOfRange, match="page 1 "):
        p.send_pages("r", [3], None, start=2, origin="prompt")
    succeed(world, rx, p.send_pages("r", [3], None, start=1, origin="prompt"), p.finish("r", None))
    check(p, [3], d, [6])


def halves() -> list[Place]:
    """p has a layer on each of its ranks; d only needs the first."""
    full = {"num_kv_heads": 2, "head_dim": 4, "page_size": PAGE, "dtype": torch.int16}
    places = [Place("p", KVLayout.gqa(num_layers=2, layers=[layer], **full)) for layer in (0, 1)]
    return [*places, Place("d", KVLayout.gqa(num_layers=2, layers=[0], **full))]


@served_by
@verbs_come
@pytest.mark.parametrize("ends", ["finish", "cancel"])
def test_who_owes_nothing_is_told_and_completes(ends: str, first: str, views: bool) -> None:
    world = Cluster(halves(), seed=seed(), views=views, options=OPTIONS)
    p0, p1, d = world.ranks
    for _ in range(2):
        works = send(p1, [1, 2]) if first == "verbs" else []
        rx = d.recv_pages("r", [3, 4], "p")
        world.run(limit=0.2)
        if first == "grant":
            with pytest.raises(LayoutMismatch, match="finish\\(\\) completes"):
                p1.granted("r", None)
            works = send(p1, [1, 2]) if ends == "finish" else [p1.cancel("r")]
        succeed(world, *works)
        assert sum(work.bytes for work in works) == 0
        succeed(world, rx, *send(p0, [1, 2]))
        check(p0, [1, 2], d, [3, 4])
    nothing_left(world)


@served_by
@verbs_come
def test_who_declines_answers_every_rank_that_grants(first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 2), views=views)
    p, d0, d1 = world.ranks
    received = [d0.recv_pages("r", [3, 4], "p")] if first == "grant" else []
    world.run(limit=0.1)
    assert p.cancel("r", decline=True).is_success()
    received += [d.recv_pages("r", [3, 4], "p") for d in (d0, d1)[len(received) :]]
    assert world.run(done(*received), limit=SOON)
    assert [type(rx.exception()) for rx in received] == [TransferCancelled] * 2
    assert world.run(lambda: not d0.quarantined() and not d1.quarantined(), limit=SOON)
    received = [d.recv_pages("r", [3, 4], "p") for d in (d0, d1)]
    succeed(world, *received, p.send_pages("r", [1, 2], None), p.finish("r", None))
    nothing_left(world)


@served_by
@pytest.mark.parametrize("readers", [1, 2])
def test_a_cancel_before_the_grant_meets_it(readers: int, views: bool) -> None:
    world = cluster(("p", 1), ("d", readers), views=views)
    p, ds = world[0], world.ranks[1:]
    works = [p.send_pages("r", [1, 2], None), p.finish("r", None)]
    assert world.run(p.cancel("r").is_completed, limit=SOON)
    assert {type(work.exception()) for work in works} == {TransferCancelled}
    received = [d.recv_pages("r", [3, 4], "p") for d in ds]
    assert world.run(done(*received), limit=SOON)
    assert {type(rx.exception()) for rx in received} == {TransferCancelled}
    world.run(limit=1.0)
    received = [d.recv_pages("r", [3, 4], "p") for d in ds]
    succeed(world, *received, p.send_pages("r", [1, 2], None), p.finish("r", None))
    nothing_left(world)


@served_by
@verbs_come
def test_what_every_receiver_refuses_fails_once(first: str, views: bool) -> None:
    world = cluster(("p", 1), ("d", 2), views=views)
    p, d0, d1 = world.ranks
    works = [p.send_pages("r", [1, 2], None), p.finish("r", None)] if first == "verbs" else []
    for d in (d0, d1):
        d.refuse("r", "p")
    world.run(limit=0.5)
    if first == "grant":
        with pytest.raises(TransferCancelled, match="refused by its receiver"):
            p.send_pages("r", [1], None)
    assert world.run(done(*works), limit=SOON)
    assert all(isinstance(work.exception(), TransferCancelled) for work in works)
    assert world.run(p.cancel("r").is_completed, limit=SOON)
    received = [d.recv_pages("r", [3, 4], "p") for d in (d0, d1)]
    succeed(world, *received, p.send_pages("r", [1, 2], None), p.finish("r", None))
    nothing_left(world)


@served_by
def test_a_grant_that_comes_too_late_is_refused(views: bool) -> None:
    world = cluster(("p", 1), ("d", 2), views=views, options=Options(transport="loopback", grant_timeout=2.0))
    p, d0, d1 = world.ranks
    works = [p.send_pages("r", [1, 2], None), p.finish("r", None)]
    assert world.run(done(*works), limit=SOON)
    assert all(isinstance(work.exception(), TransferTimeout) for work in works)
    assert "no rank has posted recv_pages within 2 s" in str(works[0].exception())
    received = [d.recv_pages("r", [3, 4], "p") for d in (d0, d1)]
    assert world.run(done(*received), limit=1.5)
    assert world.run(p.cancel("r").is_completed, limit=SOON)
    world.run(limit=0.5)  # the second rank's grant may come after all has failed, and fail what has begun by then
    received = [d.recv_pages("r", [5, 6], "p") for d in (d0, d1)]
    succeed(world, *received, p.send_pages("r", [1, 2], None), p.finish("r", None))


@served_by
def test_a_rank_of_the_instance_that_is_lost_fails_the_request_at_once(views: bool) -> None:
    world = cluster(("p", 1), ("d", 2), views=views)
    p, d = world.ranks[:2]
    world.kill(2)
    assert world.run(lambda: 2 in p.engine.lost, limit=SOON)
    works = [p.send_pages("r", [1, 2], None), p.finish("r", None)]
    rx = d.recv_pages("r", [3, 4], "p")
    assert world.run(done(*works, rx), limit=SOON)
    assert isinstance(works[1].exception(), PeerLost)


def test_one_request_has_one_way_of_naming_its_receiver() -> None:
    world = cluster(("p", 1), ("d", 1), views=False)
    p = world[0]
    p.send_pages("r", [1], None)
    for verb in (lambda: p.send_pages("r", [1], 1), lambda: p.finish("r", 1), lambda: p.granted("r", 1)):
        with pytest.raises(ProtocolError, match="dst=None in all verbs"):
            verb()
    with pytest.raises(ProtocolError, match="origin='start'"):
        p.send_pages("r", [1], None, origin="start")


@served_by
def test_layers_go_whole_or_the_request_fails(views: bool) -> None:
    world = cluster(("p", 1), ("d", 2), views=views)
    p, d0, d1 = world.ranks
    layer = p.send_layer("r", 0, [1, 2], None)
    received = [d.recv_pages("r", [3, 4], "p") for d in (d0, d1)]
    assert world.run(done(layer, *received), limit=SOON)
    assert isinstance(layer.exception(), LayoutMismatch)
    assert all(rx.exception() is not None for rx in received)
    assert world.run(p.cancel("r").is_completed, limit=SOON)
    received = [d.recv_pages("r", [5, 6], "p") for d in (d0, d1)]
    assert world.run(lambda: p.granted("r", None) == 0, limit=SOON)
    with pytest.raises(LayoutMismatch, match="use send_slice or send_pages"):
        p.send_layer("r", 0, [1, 2], None)
    succeed(world, *received, p.send_pages("r", [1, 2], None), p.finish("r", None))


@served_by
def test_missing_pages_are_named_once_the_grant_is_there(views: bool) -> None:
    world = cluster(("p", 1), ("d", 1), views=views)
    p, d = world.ranks
    works = [p.send_pages("r", [1], None), p.finish("r", None)]
    rx = d.recv_pages("r", [3, 4], "p")
    assert world.run(done(rx, *works), limit=SOON)
    assert isinstance(works[1].exception(), ProtocolError)
    assert "layer 0 page 1" in str(works[1].exception())


@served_by
def test_many_requests_under_a_bad_network(views: bool) -> None:
    faults = Faults(min_delay=1e-4, max_delay=2e-2, drop=0.3, duplicate=0.3)
    world = cluster(("p", 1), ("d", 1), ("e", 1), views=views, faults=faults)
    p, d, e = world.ranks
    works, received = [], []
    for i in range(20):
        if i % 2:
            works += send(p, [1, i + 2], f"r{i}")
        received.append((d, e)[i % 3 == 0].recv_pages(f"r{i}", [2 * i, 2 * i + 1], "p"))
    world.run(limit=0.05)
    for i in range(0, 20, 2):
        works += send(p, [1, i + 2], f"r{i}")
    succeed(world, *works, *received)
    for i in range(20):
        check(p, [1, i + 2], (d, e)[i % 3 == 0], [2 * i, 2 * i + 1])
    nothing_left(world)
