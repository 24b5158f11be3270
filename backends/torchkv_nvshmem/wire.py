"""The bytes that ranks exchange: what they say of themselves in collective calls, addresses, and region descriptors.

They cross the network in a frame (`torchkv.transport.framing`), and their fields are bounded. The places that they name
are checked against the heap before they become addresses.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from torchkv.host.processes import ProcessId
from torchkv.transport.framing import Frame
from torchkv_nvshmem.library import UID_NBYTES

__all__ = [
    "HEAP_ID_NBYTES",
    "MAX_METADATA",
    "MAX_NBYTES",
    "NO_BLOCK",
    "AddressBlob",
    "AllocateMetadata",
    "JoinMetadata",
    "RegionBlob",
    "StartMetadata",
    "heap_id",
    "pack",
    "unpack",
]

MAX_NBYTES = 1 << 46
MAX_METADATA = 4 << 10  # also what Region.descriptor() may take
HEAP_ID_NBYTES = 16
NO_BLOCK = -1  # the region lies outside the symmetric heap

_FRAME = Frame(transport="nvshmem", magic=b"tknv2")

_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
_Pe = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_HeapId = Annotated[bytes, msgspec.Meta(max_length=HEAP_ID_NBYTES)]
_Reason = Annotated[str, msgspec.Meta(max_length=1024)]


class RegionBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="region"):
    """A region: ``nbytes`` from ``offset`` on in a block of ``pe``.

    block: `NO_BLOCK` for memory outside the heap; ``share`` (of `torchkv.cuda.ipc`) then says how to map it.
    """

    heap: _HeapId
    pe: _Pe
    block: Annotated[int, msgspec.Meta(ge=NO_BLOCK, lt=1 << 20)]
    offset: _Nbytes
    nbytes: _Nbytes
    share: Annotated[bytes, msgspec.Meta(max_length=1024)] = b""


class AddressBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="address"):
    """A transport: its PE and its process."""

    heap: _HeapId
    pe: _Pe
    process: ProcessId


class JoinMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """What a rank says in `join`.

    reason: why it cannot take part, or "". heap, pe: the job that it is a member of, and its PE; empty if of none.
    nbytes: symmetric memory that it wants first. host: its identity. gpu, gpu_nbytes: UUID and memory of its GPU.
    """

    reason: _Reason
    heap: _HeapId = b""
    pe: _Pe = 0
    nbytes: _Nbytes = 0
    host: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    gpu: Annotated[str, msgspec.Meta(max_length=64)] = ""
    gpu_nbytes: _Nbytes = 0


class StartMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start"):
    """What a rank says after a step of the start. reason: why it failed, or "". uid: the job's, from rank 0."""

    reason: _Reason
    uid: Annotated[bytes, msgspec.Meta(max_length=UID_NBYTES)] = b""


class AllocateMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allocate"):
    """What a rank says in `allocate_shared`.

    reason: why it cannot take part, or "". heap, pe: its job and PE. nbytes: what it needs. spare: the largest free
    span of its blocks. free: free memory of its GPU.
    """

    reason: _Reason
    heap: _HeapId = b""
    pe: _Pe = 0
    nbytes: _Nbytes = 0
    spare: _Nbytes = 0
    free: _Nbytes = 0


T = TypeVar("T", bound=msgspec.Struct)


def pack(blob: RegionBlob | AddressBlob | JoinMetadata | StartMetadata | AllocateMetadata) -> bytes:
    packed = _FRAME.pack(blob)
    assert len(packed) <= MAX_METADATA
    return packed


def unpack(data: bytes, kind: type[T]) -> T:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for a ``kind``."""
    return _FRAME.unpack(data, kind, limit=MAX_METADATA)


def heap_id(uid: bytes) -> bytes:
    """The name of the heap that the members of the job ``uid`` share."""
    return hashlib.blake2b(uid, digest_size=HEAP_ID_NBYTES, person=b"torchkv-nvheap").digest()
