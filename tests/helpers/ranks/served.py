"""What Python serves although the resident loop might have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torchkv_ucx.channel import UCXChannel

from torchkv import KVProcessGroup
from torchkv.engine.resident import routes
from torchkv.engine.resident.standing_stages import StandingStages
from torchkv.engine.scheduler import TransferScheduler
from torchkv.protocol.actions import BoundGrant, SendOp

__all__ = ["keep_loops_from_staging", "loops_served", "put_by_the_loop", "served_by_python", "staged_by_python"]


def keep_loops_from_staging() -> None:
    """From now on this process grants no standing stage, so that Python stages what is written to it."""
    StandingStages._grant = lambda self, rank: False


@contextmanager
def staged_by_python() -> Iterator[None]:
    """What is written to this process inside is staged by Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandingStages, "_grant", StandingStages._grant)  # undone at the end
        keep_loops_from_staging()
        yield


@contextmanager
def served_by_python() -> Iterator[list[SendOp]]:
    """The ops that this process's schedulers are given inside."""
    served: list[SendOp] = []
    start = TransferScheduler.start

    def noting(self: TransferScheduler, op: SendOp, grant: BoundGrant) -> None:
        served.append(op)
        start(self, op, grant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransferScheduler, "start", noting)
        yield served


@contextmanager
def put_by_the_loop(*, over_cuda_ipc: bool = True) -> Iterator[list[SendOp]]:
    """The ops that Python serves although the loop is let put, and pack, over CUDA IPC, as it does over a network."""
    with served_by_python() as served, pytest.MonkeyPatch.context() as patch:
        if over_cuda_ipc:
            patch.setattr(UCXChannel, "_puts_cheaply", lambda self: True)
            patch.setattr(routes, "puts_keep_up", lambda plan, costs: True)
        yield served


def loops_served(kv: KVProcessGroup, served: list[SendOp]) -> bool:
    """Whether no rank's Python has `served` anything. All ranks call it."""
    everyone: list[Any] = [None] * kv.size()
    dist.all_gather_object(everyone, len(served), group=kv)
    return not any(everyone)
