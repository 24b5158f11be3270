"""Tables of regions with their UCX handles, and the check of a batch against them."""

from __future__ import annotations

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.transport import Batch, batch_check
from torchkv_ucx.libucp import HOST, MEMORY_TYPES
from torchkv_ucx.operation import Spans

__all__ = ["LocalRegions", "RemoteRegions", "resolve"]


class LocalRegions(batch_check.Table):
    """The regions registered here. memh: memory handles. no_put: why a region cannot be put from, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.memh: Int64Array = np.zeros(0, dtype=np.int64)
        self.memory_type: Int64Array = np.zeros(0, dtype=np.int64)
        self.no_put: dict[int, str] = {}

    def add(self, base: int, nbytes: int, memh: int = 0, memory_type: int = HOST, no_put: str = "") -> int:
        """Adds a region; returns its index. no_put: why nothing can be put from it, "" if it can."""
        index = super().add(base, nbytes)
        self.memh = np.append(self.memh, np.int64(memh))
        self.memory_type = np.append(self.memory_type, np.int64(memory_type))
        if no_put:
            self.no_put[index] = no_put
        return index


class RemoteRegions(batch_check.Table):
    """The regions of one peer. rkey: remote keys. no_put: why a region cannot be put into, by index."""

    def __init__(
        self, base: Int64Array, nbytes: Int64Array, rkey: Int64Array, memory_type: Int64Array | None = None
    ) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rkey = rkey
        self.memory_type = np.full(len(base), HOST, dtype=np.int64) if memory_type is None else memory_type
        self.no_put: dict[int, str] = {}


def resolve(batch: Batch, local: LocalRegions, remote: RemoteRegions, peer: str) -> Spans:
    """Checks every span of ``batch`` against both regions, see `torchkv.transport.batch_check.resolve`.

    Raises ``ProtocolError`` that names the first span outside a region, or in another kind of memory than the first
    span, and ``TransportUnavailable`` for a region that UCX cannot put from or into.
    """
    checked = batch_check.resolve(batch, local, remote, peer)
    memory_type = _memory_type(checked, local, remote, peer)
    for side, region, table in (("local", checked.local_region, local), ("remote", checked.remote_region, remote)):
        for index, reason in table.no_put.items():
            if np.any((region == index) & (checked.length > 0)):
                raise TransportUnavailable(f"put to {peer}: {side} region {index}: {reason}; views of it may work")
    return Spans(
        source=checked.source,
        target=checked.target,
        length=checked.length,
        local_region=checked.local_region,
        remote_region=checked.remote_region,
        memhs=local.memh,
        rkeys=remote.rkey,
        memory_type=memory_type,
    )


def _memory_type(checked: batch_check.Spans, local: LocalRegions, remote: RemoteRegions, peer: str) -> int:
    """The kind of memory of all spans on both sides. There may be one only: UCX is told it once for the batch."""
    kinds = {*local.memory_type.tolist(), *remote.memory_type.tolist()}
    if len(kinds) == 1:
        return int(kinds.pop())
    if len(checked.length) == 0:
        return HOST
    sources, targets = local.memory_type[checked.local_region], remote.memory_type[checked.remote_region]
    unlike = (sources != sources[0]) | (targets != sources[0])
    if unlike.any():
        i = int(np.argmax(unlike))
        names = {number: name for name, number in MEMORY_TYPES.items()}
        raise ProtocolError(
            f"put to {peer}: span {i} goes from {names[int(sources[i])]} to {names[int(targets[i])]} memory, span 0 "
            f"comes from {names[int(sources[0])]}; a batch stays in one kind of memory: put the others separately, "
            "or copy to the other kind first"
        )
    return int(sources[0])
