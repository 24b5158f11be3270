"""A receiver's ring stays full: what was sent on the cheapest path goes another way, what had to be staged fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.ranks.layout_cases import gqa
from tests.helpers.simulation.cluster import Cluster, Place
from torchkv import KVWork, RingExhausted
from torchkv.options import Options
from torchkv.transfer.peer_connection import Costs

RING = 1 << 14
TIMEOUT = 3.0
PAGES, TARGETS = [5, 2, 7, 0], [3, 9, 1, 4]


def send(verb: str, *, views: bool = False) -> tuple[Cluster, KVWork, KVWork]:
    """From rank 0 to rank 1, whose ring is taken by somebody who never gives it back."""
    options = Options(transport="loopback", timeout=TIMEOUT, grant_timeout=20.0, heartbeat=0.2, staging_recv=RING)
    layout = gqa(num_kv_heads=2, page_size=4)
    cluster = Cluster([Place("p", layout, 16), Place("d", layout, 16)], options=options, faults=Faults(), views=views)
    writer, reader = cluster.ranks
    for rank in cluster.ranks:
        for storage in rank.cache.storages:
            storage.copy_(torch.from_numpy(np.random.default_rng().integers(0, 256, storage.numel(), dtype=np.uint8)))
    assert reader.engine.credits.ring.allocate(RING, "somebody") is not None
    writer.engine.connection(1).costs = Costs(descriptor=10.0, byte=0.0, pack=0.0)  # so that staging is cheapest
    rx = reader.recv_pages("r", TARGETS, 0)
    work = writer.send_pages("r", PAGES, 1) if verb == "send_pages" else writer.staged_put("r", None, PAGES, 1)
    cluster.run(work.is_completed, limit=10 * TIMEOUT)
    return cluster, work, rx


def test_send_pages_takes_another_path() -> None:
    cluster, work, rx = send("send_pages")
    writer, reader = cluster.ranks
    assert work.exception() is None
    assert work.path == "runs"
    done = writer.finish("r", 1)
    assert cluster.run(done.is_completed, limit=10.0)
    assert rx.is_success()
    for name in ("k", "v"):
        for sent, arrived in zip(writer.cache[name], reader.cache[name], strict=True):
            assert torch.equal(arrived[TARGETS].view(torch.int16), sent[PAGES].view(torch.int16))
    assert not reader.quarantined()


@pytest.mark.parametrize("views", [False, True])
def test_staged_put_fails_and_says_who_has_the_ring(views: bool) -> None:
    """Also the negative control: the ring is full, and staging was the cheapest."""
    cluster, work, rx = send("staged_put", views=views)
    with pytest.raises(RingExhausted, match=f"{RING} in use.*held by somebody"):
        work.wait(1)
    assert cluster.run(rx.is_completed, limit=1.0)
    assert isinstance(rx.exception(), RingExhausted)
