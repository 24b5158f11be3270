"""What waits for all streams is put off while one waits for this rank: kernels, staging memory, unmapping the dead."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fake import Gpu

from torchkv import Options
from torchkv.engine import Engine
from torchkv.errors import TransportUnavailable
from torchkv.mover import Mover
from torchkv.route import Route

PLAN: Any = SimpleNamespace()


@dataclass
class Table:
    """In place of `torchkv.jobs.JobTable`."""

    plan: Any
    is_loaded: bool = False
    fails: bool = False

    def load(self) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.is_loaded = True


class Stages:
    """In place of `torchkv.stagememory.SendStages`."""

    def __init__(self) -> None:
        self.taken = 0
        self.ring = SimpleNamespace(capacity=4096)

    def take(self) -> None:
        self.taken = self.ring.capacity


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("torchkv.mover.StagedTransfer", lambda *_, stages, **__: stages)
    return Gpu()


def mover(gpu: Gpu, stages: Any = None) -> Mover:
    unused: Any = SimpleNamespace()
    return Mover(
        sender=unused,
        lock=threading.Lock(),
        options=Options(),
        local=unused,
        device=gpu,  # type: ignore[arg-type]
        staging=SimpleNamespace(sending=stages, packer=unused),  # type: ignore[arg-type]
        client=unused,
        route=unused,
        broke=unused,
        speak=unused,
    )


def route_with(*tables: Any) -> Route:
    layout: Any = SimpleNamespace()
    return Route(rank=1, layout=layout, placements={}, channel=None, views=(), job_tables=[*tables])


def test_kernels_of_a_plan_that_nobody_foresaw(gpu: Gpu) -> None:
    moving, table = mover(gpu), Table(PLAN)
    route = route_with(Table(SimpleNamespace(), is_loaded=True), table)
    gpu.holding = True
    assert moving._jobs(PLAN, route) is None
    assert not table.is_loaded
    gpu.holding = False
    assert moving._jobs(PLAN, route) is table
    assert table.is_loaded
    gpu.holding = True
    assert moving._jobs(PLAN, route) is table, "loaded once, it waits for nothing"


def test_kernels_that_could_not_be_loaded_are_not_taken_for_loaded(gpu: Gpu) -> None:
    moving, table = mover(gpu), Table(PLAN, fails=True)
    route = route_with(table)
    with pytest.raises(TransportUnavailable, match="refused to load kernels: out of memory"):
        moving._jobs(PLAN, route)
    gpu.holding = True
    assert moving._jobs(PLAN, route) is None
    gpu.holding, table.fails = False, False
    assert moving._jobs(PLAN, route) is table


@pytest.mark.parametrize("mapped", [False, True])
def test_memory_to_send_from(gpu: Gpu, mapped: bool) -> None:
    """None is taken where pieces are packed straight into the receiver's ring."""
    moving, op = mover(gpu, stages := Stages()), SimpleNamespace(payload=SimpleNamespace(pages=None))
    route: Any = SimpleNamespace(staging_view=object() if mapped else None)
    arguments: Any = (op, None, op.payload, route)
    gpu.holding = True
    assert (moving._staged_transfer(*arguments) is None) is not mapped
    gpu.holding = False
    assert moving._staged_transfer(*arguments) is stages  # type: ignore[comparison-overlap]  # the fake's result
    assert stages.taken == (0 if mapped else 4096)
    gpu.holding = True
    assert moving._staged_transfer(*arguments) is stages  # type: ignore[comparison-overlap]


def test_what_is_mapped_of_a_dead_peer(gpu: Gpu) -> None:
    closed: list[int] = []
    routes = [SimpleNamespace(close=lambda number=number: closed.append(number)) for number in range(2)]
    engine: Any = SimpleNamespace(device=gpu, _closing=[*routes])
    gpu.holding = True
    Engine.let_go(engine)
    assert closed == gpu.freed == []
    gpu.holding = False
    Engine.let_go(engine)
    assert sorted(closed) == [0, 1]
    assert gpu.freed == ["quiet"], "and what this thread could not free before"
    on_host: Any = SimpleNamespace(device=None, _closing=[*routes])
    Engine.let_go(on_host)
    assert len(closed) == 4
