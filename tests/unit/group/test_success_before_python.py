"""A request that its loops have ended has succeeded for its caller before Python has acted upon that."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from tests.helpers.references.memory import page_bytes
from tests.helpers.simulation.acquainted import PAGES, of_layer_groups, pair, some_lists, two_readers
from tests.helpers.simulation.cluster import Cluster, Rank
from torchkv.engine.work import KVWork
from torchkv.errors import PageOutOfRange, TransferCancelled
from torchkv.group.process_group import KVProcessGroup
from torchkv.pipelining.context import _checked

WRITER, READER = 0, 1
SENT, GRANTED = np.array([5, 6, 2]), [3, 1, 9]
AUX = b"first token"
AGAIN = SENT[::-1].copy()  # what is sent the second time


def run_loops(cluster: Cluster) -> None:
    """Until none has had anything to do for a while. Python does nothing meanwhile."""
    runners, idle = [rank.engine.flows.core.runner for rank in cluster.ranks], 0
    while idle < 100:  # some take turns seldom
        idle = 0 if [runner for runner in runners if runner.step()] else idle + 1


def served(cluster: Cluster) -> tuple[KVWork, list[KVWork]]:
    """What the reader and the writer wait for, once the loops have served "r"."""
    writer, received = cluster[WRITER], cluster[READER].recv_pages("r", GRANTED, WRITER)
    run_loops(cluster)
    sent = [writer.send_pages("r", SENT, READER), writer.finish("r", READER, aux=AUX)]
    run_loops(cluster)
    return received, sent


def test_success_is_known_at_once_and_everything_else_when_it_is_asked_for() -> None:
    cluster = pair()
    received, (sent, finished) = served(cluster)
    sends, receives = cluster[WRITER].engine.sender.requests, cluster[READER].engine.receiver.requests
    assert received.is_completed()
    assert finished.is_completed()
    assert received.wait()
    assert finished.is_success()
    assert received.exception() is None
    assert ("r", READER) in sends.by_key, "Python has not acted upon it"
    assert "r" in receives.live
    seconds = received.seconds, finished.seconds
    layout = cluster[READER].cache.layout
    moved = 3 * len(SENT) * sum(layout.page_nbytes(name) for name in ("k", "v"))
    assert (received.bytes, received.aux, received.path) == (moved, AUX, "direct")
    assert (sent.bytes, sent.path, finished.aux) == (moved, "direct", AUX[:0])
    assert ("r", READER) not in sends.by_key
    assert "r" not in receives.live
    time.sleep(0.001)
    assert (received.seconds, finished.seconds) == seconds, "it had ended when it was asked"


@pytest.mark.parametrize("performed", [False, True])
def test_nothing_is_missing_of_what_was_taken_in_for_another_reason(performed: bool) -> None:
    """By a thread that takes another request back, or that has taken all in and is about to complete works."""
    cluster = pair()
    received, (sent, finished) = served(cluster)
    assert received.is_completed()
    assert finished.is_completed()
    for rank in cluster.ranks:
        assert rank.engine.flows is not None
        with rank.engine.lock:
            with rank.engine.flows.notices.standing_still():
                assert not rank.engine.flows.notices.has_news
            if performed:
                rank.engine.exchange.perform(cluster.world.now)
    assert received.aux == AUX
    assert received.bytes == sent.bytes > 0
    assert finished.path == received.path.replace("direct", "none")


VERBS: dict[str, Callable[[Rank], object]] = {
    "send_pages": lambda writer: writer.send_pages("r", AGAIN, READER),
    "send_pages to anybody": lambda writer: writer.send_pages("r", AGAIN, None),
    "send_layer": lambda writer: [writer.send_layer("r", layer, AGAIN, READER) for layer in range(3)],
    "send_slice": lambda writer: writer.send_slice("r", None, AGAIN.tolist(), READER),
    "granted": lambda writer: (writer.granted("r", READER), writer.send_pages("r", AGAIN, READER)),
    "a list of one rank": lambda writer: writer.send_pages("r", AGAIN, [READER]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_same_name_and_pages_can_be_used_again_at_once(verb: str) -> None:
    cluster = pair()
    received, sent = served(cluster)
    assert received.is_completed()
    assert sent[1].is_completed()
    again = cluster[READER].recv_pages("r", GRANTED, WRITER)
    run_loops(cluster)
    VERBS[verb](cluster[WRITER])
    finished = cluster[WRITER].finish("r", None if "anybody" in verb else READER)
    assert cluster.run(lambda: again.is_completed() and finished.is_completed(), limit=5)
    assert again.is_success()
    assert finished.is_success()
    source, arrived = page_bytes(cluster[WRITER]), page_bytes(cluster[READER])
    for key, pages in source.items():
        assert (arrived[key][GRANTED] == pages[AGAIN]).all()


def test_a_pipeline_may_have_the_name_of_a_request_that_has_just_succeeded() -> None:
    cluster = pair()
    _, (_, finished) = served(cluster)
    assert finished.is_completed()
    writer = cluster[WRITER]
    kv = cast(KVProcessGroup, SimpleNamespace(_verbs=writer))
    sending = _checked(kv, writer, writer.cache.layout, "r", AGAIN, READER, 0, "prefix", None)
    assert sending is not None


def test_the_leader_hears_of_a_refusal_behind_a_success() -> None:
    cluster = two_readers()
    writer, leader, reader = cluster.ranks
    received = [rank.recv_pages("r", GRANTED, "p") for rank in (leader, reader)][1]
    assert cluster.run(lambda: writer.granted("r", "d") is not None, limit=1)
    writer.send_slice("r", None, SENT, "d")
    writer.finish("r", "d")
    receiver = reader.engine.receiver
    for _ in range(3):  # the leader's Python opens the round
        run_loops(cluster)
        leader.step(cluster.world.now)
    told = receiver._endings.told_leader
    assert received.is_completed()
    assert "r" in receiver.requests.live
    with pytest.raises(PageOutOfRange):
        reader.recv_pages("r", [PAGES], [0])  # by the general way
    assert receiver._endings.told_leader == told + 1


def test_a_grant_is_on_its_way_before_the_end_of_the_last_request_is_acted_upon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = pair()
    received, _ = served(cluster)
    assert received.is_completed()
    reader, order = cluster[READER], []
    posts, notices = reader.engine.receiver.posts, reader.engine.flows.notices
    post, catch_up = posts.post_plain, notices.catch_up
    monkeypatch.setattr(posts, "post_plain", lambda *args: order.append("grant") or post(*args))
    monkeypatch.setattr(notices, "catch_up", lambda now, **how: order.append("end") or catch_up(now, **how))
    reader.recv_pages("other", [0, 2, 4], WRITER)
    assert order == ["grant", "end"]
    assert served(cluster)[0].is_completed()
    order.clear()
    reader.recv_pages("another", GRANTED, WRITER)
    assert order[:3] == ["grant", "end", "grant"], "its pages are free only then"


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_fails_a_request_that_its_loops_have_ended(asked: bool) -> None:
    cluster = pair()
    received, (_, finished) = served(cluster)
    if asked:
        assert received.is_completed()
        assert finished.is_completed()
    cluster[READER].cancel("r")
    cluster[WRITER].cancel("r")
    cluster.run(limit=1)
    for work in (received, finished):
        assert work.is_success()
        assert work.exception() is None


def test_a_request_that_python_has_taken_back_has_not_succeeded() -> None:
    """Neither while its flow is free, nor once the flow is that of another one, which has."""
    cluster = pair()
    writer, received = cluster[WRITER], cluster[READER].recv_pages("r", GRANTED, WRITER)
    run_loops(cluster)
    writer.send_layer("r", 0, SENT, READER)
    req, flows = writer.engine.sender.requests.by_key[("r", READER)], writer.engine.flows
    assert flows is not None
    flow = req.flow
    cluster[READER].cancel("r")
    assert cluster.run(lambda: req.error is not None, limit=5)
    assert not flows.has_sent(req)
    assert received.is_completed()
    assert isinstance(received.exception(), TransferCancelled)
    other = cluster[READER].recv_pages("other", [0, 2, 4], WRITER)
    run_loops(cluster)
    finished = [writer.send_pages("other", SENT, READER), writer.finish("other", READER)][1]
    run_loops(cluster)
    assert writer.engine.sender.requests.by_key[("other", READER)].flow == flow
    assert flows.core.sends.has_sent(flow)
    assert not flows.has_sent(req)
    assert finished.is_completed()
    assert other.is_completed()


def test_a_flow_that_is_given_to_another_request_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the request back after its caller has read its flow; then another one succeeds there."""
    cluster = pair()
    received, (_, finished) = served(cluster)
    for rank, (req, work) in enumerate(((finished._sends[0], finished), (received._receives[0], received))):
        flows = cluster[rank].engine.flows
        assert flows is not None
        assert req is not None
        owner, name = (flows.core.sends, "has_sent") if rank == WRITER else (flows.core.receives, "has_received")
        monkeypatch.setattr(owner, name, lambda flow, req=req: setattr(req, "flow", None) or True)
        monkeypatch.setattr(flows.notices, "catch_up", lambda now, **how: None)
        assert not work.is_completed()


