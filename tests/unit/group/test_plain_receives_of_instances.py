"""Plain receives on the ranks of an instance, and from the ranks of one: they do what the general way does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.references.memory import page_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.layout.layout import KVLayout

SENT, GRANTED = [5, 6, 2], [3, 1, 9]
LAYERS, PAGES = 4, 16


def layout(tp_rank: int = 0, tp_size: int = 1, layers: list[int] | None = None) -> KVLayout:
    return KVLayout.gqa(
        num_layers=LAYERS,
        num_kv_heads=2,
        head_dim=2,
        page_size=2,
        dtype=torch.int16,
        tp_rank=tp_rank,
        tp_size=tp_size,
        layers=layers,
    )


def cluster(writers: list[KVLayout], readers: list[KVLayout]) -> Cluster:
    """Their loops have no threads. A request has been served before, so that all are connected."""
    places = [*(Place("p", each, PAGES) for each in writers), *(Place("d", each, PAGES) for each in readers)]
    made = Cluster(places, views=True)
    assert request(made, "before")
    return made


def tp(size: int) -> list[KVLayout]:
    return [layout(rank, size) for rank in range(size)]


def request(world: Cluster, name: str = "r", src: int | str = "p") -> tuple[object, ...]:
    """What a request leaves behind. Every byte is looked at."""
    senders = [rank for rank in world.ranks if rank.engine.group_map.me.instance == "p"]
    readers = [rank for rank in world.ranks if rank.engine.group_map.me.instance == "d"]
    for rank in senders:
        for storage in rank.cache.storages:
            storage.random_(0, 255)
    for rank in readers:
        for storage in rank.cache.storages:
            storage.fill_(0x5A)
    works = [rank.recv_pages(name, GRANTED, src) for rank in readers]
    for rank in senders:
        works += [rank.send_pages(name, SENT, None), rank.finish(name, None)]
    assert world.run(lambda: all(work.is_completed() for work in works), limit=5)
    assert [work.exception() for work in works] == [None] * len(works)
    for reader in readers:
        for (component, layer), pages in page_bytes(reader).items():
            mine = _heads(senders, component, layer, reader)
            assert (pages[GRANTED].reshape(len(GRANTED), -1) == mine).all()
            assert (np.delete(pages, GRANTED, axis=0) == 0x5A).all()
    counts = [(rank.engine.receiver.counts.outcomes, rank.engine.receiver.counts.bytes) for rank in readers]
    taken_back = [rank.engine.sender.counts.taken_back for rank in senders]
    told = [rank.engine.receiver._endings.told_leader for rank in readers]
    return counts, taken_back, told, [work.bytes for work in works]


def _heads(senders: list[Rank], component: str, layer: int, reader: Rank) -> np.ndarray:
    """What the reader's pages should hold of one layer."""
    parts = []
    for sender in senders:
        found = page_bytes(sender).get((component, layer))
        if found is not None:
            heads = 2 // sender.cache.layout.tp_size
            parts.append(found[SENT].reshape(len(SENT), 2, heads, -1))
    whole = np.concatenate(parts, axis=2)
    mine = reader.cache.layout
    size = 2 // mine.tp_size
    return whole[:, :, mine.tp_rank * size : (mine.tp_rank + 1) * size].reshape(len(SENT), -1)


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (1, 2), (1, 1)])
def test_it_leaves_behind_what_the_general_way_does(
    writers: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster(tp(writers), tp(readers))
    for rank in world.ranks:
        forbid_the_general_way(rank, monkeypatch, "_recv_pages")
    plain = request(world)
    leave_the_straight_way(monkeypatch)
    assert request(cluster(tp(writers), tp(readers))) == plain


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (tp(2), tp(1)),  # two ranks write
        (
            [layout(layers=[0, 1]), layout(layers=[2, 3])],
            [layout(layers=[0, 1])],
        ),  # rank 1 must be told that it is free
    ],
    ids=["two writers", "a rank that owes nothing"],
)
def test_what_needs_more_than_one_writer_goes_the_general_way(
    writers: list[KVLayout], readers: list[KVLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster(writers, readers)
    for rank in world.ranks:
        forbid_the_general_way(rank, monkeypatch, "_recv_pages")
    with pytest.raises(AssertionError, match="not the straight way"):
        world.ranks[-1].recv_pages("r", GRANTED, "p")


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.recv_pages("r", GRANTED, "e"),
        lambda kv: kv.recv_pages("r", GRANTED, 9),
        lambda kv: kv.recv_pages("r", GRANTED, 3),  # a rank of its own instance
        lambda kv: kv.recv_pages("r", GRANTED, 1),  # holds other heads
        lambda kv: kv.recv_pages("r", [PAGES], "p"),
        lambda kv: kv.recv_pages("r", GRANTED, "p", prefix_tokens=1),
    ],
)
def test_what_is_refused_leaves_nothing(call: Callable[[Rank], object], monkeypatch: pytest.MonkeyPatch) -> None:
    world = cluster(tp(2), tp(2))
    reader = world[2]
    said = outcome(lambda: call(reader))
    assert not reader.engine.receiver.requests.live
    assert not reader.engine.receiver.requests.by_generation
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(reader)) == said != "accepted"
