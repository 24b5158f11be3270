"""The opaque bytes of this transport: addresses and region descriptors.

They cross the network. Each is framed (magic, kind, version, length) and carries a digest, so that damaged or
foreign bytes are refused here: UCX itself parses addresses and keys without bounds. The digest proves integrity,
not origin; that is the job of the authenticated control channel which carries these bytes.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeVar

import msgspec

from torchkv.errors import ProtocolError
from torchkv_ucx.mailbox import SIGNAL_NBYTES, SLOTS

__all__ = [
    "MAX_ADDRESS",
    "MAX_DESCRIPTOR",
    "AddressBlob",
    "RegionBlob",
    "frame",
    "pack",
    "unpack_address",
    "unpack_region",
]

MAX_ADDRESS = 16 << 10  # what Transport.address() may take
MAX_DESCRIPTOR = 4 << 10  # what Region.descriptor() may take
_MAX_WORKER_ADDRESS = 8 << 10
_MAX_RKEY = 1 << 10
_MAX_SHARE = 1 << 10
_MAX_DOORSTEPS = 16  # one per GPU of a host
# User addresses stay below: on AArch64 they have 48 bits; those of device memory follow the GPU's page tables.
_ADDRESS_SPACE = {"cpu": 1 << 48, "cuda": 1 << 57}

_MAGIC = b"tkux2"
_DIGEST_BYTES = 16


class RegionBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="region"):
    """A registered span: ``base`` and ``nbytes`` at its owner, its remote key, how to map it (or empty).

    A span of device memory may have no key, where its owner's UCX cannot put device memory: it is for mapping only.
    """

    base: int
    nbytes: int
    rkey: bytes
    share: bytes
    device: Literal["cpu", "cuda"] = "cpu"


class AddressBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="address"):
    """A transport: its UCX worker, its signal mailbox, a name for error messages.

    doorsteps: remote keys of memory that is unpacked before any region's, see `torchkv_ucx.gpu.doorstep`.
    """

    worker: bytes
    mailbox: RegionBlob
    pid: int
    doorsteps: tuple[bytes, ...] = ()


Blob = TypeVar("Blob", RegionBlob, AddressBlob)


def pack(blob: RegionBlob | AddressBlob) -> bytes:
    body = msgspec.msgpack.encode(blob)
    packed = frame(body)
    limit = MAX_ADDRESS if isinstance(blob, AddressBlob) else MAX_DESCRIPTOR
    if len(packed) > limit:
        raise ProtocolError(f"{type(blob).__name__} takes {len(packed)} bytes, over the limit of {limit}")
    return packed


def frame(body: bytes) -> bytes:
    """``body`` with magic and digest in front."""
    return _MAGIC + _digest(body) + body


def unpack_address(data: bytes) -> AddressBlob:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for an address."""
    blob = _unpack(data, AddressBlob, MAX_ADDRESS)
    if not 0 < len(blob.worker) <= _MAX_WORKER_ADDRESS:
        raise ProtocolError(
            f"UCX transport address: worker address of {len(blob.worker)} bytes, allowed 1..{_MAX_WORKER_ADDRESS}"
        )
    _check_region(blob.mailbox)
    if len(blob.doorsteps) > _MAX_DOORSTEPS or not all(0 < len(key) <= _MAX_RKEY for key in blob.doorsteps):
        raise ProtocolError(
            f"UCX transport address: doorstep keys of {[len(key) for key in blob.doorsteps[:20]]} bytes, allowed are "
            f"{_MAX_DOORSTEPS} keys of 1..{_MAX_RKEY}"
        )
    if blob.mailbox.device != "cpu":
        raise ProtocolError(f"UCX transport address: mailbox in {blob.mailbox.device} memory, must be in the host's")
    if blob.mailbox.nbytes < SLOTS * SIGNAL_NBYTES:
        raise ProtocolError(
            f"UCX transport address: mailbox of {blob.mailbox.nbytes} bytes, its slots need {SLOTS * SIGNAL_NBYTES}"
        )
    return blob


def unpack_region(data: bytes) -> RegionBlob:
    """Raises ``ProtocolError`` unless ``data`` is the whole output of `pack` for a region."""
    blob = _unpack(data, RegionBlob, MAX_DESCRIPTOR)
    _check_region(blob)
    return blob


def _unpack(data: bytes, kind: type[Blob], limit: int) -> Blob:
    what = f"UCX transport {kind.__struct_config__.tag}"
    start = len(_MAGIC) + _DIGEST_BYTES
    if not isinstance(data, bytes) or not start < len(data) <= limit:
        size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ProtocolError(f"{what}: got {size}, expected {start + 1}..{limit} bytes")
    if not data.startswith(_MAGIC):
        raise ProtocolError(f"{what}: not made by this version of the ucx transport; run the same torchkv on all ranks")
    body = data[start:]
    if _digest(body) != data[len(_MAGIC) : start]:
        raise ProtocolError(f"{what}: digest does not match, the bytes were damaged on their way")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: {error}") from error


def _check_region(blob: RegionBlob) -> None:
    where = "UCX transport region"
    if blob.nbytes < 0 or blob.base < 0 or blob.base + blob.nbytes > _ADDRESS_SPACE[blob.device]:
        raise ProtocolError(f"{where}: [{blob.base:#x}, +{blob.nbytes}) is not a span of user addresses")
    if len(blob.rkey) > _MAX_RKEY or (blob.nbytes > 0 and not blob.rkey and blob.device == "cpu"):
        raise ProtocolError(f"{where}: remote key of {len(blob.rkey)} bytes, allowed 1..{_MAX_RKEY}")
    if len(blob.share) > _MAX_SHARE:
        raise ProtocolError(f"{where}: share descriptor of {len(blob.share)} bytes, limit {_MAX_SHARE}")
    if blob.device == "cuda" and not blob.share:
        raise ProtocolError(f"{where}: device memory without a share descriptor, which every owner has")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, person=b"torchkv-ucx").digest()
