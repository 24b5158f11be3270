"""Checked spans, all of them in symmetric memory."""

from __future__ import annotations

import numpy as np

from torchkv import spans
from torchkv.errors import TransportUnavailable
from torchkv.spans import Spans, Table
from torchkv.transport import Batch, Int64Array

__all__ = ["OUTSIDE", "resolve"]

OUTSIDE = 0  # stands in a `Table` for the address of a region outside symmetric memory


def resolve(batch: Batch, local: Table, remote: Table, peer: str) -> Spans:
    """See `torchkv.spans.resolve`. Raises also ``TransportUnavailable`` for a region outside symmetric memory."""
    checked = spans.resolve(batch, local, remote, peer)
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
