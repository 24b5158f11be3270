"""Conformance tests of what a transport must refuse, and of refusals doing no harm: nothing is written, all goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.testing.ends import Ends
from torchkv.testing.pair import KIB, MIB, columns, connected

__all__ = ["RefusalTests"]

_SIZE = 1 * MIB
_HUGE = (1 << 63) - 1
_OUTSIDE = {
    "local-beyond": (0, _SIZE, 0, 0, 1),
    "local-straddles": (0, _SIZE - 1, 0, 0, 2),
    "local-negative": (0, -1, 0, 0, 1),
    "local-region": (1, 0, 0, 0, 1),
    "local-region-negative": (-1, 0, 0, 0, 1),
    "remote-beyond": (0, 0, 0, _SIZE, 1),
    "remote-straddles": (0, 0, 0, _SIZE - 1, 2),
    "remote-negative": (0, 0, 0, -1, 1),
    "remote-region": (0, 0, 1, 0, 1),
    "remote-region-negative": (0, 0, -1, 0, 1),
    "length-negative": (0, 8, 0, 8, -1),
    "length-overflows": (0, 1, 0, 0, _HUGE),
    "offset-overflows": (0, 0, 0, _HUGE, 2),
    "lowest-offset": (0, -_HUGE - 1, 0, 0, 1),
    "lowest-length": (0, 0, 0, 0, -_HUGE - 1),
}


def _damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """What cannot be what a peer has published, and how it was made."""
    rng = np.random.default_rng()
    yield "empty", b""
    yield "zeros", bytes(len(whole))
    yield "ones", b"\xff" * len(whole)
    yield "doubled", whole * 2
    for _ in range(60):
        yield "random", rng.bytes(int(rng.integers(0, 600)))
    for end in {1, len(whole) - 1, *rng.integers(1, len(whole), 60).tolist()}:
        yield f"cut to {end} bytes", whole[:end]
    for extra in rng.integers(1, 65, 20).tolist():
        yield f"extended by {extra} bytes", whole + rng.bytes(extra)
    for bit in {0, 8 * len(whole) - 1, *rng.integers(0, 8 * len(whole), 200).tolist()}:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        yield f"the peer's but for bit {bit}", bytes(flipped)


class RefusalTests:
    """Part of `torchkv.testing.TransportConformance`."""

    # -- batches -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("row", _OUTSIDE.values(), ids=_OUTSIDE.keys())
    def test_spans_outside_a_region_write_nothing(self, ends: Ends, row: tuple[int, int, int, int, int]) -> None:
        pair = connected(ends)
        good = (0, 0, 0, 0, 4096)
        with pytest.raises(ProtocolError, match="span 1"):
            pair.a.call("put", pair.channel, *columns(good, row))
        assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
        pair.assert_received()
        pair.put(columns(good))  # and the channel is as good as before
        pair.assert_put(columns(good))

    def test_one_bad_span_among_many_refuses_them_all(self, ends: Ends) -> None:
        pair = connected(ends)
        rows = [(0, 512 * i, 0, 512 * i, 512) for i in range(2000)]
        rows[1999] = (0, 0, 0, _SIZE - 511, 512)
        with pytest.raises(ProtocolError, match="span 1999"):
            pair.a.call("put", pair.channel, *columns(*rows))
        assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
        pair.assert_received()

    @pytest.mark.parametrize("broken", ["short", "float", "matrix"])
    def test_malformed_batches_are_refused(self, ends: Ends, broken: str) -> None:
        pair = connected(ends)
        batch = list(columns((0, 0, 0, 0, 1), (0, 1, 0, 1, 1)))
        column = {"short": batch[3][:1], "float": batch[3].astype(np.float64), "matrix": batch[3].reshape(1, 2)}[broken]
        with pytest.raises(ProtocolError):
            pair.a.call("put", pair.channel, *batch[:3], column, batch[4])
        pair.assert_received()

    # -- bytes from the network ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("damaged", ["address", "region"])
    def test_damaged_bytes_do_not_connect(self, ends: Ends, damaged: str) -> None:
        """Addresses and descriptors cross the network: what is not byte for byte what the peer published is refused."""
        pair = connected(ends)
        address, regions = pair.b.call("published")
        for damage, bad in _damaged(address if damaged == "address" else regions[0]):
            try:
                if damaged == "address":
                    pair.a.call("connect", bad, regions)
                else:
                    pair.a.call("connect", address, [bad])
            except ProtocolError:
                continue
            pytest.fail(f"{damaged} bytes were not refused that are {damage}: {bad.hex()}")
        pair.put(columns((0, 0, 0, 0, 4096)))  # what is not damaged still works
        pair.assert_put(columns((0, 0, 0, 0, 4096)))

    def test_addresses_and_descriptors_are_told_apart(self, ends: Ends) -> None:
        pair = connected(ends)
        address, regions = pair.b.call("published")
        with pytest.raises(ProtocolError):
            pair.a.call("connect", regions[0], regions)
        with pytest.raises(ProtocolError):
            pair.a.call("connect", address, [address])

    def test_published_bytes_keep_their_limits(self, ends: Ends) -> None:
        pair = connected(ends, (1 * MIB, 64), "allocate")
        address, regions = pair.b.call("published")
        assert len(address) <= 16 * KIB
        assert all(len(region) <= 4 * KIB for region in regions)
        pair.assert_received()

    # -- memory ------------------------------------------------------------------------------------------------

    def test_memory_of_an_unknown_device_is_refused(self, ends: Ends) -> None:
        with pytest.raises(TransportUnavailable):
            ends.end("a").call("register_meta")

    def test_foreign_memory_has_no_view(self, process_ends: Ends) -> None:
        lane = process_ends.lane
        if lane.devices != ("cpu",) or not lane.foreign_memory:
            pytest.skip("only host memory that another allocator made is out of reach of views")
        pair = connected(process_ends, make="adopt")
        assert pair.a.call("view", pair.channel, 0) is False
        assert pair.a.call("why_no_view", pair.channel, 0)

    def test_foreign_memory_that_cannot_be_put_into_is_refused(self, ends: Ends) -> None:
        if ends.lane.foreign_memory:
            pytest.skip("the transport takes all memory of its devices")
        pair = connected(ends)
        try:
            index = pair.b.call("adopt", 4096)
        except TransportUnavailable:
            return
        channel = pair.a.call("connect", *pair.b.call("published"))
        with pytest.raises(TransportUnavailable):
            pair.a.call("put", channel, *columns((0, 0, 0, 0, 1), (0, 0, index, 0, 4096)))
        assert pair.a.call("wait", pair.a.call("flush", channel)) == [None]
        pair.assert_received()

    @pytest.mark.parametrize("region", [-1, 1])
    def test_views_of_unknown_regions_are_refused(self, ends: Ends, region: int) -> None:
        pair = connected(ends, make="allocate")
        with pytest.raises(ProtocolError):
            pair.a.call("view", pair.channel, region)
