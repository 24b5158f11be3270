"""The straight way of plain verbs: it does what the general way does, and leaves to that all that is not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.references.memory import page_bytes
from tests.helpers.refusals import outcome
from tests.helpers.simulation.acquainted import PAGES, pair
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.group.arguments import HeldLayers
from torchkv.layout.layout import KVLayout

WRITER, READER = 0, 1
SENT, GRANTED = np.array([5, 6, 2]), [3, 1, 9]


def granted(cluster: Cluster, src: int | str = WRITER, prefix_tokens: int = 0) -> Rank:
    """The writer, once the grant of "r" has come."""
    writer = cluster[WRITER]
    cluster[READER].recv_pages("r", GRANTED, src, prefix_tokens=prefix_tokens)
    assert cluster.run(lambda: waits(writer), limit=1)
    return writer


def waits(writer: Rank) -> bool:
    return ("r", READER) in [(grant.request, grant.dst) for grant in writer.grants()]


@pytest.fixture
def only_plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rank], None]:
    return lambda rank: forbid_the_general_way(rank, monkeypatch)


def carried(
    cluster: Cluster,
    verbs: Callable[[Rank], None],
    *,
    src: int | str = WRITER,
    dst: int | str | None = READER,
    prefix_tokens: int = 0,
) -> tuple[object, ...]:
    """What a request leaves behind: the bytes, and what is counted."""
    for storage in cluster[READER].cache.storages:
        storage.fill_(0x5A)
    writer = granted(cluster, src, prefix_tokens)
    if dst is None:
        assert writer.granted("r", None) == prefix_tokens  # now it is known to whom
    verbs(writer)
    finished = writer.finish("r", dst, aux=b"aux")
    assert cluster.run(finished.is_completed, limit=5)
    assert finished.is_success()
    sender, receiver = writer.engine.sender, cluster[READER].engine.receiver
    assert cluster.run(lambda: not receiver.requests.live, limit=5)
    sent, arrived = page_bytes(writer), page_bytes(cluster[READER])
    for key, pages in sent.items():
        assert (arrived[key][GRANTED] == pages[SENT]).all()
        assert (np.delete(arrived[key], GRANTED, axis=0) == 0x5A).all()
    counts = sender.counts
    return counts.outcomes, counts.bytes, counts.taken_back, sum(counts.grants.counts), receiver.counts.bytes


def one_verb(writer: Rank) -> None:
    writer.send_pages("r", SENT, READER)


def layer_by_layer(writer: Rank) -> None:
    for layer in range(3):
        writer.send_layer("r", layer, SENT.tolist(), READER)


def as_pipelines_send(writer: Rank) -> None:
    """Whose groups of layers are known to be this rank's."""
    for layers in ((0, 1), (2,)):
        writer.send_pages("r", SENT, READER, layers=HeldLayers(layers))


def in_chunks(writer: Rank) -> None:
    for start in range(3):
        writer.send_pages("r", torch.from_numpy(SENT[start : start + 1]), READER, start=start)


