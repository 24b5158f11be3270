"""The opaque bytes of this transport: what ranks tell each other when they join, addresses and region descriptors.

They cross the network. All are msgpack of closed types with bounded fields; what they name is checked against the
heap before it becomes an address.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from torchkv.errors import ProtocolError
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

_MAGIC = b"tknv1"
_DIGEST_NBYTES = 16

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


Blob = TypeVar("Blob", RegionBlob, AddressBlob, JoinCard, StartCard, AllocateCard)


def pack(blob: RegionBlob | AddressBlob | JoinCard | StartCard | AllocateCard) -> bytes:
    body = msgspec.msgpack.encode(blob)
    packed = _MAGIC + _digest(body) + body
    assert len(packed) <= MAX_CARD
    return packed


def unpack(data: bytes, kind: type[Blob]) -> Blob:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for a ``kind``."""
    what = f"NVSHMEM transport {kind.__struct_config__.tag}"
    start = len(_MAGIC) + _DIGEST_NBYTES
    if not isinstance(data, bytes) or not start < len(data) <= MAX_CARD:
        size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ProtocolError(f"{what}: got {size}, expected {start + 1}..{MAX_CARD} bytes")
    if not data.startswith(_MAGIC):
        raise ProtocolError(
            f"{what}: not made by this version of the nvshmem transport; run the same torchkv everywhere"
        )
    body = data[start:]
    if _digest(body) != data[len(_MAGIC) : start]:
        raise ProtocolError(f"{what}: digest does not match, the bytes were damaged on their way")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: {error}") from error


def heap_id(uid: bytes) -> bytes:
    """Names the heap that the job of ``uid`` shares."""
    return hashlib.blake2b(uid, digest_size=HEAP_ID_NBYTES, person=b"torchkv-nvheap").digest()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES, person=b"torchkv-nvshmem").digest()
