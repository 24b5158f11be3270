"""Who waits for whom: each state of a request in the dumps of its two sides becomes the right sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchkv import trace
from torchkv.errors import ProtocolError
from torchkv.observe.dump_format import VERSION, Dump, Entry, Member, Receive, Send, WriterOf, read_dump
from torchkv.observe.waits import latest, rank_name, sentences

NOW = 1_700_000_000_000_000_000
PREFILL, DECODE = 0, 1
INSTANCES = ("prefill", "decode")


def entry(verb: str, *, layers: str = "", ago: float = 3.2, **changes: Any) -> Entry:
    plain = {
        "record_id": 0,
        "profiling_name": f"torchkv:{verb}",
        "request": "r7",
        "peers": "decode",
        "layers": layers,
        "num_pages": 3,
        "time_created_ns": NOW - int(ago * 1e9),
        "time_discovered_completed_ns": None,
        "duration_ms": None,
        "state": "completed",
        "retired": True,
        "nbytes": 0,
        "path": "none",
        "error": "",
    }
    return Entry(**{**plain, **changes})


def dump(
    rank: int,
    *,
    sends: Sequence[Send] | None = (),
    receives: Sequence[Receive] | None = (),
    entries: Sequence[Entry] = (),
    lost: str = "",
    time_ns: int = NOW,
) -> Dump:
    members = [
        Member(
            rank=each, number=each, instance=INSTANCES[each], incarnation=100 + each, lost=lost if each != rank else ""
        )
        for each in (PREFILL, DECODE)
    ]
    return Dump(
        version=VERSION,
        reason="a test",
        time_ns=time_ns,
        host="here",
        pid=rank,
        rank=rank,
        instance=INSTANCES[rank],
        incarnation=100 + rank,
        members=members,
        sends=None if sends is None else list(sends),
        receives=None if receives is None else list(receives),
        entries=list(entries),
        stats={},
    )


def send(state: str = "bound", **changes: Any) -> Send:
    plain: dict[str, Any] = {
        "request": "r7",
        "layer_group": "",
        "to": DECODE,
        "state": state,
        "age_s": 5.0,
        "finished": False,
        "queued": 0,
        "running": 0,
        "num_pages": 3,
        "generation": 1,
        "on_loop": False,
        "error": "",
    }
    return Send(**{**plain, **changes})


def receive(state: str = "live", *, sealed: bool = False, missing: str = "") -> Receive:
    writer = WriterOf(rank=PREFILL, sealed=sealed, quiescent=False, missing=missing)
    return Receive(
        request="r7",
        layer_group="",
        generation=1,
        state=state,
        age_s=4.0,
        idle_s=None,
        num_pages=3,
        on_loop=False,
        error="PeerLost: gone" if state == "revoking" else "",
        writers=[writer],
    )


WAITS = "decode rank 1 waits for request 'r7', 4.0 s old: "
LAST = [entry("send_layer", layers="17")]


@pytest.mark.parametrize(
    ("dumps", "told"),
    [
        (
            [dump(PREFILL, sends=[send()], entries=LAST), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has not called finish; last verb send_layer 17, 3.2 s ago",
        ),
        (
            [dump(PREFILL, sends=[send(finished=True, running=2)]), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has called finish, but 2 of its transfers have not ended",
        ),
        (
            [dump(PREFILL, sends=[send(running=1)]), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has not called finish, and 1 of its transfers have not ended",
        ),
        (
            [dump(PREFILL, sends=[send("sealed", finished=True)]), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has sealed it, but the seal has not arrived",
        ),
        (
            [dump(PREFILL, sends=[send("failed", error="PeerLost: x")]), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has failed it (PeerLost: x), and has not been cancelled there",
        ),
        (
            [dump(PREFILL), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has no such request open, and called no verb for it that its dump still has",
        ),
        (
            [dump(PREFILL, sends=None), dump(DECODE, receives=[receive()])],
            f"{WAITS}prefill rank 0 has not sealed it, and its dump does not tell its requests: its lock was held",
        ),
        (
            [dump(DECODE, receives=[receive(missing="layer 3, token 0")])],
            f"{WAITS}prefill rank 0 has not sealed it (layer 3, token 0 is missing), and there is no dump of that rank",
        ),
        (
            [dump(DECODE, receives=[receive()], lost="it is silent")],
            f"{WAITS}prefill rank 0 does not answer (it is silent)",
        ),
        (
            [dump(DECODE, receives=[receive(sealed=True, missing="layer 1, token 0")])],
            f"{WAITS}prefill rank 0 has sealed it, but layer 1, token 0 has not been unpacked or has not arrived",
        ),
        (
            [dump(DECODE, receives=[receive("complete", sealed=True)])],
            f"{WAITS}all of it is here, but its instance has not decided",
        ),
        (
            [dump(DECODE, receives=[receive("revoking")])],
            "decode rank 1 has failed request 'r7' (PeerLost: gone), but prefill rank 0 may still write to its pages",
        ),
        (
            [dump(PREFILL, sends=[send("waiting", queued=2)]), dump(DECODE, entries=[entry("cancel", ago=1)])],
            "prefill rank 0 waits with request 'r7', 5.0 s old: decode rank 1 has not called recv_pages; last verb "
            "cancel, 1.0 s ago",
        ),
        (
            [dump(PREFILL, sends=[send("waiting", to=-1)])],
            "prefill rank 0 waits with request 'r7', 5.0 s old: no rank has granted it",
        ),
        (
            [dump(PREFILL, sends=[send("sealed")])],
            "prefill rank 0 waits with request 'r7', 5.0 s old: decode rank 1 has not reported its verdict, and there "
            "is no dump of that rank",
        ),
    ],
)
def test_each_state_is_told(dumps: list[Dump], told: str) -> None:
    assert told in sentences(dumps)
    assert sentences(dumps, request="another") == []


def test_nobody_waits() -> None:
    assert sentences([dump(PREFILL, entries=LAST), dump(DECODE, receives=[receive(sealed=True)])]) == []


def test_the_grant_under_way_is_told() -> None:
    both = sentences([dump(PREFILL, sends=[send("waiting")]), dump(DECODE, receives=[receive()])])
    assert f"{WAITS}prefill rank 0 has not seen its grant" in both
    assert any("decode rank 1 has called recv_pages, but the grant has not arrived" in each for each in both)


def test_the_newest_dump_of_a_rank_counts() -> None:
    older = dump(DECODE, receives=[receive()], time_ns=NOW - 1)
    assert latest([dump(DECODE), older, dump(PREFILL)]) == [dump(DECODE), dump(PREFILL)]


def test_names() -> None:
    assert rank_name("rank3", 3) == "rank 3"
    assert rank_name("decode", 3) == "decode rank 3"


def write(folder: Path, *dumps: Dump) -> None:
    for number, each in enumerate(dumps):
        (folder / f"{number}.json").write_bytes(msgspec.json.encode(each))


def test_the_command_merges_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, dump(PREFILL, sends=[send()], entries=LAST), dump(DECODE, receives=[receive()]))
    assert trace.main([str(tmp_path), "--timeline"]) == 1
    out = capsys.readouterr().out
    assert "prefill rank 0 has not called finish; last verb send_layer 17, 3.2 s ago" in out
    assert "send_layer 'r7' decode layers 17 3 pages: completed" in out
    assert trace.main([str(tmp_path), "--request", "another"]) == 0
    assert "no rank waits" in capsys.readouterr().out
    assert trace.main([str(tmp_path), "--json"]) == 1
    assert len(msgspec.json.decode(capsys.readouterr().out)["waits"]) == 1


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"version": 1}', b"[" * 5000])
def test_what_is_no_dump_is_refused(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProtocolError, match="no dump"):
        read_dump(data, "x.json")
    (tmp_path / "x.json").write_bytes(data)
    assert trace.main([str(tmp_path)]) == 2
    assert "x.json" in capsys.readouterr().err


def test_dumps_of_another_version_are_refused() -> None:
    other = dump(PREFILL)
    other.version = "torchkv-0"
    with pytest.raises(ProtocolError, match="version torchkv-0"):
        read_dump(msgspec.json.encode(other), "x.json")


def test_an_empty_folder_holds_no_dumps(tmp_path: Path) -> None:
    assert trace.main([str(tmp_path)]) == 2
    assert trace.main([str(tmp_path / "missing.json")]) == 2
