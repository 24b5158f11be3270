"""Instances that are launched apart, in processes of their own: they meet, exchange pages, die and come again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, ask
from tests.helpers.jobs import SECRET, Jobs, new_secret_file
from tests.helpers.ranks.member import (
    NUM_PAGES,
    Member,
    await_forgotten,
    await_peer,
    connect,
    footprint,
    footprint_within,
    layout,
    leave,
)
from tests.helpers.waiting import until
from torchkv import (
    KVCache,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    TransportUnavailable,
)

P0, P1, D, E, SPARE0, SPARE1 = range(6)


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = new_secret_file(tmp_path / "secret")
    monkeypatch.setenv(SECRET, str(path))
    return path


@pytest.fixture
def jobs(secret: Path, tmp_path: Path) -> Iterator[Jobs]:
    ranks = Ranks(6, env={SECRET: str(secret)}, world=False)
    yield Jobs(ranks, tmp_path)
    ranks.close()


def test_jobs_of_unlike_tp_meet_by_address(jobs: Jobs) -> None:
    address = jobs.start("prefill", [P0, P1])
    jobs.start("decode", [D], page_size=16)
    jobs.start("other", [E, SPARE0])
    assert jobs.run("decode", connect, address) == ["prefill"]
    assert jobs.run("other", connect, address) == ["prefill"] * 2, "every rank may connect, though one is enough"
    for name in ("decode", "other"):
        jobs.run("prefill", await_peer, name)
    for number in range(3):
        jobs.transfer(f"r{number}", "prefill", "decode", pages=2, page_size=16)
        jobs.transfer(f"r{number}", "prefill", "other")
    jobs.transfer("back", "other", "prefill")
    for name in ("prefill", "decode", "other"):
        jobs.run(name, leave)


def test_a_sender_need_not_know_who_receives(jobs: Jobs) -> None:
    """As behind routers that tell the decode instance alone: its first request brings the two together."""
    address = jobs.start("prefill", [P0, P1])
    jobs.start("decode", [D], page_size=16)
    jobs.start("other", [E, SPARE0])
    for number in range(3):
        jobs.transfer(f"r{number}", "prefill", "decode", pages=2, page_size=16, address=address)
        jobs.transfer(f"r{number}", "prefill", "other", address=address)


def test_one_of_three_jobs_is_killed_and_comes_again_while_the_others_serve(jobs: Jobs, tmp_path: Path) -> None:
    jobs.store = str(tmp_path / "store")
    jobs.start("p", [P0, P1])
    jobs.start("d", [D])
    jobs.start("e", [E])
    # By name, and by the first verb that names it.
    for name in ("d", "e"):
        jobs.run("p", connect, name)
        jobs.transfer("first", "p", name)
    jobs.kill("d")
    jobs.transfer("meanwhile", "p", "e")
    jobs.run("p", await_peer, "d", False)
    jobs.transfer("after", "p", "e")
    jobs.start("d", [SPARE0, SPARE1])
    jobs.transfer("lazily", "p", "d")
    jobs.transfer("first", "p", "d")
    jobs.transfer("still", "p", "e")
    for name in ("p", "d", "e"):
        jobs.run(name, leave)


def wait_for_a_dead_one() -> tuple[str, float, list[tuple[str, bool]], dict[int, tuple[int, ...]]]:
    kv = Member.kv
    told: list[tuple[str, bool]] = []
    kv.listen(lambda name, present: told.append((name, present)))
    rx = kv.recv_pages("r", [1, 2], "p")
    ask()
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        rx.wait(20)
    lost = time.monotonic() - began
    until(lambda: "p" not in kv.peers() and caught.value.pages_safe, "the writer is forgotten, and the pages are safe")
    return str(caught.value), lost, told, kv.quarantined()


def test_a_killed_writer_is_lost_within_a_second_and_forgotten(jobs: Jobs) -> None:
    address = jobs.start("p", [P0, P1])
    jobs.start("d", [D])
    jobs.run("d", connect, address)
    ranks = jobs.ranks
    ranks.start(wait_for_a_dead_one, ranks=[D])
    ranks.hear(D)
    jobs.kill("p")
    ranks.tell(D)
    ((text, lost, told, quarantined),) = ranks.join([D])
    assert "has ended" in text
    assert lost < 1.0
    assert told == [("p", False)]
    assert quarantined == {}
    jobs.run("d", leave)


def test_nothing_is_left_of_those_that_were_killed(jobs: Jobs) -> None:
    address = jobs.start("stays", [P0])
    least = None
    for process in (P1, D, E, SPARE0, SPARE1):
        jobs.start("comes", [process])
        jobs.run("comes", connect, address)
        jobs.run("stays", await_peer, "comes")
        jobs.transfer("r", "stays", "comes")
        jobs.transfer("r", "comes", "stays")
        jobs.kill("comes")
        jobs.run("stays", await_forgotten)
        (left,) = jobs.run("stays", footprint_within, least) if least else jobs.run("stays", footprint)
        least = least or left
    jobs.run("stays", leave)


# ------------------------------------------------------------------ in this process


def member(name: str, heartbeat: float = 1.0, **changes: Any) -> torchkv.KVMember:
    options = torchkv.Options(
        timeout=5.0, grant_timeout=10.0, heartbeat=heartbeat, staging_send=1 << 20, staging_recv=1 << 20
    )
    return torchkv.join(KVCache.empty(layout(0, 1, **changes), NUM_PAGES, device="cpu"), name, options=options)


@pytest.mark.usefixtures("secret")
def test_a_verb_may_name_an_address() -> None:
    with member("p") as p, member("d") as d:
        done = threading.Thread(target=lambda: send_one(p))
        rx = d.recv_pages("r", [1, 2], p.address)
        done.start()
        rx.wait(20)
        done.join()
        assert d.explain("p").instance == "p"
        assert torchkv.explain("p", group=d).peer == d.peers()["p"].ranks[0]
        assert torchkv.quarantined(group=d) == {}
        assert d.connect("p").result(0) == "p", "who is here need not be looked for"
        assert d.connect(p.address).result(0) == "p"


def send_one(p: torchkv.KVMember) -> None:
    until(lambda: "d" in p.peers(), "the reader is here")
    torchkv.send_pages("r", [3, 4], "d", group=p)
    torchkv.finish("r", "d", group=p).wait(20)


@pytest.mark.usefixtures("secret")
def test_who_closes_is_forgotten_at_once_although_its_process_lives_on() -> None:
    with member("d", heartbeat=60.0) as d:
        told: list[tuple[str, bool]] = []
        d.listen(lambda name, here: told.append((name, here)))
        for life in range(1, 4):
            with member("p", heartbeat=60.0) as p:
                assert d.connect(p.address).result(20) == "p"
                until(lambda: "d" in p.peers(), "the reader is here")
                rx = d.recv_pages(f"r{life}", [1, 2], "p")
            with pytest.raises((PeerLost, TransferCancelled), match=r"has left|was destroyed"):
                rx.wait(20)
            until(lambda: not d.peers(), "the other is forgotten")
            assert told == [("p", True), ("p", False)] * life
        assert d.quarantined() == {}


@pytest.mark.usefixtures("secret")
def test_who_is_not_there_is_an_error() -> None:
    with member("d") as d:
        with pytest.raises(ProtocolError, match="no store"):
            d.connect("p")
        with pytest.raises(ProtocolError, match="no store"):
            d.recv_pages("r", [1], "p")
        with pytest.raises(ProtocolError, match="timeout"):
            d.connect("tcp://127.0.0.1:9", timeout=0)
        with pytest.raises(TransferTimeout, match="TORCHKV_SECRET_FILE"):
            d.connect("tcp://127.0.0.1:9", timeout=0.3).result(5)
        waiting = d.connect("tcp://127.0.0.1:9")
    with pytest.raises(torchkv.TransferCancelled):
        waiting.result(5)
    with pytest.raises(ProtocolError):
        d.connect("tcp://127.0.0.1:9")


@pytest.mark.usefixtures("secret")
def test_who_is_not_in_the_store_is_an_error_that_says_what_to_look_at() -> None:
    cache = KVCache.empty(layout(0, 1), 4, device="cpu")
    words = r"'p'.*has it joined, under this very name.*the same store\?"
    with torchkv.join(cache, "d", store=dist.HashStore()) as d, pytest.raises(TransferTimeout, match=words):
        d.connect("p", timeout=0.1).result(5)


@pytest.mark.usefixtures("secret")
def test_who_must_be_at_an_address_is_checked() -> None:
    """Also if it is known already who is there."""
    with member("p") as p, member("d") as d:
        for _ in range(2):
            with pytest.raises(ProtocolError, match="'q' should be, there is 'p'"):
                d.connect(p.address, instance="q").result(20)
        assert d.connect(p.address, instance="p").result(0) == "p"


@pytest.mark.usefixtures("secret")
def test_who_cannot_work_together_is_told_why() -> None:
    with member("p") as p, member("d", head_dim=16) as d:
        with pytest.raises(LayoutMismatch, match="dim"):
            d.connect(p.address).result(10)
        assert d.peers() == p.peers() == {}


def test_who_has_another_secret_is_nobody(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with member("p") as p:
        other = new_secret_file(tmp_path / "other")
        monkeypatch.setenv(SECRET, str(other))
        with member("d") as d, pytest.raises(TransferTimeout):
            d.connect(p.address, timeout=1.0).result(10)
        assert p.peers() == {}
        assert p._verbs is not None
        assert p._verbs.engine.messenger.dropped == 0, "what strangers send is not even decoded"


@pytest.mark.usefixtures("secret")
def test_bad_arguments_are_refused() -> None:
    cache = KVCache.empty(layout(0, 1), 4, device="cpu")
    for name in ("", "x" * 129, "tcp://x:1"):
        with pytest.raises(ProtocolError, match="instance"):
            torchkv.join(cache, name)
    with pytest.raises(ProtocolError, match="KVCache"):
        torchkv.join([], "p")
    with pytest.raises(ProtocolError, match=r"options is a dict; give a torchkv\.Options"):
        torchkv.join(cache, "p", options={"timeout": 5.0})
    with pytest.raises(ProtocolError, match=r"store is a str; give a dist\.TCPStore"):
        torchkv.join(cache, "p", store="localhost:29500")
    with pytest.raises(ProtocolError, match="min_gbps"):
        torchkv.join(cache, "p", options=torchkv.Options(min_gbps=1.0))
    with pytest.raises(TransportUnavailable):
        torchkv.join(cache, "p", options=torchkv.Options(transport="none such"))
