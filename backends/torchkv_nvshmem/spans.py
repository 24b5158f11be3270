"""The check of a batch: every span inside its regions, and all of them in symmetric memory."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import TransportUnavailable
from torchkv.transport import Batch, batch_check
from torchkv.transport.batch_check import Spans, Table

__all__ = ["OUTSIDE", "resolve"]

OUTSIDE = 0  # in a `Table`: the address of a region outside symmetric memory


def resolve(batch: Batch, local: Table, remote: Table, peer: str) -> Spans:
    """Checks every span of ``batch`` against both regions, see `torchkv.transport.batch_check.resolve`.

    Raises ``ProtocolError`` that names the first span outside a region, ``TransportUnavailable`` for a region outside
    symmetric memory.
    """
    checked = batch_check.resolve(batch, local, remote, peer)
    _require_symmetric(f"put to {peer}: local", checked.local_region, checked.length, local)
    _require_symmetric(f"put to {peer}: remote", checked.remote_region, checked.length, remote)
    return checked


def _require_symmetric(where: str, region: Int64Array, length: Int64Array, table: Table) -> None:
    foreign = (table.base[region] == OUTSIDE) & (length > 0)
    if foreign.any():
        i = int(np.argmax(foreign))
        raise TransportUnavailable(
            f"{where} region {region[i]} of span {i} lies outside symmetric memory, where NVSHMEM cannot put: use the "
            "region's view, or allocate it with KVCache.empty(group=...); nothing of the batch was written"
        )
