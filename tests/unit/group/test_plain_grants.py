"""A sender that asks for the prefix of one receiver is told in the straight way, which binds its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import leave_the_straight_way
from tests.helpers.references.memory import page_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.acquainted import PAGE_SIZE, PAGES, of_layer_groups, pair, run_to_success, some_lists
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.errors import TransferCancelled
from torchkv.layout.layout import KVLayout

WRITER, READER = 0, 1
LAYERS = 3
GRANTED, SENT, HELD = [3, 1, 9], [5, 6, 2], [8, 7]
OTHERS = [0, 4, 10]  # other pages to be granted
PREFIX = len(HELD) * PAGE_SIZE


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the requests that were bound by being asked for."""
    names: list[str] = []
    bind = PlainSends.bind

    def noting(self: PlainSends, request: str, *rest: Any) -> Any:
        found = bind(self, request, *rest)
        if found is not None:
            names.append(request)
        return found

    monkeypatch.setattr(PlainSends, "bind", noting)
    return names


def step(cluster: Cluster, *ranks: int) -> None:
    """Only loops go on: Python does not take in what they tell."""
    for _ in range(100):
        for rank in ranks or range(len(cluster.ranks)):
            cluster[rank].engine.flows.core.runner.step()


def receive(cluster: Cluster, prefix: int = 0, pages: Sequence[int] = GRANTED) -> Any:
    for storage in cluster[READER].cache.storages:
        storage.fill_(0x5A)
    return cluster[READER].recv_pages("r", pages, WRITER, prefix_tokens=prefix)


def send(writer: Rank, *, from_prompt: bool = False) -> list[Any]:
    pages = np.array([*HELD, *SENT] if from_prompt else SENT)
    origin: Any = "prompt" if from_prompt else "prefix"
    works = [writer.send_layer("r", layer, pages, READER, origin=origin) for layer in range(LAYERS)]
    return [*works, writer.finish("r", READER)]


