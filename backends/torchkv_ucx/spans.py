"""From a batch, which the caller numbers and which may be wrong, to checked absolute addresses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchkv.errors import ProtocolError
from torchkv.transport import Batch, Int64Array
from torchkv_ucx.operation import Spans

__all__ = ["LocalRegions", "RemoteRegions", "resolve"]


class LocalRegions:
    """Tables over the transport's regions, by index; replaced, never changed, so that running puts keep theirs."""

    def __init__(self) -> None:
        self.base: Int64Array = np.zeros(0, dtype=np.int64)
        self.nbytes: Int64Array = np.zeros(0, dtype=np.int64)
        self.memh: Int64Array = np.zeros(0, dtype=np.int64)

    def add(self, base: int, nbytes: int, memh: int) -> int:
        self.base = np.append(self.base, np.int64(base))
        self.nbytes = np.append(self.nbytes, np.int64(nbytes))
        self.memh = np.append(self.memh, np.int64(memh))
        return len(self.base) - 1

    def remove(self, index: int) -> None:
        self.nbytes = self.nbytes.copy()
        self.nbytes[index] = -1  # not even an empty span lies inside


class RemoteRegions:
    """The same for one peer's regions."""

    def __init__(self, base: Int64Array, nbytes: Int64Array, rkey: Int64Array) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rkey = rkey


def resolve(batch: Batch, local: LocalRegions, remote: RemoteRegions, peer: str) -> Spans:
    """Checks every span of ``batch`` against both regions. Raises ``ProtocolError`` naming the first bad one.

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
    return Spans(
        source=source,
        target=target,
        length=length,
        local_region=arrays["local_region"],
        remote_region=arrays["remote_region"],
        memhs=local.memh,
        rkeys=remote.rkey,
    )


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