@pytest.mark.parametrize("verbs", [one_verb, layer_by_layer, as_pipelines_send])
def test_it_leaves_behind_what_the_general_way_does(
    verbs: Callable[[Rank], None], only_plain: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = pair()
    for rank in (cluster[WRITER], cluster[READER]):
        only_plain(rank)
    plain = carried(cluster, verbs)
    monkeypatch.undo()
    leave_the_straight_way(monkeypatch)
    assert carried(pair(), verbs) == plain


@pytest.mark.parametrize(("src", "dst"), [("p", "d"), ("p", None), (WRITER, READER)])
@pytest.mark.parametrize("prefix_tokens", [0, 4])
@pytest.mark.parametrize("from_prompt", [False, True])
def test_peers_prefixes_and_origins(
    src: int | str,
    dst: int | str | None,
    prefix_tokens: int,
    from_prompt: bool,
    only_plain: Callable[[Rank], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a single peer is called, and wherever its pages count from."""
    held = [9, 8] if from_prompt and prefix_tokens else []
    count: dict[str, Any] = {"origin": "prompt"} if from_prompt else {}

    def verbs(writer: Rank) -> None:
        for layer in range(3):
            pages = [*held, *SENT] if layer < 2 else SENT
            writer.send_pages("r", np.array(pages), dst, layers=layer, start=len(held) + 3 - len(pages), **count)

    way: dict[str, Any] = {"src": src, "dst": dst, "prefix_tokens": prefix_tokens}
    cluster = pair()
    cluster[WRITER].engine.group_map.targets("d", "")
    for rank in (cluster[WRITER], cluster[READER]):
        only_plain(rank)
    plain = carried(cluster, verbs, **way)
    leave_the_straight_way(monkeypatch)
    assert carried(pair(), verbs, **way) == plain


def test_layers_to_anybody_are_plain_behind_the_first(only_plain: Callable[[Rank], None]) -> None:
    """That one finds out that the pages match."""
    cluster = pair()
    writer = granted(cluster)
    writer.engine.whole_pages.clear()
    for layer in range(3):
        writer.send_layer("r", layer, SENT, None)
        only_plain(writer)
    finished = writer.finish("r", None)
    assert cluster.run(finished.is_completed, limit=5)
    assert finished.is_success()


def test_a_request_may_begin_with_its_last_page() -> None:
    def backwards(writer: Rank) -> None:
        for start in (2, 1, 0):
            writer.send_pages("r", SENT[start : start + 1], READER, start=start)

    carried(pair(), backwards)


def test_a_finish_that_must_look_at_each_page_goes_the_general_way() -> None:
    carried(pair(), in_chunks)


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.send_pages("r", np.array([0, PAGES]), READER),
        lambda kv: kv.send_pages("r", np.array([-1]), READER),
        lambda kv: kv.send_pages("r", [0.5], READER),
        lambda kv: kv.send_pages("r", np.array([1.0]), READER),
        lambda kv: kv.send_pages("r", SENT, READER, layers=3),
        lambda kv: kv.send_pages("r", SENT, READER, layers=True),
        lambda kv: kv.send_pages("r", SENT, READER, start=1),
        lambda kv: kv.send_pages("r", SENT, READER, start=-1),
        lambda kv: kv.send_pages("r", SENT, READER, start=True),
        lambda kv: kv.send_pages("r", SENT, READER, event="now"),
        lambda kv: kv.send_pages("r", SENT, 2),
        lambda kv: kv.send_pages("r", SENT, READER, origin="end"),
        lambda kv: kv.send_layer("r", -1, SENT, READER),
        lambda kv: kv.send_layer("", 0, SENT, READER),
        lambda kv: kv.finish("r", READER),
        lambda kv: kv.finish("r", READER, aux="text"),
        lambda kv: kv.finish("r", READER, state_slot=0),
    ],
)
def test_a_first_verb_that_is_refused_begins_nothing(
    call: Callable[[Rank], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = granted(pair())
    said = outcome(lambda: call(writer))
    assert waits(writer)
    assert not writer.engine.sender.requests.by_key
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(writer)) == said != "accepted"


@pytest.mark.parametrize("pages", [[PAGES, 8, *SENT], [9, -1, *SENT], [9, 8, 5, 6, PAGES]])
def test_a_page_that_the_receiver_holds_must_be_one_too(pages: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    writer = granted(pair(), prefix_tokens=4)
    said = outcome(lambda: writer.send_pages("r", pages, READER, origin="prompt"))
    assert not writer.engine.sender.requests.by_key
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: writer.send_pages("r", pages, READER, origin="prompt")) == said
    assert said.startswith("PageOutOfRange")


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.finish("r", READER),  # one layer was sent
        lambda kv: kv.finish("r", READER, aux=bytes((64 << 10) + 1)),
        lambda kv: kv.finish("r", READER, state_slot=0),
        lambda kv: kv.finish("r", 2),
    ],
)
def test_a_finish_that_is_refused_changes_nothing(
    call: Callable[[Rank], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = granted(pair())
    writer.send_layer("r", 0, SENT, READER)
    said = outcome(lambda: call(writer))
    req = writer.engine.sender.requests.by_key["r", READER]
    assert (req.finish, req.sealed_at) == (None, None)
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(writer)) == said != "accepted"


@pytest.mark.parametrize("plain", [True, False])
def test_what_stands_against_a_request_is_said(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        leave_the_straight_way(monkeypatch)
    cluster = pair()
    writer = granted(cluster)
    writer.engine.lost[READER] = "rank 1 sleeps"
    assert outcome(lambda: writer.send_pages("r", SENT, READER)).startswith("PeerLost: send_pages('r'): rank 1 sleeps")
    del writer.engine.lost[READER]
    cancel = cluster[READER].cancel("r")
    assert cluster.run(lambda: cancel.is_completed() and not waits(writer), limit=5)
    said = "TransferCancelled: request 'r' was cancelled on its receiver, rank 1"
    assert outcome(lambda: writer.send_pages("r", SENT, READER)) == said
    assert outcome(lambda: writer.send_pages("r", SENT, READER)) == said, "a tombstone"
    assert outcome(lambda: writer.finish("r", READER)) == said
    writer.engine.closed = "the group was destroyed"
    assert outcome(lambda: writer.send_pages("q", SENT, READER)) == "ProtocolError: send_pages('q'): " + str(
        writer.engine.closed
    )


def test_a_verb_after_finish_is_refused() -> None:
    writer = granted(pair())
    writer.send_pages("r", SENT, READER)
    writer.finish("r", READER)
    for call in (lambda: writer.send_pages("r", SENT, READER), lambda: writer.finish("r", READER)):
        assert outcome(call).startswith("ProtocolError: request 'r' to rank 1 is finished already")


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.recv_pages("r", np.array([0, PAGES]), WRITER),
        lambda kv: kv.recv_pages("r", np.array([-1]), WRITER),
        lambda kv: kv.recv_pages("r", np.array([3, 1, 3]), WRITER),
        lambda kv: kv.recv_pages("r", [0.5], WRITER),
        lambda kv: kv.recv_pages("r", np.array([1.0]), WRITER),
        lambda kv: kv.recv_pages("r", [4, 5], WRITER),  # 5 is leased
        lambda kv: kv.recv_pages("taken", [4], WRITER),
        lambda kv: kv.recv_pages("r", [4], 2),
        lambda kv: kv.recv_pages("", [4], WRITER),
        lambda kv: kv.recv_pages("\udc80", [4], WRITER),
        lambda kv: kv.recv_pages("r" * 1025, [4], WRITER),
        lambda kv: kv.recv_pages("r", [4], WRITER, prefix_tokens=1),
        lambda kv: kv.recv_pages("r", [4], WRITER, prefix_tokens=-2),
        lambda kv: kv.recv_pages("r", [4], WRITER, state_slot=0),
        lambda kv: kv.recv_pages("r", [4], WRITER, timeout=-1.0),
    ],
)
def test_a_receive_that_is_refused_leases_nothing(
    call: Callable[[Rank], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = pair()
    reader = cluster[READER]
    reader.recv_pages("taken", [5], WRITER)
    marks = reader.engine.receiver.leases.marks(0).copy()
    free = len(reader.engine.flows.core.receives._free)
    told: list[object] = []
    real = reader.engine.receiver.posts.refuse
    monkeypatch.setattr(reader.engine.receiver.posts, "refuse", lambda *what: (told.append(what[0]), real(*what)))
    said = outcome(lambda: call(reader))
    assert (reader.engine.receiver.leases.marks(0) == marks).all()
    assert len(reader.engine.flows.core.receives._free) == free
    assert [*reader.engine.receiver.requests.live] == ["taken"]
    seen = [*told]
    leave_the_straight_way(monkeypatch)
    assert outcome(lambda: call(reader)) == said != "accepted"
    assert told == 2 * seen, "the other ranks of the instance are told"


def test_what_stands_against_a_receive_is_said() -> None:
    cluster = pair()
    reader = cluster[READER]
    reader.engine.lost[WRITER] = "rank 0 sleeps"
    said = "PeerLost: recv_pages('r'): rank 0 sleeps; use another rank, or make a new group"
    assert outcome(lambda: reader.recv_pages("r", [4], WRITER)) == said
    del reader.engine.lost[WRITER]
    reader.engine.closed = "the group was destroyed"
    said = "ProtocolError: recv_pages('r'): the group was destroyed"
    assert outcome(lambda: reader.recv_pages("r", [4], WRITER)) == said
    assert not reader.engine.receiver.leases.marks(0).any()


def test_a_name_whose_last_request_has_not_ended_goes_the_general_way(only_plain: Callable[[Rank], None]) -> None:
    """Its grant might be taken for that of the last one: grants of one name come in order, by one way."""
    cluster = pair()
    reader = cluster[READER]
    reader.recv_pages("r", [4], WRITER)
    cluster.pause(WRITER)
    reader.cancel("r")
    only_plain(reader)
    with pytest.raises(AssertionError, match="not the straight way"):
        reader.recv_pages("r", [6], WRITER)


def test_what_is_received_can_be_waited_for_by_layer() -> None:
    cluster = pair()
    writer = granted(cluster)
    (req,) = cluster[READER].engine.receiver.requests.live.values()
    work = req.work
    assert not work._pages_safe()
    layer_by_layer(writer)
    writer.finish("r", READER)
    assert cluster.run(work.is_completed, limit=5)
    assert work.wait_layer(2)
    assert work._pages_safe()


def test_another_request_of_the_name_is_taken_back_once_the_first_op_is_known() -> None:
    """That one waits on the loop, which tells no prefix from another. This op may have ended by then."""
    layout = KVLayout.gqa(num_layers=3, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    cluster = Cluster([Place(name, layout, PAGES) for name in ("p", "d", "e")], views=True)
    writer, readers = cluster[WRITER], cluster.ranks[1:]
    works = [reader.recv_pages("before", [0], WRITER) for reader in readers]
    works += [
        verb("before", *rest)
        for rank in (1, 2)
        for verb, *rest in ((writer.send_pages, [0], rank), (writer.finish, rank))
    ]
    assert cluster.run(lambda: all(work.is_completed() for work in works), limit=5)
    first = writer.send_pages("r", SENT, 1)
    readers[1].recv_pages("r", GRANTED, WRITER, prefix_tokens=2)
    plain, core = writer.engine.flows.plain, writer.engine.flows.core
    meet, found = plain.meet, []

    def met(*arguments: Any) -> Any:
        for _ in range(200):
            readers[1].engine.flows.core.runner.step()
            core.runner.step()
        found.append(meet(*arguments))
        for _ in range(200):
            core.runner.step()
        return found[0]

    plain.meet = met
    second = writer.send_pages("r", SENT, 2)
    assert found != [None]
    assert cluster.run(second.is_completed, limit=5)
    received = readers[0].recv_pages("r", GRANTED, WRITER)
    works = [writer.finish("r", rank) for rank in (1, 2)]
    assert cluster.run(lambda: all(work.is_completed() for work in [*works, first, received]), limit=5)
    assert all(work.is_success() for work in [*works, first, second, received])
