"""The control messages and how they look as bytes: typed, bounded, versioned, authenticated.

A frame is a fixed header, a MAC and at most one message. Messages name things by handle (generation, layer, page)
and never by address. Nothing received is unpickled or evaluated: msgspec decodes into the types below and refuses
everything else, including unknown fields and anything over its bound.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from torchkv.compiled import compiled_with_gil
from torchkv.errors import AuthError, ProtocolError
from torchkv.transport import Int64Array

__all__ = [
    "MAX_ASKS",
    "MAX_AUX",
    "MAX_FRAME",
    "MAX_PAGES",
    "MAX_REQUEST_BYTES",
    "Abort",
    "Alive",
    "Attest",
    "Frame",
    "Grant",
    "InstanceVerdict",
    "Message",
    "Outcome",
    "Post",
    "Quiesced",
    "Revoke",
    "Seal",
    "StageAsk",
    "StageDenied",
    "StageGrant",
    "Staged",
    "Verdict",
    "Withdraw",
    "Withdrawn",
    "decode_frame",
    "encode_frame",
    "pack_pages",
    "unpack_pages",
    "warm_up",
]

MAX_REQUEST_BYTES = 128
MAX_AUX = 64 << 10
MAX_PAGES = 1 << 20
MAX_RANKS = 1 << 14
MAX_LAYERS = 1 << 14
MAX_TEXT = 2048
MAX_ASKS = 8  # of one writer under one generation: stages asked for and not yet written
MAX_FRAME = MAX_PAGES * 8 + MAX_AUX + (64 << 10)

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Request: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_BYTES)]
Kind: TypeAlias = Annotated[str, msgspec.Meta(max_length=32)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag_field="t"):
    """Base of all control messages. ``generation`` names one `recv_pages` of the receiving rank."""


class Grant(Message, frozen=True, tag="grant"):
    """Receiver -> writer: you may write these pages of mine, in order of position after the prefix, and this slot."""

    request: Request
    generation: Count
    prefix_tokens: Count
    pages: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]
    writers: Annotated[list[Rank], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    state_slot: Count | None = None  # None: it has no state


class Attest(Message, frozen=True, tag="attest"):
    """Writer -> receiver: tokens [lo, hi) of these layers are visible in your memory, as far as they are mine.

    ``state``: not the tokens of these layers, but their state.
    """

    generation: Count
    layers: Annotated[list[Layer], msgspec.Meta(max_length=MAX_LAYERS)]
    lo: Count
    hi: Count
    nbytes: Count
    path: Kind
    state: bool = False


class Seal(Message, frozen=True, tag="seal"):
    """Writer -> receiver: that was everything: ``num_pages`` of my pages, counted after the prefix, and the aux."""

    generation: Count
    num_pages: Count
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX)]


class Abort(Message, frozen=True, tag="abort"):
    """Writer -> receiver: this request has failed (or is refused) here, for this reason."""

    generation: Count
    kind: Kind
    text: Text


class Quiesced(Message, frozen=True, tag="quiesced"):
    """Writer -> receiver: nothing that I wrote under this grant can land any more."""

    generation: Count


class Revoke(Message, frozen=True, tag="revoke"):
    """Receiver -> writer: this request has failed for this reason; stop, drain and answer ``Quiesced``."""

    generation: Count
    kind: Kind
    text: Text


class Verdict(Message, frozen=True, tag="verdict"):
    """Receiver -> writer: the request succeeded on every rank of the receiving instance."""

    generation: Count


class Alive(Message, frozen=True, tag="alive"):
    """Either way: this request is still making progress here."""

    generation: Count
    to_writer: bool


class Post(Message, frozen=True, tag="post"):
    """Rank -> lowest rank of its instance: I have posted this request, for so many tokens."""

    request: Request
    generation: Count
    prefix_tokens: Count
    num_tokens: Count
    page_size: Count


class Outcome(Message, frozen=True, tag="outcome"):
    """Rank -> lowest rank of its instance: all is here (empty kind), or it failed."""

    request: Request
    generation: Count
    kind: Kind
    text: Text


class InstanceVerdict(Message, frozen=True, tag="instance"):
    """Lowest rank -> rank of its instance: all of us succeeded (empty kind), or somebody failed."""

    generation: Count
    kind: Kind
    text: Text


class StageAsk(Message, frozen=True, tag="stage_ask"):
    """Writer -> receiver: I need a stage of ``nbytes`` of your staging ring, or at least of ``least``.

    ``serial`` counts 0, 1, 2, ... per (writer, generation). ``only``: under this generation I write through the ring
    and nowhere else, until I withdraw that.
    """

    generation: Count
    serial: Count
    nbytes: Count
    least: Count
    only: bool


class StageGrant(Message, frozen=True, tag="stage_grant"):
    """Receiver -> writer: bytes [offset, offset + nbytes) of my ring are yours until you say ``Staged``.

    With a ``value`` that is not 0 you may say so early: signal word ``word`` of my ring then rises to ``value`` when
    your GPU has written the stage.
    """

    generation: Count
    serial: Count
    offset: Count
    nbytes: Count
    word: Count = 0
    value: Count = 0


class StageDenied(Message, frozen=True, tag="stage_denied"):
    """Receiver -> writer: you get no stage for this ask, for this reason."""

    generation: Count
    serial: Count
    text: Text


class Staged(Message, frozen=True, tag="staged"):
    """Writer -> receiver: the stage holds pages [start, start + num_pages) of these layers, visible in your ring.

    Pages are mine, counted after the prefix. ``checked``: their checksums lie in the stage too. With 0 pages the
    stage is given back unused. ``state``: it is the state of these layers, as if that were one page. ``early``: it
    will hold them, and is mine until then, when the signal of its grant rises. ``chunk``, if not 0: they pass through
    it, ``chunk`` bytes at a time in each of ``channels`` channels, and the words of that signal say how far each is.
    """

    generation: Count
    serial: Count
    layers: Annotated[list[Layer], msgspec.Meta(max_length=MAX_LAYERS)]
    start: Count
    num_pages: Count
    checked: bool
    state: bool = False
    early: bool = False
    chunk: Count = 0
    channels: Count = 0


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Writer -> receiver: I want to write to your pages directly, and promise no longer to use the ring only."""

    generation: Count


