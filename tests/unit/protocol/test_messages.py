"""Messages and frames as bytes: exact round trips, and every malformed frame is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkv.errors import AuthError, ProtocolError
from torchkv.protocol.messages import (
    MAX_AUX,
    MAX_FRAME,
    Abort,
    Alive,
    Attest,
    ControlFrame,
    Exempt,
    Grant,
    InstanceVerdict,
    Left,
    Mailbox,
    Message,
    Outcome,
    Post,
    Quiesced,
    Refused,
    Revoke,
    Seal,
    StageAsk,
    Staged,
    StageDenied,
    StageGrant,
    Verdict,
    Withdraw,
    Withdrawn,
    _mac,
    decode_frame,
    encode_frame,
    pack_pages,
    unpack_pages,
)

KEY = bytes(range(32))

_count = st.integers(0, (1 << 62) - 1)
_text = st.text(max_size=50)
_request = st.text(min_size=1, max_size=40)
_kind = st.text(max_size=32)
_retryable = st.none() | st.booleans()
_layers = st.lists(st.integers(0, (1 << 20) - 1))
MESSAGES = st.one_of(
    st.builds(
        Grant,
        _request,
        _count,
        _count,
        st.binary(max_size=80),
        st.lists(st.integers(0, 16383), min_size=1),
        st.none() | _count,
    ),
    st.builds(Attest, _count, _layers, _count, _count, _count, _kind, st.booleans()),
    st.builds(Seal, _count, _count, st.binary(max_size=200)),
    st.builds(Abort, _count, _kind, _text, _retryable),
    st.builds(Quiesced, _count),
    st.builds(Revoke, _count, _kind, _text, _retryable),
    st.builds(Verdict, _count),
    st.builds(Alive, _count, st.booleans()),
    st.builds(Post, _request, _count, _count, _count, _count),
    st.builds(Outcome, _request, _count, _kind, _text, _retryable),
    st.builds(InstanceVerdict, _count, _kind, _text, _retryable),
    st.builds(StageAsk, _count, _count, _count, _count, st.booleans()),
    st.builds(StageGrant, _count, _count, _count, _count),
    st.builds(StageDenied, _count, _count, _text),
    st.builds(Staged, _count, _count, _layers, _count, _count, st.booleans(), st.booleans()),
    st.builds(Withdraw, _count),
    st.builds(Withdrawn, _count),
    st.builds(Mailbox, _count),
    st.builds(Left),
    st.builds(Refused, _request, _kind, _text, _retryable),
    st.builds(Exempt, _request),
)
_word = st.integers(0, (1 << 64) - 1)


def frame_with(message: Message | None) -> ControlFrame:
    return ControlFrame(3, 1 << 60, 1 << 61, 0 if message is None else 5, 4, message)


def signed(body: bytes) -> bytes:
    """A frame with any body and a correct MAC: what a malicious peer that has the key could send."""
    whole = encode_frame(frame_with(Quiesced(1)), KEY)
    plain = encode_frame(frame_with(None), KEY)
    header = whole[: len(plain) - 16]
    return header + _mac(KEY, header, body) + body


@given(MESSAGES, st.integers(0, (1 << 32) - 1), _word, _word, st.integers(1, (1 << 64) - 1), _word)
def test_round_trip(message: Message, source: int, incarnation: int, target: int, seq: int, ack: int) -> None:
    frame = ControlFrame(source, incarnation, target, seq, ack, message)
    assert decode_frame(encode_frame(frame, KEY), KEY) == frame


def test_round_trip_of_a_bare_acknowledgement() -> None:
    assert decode_frame(encode_frame(frame_with(None), KEY), KEY) == frame_with(None)


def test_every_message_type_is_covered() -> None:
    seen = {Grant, Attest, Seal, Abort, Quiesced, Revoke, Verdict, Alive, Post, Outcome, InstanceVerdict}
    seen |= {StageAsk, StageGrant, StageDenied, Staged, Withdraw, Withdrawn, Mailbox, Left, Refused, Exempt}
    assert set(Message.__subclasses__()) == seen


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises((ProtocolError, AuthError)):
        decode_frame(data, KEY)


@given(MESSAGES, st.data())
@settings(max_examples=200)
def test_one_flipped_bit_is_noticed(message: Message, data: st.DataObject) -> None:
    whole = bytearray(encode_frame(frame_with(message), KEY))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthError):
        decode_frame(bytes(whole), KEY)


def test_another_key_is_refused() -> None:
    data = encode_frame(frame_with(Quiesced(1)), KEY)
    with pytest.raises(AuthError, match="key"):
        decode_frame(data, KEY[::-1])


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=300)
def test_a_right_mac_does_not_make_garbage_a_message(body: bytes) -> None:
    try:
        frame = decode_frame(signed(body), KEY)
    except ProtocolError:
        return
    assert isinstance(frame.message, Message), "the few bytes that do decode give a typed message"


@pytest.mark.parametrize("body", [b"\x91\xa3\x00\x00\x80", b"\x91" * 100_000], ids=["no utf-8", "deep"])
def test_bodies_on_which_the_decoder_itself_stumbles(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="decode"):
        decode_frame(signed(body), KEY)


def encoded(*fields: object) -> bytes:
    return signed(msgspec.msgpack.encode(list(fields)))


def test_the_way_of_forging_works() -> None:
    """Negative control of the next test: with fields inside their bounds, frames made like this are accepted."""
    assert decode_frame(encoded("seal", 1, 2, b"aux"), KEY).message == Seal(1, 2, b"aux")
    assert decode_frame(encoded("stage_ask", 1, 0, 8, 4, True), KEY).message == StageAsk(1, 0, 8, 4, True)
    assert decode_frame(encoded("stage_grant", 1, 0, 256, 8), KEY).message == StageGrant(1, 0, 256, 8)
    assert decode_frame(encoded("stage_denied", 1, 0, "x" * 2048), KEY).message == StageDenied(1, 0, "x" * 2048)
    assert decode_frame(encoded("staged", 1, 0, [0], 0, 1, False), KEY).message == Staged(1, 0, [0], 0, 1, False)
    assert decode_frame(encoded("withdrawn", 1), KEY).message == Withdrawn(1)
    assert decode_frame(encoded("grant", "r", 1, 0, b"", [0], 3), KEY).message == Grant("r", 1, 0, b"", [0], 3)
    assert decode_frame(encoded("attest", 1, [0], 0, 1, 1, "runs", True), KEY).message == Attest(
        1, [0], 0, 1, 1, "runs", True
    )
    assert decode_frame(encoded("staged", 1, 0, [0], 0, 1, False, True), KEY).message == Staged(
        1, 0, [0], 0, 1, False, True
    )


@pytest.mark.parametrize(
    "fields",
    [
        ("seal", -1, 2, b""),
        ("seal", 1 << 62, 2, b""),
        ("seal", 1, -1, b""),
        ("seal", 1, 2, bytes(MAX_AUX + 1)),
        ("seal", 1, 2, "text"),
        ("seal", 1.0, 2, b""),
        ("seal", 1, 2),
        ("seal", 1, 2, b"", "unknown"),
        ("grant", "", 1, 0, b"", [0]),
        ("grant", "x" * 1025, 1, 0, b"", [0]),
        ("grant", "r", 1, 0, b"", []),
        ("grant", "r", 1, 0, b"", [1 << 14]),
        ("grant", "r", 1, 0, b"", [-1]),
        ("grant", "r", 1, 0, b"", [0], -1),
        ("grant", "r", 1, 0, b"", [0], 1 << 62),
        ("grant", "r", 1, 0, b"", [0], True),
        ("grant", "r", 1, 0, b"", [0], 3, -1),
        ("grant", "r", 1, 0, b"", [0], 3, 4, 5, -1),
        ("grant", "r", 1, 0, b"", [0], 3, 4, 5, 6, 7),
        ("grant", "r", 1, 0, b"", [0], 3, 4, -1),
        ("attest", 1, [0], 0, 1, 1, "runs", 1),
        ("attest", 1, [0], 0, 1, 1, "runs", None),
        ("attest", 1, [1 << 20], 0, 1, 1, "runs"),
        ("attest", 1, list(range((1 << 14) + 1)), 0, 1, 1, "runs"),
        ("attest", 1, [0], 0, 1, 1, "x" * 33),
        ("abort", 1, "ProtocolError", "x" * 2049),
        ("refused", "", "ProtocolError", "why"),
        ("left", 1),
        ("alive", 1, 1),
        ("stage_ask", 1, -1, 8, 8, True),
        ("stage_ask", 1, 0, 1 << 62, 8, True),
        ("stage_ask", 1, 0, 8, -1, True),
        ("stage_ask", 1, 0, 8, 8, 1),
        ("stage_grant", 1, 0, -256, 8),
        ("stage_grant", 1, 0, 0, 1 << 62),
        ("stage_denied", 1, 0, "x" * 2049),
        ("staged", 1, 0, [1 << 20], 0, 1, False),
        ("staged", 1, 0, [-1], 0, 1, False),
        ("staged", 1, 0, list(range((1 << 14) + 1)), 0, 1, False),
        ("staged", 1, 0, [0], -1, 1, False),
        ("staged", 1, 0, [0], 0, 1 << 62, False),
        ("staged", 1, 0, [0], 0, 1, None),
        ("staged", 1, 0, [0], 0, 1, False, 1),
        ("withdraw", -1),
        ("withdrawn", 1, 2),
        ("nonsense", 1),
        (),
    ],
)
def test_fields_are_bounded(fields: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError, match="decode"):
        decode_frame(encoded(*fields), KEY)


@pytest.mark.parametrize("size", [0, 10, MAX_FRAME + 1])
def test_frame_sizes_are_bounded(size: int) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        decode_frame(bytes(size), KEY)


def test_sequence_number_and_body_must_agree() -> None:
    for frame in (ControlFrame(0, 1, 2, 0, 0, Quiesced(1)), ControlFrame(0, 1, 2, 7, 0, None)):
        with pytest.raises(ProtocolError, match="disagree"):
            decode_frame(encode_frame(frame, KEY), KEY)


def test_another_version_is_named() -> None:
    data = encode_frame(frame_with(None), KEY)
    header = b"tkv9" + data[4:-16]
    with pytest.raises(ProtocolError, match="tkv9"):
        decode_frame(header + _mac(KEY, header, b""), KEY)


def test_page_lists() -> None:
    ids = np.random.default_rng().integers(0, 1000, 50)
    assert unpack_pages(pack_pages(ids), 1000).tolist() == ids.tolist()
    assert unpack_pages(b"", 1).tolist() == []
    for bad, limit in ((pack_pages(ids)[:-1], 1000), (pack_pages(np.array([5])), 5), (pack_pages(np.array([-1])), 5)):
        with pytest.raises(ProtocolError):
            unpack_pages(bad, limit)


# -- the source -------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load")}


def dangers(source: str) -> list[str]:
    """Names in a module that could turn received bytes into running code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            found += [alias.name for alias in node.names if alias.name.endswith("_object")]
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in FORBIDDEN_ATTRIBUTES or node.attr.endswith(("_object", "_object_list")):
                found.append(f"{owner}.{node.attr}")
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "exec(x)",
        "torch.load(f)",
        "dist.all_gather_object(a)",
    ],
)
def test_the_scan_sees_dangers(source: str) -> None:
    assert dangers(source)


def test_no_module_evaluates_what_it_receives() -> None:
    modules = [path for folder in ("torchkv", "backends") for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 20
    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: operation for path, operation in found.items() if operation} == {}


def test_decoders_are_not_made_by_the_calls_that_use_them() -> None:
    """``msgspec.msgpack.decode(type=)`` prepares the type when it first meets it: in several threads it has crashed."""
    modules = [path for folder in ("torchkv", "backends") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in modules if "msgpack.decode(" in path.read_text(encoding="utf-8")] == []
