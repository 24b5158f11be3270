"""Processes that stop without dying: nothing may free their pages but their own word, and nothing may hang."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_world
from tests.helpers.ranks.small_cache import check_transfer, page_bytes, random_cache
from torchkv import PageOutOfRange, PeerLost, TransferCancelled, TransferTimeout

WRITER, RECEIVER, OTHER = range(3)
PATIENCE = 40

# 8 layers of 2 * 4 MiB over TCP: a writer that is stopped stops among its puts.
BIG = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 256, "page_size": 16}
PAGES = list(range(64))
POOL = 128


class Gate:
    def __init__(self) -> None:
        self.open = threading.Event()

    def query(self) -> bool:
        return self.open.is_set()


@pytest.fixture
def three(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(3, env={"UCX_TLS": "tcp", **request.param})
    yield ranks
    ranks.close()


def join_big() -> None:
    kv_world().register(random_cache(num_pages=POOL, **BIG))


def write_and_wait() -> None:
    """Sends all layers but the last, which waits for a gate that opens only after the pause."""
    kv = kv_world()
    gate = Gate()
    works = [kv.send_pages("r", PAGES, RECEIVER, layers=layer) for layer in range(7)]
    works.append(kv.send_pages("r", PAGES, RECEIVER, layers=7, event=gate))
    done = kv.finish("r", RECEIVER)
    ask("stop me")
    gate.open.set()
    for work in (works[-1], done):
        with pytest.raises((TransferCancelled, PeerLost, TransferTimeout)):
            work.wait(PATIENCE)
    kv.cancel("r").wait(PATIENCE)


def fill_from_other() -> None:
    kv = kv_world()
    for name in ("elsewhere", "again"):
        kv.send_pages(name, PAGES, RECEIVER)
        kv.finish(name, RECEIVER).wait(PATIENCE)
    dist.send(page_bytes(kv._verbs.cache, PAGES), RECEIVER)


def _path(env: dict[str, str]) -> str:
    """test_staged_pause has the staged one."""
    return env.get("TORCHKV_PATH", "direct")


def receive_and_cancel() -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", PAGES, WRITER)
    rx.wait_layer(0, PATIENCE)
    ask("the writer may stop")
    cancelled = kv.cancel("r")
    with pytest.raises(TransferCancelled, match="'r'"):
        rx.wait(PATIENCE)
    error = rx.exception()
    assert error is not None
    with pytest.raises(TransferTimeout):
        cancelled.wait(0.3)  # no word of the writer, no quiescence
    assert not error.pages_safe
    assert kv.quarantined() == dict.fromkeys(PAGES, (WRITER,))
    with pytest.raises(PageOutOfRange, match=rf"page 5 is quarantined.*ranks \[{WRITER}\].*'r'"):
        kv.recv_pages("elsewhere", [100, 5], OTHER)
    kv.recv_pages("elsewhere", range(64, 128), OTHER).wait(PATIENCE)  # other pages, meanwhile
    ask("the writer may go on")
    cancelled.wait(PATIENCE)
    assert error.pages_safe
    assert kv.quarantined() == {}
    kv.recv_pages("again", PAGES, OTHER).wait(PATIENCE)
    expected = torch.empty_like(page_bytes(kv._verbs.cache, PAGES))
    dist.recv(expected, OTHER)
    ask("let the writer end")  # whatever it had in flight has landed by now, if anywhere
    for pages in (PAGES, list(range(64, 128))):
        assert torch.equal(page_bytes(kv._verbs.cache, pages), expected)


@pytest.mark.parametrize("three", [{}, {"TORCHKV_PATH": "runs"}, {"TORCHKV_PATH": "slices"}], indirect=True, ids=_path)
def test_pages_of_a_stopped_writer_stay_quarantined_until_it_answers(three: Ranks) -> None:
    three.run(join_big)
    three.start(write_and_wait, ranks=[WRITER])
    three.start(fill_from_other, ranks=[OTHER])
    three.start(receive_and_cancel, ranks=[RECEIVER])
    assert three.hear(WRITER) == "stop me"
    assert three.hear(RECEIVER) == "the writer may stop"
    three.signal(WRITER, signal.SIGSTOP)
    three.tell(RECEIVER)
    assert three.hear(RECEIVER) == "the writer may go on"
    three.signal(WRITER, signal.SIGCONT)
    three.tell(WRITER)
    three.tell(RECEIVER)
    assert three.hear(RECEIVER) == "let the writer end"
    three.join([WRITER, OTHER])
    three.tell(RECEIVER)
    three.join([RECEIVER])


# ---------------------------------------------------------------------- silence that heartbeats notice


def join_small() -> None:
    kv_world().register(random_cache())


def lose_and_find() -> None:
    """A peer that is silent for too long is lost; when it answers again it is as good as before."""
    kv = kv_world()
    rx = kv.recv_pages("r", [1, 2], WRITER)
    ask("stop the writer")
    with pytest.raises(PeerLost, match=rf"'r'.*rank {WRITER} does not answer.*heartbeat") as caught:
        rx.wait(PATIENCE)
    assert not caught.value.pages_safe
    assert kv.quarantined() == {1: (WRITER,), 2: (WRITER,)}
    with pytest.raises(PeerLost):
        kv.recv_pages("more", [3], WRITER)
    cancelled = kv.cancel("r")
    check_transfer(kv, OTHER, RECEIVER, avoid=(1, 2))
    ask("wake the writer")
    cancelled.wait(PATIENCE)
    assert caught.value.pages_safe
    assert kv.quarantined() == {}


def one_check_from_other() -> None:
    check_transfer(kv_world(), OTHER, RECEIVER, avoid=(1, 2))


def usable() -> None:
    engine = kv_world()._verbs.engine
    assert engine is not None
    with engine.callers.changed:  # its frames may have come another way before the connection that shows it to be there
        assert engine.callers.changed.wait_for(lambda: not engine.lost, PATIENCE)
    dist.barrier(kv_world())
    check_transfer(kv_world(), WRITER, RECEIVER)
    check_transfer(kv_world(), RECEIVER, WRITER)


@pytest.mark.parametrize("three", [{"TORCHKV_HEARTBEAT": "0.2"}], indirect=True, ids=[""])
def test_a_silent_peer_is_lost_and_found_again(three: Ranks) -> None:
    three.run(join_small)
    three.start(lose_and_find, ranks=[RECEIVER])
    assert three.hear(RECEIVER) == "stop the writer"
    three.signal(WRITER, signal.SIGSTOP)
    three.start(one_check_from_other, ranks=[OTHER])
    three.tell(RECEIVER)
    assert three.hear(RECEIVER) == "wake the writer"
    three.signal(WRITER, signal.SIGCONT)
    three.tell(RECEIVER)
    three.join([RECEIVER, OTHER])
    three.run(usable)


def busy(seconds: int) -> None:
    """Keeps the GIL: no Python of this process runs, the progress thread's included."""
    ask("busy from now")
    ctypes.PyDLL(None).sleep(seconds)


def receive_from_the_busy() -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", [1, 2], WRITER)
    ask("granted")
    ask("it was busy")
    assert kv.explain(WRITER).lost == ""
    assert rx.exception() is None
    assert not rx.is_completed()
    kv.cancel("r").wait(PATIENCE)


@pytest.mark.parametrize("three", [{"TORCHKV_HEARTBEAT": "0.2"}], indirect=True, ids=[""])
def test_a_busy_gil_is_not_taken_for_death(three: Ranks) -> None:
    """Busy for 4 s, where five heartbeats are 1 s: the very pause that loses a stopped process."""
    three.run(join_small)
    three.start(receive_from_the_busy, ranks=[RECEIVER])
    assert three.hear(RECEIVER) == "granted"
    three.start(busy, 4, ranks=[WRITER])
    assert three.hear(WRITER) == "busy from now"
    three.tell(RECEIVER)
    assert three.hear(RECEIVER) == "it was busy"
    three.tell(WRITER)
    three.join([WRITER])
    three.tell(RECEIVER)
    three.join([RECEIVER])
    three.run(usable)
