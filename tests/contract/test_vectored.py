"""`VectoredPut`: small spans over cma, hundreds in each call of process_vm_writev, into a real process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from torchkv_ucx import pump
from torchkv_ucx.operation import Link, Spans, VectoredPut
from torchkv_ucx.process import LocalProcess

from torchkv.errors import PeerLost

RUN = 512
NBYTES = 1 << 20
POISON = 0xDD


# A process that holds a poisoned buffer. It prints the address, and the contents for every line that it reads.
HOLDER = f"""
import sys
import numpy
buffer = numpy.full({NBYTES}, {POISON}, dtype=numpy.uint8)
print(buffer.ctypes.data, flush=True)
for line in sys.stdin:
    sys.stdout.buffer.write(buffer.tobytes())
    sys.stdout.buffer.flush()
"""


class Holder:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.base = int(self.stdout.readline())
        self.peer = LocalProcess(self.process.pid)

    def show(self) -> bytes:
        self.stdin.write(b"show\n")
        self.stdin.flush()
        return self.stdout.read(NBYTES)

    def close(self) -> None:
        self.peer.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder() -> Iterator[Holder]:
    held = Holder()
    yield held
    held.close()


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


def test_spans_land_where_they_belong_and_nowhere_else(holder: Holder) -> None:
    count = 3 * pump.VECTOR + 17  # several calls and a remainder
    source = np.random.default_rng().integers(0, 256, count * RUN, dtype=np.uint8)
    offsets = np.random.default_rng().permutation(NBYTES // RUN)[:count].astype(np.int64) * RUN
    put = _put(source, offsets, holder.base, holder.peer)
    _run(put)
    assert put.error is None
    expected = np.full(NBYTES, POISON, dtype=np.uint8)
    for i, offset in enumerate(offsets):
        expected[offset : offset + RUN] = source[i * RUN : (i + 1) * RUN]
    assert holder.show() == expected.tobytes()
    expected[offsets[0]] ^= 1  # the control: one flipped bit is seen
    assert holder.show() != expected.tobytes()


def test_a_dead_process_is_lost_not_another_one_overwritten(holder: Holder) -> None:
    assert not holder.peer.ended
    holder.process.kill()
    holder.process.wait(10)
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), np.arange(4, dtype=np.int64) * RUN, holder.base, holder.peer)
    _run(put)
    assert isinstance(put.error, PeerLost)
    assert str(holder.process.pid) in str(put.error)


def test_memory_that_is_not_there_fails_the_put_and_says_why(holder: Holder) -> None:
    offsets = np.array(
        [0, RUN, -holder.base + 4096, 2 * RUN], dtype=np.int64
    )  # the third points at page one: never mapped
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), offsets, holder.base, holder.peer)
    _run(put)
    assert isinstance(put.error, PeerLost)
    assert "Bad address" in str(put.error)


def test_a_stopped_put_writes_no_more(holder: Holder) -> None:
    put = _put(np.zeros(RUN * 4, dtype=np.uint8), np.arange(4, dtype=np.int64) * RUN, holder.base, holder.peer)
    put.cancel()
    _run(put)
    assert type(put.error).__name__ == "TransferCancelled"
    assert holder.show() == bytes([POISON]) * NBYTES
