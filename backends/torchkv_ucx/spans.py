"""From a batch, which the caller numbers and which may be wrong, to checked absolute addresses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.transport import Batch, Int64Array
from torchkv_ucx.libucp import HOST, MEMORY_TYPES
from torchkv_ucx.operation import Spans

__all__ = ["LocalRegions", "RemoteRegions", "resolve"]


class LocalRegions:
    """Tables over the transport's regions, by index; replaced, never changed, so that running puts keep theirs."""

    def __init__(self) -> None:
        self.base: Int64Array = np.zeros(0, dtype=np.int64)
        self.nbytes: Int64Array = np.zeros(0, dtype=np.int64)
        self.memh: Int64Array = np.zeros(0, dtype=np.int64)
        self.memory_type: Int64Array = np.zeros(0, dtype=np.int64)
        self.no_put: dict[int, str] = {}

    def add(self, base: int, nbytes: int, memh: int, memory_type: int = HOST, no_put: str = "") -> int:
        """Returns the region's index. ``no_put``: why nothing can be put from it, if so."""
        self.base = np.append(self.base, np.int64(base))
        self.nbytes = np.append(self.nbytes, np.int64(nbytes))
        self.memh = np.append(self.memh, np.int64(memh))
        self.memory_type = np.append(self.memory_type, np.int64(memory_type))
        index = len(self.base) - 1
        if no_put:
            self.no_put[index] = no_put
        return index

    def remove(self, index: int) -> None:
        self.nbytes = self.nbytes.copy()
        self.nbytes[index] = -1  # not even an empty span lies inside


class RemoteRegions:
    """The same for one peer's regions."""

    def __init__(
        self, base: Int64Array, nbytes: Int64Array, rkey: Int64Array, memory_type: Int64Array | None = None
    ) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rkey = rkey
        self.memory_type = np.full(len(base), HOST, dtype=np.int64) if memory_type is None else memory_type
        self.no_put: dict[int, str] = {}


def resolve(batch: Batch, local: LocalRegions, remote: RemoteRegions, peer: str) -> Spans:
    """Checks every span of ``batch`` against both regions.

    Raises ``ProtocolError`` naming the first span that lies outside a region or is of another kind of memory than
    the rest, ``TransportUnavailable`` for a region that UCX cannot put from or into.
    The arrays are copied: what was checked is what will be posted, whatever the caller does to its own.
    """
    names = ("local_region", "local_offset", "remote_region", "remote_offset", "length")
    arrays = {name: _column(getattr(batch, name), name) for name in names}
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise ProtocolError(f"put to {peer}: the batch's arrays differ in length ({sizes})")
    length = arrays["length"]
    source = _side(f"put to {peer}: local", arrays["local_region"], arrays["local_offset"], length, local)
    target = _side(f"put to {peer}: remote", arrays["remote_region"], arrays["remote_offset"], length, remote)
    memory_type = _memory_type(arrays["local_region"], arrays["remote_region"], local, remote, peer)
    for side, table in (("local", local), ("remote", remote)):
        for region, reason in table.no_put.items():
            if np.any((arrays[f"{side}_region"] == region) & (length > 0)):
                raise TransportUnavailable(f"put to {peer}: {side} region {region}: {reason}; views of it may work")
    return Spans(
        source=source,
        target=target,
        length=length,
        local_region=arrays["local_region"],
        remote_region=arrays["remote_region"],
        memhs=local.memh,
        rkeys=remote.rkey,
        memory_type=memory_type,
    )


def _memory_type(
    local_region: Int64Array, remote_region: Int64Array, local: LocalRegions, remote: RemoteRegions, peer: str
) -> int:
    """The one kind of memory of all spans, on both sides: UCX is told it once a batch."""
    kinds = {*local.memory_type.tolist(), *remote.memory_type.tolist()}
    if len(kinds) == 1:
        return int(kinds.pop())
    if len(local_region) == 0:
        return HOST
    sources, targets = local.memory_type[local_region], remote.memory_type[remote_region]
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


def _column(values: npt.NDArray[np.int64], name: str) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ProtocolError(f"batch.{name} must be one-dimensional int64, not {array.ndim}-dimensional {array.dtype}")
    return np.array(array, dtype=np.int64, order="C", copy=True)


def _side(
    where: str, region: Int64Array, offset: Int64Array, length: Int64Array, table: LocalRegions | RemoteRegions
) -> Int64Array:
    """Absolute addresses of the spans on one side, all of them inside their regions."""
    unknown = (region < 0) | (region >= len(table.base))
    if unknown.any():
        i = int(np.argmax(unknown))
        raise ProtocolError(f"{where} region {region[i]} of span {i} does not exist: there are {len(table.base)}")
    limit = table.nbytes[region]
    # In this order nothing can overflow: limit - offset is only decisive where 0 <= offset <= limit.
    outside = (offset < 0) | (length < 0) | (offset > limit) | (length > limit - np.clip(offset, 0, None))
    if outside.any():
        i = int(np.argmax(outside))
        size = "is deregistered" if limit[i] < 0 else f"has {limit[i]} bytes"
        raise ProtocolError(
            f"{where} span {i} [offset {offset[i]}, +{length[i]} bytes] lies outside region {region[i]}, which {size}; "
            "nothing of the batch was written"
        )
    return table.base[region] + offset
