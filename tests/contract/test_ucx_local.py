"""The UCX transport where no UCX is needed: no port, the right process, and peers that have UCX all the same."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchkv_ucx import UCXTransport, local_channel, wire
from torchkv_ucx.channel import UCXChannel
from torchkv_ucx.local_channel import LocalChannel, needs_ucx
from torchkv_ucx.operation import Spans

from torchkv.errors import PeerLost, TransportUnavailable
from torchkv.testing.pair import columns
from torchkv.transport import Batch

NBYTES = 1 << 20
POISON = 0xDD
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there are GPUs UCX is always started")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "MASTER_ADDR", "TORCHKV_INTERFACE"):
        monkeypatch.delenv(name, raising=False)


def memory(value: int | None = None) -> torch.Tensor:
    if value is None:
        return torch.from_numpy(np.random.default_rng().integers(0, 256, NBYTES, dtype=np.uint8))
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def run(until: Callable[[], bool], *transports: UCXTransport) -> None:
    for _ in range(200_000):
        if until():
            return
        for transport in transports:
            transport.progress()
    pytest.fail("nothing more happens")


def test_ucx_is_started_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert needs_ucx() == ""
    with monkeypatch.context() as set_to:
        set_to.setenv("UCX_TLS", "tcp")
        assert "UCX_TLS" in needs_ucx()
    with monkeypatch.context() as set_to:
        set_to.setenv("UCX_NET_DEVICES", "all")
        assert "UCX_NET_DEVICES" in needs_ucx()
        set_to.setenv("UCX_NET_DEVICES", "lo")  # what torchkv itself writes there
        assert needs_ucx() == ""
    monkeypatch.setattr(local_channel, "job_interface", lambda: ("eth0", "10.0.0.1"))
    assert "other hosts" in needs_ucx()
    monkeypatch.undo()
    scope = tmp_path / "ptrace_scope"
    for text, allowed in (("0\n", True), ("1\n", False)):
        scope.write_text(text)
        monkeypatch.setattr(local_channel, "_YAMA", scope)
        assert (needs_ucx() == "") is allowed


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[UCXTransport, UCXTransport]]:
    """One transport with UCX, and one without."""
    monkeypatch.setenv("UCX_TLS", "all")
    with_ucx = UCXTransport()
    monkeypatch.delenv("UCX_TLS")
    without = UCXTransport()
    yield with_ucx, without
    with_ucx.close()
    without.close()


def test_a_side_without_ucx_is_reached_and_reaches_one_that_has_it(mixed: tuple[UCXTransport, UCXTransport]) -> None:
    """Both ways without UCX: else what travels through a socket would not be seen to have drained."""
    for a, b in (mixed, mixed[::-1]):
        source, target = memory(), memory(POISON)
        here, there = a.register(source), b.register(target)
        channel = a.connect(b.address(), [there.descriptor()])
        assert isinstance(channel, LocalChannel)
        put = channel.put(Batch(*columns((here.index, 5, 0, 9, NBYTES - 20))))
        flush = channel.flush()
        run(lambda flush=flush: flush.done, a, b)
        assert put.error is None
        expected = np.full(NBYTES, POISON, dtype=np.uint8)
        expected[9 : NBYTES - 11] = source.numpy()[5 : NBYTES - 15]
        assert np.array_equal(target.numpy(), expected)
        channel.close()


def test_with_ucx_on_both_sides_it_is_used(mixed: tuple[UCXTransport, UCXTransport]) -> None:
    channel = mixed[0].connect(mixed[0].address(), [])
    assert isinstance(channel, UCXChannel)


@pytest.mark.parametrize("change", ["another token", "a number of nobody", "no such memory"])
def test_another_process_is_never_written_to(change: str, mixed: tuple[UCXTransport, UCXTransport]) -> None:
    """As where a peer of another PID namespace has a number that is somebody else's here."""
    _, a = mixed
    address = wire.unpack_address(a.address())
    bad = {
        "another token": {"token": bytes(16)},
        "a number of nobody": {"pid": (1 << 22) + 1},
        "no such memory": {"token_at": 4096},
    }[change]
    with pytest.raises(TransportUnavailable, match="UCX_TLS=all"):
        a.connect(wire.pack(msgspec.structs.replace(address, **bad)), [])
    assert isinstance(a.connect(wire.pack(address), []), LocalChannel)  # the control


_PEER = """
import sys
from torchkv_ucx import UCXTransport
transport = UCXTransport()
sys.stdout.buffer.write(transport.address().hex().encode() + b"\\n")
sys.stdout.buffer.flush()
sys.stdin.read()
"""


def test_the_end_of_a_process_wakes_its_peer_once() -> None:
    peer = subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    transport = UCXTransport()
    try:
        channel = transport.connect(bytes.fromhex(peer.stdout.readline().decode()), [])
        run(lambda: transport.arm() is not None, transport)
        fd = transport.arm()
        assert fd is not None
        poller = polling(fd)
        assert not poller(0)
        peer.kill()
        assert poller(20_000)
        run(lambda: channel.drained, transport)
        with pytest.raises(PeerLost):
            channel.flush()
        assert not poller(0), "its owner would never sleep again"
    finally:
        transport.close()
        peer.kill()
        peer.communicate()


def polling(fd: int) -> Callable[[int], bool]:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return lambda milliseconds: bool(poller.poll(milliseconds))


@given(st.lists(st.integers(0, 5 << 20), min_size=1, max_size=20))
def test_long_spans_are_cut_and_no_byte_is_lost(lengths: list[int]) -> None:
    length = np.array(lengths, dtype=np.int64)
    begin = np.arange(len(length), dtype=np.int64) * (8 << 20)
    regions = np.arange(len(length), dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    spans = Spans(begin, begin + 7, length, regions, regions, none, none)
    pieces = local_channel._in_pieces(spans)
    assert int(pieces.length.max()) <= local_channel._PIECE
    for i in range(len(length)):
        mine = pieces.local_region == i
        assert np.array_equal(mine, pieces.remote_region == i)
        source, sizes = pieces.source[mine], pieces.length[mine]
        assert source[0] == begin[i]
        assert np.array_equal(source[1:], source[:-1] + sizes[:-1])
        assert int(sizes.sum()) == lengths[i]
        assert np.array_equal(pieces.target[mine], source + 7)
