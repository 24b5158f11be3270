"""For transports: the frame around the bytes they publish, which is a magic, a digest, and msgpack of a closed type.

Addresses and descriptors cross the network. Damaged or foreign bytes are refused here, before a network library parses
them that trusts its input. The digest proves that the bytes are whole, not who sent them: the channel that carries them
authenticates its peers.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from torchkv.errors import ProtocolError

__all__ = ["Frame"]

DIGEST_NBYTES = 16

T = TypeVar("T", bound=msgspec.Struct)

_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One transport's frame.

    transport: its name; goes into the digest. magic: first bytes of every frame; changes when the format changes.
    """

    transport: str
    magic: bytes

    def pack(self, blob: msgspec.Struct) -> bytes:
        """``blob`` in a frame."""
        return self.wrap(msgspec.msgpack.encode(blob))

    def wrap(self, body: bytes) -> bytes:
        """``body`` with magic and digest in front."""
        return self.magic + self._digest(body) + body

    def unpack(self, data: bytes, kind: type[T], *, limit: int) -> T:
        """The blob of type ``kind`` that `pack` put into ``data``.

        Raises ``ProtocolError`` for anything else, and for more than ``limit`` bytes.
        """
        operation = f"{self.transport.upper()} transport {kind.__struct_config__.tag}"
        start = len(self.magic) + DIGEST_NBYTES
        if not isinstance(data, bytes) or not start < len(data) <= limit:
            size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ProtocolError(f"{operation}: got {size}, expected {start + 1}..{limit} bytes")
        if not data.startswith(self.magic):
            raise ProtocolError(
                f"{operation}: not made by this version of the {self.transport} transport; run the same torchkv on "
                "all ranks"
            )
        body = data[start:]
        if self._digest(body) != data[len(self.magic) : start]:
            raise ProtocolError(f"{operation}: digest does not match, the bytes were damaged on their way")
        try:
            return _decoder(kind).decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{operation}: {error}") from error

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=DIGEST_NBYTES, person=f"torchkv-{self.transport}".encode()).digest()


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """One thread at a time makes it: msgspec's own preparation for a type is not safe among threads."""
    if kind not in _decoders:
        with _making:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]
