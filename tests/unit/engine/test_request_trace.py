"""The debug trace of a request: one line for each step of its way, in order."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.helpers.simulation.cluster import Cluster, Place
from torchkv.errors import TransferCancelled
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

WRITER, READER = 0, 1
LOGGER = "torchkv.request"


def new_cluster(path: str | None = None) -> Cluster:
    layout = KVLayout.gqa(num_layers=2, num_kv_heads=1, head_dim=2, page_size=2, dtype=torch.int16)
    options = Options(transport="loopback", timeout=3.0, grant_timeout=8.0, heartbeat=0.2, path=path)
    return Cluster([Place("p", layout), Place("d", layout)], options=options)


def trail(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("path", ["runs", "slices", "staged"])
def test_a_request_leaves_its_trail_in_order(path: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = new_cluster(path)
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        received = cluster[READER].recv_pages("r", [3, 1], WRITER)
        cluster[WRITER].send_pages("r", [5, 6], READER)
        finished = cluster[WRITER].finish("r", READER)
        assert cluster.run(lambda: received.is_completed() and finished.is_completed(), limit=20)
    moved = "64 bytes are in its staging ring" if path == "staged" else "layers (0, 1) attested, 64 bytes"
    assert trail(caplog) == [
        "request 'r': granted to ranks (0,), generation 1",
        "request 'r' to ranks (1,): send_pages queued, layers (0, 1), 2 pages or slots",
        "request 'r' to ranks (1,): finish queued",
        "request 'r' to rank 1: bound to its grant, generation 1",
        f"request 'r' to rank 1: transfer of layers (0, 1) started: {path}",
        f"request 'r' to rank 1: {moved}",
        "request 'r' to rank 1: sealed, 2 pages",
        "request 'r': covered, generation 1",
        "request 'r': verdict: success, generation 1",
        "request 'r' to rank 1: verdict: success",
    ]


def test_a_request_that_fails_says_so_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    cluster = new_cluster()
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        received = cluster[READER].recv_pages("r", [3, 1], WRITER)
        sent = cluster[WRITER].send_pages("r", [5, 6], READER)
        assert cluster.run(sent.is_completed, limit=20)
        cancelled = cluster[READER].cancel("r")
        assert cluster.run(cancelled.is_completed, limit=20)
    assert isinstance(received.exception(), TransferCancelled)
    why = "request 'r' was cancelled on its receiver, rank 1"
    assert trail(caplog)[-2:] == [
        f"request 'r': failed, generation 1: {why}",
        f"request 'r' to rank 1: failed: {why}",
    ]


def test_nothing_is_traced_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    cluster = new_cluster()
    with caplog.at_level(logging.INFO):
        received = cluster[READER].recv_pages("r", [3, 1], WRITER)
        cluster[WRITER].send_pages("r", [5, 6], READER)
        cluster[WRITER].finish("r", READER)
        assert cluster.run(received.is_completed, limit=20)
    assert trail(caplog) == []
