"""The frame around what a transport publishes as opaque bytes: magic, digest, msgpack of a closed type.

They cross the network. Damaged or foreign bytes are refused here, before anything parses them that trusts its input.
The digest proves integrity, not origin; that is the job of the authenticated channel that carries these bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from torchkv.errors import ProtocolError

__all__ = ["Frame"]

DIGEST_NBYTES = 16

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One transport's frame. transport: its name, which goes into the digest. magic: changes with the format."""

    transport: str
    magic: bytes

    def pack(self, blob: msgspec.Struct) -> bytes:
        return self.wrap(msgspec.msgpack.encode(blob))

    def wrap(self, body: bytes) -> bytes:
        """``body`` with magic and digest in front."""
        return self.magic + self._digest(body) + body

    def unpack(self, data: bytes, kind: type[T], *, limit: int) -> T:
        """Raises ``ProtocolError`` unless ``data`` is what `pack` makes of a ``kind``, and at most ``limit`` bytes."""
        what = f"{self.transport.upper()} transport {kind.__struct_config__.tag}"
        start = len(self.magic) + DIGEST_NBYTES
        if not isinstance(data, bytes) or not start < len(data) <= limit:
            size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ProtocolError(f"{what}: got {size}, expected {start + 1}..{limit} bytes")
        if not data.startswith(self.magic):
            raise ProtocolError(
                f"{what}: not made by this version of the {self.transport} transport; run the same torchkv on all ranks"
            )
        body = data[start:]
        if self._digest(body) != data[len(self.magic) : start]:
            raise ProtocolError(f"{what}: digest does not match, the bytes were damaged on their way")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{what}: {error}") from error

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=DIGEST_NBYTES, person=f"torchkv-{self.transport}".encode()).digest()
