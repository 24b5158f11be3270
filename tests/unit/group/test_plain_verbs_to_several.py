"""Plain verbs to the ranks of an instance: as the general way, at all of them or none.

Each test runs twice: where Python knows the grants when the first verb is called, and where it has left them to that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.references.memory import page_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.acquainted import PAGE_SIZE, PAGES, READERS, two_readers
from tests.helpers.simulation.cluster import Cluster, Rank
from torchkv.core.loop import codes

SENT, GRANTED = np.array([5, 6, 2]), [[3, 1, 9], [0, 8, 2]]
HELD = [9, 8]  # in front of them, where receivers hold a prefix
LAYERS = 4
LEAVES = False  # whether Python leaves grants


@pytest.fixture(params=[False, True], ids=["known", "left"], autouse=True)
def leaves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LEAVES", request.param)


def have_come(writer: Rank, *ranks: int) -> bool:
    """Whether the grants of these ranks are there."""
    if not LEAVES:
        return {grant.dst for grant in writer.grants()} == {*ranks}
    world = writer.engine.flows.core.runner.memory[0]
    left = world["unclaimed"][: int(world["unclaimed_tail"])]
    return {int(event["source"]) for event in left[left["kind"] == codes.GRANTED]} == {*ranks}


def granted(cluster: Cluster, *prefixes: int, dst: str | None = "d", begun: bool = True) -> Rank:
    """The writer, once both have granted "r" behind these prefixes, in tokens. begun: its first layer is sent."""
    writer, readers = cluster[0], cluster.ranks[1:]
    for reader, prefix, pages in zip(readers, prefixes or (0, 0), GRANTED, strict=True):
        more = [7] if prefix == PAGE_SIZE else []  # it holds one page less
        reader.recv_pages("r", [*more, *pages], "p", prefix_tokens=prefix)
    assert cluster.run(lambda: have_come(writer, 1, 2), limit=1)
    if dst is None and len(set(prefixes)) < 2:
        assert writer.granted("r", None) is not None  # now it is known to whom
    if begun:
        first = np.array([*HELD, *SENT]) if any(prefixes) else SENT
        writer.send_slice("r", 0, first, dst, origin="prompt")
    return writer


def end(cluster: Cluster, dst: str | None) -> tuple[object, ...]:
    """Finishes "r", and looks at every byte. What is counted."""
    finished = cluster[0].finish("r", dst)
    assert cluster.run(finished.is_completed, limit=5)
    assert finished.is_success()
    assert cluster.run(lambda: not any(rank.engine.receiver.requests.live for rank in cluster.ranks), limit=5)
    for number, reader in enumerate(cluster.ranks[1:]):
        for (component, layer), pages in page_bytes(reader).items():
            held = page_bytes(cluster[0])[component, layer][SENT]
            mine = held.reshape(len(SENT), PAGE_SIZE, READERS, -1)[:, :, number].reshape(len(SENT), -1)
            assert (pages[GRANTED[number]].reshape(len(SENT), -1) == mine).all()
            others = np.delete(pages, [*GRANTED[number], 0], axis=0)
            assert (others == 0x5A).all()
    counts = cluster[0].engine.sender.counts
    return counts.outcomes, counts.bytes, counts.taken_back, [r.engine.receiver.counts.bytes for r in cluster.ranks]


def poison(cluster: Cluster) -> None:
    for reader in cluster.ranks[1:]:
        for storage in reader.cache.storages:
            storage.fill_(0x5A)


@pytest.mark.parametrize("dst", ["d", None])
@pytest.mark.parametrize("prefix", [0, 2 * PAGE_SIZE])
@pytest.mark.parametrize("from_prompt", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_it_leaves_behind_what_the_general_way_does(
    dst: str | None, prefix: int, from_prompt: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HELD if from_prompt and prefix else []
    origin: dict[str, Any] = {"origin": "prompt"} if from_prompt else {}

    def run() -> tuple[object, ...]:
        cluster = two_readers()
        poison(cluster)
        writer = granted(cluster, prefix, prefix, dst=dst, begun=begun)
        if plain:
            forbid_the_general_way(writer, monkeypatch)
        works = [writer.send_slice("r", layer, [*held, *SENT], dst, **origin) for layer in ((1,) if begun else (0, 1))]
        works.append(writer.send_pages("r", torch.from_numpy(np.array([*held, *SENT])), dst, layers=2, **origin))
        works.append(writer.send_pages("r", np.array([*held, *SENT]), dst, layers=3, **origin))
        left = end(cluster, dst)
        nbytes = [work.bytes for work in works]
        assert all(work.is_success() for work in works)
        return *left, nbytes

    plain = True
    straight = run()
    plain = False
    leave_the_straight_way(monkeypatch)
    assert run() == straight


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their verbs are plain, and their finish, which must look at each page, is not."""
    cluster = two_readers()
    poison(cluster)
    writer = granted(cluster)
    with monkeypatch.context() as patch:
        forbid_the_general_way(writer, patch)
        for layer in (1, 2, 3):
            for at in range(3):
                writer.send_pages("r", SENT[at : at + 1], "d", layers=layer, start=at)
        with pytest.raises(AssertionError, match="not the straight way"):
            writer.finish("r", "d")
    end(cluster, "d")


