"""What Python serves although the resident loop might have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchkv.engine.scheduler import TransferScheduler
from torchkv.protocol.actions import BoundGrant, SendOp

__all__ = ["served_by_python"]


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
