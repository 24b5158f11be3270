"""The control messages between ranks, and their encoding: typed, bounded, versioned, authenticated.

A control frame is a fixed header, a MAC and at most one message. Messages name things by handle (generation, layer,
page) and never by address. Nothing received is unpickled or evaluated: msgspec decodes into the types below and refuses
everything else, including unknown fields and values over their bounds.

One request between a writer and a receiver, without staging:

    receiver --Grant--> writer       these pages may be written, under this generation
    writer --Attest--> receiver      these layers and tokens are visible in your memory     (several)
    writer --Seal--> receiver        that was everything
    receiver --Verdict--> writer     the request has succeeded

and when it fails, on whichever side:

    writer --Abort--> receiver       it has failed here, for this reason
    receiver --Revoke--> writer      it has failed: stop, drain, answer
    writer --Quiesced--> receiver    nothing that I wrote under this grant can land any more
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import AuthError, KVError, ProtocolError, error_kind, make_error
from torchkv.host.jit import at_register, compiled_with_gil

__all__ = [
    "MAX_ASKS",
    "MAX_AUX",
    "MAX_FRAME",
    "MAX_PAGES",
    "MAX_REQUEST_BYTES",
    "MIN_FRAME",
    "Abort",
    "Alive",
    "Attest",
    "Cause",
    "ControlFrame",
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
    "cause_of",
    "check_inside",
    "decode_frame",
    "encode_frame",
    "error_of",
    "message_nbytes",
    "name_hashes",
    "pack_pages",
    "unpack_pages",
    "warm_up",
]

MAX_COUNT = 1 << 62
MAX_REQUEST_BYTES = 1024
MAX_AUX = 64 << 10
MAX_PAGES = 1 << 20
MAX_RANKS = 1 << 14
MAX_LAYERS = 1 << 14
MAX_TEXT = 2048
MAX_ASKS = 8  # stages that one writer may have asked for and not yet written, under one generation
MAX_FRAME = MAX_PAGES * 8 + MAX_AUX + (64 << 10)

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Request: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_BYTES)]
Kind: TypeAlias = Annotated[str, msgspec.Meta(max_length=32)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Retryable: TypeAlias = bool | None  # of the error of this kind; None: as its class has it
Cause: TypeAlias = tuple[str, str, bool | None]  # an error as messages tell it: their kind, text and retryable


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag_field="t"):
    """Base of all control messages.

    ``generation`` is the number that the receiving rank gave to one `recv_pages` call: requests that use one name after
    another have different generations, so a late message is never taken for one of a later request.
    """


def cause_of(error: KVError) -> Cause:
    return error_kind(error), str(error)[:MAX_TEXT], error.retryable


class Grant(Message, frozen=True, tag="grant"):
    """Receiver -> writer: you may write these pages and this state slot of mine, under this generation.

    ``pages``: little-endian int64 page ids, in order of position after the prefix. ``writers``: all contributing ranks,
    ascending; together with the layouts they determine what each of them owes. ``absent_tokens``: how much of the
    prefix are pages that the receiver does not hold, and needs not; verbs count their pages from before those.
    ``told_as``: the flow under which the receiver's loop may have told of this grant, too.
    """

    request: Request
    generation: Count
    prefix_tokens: Count
    pages: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]
    writers: Annotated[list[Rank], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    state_slot: Count | None = None  # None: the receiver's layout has no state
    flow: Count | None = None  # the receiver's, if its resident loop serves the request
    absent_tokens: Count = 0
    told_as: Count | None = None


class Attest(Message, frozen=True, tag="attest"):
    """Writer -> receiver: my share of tokens [lo, hi) of these layers is visible in your memory.

    Tokens count from the end of the prefix. ``nbytes`` and ``path`` are for accounting only. With ``state`` the message
    is about the state of these layers, and ``lo`` and ``hi`` mean nothing. ``again``: what was told before in a record,
    which may have been lost; its bytes are counted unless all of it was heard.
    """

    generation: Count
    layers: Annotated[list[Layer], msgspec.Meta(max_length=MAX_LAYERS)]
    lo: Count
    hi: Count
    nbytes: Count
    path: Kind
    state: bool = False
    again: bool = False


class Seal(Message, frozen=True, tag="seal"):
    """Writer -> receiver: I have sent everything, it is flushed, and I write no more.

    ``num_pages``: of my own page size, counted after the prefix. ``aux``: the bytes given to ``finish``. ``again``: a
    record told this before, over a connection that has broken. I have told again what I know to have arrived; what is
    missing then was staged, and is lost.
    """

    generation: Count
    num_pages: Count
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX)]
    again: bool = False


class Abort(Message, frozen=True, tag="abort"):
    """Writer -> receiver: this request has failed here, or I refuse its grant, for this reason."""

    generation: Count
    kind: Kind
    text: Text
    retryable: Retryable = None


class Quiesced(Message, frozen=True, tag="quiesced"):
    """Writer -> receiver: nothing that I wrote under this grant can land any more."""

    generation: Count


class Revoke(Message, frozen=True, tag="revoke"):
    """Receiver -> writer: this request has failed, for this reason. Stop, drain, and answer with ``Quiesced``."""

    generation: Count
    kind: Kind
    text: Text
    retryable: Retryable = None


class Refused(Message, frozen=True, tag="refused"):
    """Receiver -> writer: the next request of this name gets no grant, for this reason."""

    request: Request
    kind: Kind
    text: Text
    retryable: Retryable = None


class Exempt(Message, frozen=True, tag="exempt"):
    """Receiver -> rank of its ``src`` that holds nothing for this instance: the request is granted, and not by you."""

    request: Request


class Verdict(Message, frozen=True, tag="verdict"):
    """Receiver -> writer: the request succeeded on every rank of the receiving instance."""

    generation: Count


class Alive(Message, frozen=True, tag="alive"):
    """In both directions (``to_writer`` says which): the request still makes progress here, so do not time out."""

    generation: Count
    to_writer: bool


class Post(Message, frozen=True, tag="post"):
    """Rank -> lowest rank of its instance: I have posted ``recv_pages`` for this request, for so many tokens."""

    request: Request
    generation: Count
    prefix_tokens: Count
    num_tokens: Count
    page_size: Count
    flow: Count | None = None  # the rank's, if its resident loop serves the request


class Outcome(Message, frozen=True, tag="outcome"):
    """Rank -> lowest rank of its instance: all bytes are here (empty ``kind``), or the request failed here.

    Generation 0: the ``recv_pages`` call itself was refused, so it has no generation.
    """

    request: Request
    generation: Count
    kind: Kind
    text: Text
    retryable: Retryable = None


class InstanceVerdict(Message, frozen=True, tag="instance"):
    """Lowest rank -> each rank of its instance: the request succeeded on all ranks (empty ``kind``), or it failed."""

    generation: Count
    kind: Kind
    text: Text
    retryable: Retryable = None


def error_of(message: Abort | Revoke | Refused | InstanceVerdict) -> KVError:
    """The error that a message tells of."""
    return make_error(message.kind, message.text, message.retryable)


STANDING = 0  # in place of a generation: of the stage that loops use for all requests of a writer


class StageAsk(Message, frozen=True, tag="stage_ask"):
    """Writer -> receiver: I need a stage of ``nbytes`` bytes of your staging ring, or at least of ``least``.

    ``serial`` counts 0, 1, 2, ... per (writer, generation). ``ring_only``: I promise to write to the ring and not to
    your pages under this generation, until I withdraw the promise.
    """

    generation: Count
    serial: Count
    nbytes: Count
    least: Count
    ring_only: bool


class StageGrant(Message, frozen=True, tag="stage_grant"):
    """Receiver -> writer: you may write bytes [offset, offset + nbytes) of my ring until you send ``Staged``.

    Of generation `STANDING`, unasked: your loop may, from now on.
    """

    generation: Count
    serial: Count
    offset: Count
    nbytes: Count


class StageDenied(Message, frozen=True, tag="stage_denied"):
    """Receiver -> writer: the stage asked for by this serial is not granted, for this reason."""

    generation: Count
    serial: Count
    text: Text


class Staged(Message, frozen=True, tag="staged"):
    """Writer -> receiver: pages [start, start + num_pages) of these layers are in the stage, visible in your ring.

    Pages are the writer's, counted after the prefix. 0 pages: the stage is given back unused.
    ``checked``: the pages' checksums lie in the stage too.
    ``state``: the stage holds the state of these layers, which counts as one page.
    """

    generation: Count
    serial: Count
    layers: Annotated[list[Layer], msgspec.Meta(max_length=MAX_LAYERS)]
    start: Count
    num_pages: Count
    checked: bool
    state: bool = False


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Writer -> receiver: I take back the promise to write to the ring only, because I want to write to your pages."""

    generation: Count


