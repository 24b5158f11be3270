"""Batches of a put, which the caller numbers and which may be wrong, to checked absolute addresses: for transports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchkv.errors import ProtocolError
from torchkv.transport import Batch, Int64Array

__all__ = ["Spans", "Table", "resolve"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Checked puts, int64[n] each: absolute addresses here and at the peer, bytes, and the regions by index."""

    source: Int64Array
    target: Int64Array
    length: Int64Array
    local_region: Int64Array
    remote_region: Int64Array


class Table:
    """Regions by index. Its arrays are replaced, never changed, so that running puts keep theirs.

    base: address. nbytes: size, or -1 once deregistered.
    """

    def __init__(self) -> None:
        self.base: Int64Array = np.zeros(0, dtype=np.int64)
        self.nbytes: Int64Array = np.zeros(0, dtype=np.int64)

    def add(self, base: int, nbytes: int) -> int:
        """Returns the region's index."""
        self.base = np.append(self.base, np.int64(base))
        self.nbytes = np.append(self.nbytes, np.int64(nbytes))
        return len(self.base) - 1

    def remove(self, index: int) -> None:
        self.nbytes = self.nbytes.copy()
        self.nbytes[index] = -1  # not even an empty span lies inside


def resolve(batch: Batch, local: Table, remote: Table, peer: str) -> Spans:
    """Checks every span of ``batch`` against both regions. ``peer``: for messages.

    Raises ``ProtocolError`` naming the first span that lies outside a region.
    The arrays are copied: what was checked is what will be posted, whatever the caller does to its own.
    """
    names = ("local_region", "local_offset", "remote_region", "remote_offset", "length")
    arrays = {name: _column(getattr(batch, name), name) for name in names}
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise ProtocolError(f"put to {peer}: the batch's arrays differ in length ({sizes})")
    length = arrays["length"]
    return Spans(
        source=_side(f"put to {peer}: local", arrays["local_region"], arrays["local_offset"], length, local),
        target=_side(f"put to {peer}: remote", arrays["remote_region"], arrays["remote_offset"], length, remote),
        length=length,
        local_region=arrays["local_region"],
        remote_region=arrays["remote_region"],
    )


def _column(values: npt.NDArray[np.int64], name: str) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ProtocolError(f"batch.{name} must be one-dimensional int64, not {array.ndim}-dimensional {array.dtype}")
    return np.array(array, dtype=np.int64, order="C", copy=True)


def _side(where: str, region: Int64Array, offset: Int64Array, length: Int64Array, table: Table) -> Int64Array:
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
    addresses: Int64Array = table.base[region] + offset
    return addresses
