"""Two connected ends with random sources and poisoned destinations, and the slow reference for a put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.testing.ends import End, Ends

__all__ = [
    "KIB",
    "MIB",
    "POISON",
    "Columns",
    "Pair",
    "assert_same",
    "columns",
    "connected",
    "expected",
    "scattered",
    "slices",
]

POISON = 0xDD
KIB = 1024
MIB = 1024 * KIB

# Local region, local offset, remote region, remote offset, length: int64[n] each.
Columns = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]


def columns(*rows: tuple[int, int, int, int, int]) -> Columns:
    """A batch from rows of (local region, local offset, remote region, remote offset, length)."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    first, second, third, fourth, fifth = (np.ascontiguousarray(column) for column in table.T)
    return first, second, third, fourth, fifth


def expected(target: list[bytes], source: list[bytes], batch: Columns) -> list[bytes]:
    """The slow, obviously right put: ``target`` after it, by region."""
    result = [bytearray(data) for data in target]
    for local, local_offset, remote, remote_offset, length in zip(*(c.tolist() for c in batch), strict=True):
        result[remote][remote_offset : remote_offset + length] = source[local][local_offset : local_offset + length]
    return [bytes(data) for data in result]


def scattered(rng: np.random.Generator, count: int, sizes: tuple[int, ...], nbytes: int) -> Columns:
    """``count`` spans of random sizes between regions 0, at random places that do not overlap at the destination."""
    step = max(sizes)
    places = nbytes // step
    assert count <= places
    length = rng.choice(np.array(sizes, dtype=np.int64), size=count)
    remote = rng.permutation(places)[:count] * step + rng.integers(0, step - length + 1)
    local = rng.integers(0, nbytes - length + 1)
    zero = np.zeros(count, dtype=np.int64)
    return zero, local.astype(np.int64), zero.copy(), remote.astype(np.int64), length


def slices(nbytes: int) -> Columns:
    """All of region 0 in spans of 512 bytes, in order."""
    count = nbytes // 512
    zero = np.zeros(count, dtype=np.int64)
    places = np.arange(count, dtype=np.int64) * 512
    return zero, places, zero, places, np.full(count, 512, dtype=np.int64)


@dataclass
class Pair:
    """Two connected ends: ``a`` holds fresh random bytes, ``b`` poisoned ones, in regions of the same sizes.

    channel: at ``a``, towards ``b``. back: at ``b``, towards ``a``. source, target: what the regions of ``a`` hold, and
    those of ``b`` should.
    """

    a: End
    b: End
    channel: int
    back: int
    source: list[bytes]
    target: list[bytes]

    def put(self, batch: Columns) -> None:
        """Puts and flushes; asserts that both succeed."""
        operations = self.a.call("put", self.channel, *batch), self.a.call("flush", self.channel)
        assert self.a.call("wait", *operations) == [None, None]

    def received(self) -> list[bytes]:
        """What the regions of ``b`` hold."""
        return [self.b.call("read", region) for region in range(len(self.target))]

    def assert_put(self, batch: Columns) -> None:
        """Asserts that ``b`` holds what the reference says, to the byte, and that no byte around a region changed."""
        self.target = expected(self.target, self.source, batch)
        self.assert_received()

    def assert_received(self) -> None:
        """Asserts that ``b`` holds ``target``, and that no byte around a region of either end changed."""
        for region, (got, want) in enumerate(zip(self.received(), self.target, strict=True)):
            assert_same(f"region {region}", got, want)
        assert self.b.call("margins_intact"), "bytes beside a region of the receiver were written"
        assert self.a.call("margins_intact"), "bytes beside a region of the writer were written"


def assert_same(name: str, got: bytes, want: bytes) -> None:
    """Compares byte by byte; the message says how many differ, and where the first one is.

    For megabytes: what pytest makes of ``assert got == want`` takes it a minute.
    """
    assert len(got) == len(want), f"{name}: {len(got)} bytes instead of {len(want)}"
    wrong = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8))
    assert not len(wrong), f"{name}: {len(wrong)} wrong bytes, the first at {wrong[0]}"


def connected(
    ends: Ends, sizes: tuple[int, ...] = (1 * MIB,), make: str = "adopt", names: tuple[str, str] = ("a", "b")
) -> Pair:
    """Opens two ends, registers a region of each size on both, and connects them in both directions.

    make: ``"allocate"`` for memory that the transport allocates, ``"adopt"`` for other memory with canaries around it.
    """
    a, b = ends.end(names[0]), ends.end(names[1])
    rng = np.random.default_rng()
    source = [rng.bytes(size) for size in sizes]
    target = [bytes([POISON]) * size for size in sizes]
    for end, contents in ((a, source), (b, target)):
        for region, data in enumerate(contents):
            assert end.call(make if ends.lane.foreign_memory else "allocate", len(data)) == region
            end.call("write", region, data)
    channel = a.call("connect", *b.call("published"))
    back = b.call("connect", *a.call("published"))
    return Pair(a, b, channel, back, source, target)