class Withdrawn(Message, frozen=True, tag="withdrawn"):
    """Receiver -> writer: I no longer rely on that promise, so you may write to my pages."""

    generation: Count


class Left(Message, frozen=True, tag="left"):
    """Rank -> peer: I take part no more: all that I wrote to your memory has landed, and this is my last message."""


class Mailbox(Message, frozen=True, tag="mailbox"):
    """Rank -> rank of another instance: your resident loop may write records to this mailbox of mine."""

    slot: Count


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
    | Mailbox
    | Left
    | Refused
    | Exempt
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

# magic and version, source rank, source incarnation, target incarnation, sequence number, acknowledged up to
_HEADER = struct.Struct("<4sIQQQQ")
_MAGIC = b"tkv1"
_LITTLE = sys.byteorder == "little"
_MAC_BYTES = 16
MIN_FRAME = _HEADER.size + _MAC_BYTES


class ControlFrame(msgspec.Struct, frozen=True):
    """The unit of exchange between two `Session`: one message with its number, or an acknowledgement alone.

    source: sending rank. incarnation, target: incarnations of the sending and of the receiving process. seq: number of
    the message, from 1; 0 means that there is none. ack: every message up to this number has been received.
    """

    source: int
    incarnation: int
    target: int
    seq: int
    ack: int
    message: Message | None


