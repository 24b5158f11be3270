"""Conformance tests of what puts, flushes and views do where all goes well: every byte in its place, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from torchkv.testing.ends import Ends
from torchkv.testing.pair import KIB, MIB, POISON, assert_same, columns, connected, expected, scattered, slices

__all__ = ["PutTests"]


class PutTests:
    """Part of `torchkv.testing.TransportConformance`."""

    def test_the_transport_says_what_it_is(self, ends: Ends) -> None:
        lane = ends.lane
        about = ends.closed_end("a").call("about")
        assert about["available"] is None, f"{lane} says that it cannot work here: {about['available']}"
        assert ":" in lane.transport or about["name"] == lane.transport, "Transport.name is not its entry point's"
        kinds = {device.partition(":")[0] for device in lane.devices}
        assert kinds <= about["devices"], f"capabilities.devices lacks {kinds - about['devices']}"

    def test_link_names_the_lane(self, ends: Ends) -> None:
        pair = connected(ends)
        pair.put(columns((0, 0, 0, 0, 8)))
        link = pair.a.call("link", pair.channel)
        assert link
        assert ends.lane.link in link

    # -- bytes -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("make", ["adopt", "allocate"])
    def test_scattered_puts_are_exact(self, ends: Ends, make: str) -> None:
        pair = connected(ends, (4 * MIB,), make)
        batch = scattered(np.random.default_rng(), 700, (1, 3, 8, 512, 4096, 5000), 4 * MIB)
        pair.put(batch)
        pair.assert_put(batch)
        assert_same("the source after the put", pair.a.call("read", 0), pair.source[0])

    def test_the_comparison_notices_one_byte(self, ends: Ends) -> None:
        """The control: what the other tests rely on does fail."""
        pair = connected(ends)
        batch = scattered(np.random.default_rng(), 100, (512,), 1 * MIB)
        pair.put(batch)
        pair.assert_put(batch)
        place = int(batch[3][37]) + 11
        pair.b.call("write", 0, bytes([pair.target[0][place] ^ 1]), place)
        with pytest.raises(AssertionError, match="1 wrong bytes"):
            pair.assert_put(batch)

    def test_puts_between_several_regions(self, ends: Ends) -> None:
        pair = connected(ends, (64 * KIB, 1, 256 * KIB, 4097))
        batch = columns(
            (0, 5, 2, 100_001, 65_531), (2, 7, 0, 1, 40_000), (1, 0, 1, 0, 1), (3, 4096, 3, 0, 1), (0, 0, 3, 1, 4096)
        )
        pair.put(batch)
        pair.assert_put(batch)

    def test_whole_regions(self, ends: Ends) -> None:
        """From the first to the last byte; the canaries before and behind them stay."""
        pair = connected(ends, (5000, 64 * KIB, 1))
        batch = columns((0, 0, 0, 0, 5000), (1, 0, 1, 0, 64 * KIB), (2, 0, 2, 0, 1))
        pair.put(batch)
        pair.assert_put(batch)

    def test_a_put_of_no_spans_and_one_of_empty_spans_write_nothing(self, ends: Ends) -> None:
        pair = connected(ends)
        pair.put(columns())
        pair.put(columns((0, 0, 0, 1 * MIB, 0), (0, 1 * MIB, 0, 0, 0)))
        pair.assert_received()

    def test_100_000_slices(self, ends: Ends) -> None:
        size = 52 * MIB
        pair = connected(ends, (size,))
        rng = np.random.default_rng()
        count = 100_000
        zero = np.zeros(count, dtype=np.int64)
        places = rng.permutation(size // 512)[:count] * 512
        batch = zero, rng.permutation(size // 512)[:count] * 512, zero, places, np.full(count, 512, dtype=np.int64)
        pair.put(batch)
        pair.assert_put(batch)

    def test_more_than_64_mib(self, ends: Ends) -> None:
        size = 66 * MIB
        pair = connected(ends, (size,), "allocate")
        batch = columns((0, 3, 0, 0, 33 * MIB), (0, 33 * MIB, 0, 33 * MIB + 1, 33 * MIB - 2))
        pair.put(batch)
        pair.assert_put(batch)

    def test_both_directions_at_once(self, ends: Ends) -> None:
        pair = connected(ends, (8 * MIB, 8 * MIB))
        rng = np.random.default_rng()
        # a writes its region 0 into b's region 0; b writes its (poisoned) region 1 into a's region 1.
        there = scattered(rng, 2000, (512, 4096), 8 * MIB)
        backwards = columns((1, 0, 1, 0, 8 * MIB))
        first = pair.a.call("put", pair.channel, *there), pair.a.call("flush", pair.channel)
        second = pair.b.call("put", pair.back, *backwards), pair.b.call("flush", pair.back)
        assert pair.a.call("wait", *first) == [None, None]
        assert pair.b.call("wait", *second) == [None, None]
        pair.assert_put(there)
        assert_same("a's region 1", pair.a.call("read", 1), pair.target[1])

    # -- what a put holds on to --------------------------------------------------------------------------------

    def test_the_batch_may_change_after_put(self, ends: Ends) -> None:
        pair = connected(ends)
        batch = scattered(np.random.default_rng(), 200, (512,), 1 * MIB)
        first, second, third, fourth, fifth = (column.copy() for column in batch)
        operation = pair.a.call("put", pair.channel, *batch)
        for column in batch:
            column[:] = -1
        assert pair.a.call("wait", operation, pair.a.call("flush", pair.channel)) == [None, None]
        pair.assert_put((first, second, third, fourth, fifth))

    @pytest.mark.parametrize("nbytes", [64, 64 * KIB, 4 * MIB])
    def test_the_source_may_change_once_the_put_is_done(self, ends: Ends, nbytes: int) -> None:
        """A put is done when its bytes have left the source, whether or not they have arrived."""
        pair = connected(ends, (4 * MIB,))
        for _ in range(5):
            batch = columns((0, 0, 0, 0, nbytes))
            fresh = np.random.default_rng().bytes(nbytes)
            put = pair.a.call("put_then_reuse", pair.channel, 0, fresh, *batch)
            assert pair.a.call("wait", put, pair.a.call("flush", pair.channel)) == [None, None]
            pair.assert_put(batch)
            pair.source = [fresh + pair.source[0][nbytes:]]

    # -- flush -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [256, 64 * KIB])
    def test_flushed_bytes_are_there_at_once(self, ends: Ends, nbytes: int) -> None:
        """A message that is sent after a flush (here: the test's own call) finds the bytes in place."""
        pair = connected(ends)
        for _ in range(50):
            data = np.random.default_rng().bytes(nbytes)
            pair.a.call("write", 0, data)
            pair.put(columns((0, 0, 0, 12_345, nbytes)))
            assert_same("not visible after a flush", pair.b.call("read_at", 0, 12_345, nbytes), data)

    def test_a_flush_covers_all_earlier_puts(self, ends: Ends) -> None:
        """A large put is followed by many small ones, and the flush by further puts."""
        pair = connected(ends, (9 * MIB,))
        large, rest = columns((0, 0, 0, 0, 8 * MIB)), []
        pair.a.call("put", pair.channel, *large)
        for i in range(50):
            rest.append((0, 8 * MIB + 64 * i, 0, 8 * MIB + 64 * i, 64))
            pair.a.call("put", pair.channel, *columns(rest[-1]))
        flush = pair.a.call("flush", pair.channel)
        later = pair.a.call("put", pair.channel, *columns((0, 9 * MIB - 8, 0, 9 * MIB - 8, 8)))
        assert pair.a.call("wait", flush) == [None]
        want = expected(expected(pair.target, pair.source, large), pair.source, columns(*rest))[0]
        assert_same("region 0", pair.b.call("read_at", 0, 0, 9 * MIB - 8), want[: 9 * MIB - 8])
        assert pair.a.call("wait", later, pair.a.call("flush", pair.channel)) == [None, None]
        pair.assert_put(columns((0, 0, 0, 0, 8 * MIB), *rest, (0, 9 * MIB - 8, 0, 9 * MIB - 8, 8)))

    def test_a_put_overwrites_what_was_flushed_before(self, ends: Ends) -> None:
        """Nothing of an earlier put lands again, or late."""
        pair = connected(ends, (64 * KIB,))
        for i in range(20):
            batch = columns((0, i * KIB, 0, 7, 32 * KIB))
            pair.put(batch)
            pair.assert_put(batch)

    def test_a_flush_that_ends_while_the_peer_stands_still_has_delivered(self, ends: Ends) -> None:
        """A flush may need the peer's progress, but then it must wait for it."""
        pair = connected(ends)
        pair.put(columns((0, 0, 0, 0, 1)))  # so that both sides know each other
        pair.b.call("freeze", True)
        batch = scattered(np.random.default_rng(), 50, (512, 4096), 1 * MIB)
        operations = pair.a.call("put", pair.channel, *batch), pair.a.call("flush", pair.channel)
        pair.a.call("step", 500)
        pair.target = expected(pair.target, pair.source, columns((0, 0, 0, 0, 1)))
        if pair.a.call("done", operations[1]):
            pair.assert_put(batch)
        pair.b.call("freeze", False)
        assert pair.a.call("wait", *operations) == [None, None]
        pair.assert_put(batch)

    def test_flush_without_puts(self, ends: Ends) -> None:
        pair = connected(ends)
        assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]

    def test_a_sleep_on_arm_ends_when_there_is_work(self, process_ends: Ends) -> None:
        """``arm`` may refuse to sleep, but a sleep that it allowed must end when progress() has work, on both sides."""
        pair = connected(process_ends)
        for i in range(20):
            batch = columns((0, i * 4096, 0, i * 4096, 4096))
            operations = pair.a.call("put", pair.channel, *batch), pair.a.call("flush", pair.channel)
            assert pair.a.call("wait_asleep", *operations) == [None, None]
            pair.assert_put(batch)

    # -- many channels -----------------------------------------------------------------------------------------

    def test_many_channels(self, ends: Ends) -> None:
        """Three peers with four channels each, all busy at once; closing half of them does the others no harm."""
        count, size = 4, 256 * KIB
        a = ends.end("a")
        make = "adopt" if ends.lane.foreign_memory else "allocate"
        source = [np.random.default_rng().bytes(size)]
        assert a.call(make, size) == 0
        a.call("write", 0, source[0])
        peers, target, channels = [], {}, []
        for name in ("b", "c", "d"):
            peer = ends.end(name)
            assert peer.call(make, size) == 0
            target[name] = [bytes([POISON]) * size]
            peer.call("write", 0, target[name][0])
            peers.append((name, peer))
            channels += [(name, a.call("connect", *peer.call("published"))) for _ in range(count)]
        for chosen in (channels, channels[1::2]):
            rng = np.random.default_rng()
            places, operations = rng.permutation(len(channels) * 4), []
            for number, (name, channel) in enumerate(chosen):
                rows = [(0, int(rng.integers(0, size - 4097)), 0, int(p) * 5000, 4097) for p in places[number::12]]
                operations.append(a.call("put", channel, *columns(*rows)))
                target[name] = expected(target[name], source, columns(*rows))
            operations += [a.call("flush", channel) for _, channel in chosen]
            assert set(a.call("wait", *operations)) == {None}
            for name, peer in peers:
                assert_same(f"region 0 of {name}", peer.call("read", 0), target[name][0])
                assert peer.call("margins_intact")
            for _, channel in channels[::2]:
                a.call("close_channel", channel)

    # -- views -------------------------------------------------------------------------------------------------

    def test_views_reach_the_peers_memory(self, ends: Ends) -> None:
        pair = connected(ends, (3 * MIB,), "allocate")
        if not pair.a.call("view", pair.channel, 0):
            reason = pair.a.call("why_no_view", pair.channel, 0)
            assert reason, "where view() is None, why_no_view() must say why"
            pytest.skip(f"{ends.lane} has no views: {reason}")
        assert pair.a.call("view_nbytes", 0) == 3 * MIB
        data = np.random.default_rng().bytes(100_000)
        pair.b.call("write", 0, data, 77)
        assert_same("read through the view", pair.a.call("view_read", 0, 77, len(data)), data)
        pair.a.call("view_write", 0, 2 * MIB - 5, data)
        want = bytearray(pair.target[0])
        want[77 : 77 + len(data)] = data
        want[2 * MIB - 5 : 2 * MIB - 5 + len(data)] = data
        pair.target = [bytes(want)]
        pair.assert_received()

    def test_views_and_puts_of_one_region_meet(self, ends: Ends) -> None:
        """What was put is read through the view, and the view's stores do not disturb a put beside them."""
        pair = connected(ends, (1 * MIB,), "allocate")
        if not pair.a.call("view", pair.channel, 0):
            pytest.skip(f"{ends.lane} has no views")
        batch = slices(512 * KIB)
        pair.put(batch)
        assert_same("read through the view", pair.a.call("view_read", 0, 0, 512 * KIB), pair.source[0][: 512 * KIB])
        pair.a.call("view_write", 0, 512 * KIB, pair.source[0][512 * KIB :])
        pair.target = [pair.source[0]]
        pair.assert_received()