def check_bytes(cluster: Cluster) -> None:
    sent, received = page_bytes(cluster[WRITER]), page_bytes(cluster[READER])
    for key, pages in received.items():
        assert (pages[GRANTED] == sent[key][SENT]).all(), key
        assert (np.delete(pages, GRANTED, axis=0) == 0x5A).all(), key


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("prefix", [0, PREFIX])
@pytest.mark.parametrize("from_prompt", [False, True])
@pytest.mark.parametrize("ask", [Rank.granted, Rank.prefix_tokens])
def test_it_leaves_behind_what_the_general_way_does(
    early: int,
    prefix: int,
    from_prompt: bool,
    ask: Callable[[Rank, str, int], int | None],
    bound: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """early: how often it is asked before there is a grant."""

    def run() -> tuple[object, ...]:
        cluster = pair()
        writer = cluster[WRITER]
        assert [writer.granted("r", READER) for _ in range(early)] == [None] * early
        received = receive(cluster, prefix)
        step(cluster)
        assert [ask(writer, "r", READER) for _ in range(2)] == [prefix, prefix]
        run_to_success(cluster, [received, *send(writer, from_prompt=from_prompt and prefix > 0)])
        check_bytes(cluster)
        counts = writer.engine.sender.counts
        asked = sum(counts.grants.counts)
        return asked, counts.outcomes, counts.bytes, counts.taken_back, cluster[READER].engine.receiver.counts.bytes

    straight = run()
    assert bound == ["r"]
    leave_the_straight_way(monkeypatch)
    assert run() == straight
    assert bound == ["r"]


def test_once_it_was_told_its_verbs_are_of_that_grant(bound: list[str]) -> None:
    """Whatever the receiver grants next: it may be behind another prefix."""
    cluster = pair()
    writer, reader = cluster[WRITER], cluster[READER]
    receive(cluster, PREFIX)
    step(cluster)
    assert writer.granted("r", READER) == PREFIX
    assert bound == ["r"]
    reader.cancel("r")
    assert cluster.run(lambda: reader.engine.receiver.requests.live == {}, limit=5)
    received = receive(cluster, pages=OTHERS)
    cluster.run(limit=0.5)
    assert "TransferCancelled" in outcome(lambda: writer.granted("r", READER))
    assert "TransferCancelled" in outcome(lambda: send(writer))
    cluster.run(limit=0.5)
    assert not received.is_completed(), "this one's grant is for the next request of the name"


@pytest.mark.parametrize("early", [False, True])
def test_a_grant_that_is_void_and_nobody_has_said_so_is_that_of_the_request(early: bool, bound: list[str]) -> None:
    """Not the next one of the name, which has no verbs of this request."""
    cluster = pair()
    writer, reader = cluster[WRITER], cluster[READER]
    if early:
        assert writer.granted("r", READER) is None
    receive(cluster, PREFIX)
    step(cluster)
    reader.cancel("r")
    received = receive(cluster, pages=OTHERS)
    step(cluster)
    assert writer.granted("r", READER) == PREFIX
    assert bound == ["r"]
    cluster.run(limit=0.5)
    assert "TransferCancelled" in outcome(lambda: writer.send_layer("r", 0, SENT, READER))
    cluster.run(limit=0.5)
    assert not received.is_completed()


@pytest.mark.parametrize("again", [False, True])
def test_a_grant_that_was_meant_for_a_cancelled_request_is_refused(again: bool, bound: list[str]) -> None:
    """again: the name is begun anew before that grant comes."""
    cluster = pair()
    writer = cluster[WRITER]
    assert writer.granted("r", READER) is None
    writer.cancel("r")
    if again:
        assert writer.granted("r", READER) is None
    received = receive(cluster)
    step(cluster)
    told = outcome(lambda: writer.granted("r", READER))
    assert told.startswith("TransferCancelled") or told == "accepted"
    assert bound == []
    assert cluster.run(received.is_completed, limit=5)
    assert isinstance(received.exception(), TransferCancelled)


def test_a_cancel_behind_it_is_told_to_the_receiver(bound: list[str]) -> None:
    cluster = pair()
    writer, received = cluster[WRITER], receive(cluster)
    step(cluster)
    assert writer.granted("r", READER) == 0
    assert bound == ["r"]
    cancelled = writer.cancel("r")
    assert cluster.run(lambda: cancelled.is_completed() and received.is_completed(), limit=5)
    assert isinstance(received.exception(), TransferCancelled)
    core = writer.engine.flows.core
    assert len(core.sends._free) == len(core.sends._kept)


@pytest.mark.parametrize("full", [False, True])
def test_without_room_on_the_loop_the_general_way_tells(full: bool, bound: list[str]) -> None:
    cluster = pair()
    writer, received = cluster[WRITER], receive(cluster)
    step(cluster)
    free = writer.engine.flows.core.sends._free
    if full:
        kept = free[:]
        free.clear()
    assert writer.granted("r", READER) == 0
    assert bound == ([] if full else ["r"])
    if full:
        free[:] = kept
    run_to_success(cluster, [received, *send(writer)])
    check_bytes(cluster)


def test_of_pages_that_were_granted_to_other_writers_python_judges(bound: list[str]) -> None:
    """The plan depends on who writes, and the loop expects those that are likely."""
    cluster = pair()
    writer, received = cluster[WRITER], receive(cluster)
    step(cluster)
    route, writers = writer.engine.flows.plain._likely("r", READER)
    writer.engine.flows.plain._expected[READER] = route, writers | 2
    assert writer.granted("r", READER) == 0
    assert bound == []
    run_to_success(cluster, [received, *send(writer)])
    check_bytes(cluster)


def test_with_layer_groups_each_part_has_a_grant_of_its_own(bound: list[str]) -> None:
    cluster = of_layer_groups()
    writer, lists = cluster[WRITER], some_lists(1, 0, 4)
    received = cluster[READER].recv_pages("r", some_lists(2, 0, 4), "p")
    step(cluster)
    assert writer.granted("r", READER) == 0
    assert bound == []
    run_to_success(cluster, [received, writer.send_pages("r", lists, "d"), writer.finish("r", "d")])


@pytest.mark.parametrize("dst", ["d", None])
def test_an_instance_of_one_rank_is_that_rank(dst: str | None, bound: list[str]) -> None:
    """So is anybody, if it is the first that has granted the request."""
    cluster = pair()
    cluster[WRITER].engine.group_map.targets("d", "a verb before")
    writer, received = cluster[WRITER], receive(cluster, PREFIX)
    step(cluster)
    assert writer.granted("r", dst) == PREFIX
    assert bound == ["r"]
    assert writer.granted("r", READER) == PREFIX
    run_to_success(cluster, [received, *send(writer)])
    check_bytes(cluster)


def test_behind_a_prefix_another_request_of_the_name_is_taken_from_the_loop(bound: list[str]) -> None:
    """Which binds it behind none, and compares none."""
    layout = KVLayout.gqa(num_layers=LAYERS, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype=torch.int16)
    cluster = Cluster([Place(name, layout, PAGES) for name in ("p", "d", "e")], views=True)
    writer, readers = cluster[WRITER], cluster.ranks[1:]
    works = [reader.recv_pages("before", [0], WRITER) for reader in readers]
    for rank in (1, 2):
        works += [writer.send_pages("before", [0], rank), writer.finish("before", rank)]
    run_to_success(cluster, works)
    waiting = writer.send_pages("r", SENT, 1)
    readers[1].recv_pages("r", GRANTED, WRITER, prefix_tokens=PREFIX)
    step(cluster, WRITER, 2)
    known = writer.engine.sender.requests.by_key
    assert known["r", 1].flow is not None
    assert writer.granted("r", 2) == PREFIX
    assert bound == ["r"]
    assert known["r", 1].flow is None
    readers[0].recv_pages("r", GRANTED, WRITER, prefix_tokens=PREFIX)
    assert cluster.run(waiting.is_completed, limit=5)
