"""Grants that Python has seen, and has left for the verbs that begin their requests.

Of verbs to several ranks see `test_plain_verbs_to_several`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.general_way import forbid_the_general_way, leave_the_straight_way
from tests.helpers.references.memory import page_bytes
from tests.helpers.simulation.acquainted import PAGES, pair
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.engine.resident.plain_sends import PlainSends
from torchkv.errors import TransferCancelled, TransferTimeout
from torchkv.layout.layout import KVLayout

WRITER, READER = 0, 1
SENT, GRANTED = np.array([5, 6, 2]), [3, 1, 9]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each first verb that has looked for a grant which Python does not know, whether it has found it."""
    found: list[bool] = []
    meet = PlainSends.meet

    def noting(self: PlainSends, *given: Any) -> Any:
        begun = meet(self, *given)
        found.append(begun is not None)
        return begun

    monkeypatch.setattr(PlainSends, "meet", noting)
    return found


def run_loops(cluster: Cluster) -> None:
    """Python does nothing meanwhile."""
    for _ in range(100):
        for rank in cluster.ranks:
            rank.engine.flows.core.runner.step()


def left(cluster: Cluster) -> tuple[Rank, Any]:
    """The writer, which has taken in an end while the grant of "r" was there; and what the reader waits for."""
    for storage in cluster[READER].cache.storages:
        storage.fill_(0x5A)
    writer, reader = cluster[WRITER], cluster[READER]
    before, received = reader.recv_pages("before", [0], WRITER), reader.recv_pages("r", GRANTED, WRITER)
    run_loops(cluster)
    writer.send_pages("before", [0], READER)
    finished = writer.finish("before", READER)
    works = (before, finished)
    assert cluster.run(lambda: all(work.is_completed() for work in works), limit=5)
    cluster.run(limit=0.1)
    assert ("before", READER) not in writer.engine.sender.requests.by_key, "its end is known"
    assert not writer.engine.sender.grants.unmet.grants()
    assert writer.engine.flows is not None
    assert writer.engine.flows.notices.has_unclaimed
    assert not writer.engine.flows.notices.has_news
    return writer, received


def check(cluster: Cluster, works: list[Any]) -> None:
    assert cluster.run(lambda: all(work.is_completed() for work in works), limit=5)
    assert all(work.is_success() for work in works)
    sent, received = page_bytes(cluster[WRITER]), page_bytes(cluster[READER])
    for key, pages in received.items():
        assert (pages[GRANTED] == sent[key][SENT]).all(), key
        assert (np.delete(pages, [0, *GRANTED], axis=0) == 0x5A).all(), key


def test_a_first_verb_meets_one(met: list[bool]) -> None:
    cluster = pair()
    writer, received = left(cluster)
    met.clear()
    works = [received, writer.send_pages("r", SENT, READER), writer.finish("r", READER)]
    assert met == [True]
    check(cluster, works)
    assert not writer.engine.flows.notices.has_unclaimed


@pytest.mark.parametrize("ask", [Rank.granted, Rank.prefix_tokens])
def test_who_asks_for_the_prefix_meets_one(ask: Callable[[Rank, str, int], int | None]) -> None:
    cluster = pair()
    writer, received = left(cluster)
    assert ask(writer, "r", READER) == 0
    assert not writer.engine.flows.notices.has_unclaimed
    check(cluster, [received, writer.send_pages("r", SENT, READER), writer.finish("r", READER)])


def test_a_first_verb_to_anybody_meets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pair()
    writer, received = left(cluster)
    forbid_the_general_way(writer, monkeypatch)
    works = [writer.send_layer("r", layer, SENT, None) for layer in range(3)]
    works.append(writer.finish("r", None))
    assert not writer.engine.flows.notices.has_unclaimed
    check(cluster, [received, *works])
    assert not writer.engine.sender.requests.addressed


@pytest.mark.parametrize("ask", [Rank.granted, Rank.prefix_tokens])
def test_who_asks_for_the_prefix_of_anybody_meets_one(ask: Callable[[Rank, str, None], int | None]) -> None:
    cluster = pair()
    writer, received = left(cluster)
    assert ask(writer, "r", None) == 0
    assert writer.engine.sender.requests.addressed == {"r": (READER,)}
    assert not writer.engine.flows.notices.has_unclaimed
    check(cluster, [received, writer.send_pages("r", SENT, None), writer.finish("r", None)])
    assert not writer.engine.sender.requests.addressed


