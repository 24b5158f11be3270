"""The opaque bytes of this transport: what ranks tell each other when they join, addresses and region descriptors.

They cross the network in a frame (`torchkv.blob`), with bounded fields; what they name is checked against the
heap before it becomes an address.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from torchkv.blob import Frame
from torchkv.processes import ProcessId
from torchkv_nvshmem.library import UID_NBYTES

__all__ = [
    "HEAP_ID_NBYTES",
    "MAX_CARD",
    "MAX_NBYTES",
    "NO_BLOCK",
    "AddressBlob",
    "AllocateCard",
    "JoinCard",
    "RegionBlob",
    "StartCard",
    "heap_id",
    "pack",
    "unpack",
]

MAX_NBYTES = 1 << 46
MAX_CARD = 4 << 10  # also what Region.descriptor() may take
HEAP_ID_NBYTES = 16
NO_BLOCK = -1  # the region lies outside the symmetric heap

_FRAME = Frame(transport="nvshmem", magic=b"tknv1")

_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
_Pe = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_HeapId = Annotated[bytes, msgspec.Meta(max_length=HEAP_ID_NBYTES)]
_Reason = Annotated[str, msgspec.Meta(max_length=1024)]


class RegionBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="region"):
    """A registered span: ``nbytes`` from ``offset`` of a block of ``pe``, or memory outside the heap that ``share``
    (of `torchkv.devicemem`) describes."""

    heap: _HeapId
    pe: _Pe
    block: Annotated[int, msgspec.Meta(ge=NO_BLOCK, lt=1 << 20)]
    offset: _Nbytes
    nbytes: _Nbytes
    share: Annotated[bytes, msgspec.Meta(max_length=1024)] = b""


class AddressBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="address"):
    """A transport: its PE, where its signal words lie, and its process."""

    heap: _HeapId
    pe: _Pe
    mailbox_block: _Pe
    mailbox_offset: _Nbytes
    process: ProcessId


class JoinCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """A rank that joins: why it cannot (or empty), the heap it is in already (or empty) and as which PE, the memory
    that it will take at first, its host, and its GPU's UUID and memory."""

    reason: _Reason
    heap: _HeapId = b""
    pe: _Pe = 0
    nbytes: _Nbytes = 0
    host: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    gpu: Annotated[str, msgspec.Meta(max_length=64)] = ""
    gpu_nbytes: _Nbytes = 0


class StartCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start"):
    """A step of starting: why it failed here (or empty), and from rank 0 the job's unique id."""

    reason: _Reason
    uid: Annotated[bytes, msgspec.Meta(max_length=UID_NBYTES)] = b""


class AllocateCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allocate"):
    """A rank that allocates: why it cannot (or empty), its heap and PE, how much it needs, the largest free span of
    its blocks, and the free memory of its GPU."""

    reason: _Reason
    heap: _HeapId = b""
    pe: _Pe = 0
    nbytes: _Nbytes = 0
    spare: _Nbytes = 0
    free: _Nbytes = 0


T = TypeVar("T", bound=msgspec.Struct)


def pack(blob: RegionBlob | AddressBlob | JoinCard | StartCard | AllocateCard) -> bytes:
    packed = _FRAME.pack(blob)
    assert len(packed) <= MAX_CARD
    return packed


def unpack(data: bytes, kind: type[T]) -> T:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for a ``kind``."""
    return _FRAME.unpack(data, kind, limit=MAX_CARD)


def heap_id(uid: bytes) -> bytes:
    """Names the heap that the job of ``uid`` shares."""
    return hashlib.blake2b(uid, digest_size=HEAP_ID_NBYTES, person=b"torchkv-nvheap").digest()
