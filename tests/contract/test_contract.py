"""What every transport must do (torchkv/transport.py says why). Runs on every lane of every installed transport."""

from __future__ import annotations

import numpy as np
import pytest
from contract_pair import KIB, MIB, Columns, columns, connected, scattered
from contract_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchkv.errors import ProtocolError

# -- puts --------------------------------------------------------------------------------------------------------


def test_link_names_the_lane(world: World) -> None:
    pair = connected(world)
    pair.put(columns((0, 0, 0, 0, 8)))
    link = pair.a.call("link", pair.channel)
    assert link
    assert world.expected_link in link


@pytest.mark.parametrize("make", ["adopt", "allocate"])
def test_scattered_puts_are_exact(world: World, make: str) -> None:
    pair = connected(world, (4 * MIB,), make)
    batch = scattered(np.random.default_rng(), 700, (1, 3, 8, 512, 4096, 5000), 4 * MIB)
    pair.put(batch)
    pair.assert_put(batch)


def test_the_comparison_notices_one_byte(world: World) -> None:
    pair = connected(world)
    batch = scattered(np.random.default_rng(), 100, (512,), 1 * MIB)
    pair.put(batch)
    pair.assert_put(batch)
    place = int(batch[3][37]) + 11
    pair.b.call("write", 0, bytes([pair.target[0][place] ^ 1]), place)
    with pytest.raises(AssertionError, match="1 wrong bytes"):
        pair.assert_put(batch)


def test_puts_between_several_regions(world: World) -> None:
    pair = connected(world, (64 * KIB, 1, 256 * KIB, 4097))
    batch = columns(
        (0, 5, 2, 100_001, 65_531), (2, 7, 0, 1, 40_000), (1, 0, 1, 0, 1), (3, 4096, 3, 0, 1), (0, 0, 3, 1, 4096)
    )
    pair.put(batch)
    pair.assert_put(batch)


@pytest.mark.parametrize(
    "batch", [columns(), columns((0, 0, 0, 1 * MIB, 0), (0, 1 * MIB, 0, 0, 0))], ids=["none", "empty"]
)
def test_empty_puts_complete_and_write_nothing(world: World, batch: Columns) -> None:
    pair = connected(world)
    pair.put(batch)
    assert pair.received() == pair.target