@pytest.mark.parametrize("dst", [READER, None])
def test_a_cancelled_request_refuses_the_grant_that_comes(dst: int | None) -> None:
    """Also if another grant lies there, so that no other verb would wait for one."""
    cluster = pair()
    writer, received = left(cluster)
    writer.send_pages("cancelled", [0], dst)
    writer.cancel("cancelled")
    refused = cluster[READER].recv_pages("cancelled", [4], WRITER)
    assert cluster.run(refused.is_completed, limit=5)
    assert isinstance(refused.exception(), TransferCancelled)
    check(cluster, [received, writer.send_pages("r", SENT, dst), writer.finish("r", dst)])


@pytest.mark.parametrize("dst", [READER, None])
def test_a_request_that_has_failed_refuses_the_grant_that_comes_too_late(dst: int | None) -> None:
    cluster = pair()
    writer, _ = left(cluster)
    sent = writer.send_pages("late", [0], dst)
    assert cluster.run(sent.is_completed, limit=10)
    assert isinstance(sent.exception(), TransferTimeout)
    cluster.run(limit=1)
    late = cluster[READER].recv_pages("late", [4], WRITER)
    assert cluster.run(late.is_completed, limit=2)
    assert "posted recv_pages within 8 s" in str(late.exception())


@pytest.mark.parametrize("straight", [True, False])
def test_of_two_who_have_granted_a_name_anybody_is_the_first(straight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not straight:
        leave_the_straight_way(monkeypatch)
    layout = KVLayout.gqa(num_layers=2, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    cluster = Cluster([Place(name, layout, PAGES) for name in "pde"], views=True)
    writer, works = cluster[WRITER], []
    for rank in (2, 1):
        works.append(cluster[rank].recv_pages("r", GRANTED, WRITER))
        run_loops(cluster)
    writer.engine.poll()
    for done in ([True, False], [True, True]):
        works += [writer.send_pages("r", SENT, None), writer.finish("r", None)]
        assert writer.engine.flows.notices.has_unclaimed is (straight and not all(done))
        assert cluster.run(works[-1].is_completed, limit=5)
        cluster.run(limit=0.1)
        assert [work.is_completed() for work in works[:2]] == done
    assert all(work.is_success() for work in works)


@pytest.mark.parametrize("dst", ["d", None])
def test_the_general_way_finds_one(dst: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes in all that the loop has told."""
    cluster = pair()
    writer, received = left(cluster)
    leave_the_straight_way(monkeypatch)
    check(cluster, [received, writer.send_pages("r", SENT, dst), writer.finish("r", dst)])


def test_a_request_that_waits_for_another_grant_takes_in_all() -> None:
    cluster = pair()
    writer, received = left(cluster)
    waiting = writer.send_pages("late", [0], READER)
    cluster.run(limit=0.1)
    assert [grant.request for grant in writer.engine.sender.grants.unmet.grants()] == ["r"]
    assert not waiting.is_completed()
    check(cluster, [received, writer.send_pages("r", SENT, READER), writer.finish("r", READER)])


def test_one_that_its_receiver_gives_up_fails_the_request(met: list[bool]) -> None:
    cluster = pair()
    writer, received = left(cluster)
    cluster[READER].cancel("r")
    cluster.run(limit=1)
    assert received.is_completed()
    met.clear()
    with pytest.raises(TransferCancelled):
        writer.send_pages("r", SENT, READER)
    assert True not in met


@pytest.mark.parametrize("decline", [False, True])
def test_one_that_its_sender_gives_up_is_refused(decline: bool) -> None:
    cluster = pair()
    writer, received = left(cluster)
    writer.cancel("r", decline=decline)
    assert cluster.run(received.is_completed, limit=5)
    assert isinstance(received.exception(), TransferCancelled)
    for pages in page_bytes(cluster[READER]).values():
        assert (pages[GRANTED] == 0x5A).all()


def test_those_of_a_process_that_has_ended_bind_nothing(met: list[bool]) -> None:
    cluster = pair()
    writer, _ = left(cluster)
    cluster.kill(READER)
    cluster.run(limit=60)
    assert not writer.engine.flows.notices.has_unclaimed
    met.clear()
    with pytest.raises(Exception, match="rank 1"):
        writer.send_pages("r", SENT, READER)
    assert True not in met


def test_a_sender_that_ends_its_group_says_so_to_whom_has_granted() -> None:
    cluster = pair()
    writer, received = left(cluster)
    gone = TransferCancelled("the group was destroyed")
    writer.engine.fail_all(gone, cluster.world.now)
    writer.engine.end_all(gone, cluster.world.now)
    assert cluster.run(received.is_completed, limit=5)
    assert isinstance(received.exception(), TransferCancelled)
    assert "the group was destroyed" in str(received.exception())