def test_one_of_two_receivers_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_readers()
    writer, *readers = cluster.ranks
    for reader in readers:
        reader.recv_pages("r", GRANTED, "p")
    assert cluster.run(lambda: writer.granted("r", "d") is not None, limit=1)
    writer.send_slice("r", None, SENT, "d")
    finished = writer.finish("r", "d")
    run_loops(cluster)
    assert writer.engine.flows is not None
    sends = writer.engine.flows.core.sends
    first = finished._sends[0].flow
    with monkeypatch.context() as patch:
        patch.setattr(sends, "has_sent", lambda flow: flow == first)
        patch.setattr(writer.engine.flows.notices, "catch_up", lambda now, **how: None)
        assert not finished.is_completed()
        patch.setattr(sends, "has_sent", lambda flow: True)
        writer.engine._seen_news = -1  # as if there were news
        assert finished.is_completed()
    assert cluster.run(lambda: finished._is_done, limit=5)
    assert finished.is_success()


def test_all_parts_of_a_request_of_layer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = of_layer_groups()
    writer, reader = cluster.ranks
    source, target = some_lists(1, 0, 6), some_lists(2, 0, 6)
    received = reader.recv_pages("r", target, "p")
    run_loops(cluster)
    finished = [writer.send_pages("r", source, "d"), writer.finish("r", "d")][1]
    run_loops(cluster)
    first = received._receives[0].flow
    assert reader.engine.flows is not None
    assert len(received._receives) == len(target)
    with monkeypatch.context() as patch:
        patch.setattr(reader.engine.flows.core.receives, "has_received", lambda flow: flow == first)
        patch.setattr(reader.engine.flows.notices, "catch_up", lambda now, **how: None)
        assert not received.is_completed()
    reader.engine._seen_news = -1  # as if there were news
    assert received.is_completed()
    assert finished.is_completed()
    assert len(reader.engine.receiver.requests.live) == len(target), "Python has not acted upon it"
    assert received.bytes > 0
    assert not reader.engine.receiver.requests.live
    assert received.is_success()
    assert finished.is_success()


def test_where_groups_share_memory_a_lease_ends_with_the_work() -> None:
    """The other groups ask the state machines."""
    cluster = pair()
    receiver = cluster[READER].engine.receiver

    class Others:
        def check(self, places: np.ndarray, pool: int, operation: str) -> None:
            """No other group leases anything."""

    receiver.leases.others = Others()
    received, _ = served(cluster)
    assert received.is_completed()
    assert "r" not in receiver.requests.live
