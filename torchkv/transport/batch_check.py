"""For transports: turns a put's batch, which may be wrong, into checked absolute addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError
from torchkv.transport.interface import Batch

__all__ = ["Spans", "Table", "resolve"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Checked spans of a put, int64[n] each.

    source, target: addresses in this process and in the peer's. length: bytes. local_region, remote_region: indices.
    """

    source: Int64Array
    target: Int64Array
    length: Int64Array
    local_region: Int64Array
    remote_region: Int64Array


class Table:
    """Regions by index, int64[number of regions] each. The arrays are replaced, never changed: running puts hold them.

    base: address. nbytes: size, or -1 once the region is deregistered.
    """

    def __init__(self) -> None:
        self.base: Int64Array = np.zeros(0, dtype=np.int64)
        self.nbytes: Int64Array = np.zeros(0, dtype=np.int64)

    def add(self, base: int, nbytes: int) -> int:
        """Adds a region; returns its index."""
        self.base = np.append(self.base, np.int64(base))
        self.nbytes = np.append(self.nbytes, np.int64(nbytes))
        return len(self.base) - 1

    def remove(self, index: int) -> None:
        self.nbytes = self.nbytes.copy()
        self.nbytes[index] = -1  # so that not even an empty span at offset 0 passes the check


def resolve(batch: Batch, local: Table, remote: Table, peer: str) -> Spans:
    """Checks every span of ``batch`` against its local and its remote region. peer: names it in messages.

    Raises ``ProtocolError`` that names the first span outside a region, or says what is wrong with the arrays. The
    arrays are copied, so what is posted is what was checked, even if the caller changes its own.
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


def _column(values: Int64Array, name: str) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ProtocolError(f"batch.{name} must be one-dimensional int64, not {array.ndim}-dimensional {array.dtype}")
    return np.array(array, dtype=np.int64, order="C", copy=True)


def _side(where: str, region: Int64Array, offset: Int64Array, length: Int64Array, table: Table) -> Int64Array:
    """Addresses of the spans on one side. Raises ``ProtocolError`` unless all lie inside their regions."""
    unknown = (region < 0) | (region >= len(table.base))
    if unknown.any():
        i = int(np.argmax(unknown))
        raise ProtocolError(f"{where} region {region[i]} of span {i} does not exist: there are {len(table.base)}")
    limit = table.nbytes[region]
    # Nothing here overflows: limit - offset is compared only where 0 <= offset <= limit, so it is never negative.
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