def test_a_finish_of_which_one_receiver_lacks_a_layer_changes_nothing() -> None:
    cluster = two_readers()
    poison(cluster)
    writer = granted(cluster)
    for layer in (1, 2):
        writer.send_slice("r", layer, SENT, "d")
    writer.send_slice("r", 3, SENT, 1)
    assert "layer 3 page 0" in outcome(lambda: writer.finish("r", "d"))
    assert [writer.engine.sender.requests.by_key["r", rank].finish for rank in (1, 2)] == [None, None]
    writer.send_slice("r", 3, SENT, 2)
    end(cluster, "d")


@pytest.mark.parametrize("from_prompt", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_unequal_prefixes_are_for_the_general_way(
    from_prompt: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which counts from the prompt for each, or says that nobody knows where such pages begin."""

    def call(writer: Rank) -> str:
        origin: dict[str, Any] = {"origin": "prompt"} if from_prompt else {}
        return outcome(lambda: writer.send_slice("r", 1, [*HELD, *SENT], "d", **origin))

    said = call(granted(two_readers(), 2 * PAGE_SIZE, PAGE_SIZE, begun=begun))
    leave_the_straight_way(monkeypatch)
    assert call(granted(two_readers(), 2 * PAGE_SIZE, PAGE_SIZE, begun=begun)) == said
    assert "accepted" not in said or from_prompt


@pytest.mark.parametrize("begun", [False, True])
def test_pages_behind_unequal_prefixes_are_not_taken_for_those_behind_the_first(begun: bool) -> None:
    """They would fit into every grant."""
    writer = granted(two_readers(), 2 * PAGE_SIZE, PAGE_SIZE, begun=begun)
    assert outcome(lambda: writer.send_slice("r", 1, SENT, "d")) != "accepted"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.send_slice("r", 1, [0, PAGES], "d"),
        lambda kv: kv.send_slice("r", 1, [-1], "d"),
        lambda kv: kv.send_slice("r", 1, [0.5], "d"),
        lambda kv: kv.send_slice("r", LAYERS, SENT, "d"),
        lambda kv: kv.send_slice("r", 1, SENT, "d", start=1),
        lambda kv: kv.send_slice("r", 1, SENT, "d", start=-1),
        lambda kv: kv.send_slice("r", 1, SENT, "d", event="now"),
        lambda kv: kv.send_slice("r", 1, SENT, "e"),
        lambda kv: kv.send_layer("r", 1, SENT, "d"),  # the ranks hold halves of pages
    ],
)
def test_what_is_refused_begins_nowhere(
    call: Callable[[Rank], object], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = granted(two_readers(), begun=begun)
    core = writer.engine.flows.core
    free = len(core.sends._free_ops), len(core.sends._free)
    said = outcome(lambda: call(writer))
    assert (len(core.sends._free_ops), len(core.sends._free)) == free
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(writer)) == said != "accepted"


@pytest.mark.parametrize(("begun", "of"), [(True, "_free_ops"), (False, "_free_ops"), (False, "_free")])
def test_without_room_for_all_the_general_way_serves_all(begun: bool, of: str) -> None:
    cluster = two_readers()
    poison(cluster)
    writer = granted(cluster, begun=begun)
    free = getattr(writer.engine.flows.core.sends, of)
    free[:], kept = free[:1], free[1:]
    layers = range(int(begun), LAYERS)
    works = [writer.send_slice("r", layers[0], SENT, "d")]
    free += kept
    works += [writer.send_slice("r", layer, SENT, "d") for layer in layers[1:]]
    end(cluster, "d")
    assert all(work.is_success() for work in works)


def test_of_ranks_of_which_one_has_not_granted_the_general_way_waits_for_that() -> None:
    cluster = two_readers()
    poison(cluster)
    writer, readers = cluster[0], cluster.ranks[1:]
    readers[0].recv_pages("r", GRANTED[0], "p")
    assert cluster.run(lambda: have_come(writer, 1), limit=1)
    works = [writer.send_slice("r", layer, SENT, "d") for layer in range(LAYERS)]
    readers[1].recv_pages("r", GRANTED[1], "p")
    end(cluster, "d")
    assert all(work.is_success() for work in works)


def test_a_receiver_that_has_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one receiver: the verb raises its error, and begins at none."""
    cluster = two_readers()
    writer = granted(cluster)
    cancel = cluster[2].cancel("r")
    assert cluster.run(cancel.is_completed, limit=5)
    assert cluster.run(lambda: writer.engine.sender.requests.by_key["r", 2].error is not None, limit=5)
    free = len(writer.engine.flows.core.sends._free_ops)
    said = outcome(lambda: writer.send_slice("r", 1, SENT, "d"))
    assert said.startswith("TransferCancelled")
    assert len(writer.engine.flows.core.sends._free_ops) == free
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: writer.send_slice("r", 1, SENT, "d")) == said
