"""Small spans over cma: hundreds a system call, written by process_vm_writev into a process known to be the peer."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from torchkv.errors import PeerLost
from torchkv_ucx import pump
from torchkv_ucx.operation import Link, Spans, VectoredPut
from torchkv_ucx.process import LocalProcess

RUN = 512
NBYTES = 1 << 20
POISON = 0xDD


def _hold(end: Connection) -> None:
    """Holds a poisoned buffer and shows it when asked."""
    buffer = np.full(NBYTES, POISON, dtype=np.uint8)
    end.send(buffer.ctypes.data)
    while end.recv() == "show":
        end.send(buffer.tobytes())


@pytest.fixture
def holder() -> Any:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs,))
    process.start()
    assert ours.poll(60)
    yield process, ours, ours.recv()
    process.kill()
    process.join(10)


def _functions() -> np.ndarray:
    libc = ctypes.CDLL(None)
    table = np.zeros(7, dtype=np.int64)
    for place, name in ((5, "clock_gettime"), (6, "process_vm_writev")):
        table[place] = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    return table


def _put(source: np.ndarray, offsets: np.ndarray, base: int, peer: LocalProcess) -> VectoredPut:
    """Span i of the source goes to place ``offsets[i]`` of the holder's buffer."""
    count = len(offsets)
    zero = np.zeros(count, dtype=np.int64)
    spans = Spans(
        source=source.ctypes.data + np.arange(count, dtype=np.int64) * RUN,
        target=base + offsets,
        length=np.full(count, RUN, dtype=np.int64),
        local_region=zero,
        remote_region=zero,
        memhs=zero,
        rkeys=zero,
    )
    link = Link(_functions(), 0, 0, lambda status, what: PeerLost(f"{what}: {status}"))
    return VectoredPut(link, "put", spans, peer)


def _run(put: VectoredPut, rounds: int = 10_000) -> None:
    for _ in range(rounds):
        put.step(1_000_000)
        if put.done:
            return
    pytest.fail("the put does not end")


def test_spans_land_where_they_belong_and_nowhere_else(holder: Any) -> None:
    process, end, base = holder
    count = 3 * pump.VECTOR + 17  # several calls and a remainder
    source = np.random.default_rng().integers(0, 256, count * RUN, dtype=np.uint8)
    offsets = np.random.default_rng().permutation(NBYTES // RUN)[:count].astype(np.int64) * RUN
    peer = LocalProcess(process.pid)
    put = _put(source, offsets, base, peer)
    _run(put)
    assert put.error is None
    expected = np.full(NBYTES, POISON, dtype=np.uint8)
    for i, offset in enumerate(offsets):
        expected[offset : offset + RUN] = source[i * RUN : (i + 1) * RUN]
    end.send("show")
    assert end.recv() == expected.tobytes()
    expected[offsets[0]] ^= 1  # the control: one flipped bit is seen
    end.send("show")
    assert end.recv() != expected.tobytes()
    peer.close()


def test_a_dead_process_is_lost_not_another_one_overwritten(holder: Any) -> None:
    process, _, base = holder
    peer = LocalProcess(process.pid)
    assert not peer.ended
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), np.arange(4, dtype=np.int64) * RUN, base, peer)
    _run(put)
    assert isinstance(put.error, PeerLost)
    assert str(process.pid) in str(put.error)
    peer.close()


def test_memory_that_is_not_there_fails_the_put_and_says_why(holder: Any) -> None:
    process, _, base = holder
    peer = LocalProcess(process.pid)
    offsets = np.array([0, RUN, -base + 4096, 2 * RUN], dtype=np.int64)  # the third points at page one: never mapped
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), offsets, base, peer)
    _run(put)
    assert isinstance(put.error, PeerLost)
    assert "Bad address" in str(put.error)
    peer.close()


def test_a_stopped_put_writes_no_more(holder: Any) -> None:
    process, end, base = holder
    peer = LocalProcess(process.pid)
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), np.arange(4, dtype=np.int64) * RUN, base, peer)
    put.cancel()
    _run(put)
    assert type(put.error).__name__ == "TransferCancelled"
    end.send("show")
    assert end.recv() == bytes([POISON]) * NBYTES
    peer.close()
