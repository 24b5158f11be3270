"""The bytes that a loopback transport publishes: records of fixed size with a checksum."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from torchkv.errors import ProtocolError

__all__ = ["Address", "RegionRecord", "pack_address", "pack_region", "unpack_address", "unpack_region"]

_ADDRESS = struct.Struct("<4sQQ")  # magic, world, node
_REGION = struct.Struct("<4sQQQQ")  # magic, world, node, index, nbytes
_ADDRESS_MAGIC = b"tkLA"
_REGION_MAGIC = b"tkLR"
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Address:
    """A transport's address: its node in a world. world: a random number that names the world."""

    world: int
    node: int


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Region ``index`` of a node, ``nbytes`` long."""

    world: int
    node: int
    index: int
    nbytes: int


def pack_address(address: Address) -> bytes:
    return _sealed(_ADDRESS.pack(_ADDRESS_MAGIC, address.world, address.node))


def pack_region(region: RegionRecord) -> bytes:
    return _sealed(_REGION.pack(_REGION_MAGIC, region.world, region.node, region.index, region.nbytes))


def unpack_address(data: bytes) -> Address:
    """Raises ``ProtocolError`` for bytes that `pack_address` did not make."""
    world, node = _opened(data, _ADDRESS, _ADDRESS_MAGIC, "address")
    return Address(world, node)


def unpack_region(data: bytes) -> RegionRecord:
    """Raises ``ProtocolError`` for bytes that `pack_region` did not make."""
    world, node, index, nbytes = _opened(data, _REGION, _REGION_MAGIC, "region descriptor")
    return RegionRecord(world, node, index, nbytes)


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


def _sealed(body: bytes) -> bytes:
    return body + _check(body)


def _opened(data: bytes, layout: struct.Struct, magic: bytes, operation: str) -> tuple[int, ...]:
    size = layout.size + _CHECK_BYTES
    if len(data) != size:
        raise ProtocolError(f"loopback {operation} of {len(data)} bytes; this version reads {size}")
    body = data[: layout.size]
    if data[layout.size :] != _check(body) or body[:4] != magic:
        raise ProtocolError(f"loopback {operation} is damaged or not one; publish it again from the peer's transport")
    fields: tuple[int, ...] = layout.unpack(body)[1:]
    return fields