def test_100_000_slices(world: World) -> None:
    size = 52 * MIB
    pair = connected(world, (size,))
    rng = np.random.default_rng()
    count = 100_000
    zero = np.zeros(count, dtype=np.int64)
    places = rng.permutation(size // 512)[:count] * 512
    batch = zero, rng.permutation(size // 512)[:count] * 512, zero, places, np.full(count, 512, dtype=np.int64)
    pair.put(batch)
    pair.assert_put(batch)


def test_more_than_64_mib(world: World) -> None:
    size = 66 * MIB
    pair = connected(world, (size,), "allocate")
    batch = columns((0, 3, 0, 0, 33 * MIB), (0, 33 * MIB, 0, 33 * MIB + 1, 33 * MIB - 2))
    pair.put(batch)
    pair.assert_put(batch)


def test_the_batch_may_change_after_put(world: World) -> None:
    pair = connected(world)
    batch = scattered(np.random.default_rng(), 200, (512,), 1 * MIB)
    kept = tuple(column.copy() for column in batch)
    operation = pair.a.call("put", pair.channel, *batch)
    for column in batch:
        column[:] = -1
    assert pair.a.call("wait", operation, pair.a.call("flush", pair.channel)) == [None, None]
    pair.assert_put(kept)  # type: ignore[arg-type]


def test_both_directions_at_once(world: World) -> None:
    pair = connected(world, (8 * MIB, 8 * MIB))
    rng = np.random.default_rng()
    # a writes its region 0 into b's region 0; b writes its (poisoned) region 1 into a's region 1.
    there = scattered(rng, 2000, (512, 4096), 8 * MIB)
    backwards = columns((1, 0, 1, 0, 8 * MIB))
    first = pair.a.call("put", pair.channel, *there), pair.a.call("flush", pair.channel)
    second = pair.b.call("put", pair.back, *backwards), pair.b.call("flush", pair.back)
    assert pair.a.call("wait", *first) == [None, None]
    assert pair.b.call("wait", *second) == [None, None]
    pair.assert_put(there)
    assert pair.a.call("read", 1) == pair.target[1]


# -- flush and signals ---------------------------------------------------------------------------------------------


def test_flushed_bytes_are_there_at_once(world: World) -> None:
    """The control message (here: the test's own call) may overtake nothing that was flushed."""
    pair = connected(world)
    for _ in range(50):
        data = np.random.default_rng().bytes(256)
        pair.a.call("write", 0, data)
        pair.put(columns((0, 0, 0, 12_345, 256)))
        assert pair.b.call("read_at", 0, 12_345, 256) == data


def test_flush_without_puts(world: World) -> None:
    pair = connected(world)
    assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]


def test_signals_carry_values(world: World) -> None:
    pair = connected(world)
    assert [pair.b.call("read_signal", slot) for slot in range(64)] == [0] * 64
    values = {0: 1, 7: -1, 63: (1 << 63) - 1, 31: -(1 << 63), 2: 0}
    sent = [pair.a.call("signal", pair.channel, slot, value) for slot, value in values.items()]
    sent.append(pair.a.call("flush", pair.channel))
    assert pair.a.call("wait", *sent) == [None] * len(sent)
    assert {slot: pair.b.call("read_signal", slot) for slot in values} == values
    assert pair.a.call("read_signal", 0) == 0


def test_many_signals_the_last_one_stays(world: World) -> None:
    pair = connected(world)
    sent = [pair.a.call("signal", pair.channel, 5, value) for value in range(1, 701)]
    sent.append(pair.a.call("flush", pair.channel))
    assert set(pair.a.call("wait", *sent)) == {None}
    assert pair.b.call("read_signal", 5) == 700


@pytest.mark.parametrize("slot", [-1, 64])
def test_signal_slots_are_bounded(world: World, slot: int) -> None:
    pair = connected(world)
    with pytest.raises(ProtocolError, match=str(slot)):
        pair.a.call("signal", pair.channel, slot, 1)
    with pytest.raises(ProtocolError, match=str(slot)):
        pair.a.call("read_signal", slot)


def test_a_signal_never_overtakes_bytes(world: World) -> None:
    pair = connected(world)
    for i in range(1, 41):
        data = np.random.default_rng().bytes(64 * KIB)
        pair.a.call("write", 0, data)
        put = pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 64 * KIB)))
        sent = pair.a.call("signal", pair.channel, 0, i)
        while pair.b.call("read_signal", 0) != i:
            pair.a.call("step", 1)
        assert pair.b.call("read_at", 0, 0, 64 * KIB) == data
        assert pair.a.call("wait", put, sent) == [None, None]


def test_signal_order_under_hammering(processes: World) -> None:
    pair = connected(processes)
    pair.b.begin("echo", pair.back, 400, 8 * KIB)
    pair.a.call("hammer", pair.channel, 400, 8 * KIB)
    assert pair.b.end() == 0


def test_sleeping_on_arm_wakes_for_a_signal(processes: World) -> None:
    """``arm`` may refuse to sleep, but a sleep that it allowed must end when progress() has work."""
    pair = connected(processes)
    if not processes.wakes_for_signals:
        pytest.skip(f"{processes.lane}: the writer stores into the reader's memory without waking it")
    for i in range(1, 21):
        pair.b.begin("sleep_until_signal", 3, i)
        assert pair.a.call("wait", pair.a.call("signal", pair.channel, 3, i)) == [None]
        pair.b.end()


