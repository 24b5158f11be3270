"""What a rank counts of its requests, in the simulation, and what it tells Prometheus."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.simulation.cluster import Cluster, Place
from torchkv.errors import TransferCancelled
from torchkv.group.reports.snapshot import dump, stats
from torchkv.layout.layout import KVLayout
from torchkv.observe.metrics import KVCollector
from torchkv.options import Options

WRITER, READER = 0, 1
NBYTES = 64


def cluster(path: str | None = None, *, flight_recorder: int | None = None) -> Cluster:
    layout = KVLayout.gqa(num_layers=2, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    options = Options(
        transport="loopback", timeout=3.0, grant_timeout=8.0, heartbeat=0.2, path=path, flight_recorder=flight_recorder
    )
    return Cluster([Place("p", layout), Place("d", layout)], options=options)


def transfer(ranks: Cluster) -> None:
    received = ranks[READER].recv_pages("r", [3, 1], WRITER)
    ranks[WRITER].send_pages("r", [5, 6], READER)
    finished = ranks[WRITER].finish("r", READER)
    assert ranks.run(lambda: received.is_completed() and finished.is_completed(), limit=20)


@pytest.mark.parametrize("path", ["runs", "slices", "staged"])
def test_requests_and_bytes_are_counted_on_both_sides(path: str) -> None:
    ranks = cluster(path)
    transfer(ranks)
    sent, got = stats(ranks[WRITER]), stats(ranks[READER])
    assert (sent.instance, sent.rank, got.instance, got.rank) == ("p", 0, "d", 1)
    assert sent.sends == got.receives == {"success": 1}
    assert sent.receives == got.sends == {}
    assert sent.sent == {"d:1": {path: NBYTES}}
    assert got.received == {"p:0": {path: NBYTES}}
    assert sum(sent.lanes["d:1"].values()) == NBYTES
    assert sum(sent.phases["grant"].counts) == 1
    assert sent.open_sends == got.open_receives == {}
    assert got.quarantined_pages == 0
    transfer(ranks)
    assert stats(ranks[WRITER]).sent == {"d:1": {path: 2 * NBYTES}}


def test_what_is_open_and_what_has_failed() -> None:
    ranks = cluster()
    ranks[WRITER].send_pages("later", [5, 6], READER)
    received = ranks[READER].recv_pages("r", [3, 1], WRITER)
    waiting = stats(ranks[WRITER])
    assert waiting.open_sends == {"waiting": 1}
    assert (waiting.queues["ops awaiting grants"], waiting.queues["pages awaiting grants"]) == (1, 2)
    assert stats(ranks[READER]).open_receives == {"live": 1}
    ranks[READER].cancel("r")
    assert ranks.run(received.is_completed, limit=20)
    assert isinstance(received.exception(), TransferCancelled)
    failed = stats(ranks[READER])
    assert failed.receives == {"TransferCancelled": 1}
    assert failed.as_dict()["phases"]["grant"]["count"] == 0


def test_a_dump_has_the_open_sends_of_both_sides() -> None:
    ranks = cluster("runs")
    received = ranks[READER].recv_pages("r", [3, 1], WRITER)
    work = ranks[WRITER].send_layer("r", 0, [5, 6], READER)
    assert ranks.run(lambda: work.is_completed() and bool(ranks[READER].engine.receiver.counts.bytes), limit=20)
    sent = dump(ranks[WRITER], "a test")
    got = dump(ranks[READER], "a test")
    assert sent.sends is not None
    assert got.receives is not None
    assert [(each.request, each.to, each.state, each.finished) for each in sent.sends] == [("r", 1, "bound", False)]
    (receive,) = got.receives
    assert (receive.request, receive.state, receive.num_pages) == ("r", "live", 2)
    assert not receive.writers[0].sealed
    assert receive.writers[0].missing == "layer 1, token 0 after the prefix"
    assert not received.is_completed()


def test_a_dump_without_the_lock_still_tells_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkv.group.reports.snapshot.LOCK_PATIENCE", 0.01)
    rank = cluster(flight_recorder=4)[WRITER]
    assert rank.engine.recorder is not None
    rank.engine.recorder.begin("send_layer", "r", 1, 0, 1, 0.0)
    with rank.engine.lock:
        made = dump(rank, "a test")
    assert made.sends is None
    assert made.receives is None
    assert [entry.request for entry in made.entries] == ["r"]


def test_prometheus_is_told_all_of_it() -> None:
    client = pytest.importorskip("prometheus_client", reason="pip install 'torchkv[metrics]'")
    ranks = cluster("runs")
    transfer(ranks)
    registry = client.CollectorRegistry()
    registry.register(KVCollector("g", lambda: stats(ranks[WRITER])))

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(name, {"group": "g", "instance": "p", "rank": "0", **labels})
        return found

    assert value("torchkv_requests_total", role="send", outcome="success") == 1
    assert value("torchkv_bytes_total", direction="sent", peer="d:1", path="runs") == NBYTES
    assert value("torchkv_failures_total", role="send", error="success") is None
    assert value("torchkv_latency_seconds_count", phase="grant") == 1
    assert value("torchkv_queue_depth", queue="transfers") == 0
    assert value("torchkv_staging_bytes", use="capacity") is not None
    assert value("torchkv_quarantined", kind="pages") == 0
    assert value("torchkv_retries_total", what="frames") is not None
    assert value("torchkv_lost_peers") == 0


def test_a_rank_that_is_gone_has_no_metrics() -> None:
    client = pytest.importorskip("prometheus_client", reason="pip install 'torchkv[metrics]'")
    registry = client.CollectorRegistry()
    registry.register(KVCollector("g", lambda: None))
    assert list(registry.collect()) == []