def encode_frame(frame: ControlFrame, key: bytes) -> bytes:
    """Header, keyed BLAKE2b MAC over header and body, body."""
    header = _HEADER.pack(_MAGIC, frame.source, frame.incarnation, frame.target, frame.seq, frame.ack)
    body = b"" if frame.message is None else _encoder.encode(frame.message)
    return header + _mac(key, header, body) + body


def message_nbytes(message: Message) -> int:
    """Bytes of ``message`` in a frame."""
    return len(_encoder.encode(message))


def decode_frame(data: bytes, key: bytes) -> ControlFrame:
    """Raises ``AuthError`` for a wrong MAC, ``ProtocolError`` for anything else that `encode_frame` does not make."""
    if not MIN_FRAME <= len(data) <= MAX_FRAME:
        raise ProtocolError(f"control frame of {len(data)} bytes, outside [{MIN_FRAME}, {MAX_FRAME}]")
    header, mac, body = data[: _HEADER.size], data[_HEADER.size : MIN_FRAME], data[MIN_FRAME:]
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
        # msgspec lets UnicodeDecodeError escape for a tag that is not UTF-8.
        raise ProtocolError(f"control message does not decode: {error}") from error
    return ControlFrame(source, incarnation, target, seq, ack, message)


def _mac(key: bytes, header: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(header, key=key, digest_size=_MAC_BYTES)
    digest.update(body)
    return digest.digest()


@compiled_with_gil
def _are_inside(pages: Int64Array, limit: int) -> bool:
    outside = np.int64(0)  # its sign bit is set as soon as one page is below 0 or not below the limit
    for page in pages:
        outside |= page | (limit - 1 - page)
    return bool(outside >= 0)


@at_register
def warm_up() -> None:
    """Compiles the page id check, or loads it from disk, so that the first grant does not wait for it."""
    unpack_pages(b"", 0)


def name_hashes(request: str) -> tuple[int, int]:
    """The two words by which resident loops know a request's name: its BLAKE2b hash of 128 bits."""
    first, second = struct.unpack("<2q", hashlib.blake2b(request.encode(), digest_size=16).digest())
    return first, second


def pack_pages(pages: Int64Array) -> bytes:
    """Page ids as little-endian int64."""
    return pages.tobytes() if _LITTLE else pages.astype("<i8").tobytes()


def unpack_pages(data: bytes, num_pages: int) -> Int64Array:
    """Page ids as int64 [n]. Raises ``ProtocolError`` for a broken list, or an id outside [0, num_pages)."""
    if len(data) % 8:
        raise ProtocolError(f"page list of {len(data)} bytes is not a whole number of int64")
    pages = np.frombuffer(data, dtype=np.int64) if _LITTLE else np.frombuffer(data, dtype="<i8").astype(np.int64)
    check_inside(pages, num_pages)
    return pages


def check_inside(pages: Int64Array, num_pages: int) -> None:
    """Raises ``ProtocolError`` for an id outside [0, num_pages)."""
    if not _are_inside(pages, num_pages):
        raise ProtocolError(f"page list names a page outside [0, {num_pages})")