# -- what is refused ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("row", _OUTSIDE.values(), ids=_OUTSIDE.keys())
def test_spans_outside_a_region_write_nothing(world: World, row: tuple[int, int, int, int, int]) -> None:
    pair = connected(world)
    good = (0, 0, 0, 0, 4096)
    with pytest.raises(ProtocolError, match="span 1"):
        pair.a.call("put", pair.channel, *columns(good, row))
    assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
    assert pair.received() == pair.target
    pair.put(columns(good))  # and the channel is as good as before
    pair.assert_put(columns(good))


@pytest.mark.parametrize("broken", ["short", "float", "matrix"])
def test_malformed_batches_are_refused(world: World, broken: str) -> None:
    pair = connected(world)
    batch = list(columns((0, 0, 0, 0, 1), (0, 1, 0, 1, 1)))
    batch[3] = {
        "short": batch[3][:1],
        "float": batch[3].astype(np.float64),
        "matrix": batch[3].reshape(1, 2),
    }[broken]
    with pytest.raises(ProtocolError):
        pair.a.call("put", pair.channel, *batch)
    assert pair.received() == pair.target


@pytest.mark.parametrize("what", ["address", "region"])
def test_damaged_bytes_do_not_connect(world: World, what: str) -> None:
    pair = connected(world)
    address, regions = pair.b.call("published")

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        whole = address if what == "address" else regions[0]
        kind = data.draw(st.sampled_from(["garbage", "cut", "flipped", "extended"]))
        if kind == "garbage":
            bad = data.draw(st.binary(max_size=600))
        elif kind == "cut":
            bad = whole[: data.draw(st.integers(0, len(whole) - 1))]
        elif kind == "flipped":
            bit = data.draw(st.integers(0, 8 * len(whole) - 1))
            bad = bytearray(whole)
            bad[bit // 8] ^= 1 << (bit % 8)
            bad = bytes(bad)
        else:
            bad = whole + data.draw(st.binary(min_size=1, max_size=64))
        with pytest.raises(ProtocolError):
            pair.a.call("connect", bad if what == "address" else address, [bad] if what == "region" else regions)

    attempt()
    pair.put(columns((0, 0, 0, 0, 4096)))  # what is not damaged still works
    pair.assert_put(columns((0, 0, 0, 0, 4096)))


def test_an_address_is_no_region(world: World) -> None:
    pair = connected(world)
    address, regions = pair.b.call("published")
    with pytest.raises(ProtocolError):
        pair.a.call("connect", regions[0], regions)
    with pytest.raises(ProtocolError):
        pair.a.call("connect", address, [address])


def test_published_bytes_keep_their_limits(world: World) -> None:
    address, regions = (pair := connected(world, (1 * MIB, 64), "allocate")).b.call("published")
    assert len(address) <= 16 * KIB
    assert all(len(region) <= 4 * KIB for region in regions)
    assert pair.received() == pair.target


# -- views ------------------------------------------------------------------------------------------------------------


def test_views_reach_the_peers_memory(world: World) -> None:
    pair = connected(world, (3 * MIB,), "allocate")
    if not pair.a.call("view", pair.channel, 0):
        pytest.skip(f"{world.lane} offers no views")
    assert pair.a.call("view_nbytes", 0) == 3 * MIB
    data = np.random.default_rng().bytes(100_000)
    pair.b.call("write", 0, data, 77)
    assert pair.a.call("view_read", 0, 77, len(data)) == data
    pair.a.call("view_write", 0, 2 * MIB - 5, data)
    want = bytearray(pair.target[0])
    want[77 : 77 + len(data)] = data
    want[2 * MIB - 5 : 2 * MIB - 5 + len(data)] = data
    assert pair.received() == [bytes(want)]


def test_foreign_memory_has_no_view(processes: World) -> None:
    if processes.devices != ("cpu",):
        pytest.skip("device memory can be mapped whoever allocated it")
    pair = connected(processes, make="adopt")
    assert pair.a.call("view", pair.channel, 0) is False


@pytest.mark.parametrize("region", [-1, 1])
def test_views_of_unknown_regions_are_refused(world: World, region: int) -> None:
    pair = connected(world, make="allocate")
    with pytest.raises(ProtocolError):
        pair.a.call("view", pair.channel, region)
