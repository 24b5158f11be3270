"""Two connected ends with random sources and poisoned destinations, and the slow reference for a put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from contract_world import End, World

POISON = 0xDD
KIB = 1024
MIB = 1024 * KIB

Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def columns(*rows: tuple[int, int, int, int, int]) -> Columns:
    """A batch from rows of (local region, local offset, remote region, remote offset, length)."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    return tuple(np.ascontiguousarray(table[:, i]) for i in range(5))  # type: ignore[return-value]


def expected(target: list[bytes], source: list[bytes], batch: Columns) -> list[bytes]:
    """The slow, obviously right put."""
    result = [bytearray(data) for data in target]
    for local, local_offset, remote, remote_offset, length in zip(*(c.tolist() for c in batch), strict=True):
        result[remote][remote_offset : remote_offset + length] = source[local][local_offset : local_offset + length]
    return [bytes(data) for data in result]


def scattered(rng: np.random.Generator, count: int, sizes: tuple[int, ...], nbytes: int) -> Columns:
    """``count`` spans of random sizes, at random places that do not overlap at the destination."""
    step = max(sizes)
    places = nbytes // step
    assert count <= places
    length = rng.choice(np.array(sizes, dtype=np.int64), size=count)
    remote = rng.permutation(places)[:count] * step + rng.integers(0, step - length + 1)
    local = rng.integers(0, nbytes - length + 1)
    zero = np.zeros(count, dtype=np.int64)
    return zero, local.astype(np.int64), zero.copy(), remote.astype(np.int64), length


@dataclass
class Pair:
    """Two connected ends: ``a`` holds fresh random source bytes, ``b`` poisoned destinations."""

    a: End
    b: End
    channel: int  # at a, towards b
    back: int  # at b, towards a
    source: list[bytes]
    target: list[bytes]

    def put(self, batch: Columns) -> None:
        """Puts and flushes; asserts that both succeed."""
        operations = self.a.call("put", self.channel, *batch), self.a.call("flush", self.channel)
        assert self.a.call("wait", *operations) == [None, None]

    def received(self) -> list[bytes]:
        return [self.b.call("read", region) for region in range(len(self.target))]

    def assert_put(self, batch: Columns) -> None:
        """``b`` holds what the reference says, to the byte, and nothing around its regions was touched."""
        self.target = expected(self.target, self.source, batch)
        for region, (got, want) in enumerate(zip(self.received(), self.target, strict=True)):
            wrong = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8))
            assert not len(wrong), f"region {region}: {len(wrong)} wrong bytes, the first at {wrong[0]}"
        assert self.b.call("margins_intact")
        assert self.a.call("margins_intact")


def connected(
    world: World,
    sizes: tuple[int, ...] = (1 * MIB,),
    make: str = "adopt",
    names: tuple[str, str] = ("a", "b"),
) -> Pair:
    a, b = world.end(names[0]), world.end(names[1])
    rng = np.random.default_rng()
    source = [rng.bytes(size) for size in sizes]
    target = [bytes([POISON]) * size for size in sizes]
    for end, contents in ((a, source), (b, target)):
        for region, data in enumerate(contents):
            assert end.call(make, len(data)) == region
            end.call("write", region, data)
    channel = a.call("connect", *b.call("published"))
    back = b.call("connect", *a.call("published"))
    return Pair(a, b, channel, back, source, target)


def slices(nbytes: int) -> Columns:
    """All of region 0 in spans of 512 bytes, in order."""
    count = nbytes // 512
    zero = np.zeros(count, dtype=np.int64)
    places = np.arange(count, dtype=np.int64) * 512
    return zero, places, zero, places, np.full(count, 512, dtype=np.int64)
