"""What waits for all streams is put off while one waits for this rank: kernels, staging memory, unmapping the dead."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.fakes.gpu import Gpu
from torchkv import Options
from torchkv.engine.peers import Peers
from torchkv.engine.scheduler import LocalMemory, TransferScheduler
from torchkv.errors import TransportUnavailable
from torchkv.transfer.copy_tables import BaseAddressTables
from torchkv.transfer.peer_connection import PeerConnection

PLAN: Any = SimpleNamespace()


@dataclass
class Table:
    """In place of `torchkv.transfer.copy_tables.BaseAddressTable`."""

    plan: Any
    is_loaded: bool = False
    fails: bool = False

    def load(self) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.is_loaded = True


class Stages:
    """In place of `torchkv.staging.memory.SendStages`."""

    def __init__(self) -> None:
        self.taken = 0
        self.ring = SimpleNamespace(capacity=4096)

    def take(self) -> None:
        self.taken = self.ring.capacity


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("torchkv.engine.scheduler.StagedTransfer", lambda *_, stages, **__: stages)
    return Gpu()


def new_scheduler(gpu: Gpu, stages: Any = None) -> TransferScheduler:
    unused: Any = SimpleNamespace()
    return TransferScheduler(
        sender=unused,
        lock=threading.Lock(),
        options=Options(),
        memory=LocalMemory(
            pages=unused,
            gpu=gpu,
            staging=SimpleNamespace(sending=stages, packer=unused),
        ),
        requester=unused,
        connection=unused,
        on_broken=unused,
        send_stage_messages=unused,
    )


def connection_with(scheduler: TransferScheduler, *tables: Any) -> PeerConnection:
    layout: Any = SimpleNamespace()
    connection = PeerConnection(rank=1, layout=layout, placements={}, channel=None, views=())
    unused: Any = SimpleNamespace()
    assert scheduler.kernels is not None
    scheduler.kernels._tables = BaseAddressTables(unused)
    scheduler.kernels._tables._tables[connection] = [*tables]
    return connection


def test_kernels_of_a_plan_that_nobody_foresaw(gpu: Gpu) -> None:
    scheduler, table = new_scheduler(gpu), Table(PLAN)
    connection = connection_with(scheduler, Table(SimpleNamespace(), is_loaded=True), table)
    gpu.holding = True
    assert scheduler.kernels.loaded(PLAN, connection) is None
    assert not table.is_loaded
    gpu.holding = False
    assert scheduler.kernels.loaded(PLAN, connection) is table
    assert table.is_loaded
    gpu.holding = True
    assert scheduler.kernels.loaded(PLAN, connection) is table, "loaded once, it waits for nothing"


def test_kernels_that_could_not_be_loaded_are_not_taken_for_loaded(gpu: Gpu) -> None:
    scheduler, table = new_scheduler(gpu), Table(PLAN, fails=True)
    connection = connection_with(scheduler, table)
    with pytest.raises(TransportUnavailable, match="refused to load kernels: out of memory"):
        scheduler.kernels.loaded(PLAN, connection)
    gpu.holding = True
    assert scheduler.kernels.loaded(PLAN, connection) is None
    gpu.holding, table.fails = False, False
    assert scheduler.kernels.loaded(PLAN, connection) is table


@pytest.mark.parametrize("mapped", [False, True])
def test_memory_to_send_from(gpu: Gpu, mapped: bool) -> None:
    """None is taken where pieces are packed straight into the receiver's ring."""
    scheduler, op = new_scheduler(gpu, stages := Stages()), SimpleNamespace(source_pages=SimpleNamespace(pages=None))
    connection: Any = SimpleNamespace(staging_view=object() if mapped else None)
    arguments: Any = (op, None, op.source_pages, connection)
    gpu.holding = True
    assert (scheduler._staged_transfer(*arguments) is None) is not mapped
    gpu.holding = False
    assert scheduler._staged_transfer(*arguments) is stages  # the fake's result
    assert stages.taken == (0 if mapped else 4096)
    gpu.holding = True
    assert scheduler._staged_transfer(*arguments) is stages


def test_what_is_mapped_of_a_dead_peer(gpu: Gpu) -> None:
    closed: list[int] = []
    connections = [SimpleNamespace(close=lambda number=number: closed.append(number)) for number in range(2)]
    peers: Any = SimpleNamespace(_gpu=gpu, closing=[*connections])
    gpu.holding = True
    Peers.run_deferred_frees(peers)
    assert closed == gpu.freed == []
    gpu.holding = False
    Peers.run_deferred_frees(peers)
    assert sorted(closed) == [0, 1]
    assert gpu.freed == ["deferred"], "and what this thread could not free before"
    on_host: Any = SimpleNamespace(_gpu=None, closing=[*connections])
    Peers.run_deferred_frees(on_host)
    assert len(closed) == 4
