"""The bytes that this transport publishes: its address and the descriptors of its regions.

They cross the network in a frame (`torchkv.transport.framing`). Their fields are bounded here, because UCX parses
addresses and keys without bounds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torchkv.errors import ProtocolError
from torchkv.transport.framing import Frame

__all__ = [
    "FRAME",
    "MAX_ADDRESS",
    "MAX_DESCRIPTOR",
    "AddressBlob",
    "RegionBlob",
    "pack",
    "unpack_address",
    "unpack_region",
]

MAX_ADDRESS = 16 << 10  # what Transport.address() may take
MAX_DESCRIPTOR = 4 << 10  # what Region.descriptor() may take
_MAX_WORKER_ADDRESS = 8 << 10
_MAX_RKEY = 1 << 10
_MAX_SHARE = 1 << 10
_MAX_PROBES = 16  # one per GPU of a host
# User addresses are below these limits: on AArch64 they have 48 bits; those of device memory follow the GPU's tables.
_ADDRESS_SPACE = {"cpu": 1 << 48, "cuda": 1 << 57}

FRAME = Frame(transport="ucx", magic=b"tkux4")


class RegionBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="region"):
    """A region: address and size in its owner's process, remote key, and how to map it.

    rkey: empty for device memory that the owner's UCX cannot put, for regions of 0 bytes, and where the owner has no
    UCX worker. share: a descriptor of `torchkv.host.shared_memory` or `torchkv.cuda.ipc`; empty if it cannot be mapped.
    """

    base: int
    nbytes: int
    rkey: bytes
    share: bytes
    device: Literal["cpu", "cuda"] = "cpu"


class AddressBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="address"):
    """A transport: its UCX worker, and its process id for error messages and vectored puts.

    worker: empty if it has none; it is reached by system calls then. token_at, token: see `local_channel.Token`.
    probes: remote keys that a peer unpacks before those of regions, see `torchkv_ucx.gpu.probe_memory`.
    """

    worker: bytes
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    token_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    probes: tuple[bytes, ...] = ()


def pack(blob: RegionBlob | AddressBlob) -> bytes:
    packed = FRAME.pack(blob)
    limit = MAX_ADDRESS if isinstance(blob, AddressBlob) else MAX_DESCRIPTOR
    if len(packed) > limit:
        raise ProtocolError(f"{type(blob).__name__} takes {len(packed)} bytes, over the limit of {limit}")
    return packed


def unpack_address(data: bytes) -> AddressBlob:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for an address."""
    blob = FRAME.unpack(data, AddressBlob, limit=MAX_ADDRESS)
    if len(blob.worker) > _MAX_WORKER_ADDRESS:
        raise ProtocolError(
            f"UCX transport address: worker address of {len(blob.worker)} bytes, allowed 0..{_MAX_WORKER_ADDRESS}"
        )
    if len(blob.probes) > _MAX_PROBES or not all(0 < len(key) <= _MAX_RKEY for key in blob.probes):
        raise ProtocolError(
            f"UCX transport address: probe keys of {[len(key) for key in blob.probes[:20]]} bytes, allowed are "
            f"{_MAX_PROBES} keys of 1..{_MAX_RKEY}"
        )
    return blob


def unpack_region(data: bytes) -> RegionBlob:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for a region."""
    blob = FRAME.unpack(data, RegionBlob, limit=MAX_DESCRIPTOR)
    _check_region(blob)
    return blob


def _check_region(blob: RegionBlob) -> None:
    where = "UCX transport region"
    if blob.nbytes < 0 or blob.base < 0 or blob.base + blob.nbytes > _ADDRESS_SPACE[blob.device]:
        raise ProtocolError(f"{where}: [{blob.base:#x}, +{blob.nbytes}) is not a span of user addresses")
    if len(blob.rkey) > _MAX_RKEY:
        raise ProtocolError(f"{where}: remote key of {len(blob.rkey)} bytes, allowed 0..{_MAX_RKEY}")
    if len(blob.share) > _MAX_SHARE:
        raise ProtocolError(f"{where}: share descriptor of {len(blob.share)} bytes, limit {_MAX_SHARE}")
    if blob.device == "cuda" and not blob.share:
        raise ProtocolError(f"{where}: device memory without a share descriptor, which every owner has")