class Withdrawn(Message, frozen=True, tag="withdrawn"):
    """Receiver -> writer: I no longer rely on that promise; write directly."""

    generation: Count


AnyMessage: TypeAlias = (
    Grant
    | Attest
    | Seal
    | Abort
    | Quiesced
    | Revoke
    | Verdict
    | Alive
    | Post
    | Outcome
    | InstanceVerdict
    | StageAsk
    | StageGrant
    | StageDenied
    | Staged
    | Withdraw
    | Withdrawn
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

# magic and version, source rank, source incarnation, target incarnation, sequence number, acknowledged up to
_HEADER = struct.Struct("<4sIQQQQ")
_MAGIC = b"tkv1"
_LITTLE = sys.byteorder == "little"
_MAC_BYTES = 16


class Frame(msgspec.Struct, frozen=True):
    """One datagram. ``seq`` 0 carries no message: it only acknowledges everything up to ``ack``."""

    source: int
    incarnation: int
    target: int
    seq: int
    ack: int
    message: Message | None


def encode_frame(frame: Frame, key: bytes) -> bytes:
    """The frame as bytes, with a keyed BLAKE2b MAC over header and body."""
    header = _HEADER.pack(_MAGIC, frame.source, frame.incarnation, frame.target, frame.seq, frame.ack)
    body = b"" if frame.message is None else _encoder.encode(frame.message)
    return header + _mac(key, header, body) + body


def decode_frame(data: bytes, key: bytes) -> Frame:
    """The frame that ``data`` holds. Raises ``AuthError`` (wrong MAC) or ``ProtocolError`` (anything else)."""
    start = _HEADER.size + _MAC_BYTES
    if not start <= len(data) <= MAX_FRAME:
        raise ProtocolError(f"control frame of {len(data)} bytes, outside [{start}, {MAX_FRAME}]")
    header, mac, body = data[: _HEADER.size], data[_HEADER.size : start], data[start:]
    if not hmac.compare_digest(mac, _mac(key, header, body)):
        raise AuthError("control frame with a wrong MAC: the sender does not hold this group's key")
    magic, source, incarnation, target, seq, ack = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError(f"control frame of version {magic!r}, this is {_MAGIC!r}: run one version of torchkv")
    if (seq == 0) != (body == b""):
        raise ProtocolError("control frame whose sequence number and body disagree")
    try:
        message = _decoder.decode(body) if body else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The latter escapes from msgspec for a tag that is no UTF-8.
        raise ProtocolError(f"control message does not decode: {error}") from error
    return Frame(source, incarnation, target, seq, ack, message)


def _mac(key: bytes, header: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(header, key=key, digest_size=_MAC_BYTES)
    digest.update(body)
    return digest.digest()


@compiled_with_gil
def _are_inside(pages: Int64Array, limit: int) -> bool:
    outside = np.int64(0)  # its sign: that of any difference below zero
    for page in pages:
        outside |= page | (limit - 1 - page)
    return bool(outside >= 0)


def warm_up() -> None:
    """Compiles, or loads from disk, what the first message would otherwise wait for."""
    unpack_pages(b"", 0)


def pack_pages(pages: Int64Array) -> bytes:
    """Page ids as little-endian int64."""
    return pages.tobytes() if _LITTLE else pages.astype("<i8").tobytes()


def unpack_pages(data: bytes, num_pages: int) -> Int64Array:
    """Page ids, each checked to lie in [0, num_pages). Raises ``ProtocolError``."""
    if len(data) % 8:
        raise ProtocolError(f"page list of {len(data)} bytes is not a whole number of int64")
    pages = np.frombuffer(data, dtype=np.int64) if _LITTLE else np.frombuffer(data, dtype="<i8").astype(np.int64)
    if not _are_inside(pages, num_pages):
        raise ProtocolError(f"page list names a page outside [0, {num_pages})")
    return pages
