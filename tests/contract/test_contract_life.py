"""The contract on endings: cancel, deregister, close, dead peers, and what a transport leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from contract_pair import MIB, POISON, Pair, columns, connected, scattered, slices
from contract_world import World

from torchkv.errors import PeerLost, ProtocolError, TransferCancelled, TransportUnavailable, make_error

# -- cancel, deregister, close ----------------------------------------------------------------------------------------


def test_cancel_stops_a_put_midway(world: World) -> None:
    size = 52 * MIB
    pair = connected(world, (size,))
    rng = np.random.default_rng()
    count = size // 512
    zero = np.zeros(count, dtype=np.int64)
    places = rng.permutation(count) * 512
    batch = zero, places, zero, places, np.full(count, 512, dtype=np.int64)
    operation = pair.a.call("put", pair.channel, *batch)
    pair.a.call("cancel", operation)
    errors = pair.a.call("wait", operation, pair.a.call("flush", pair.channel))
    assert errors[1] is None
    assert errors[0] is not None, "a put of 100,000 spans ended before it could be cancelled"
    assert isinstance(make_error(*errors[0]), TransferCancelled)
    first = pair.received()[0]
    assert first != pair.source[0]
    mixed = np.frombuffer(first, np.uint8).reshape(-1, 512)
    from_source = (mixed == np.frombuffer(pair.source[0], np.uint8).reshape(-1, 512)).all(axis=1)
    assert (from_source | (mixed == POISON).all(axis=1)).all(), "a span is neither written nor untouched"
    pair.a.call("step", 20)
    assert pair.received()[0] == first, "bytes landed after the cancelled put was done"
    pair.target = [first]
    pair.put(columns((0, 0, 0, 0, 4096)))  # the channel lives on
    pair.assert_put(columns((0, 0, 0, 0, 4096)))


def test_cancel_after_the_end_changes_nothing(world: World) -> None:
    pair = connected(world)
    operation = pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 4096)))
    assert pair.a.call("wait", operation) == [None]
    pair.a.call("cancel", operation)
    assert pair.a.call("wait", operation) == [None]


def test_deregistered_regions_are_refused_and_can_come_back(world: World) -> None:
    pair = connected(world)
    pair.a.call("deregister", 0)
    with pytest.raises(ProtocolError):
        pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1)))
    with pytest.raises(ProtocolError):
        pair.a.call("deregister", 0)
    assert pair.a.call("adopt", 1 * MIB) == 1, "indices are not used again"
    pair.source.append(np.random.default_rng().bytes(1 * MIB))
    pair.a.call("write", 1, pair.source[1])
    batch = columns((1, 10, 0, 20, 70_000))
    pair.put(batch)
    pair.assert_put(batch)


def test_a_region_in_use_cannot_be_deregistered(world: World) -> None:
    pair = connected(world, (52 * MIB,))
    count = 100_000
    zero = np.zeros(count, dtype=np.int64)
    places = np.arange(count, dtype=np.int64) * 512
    operation = pair.a.call("put", pair.channel, *(zero, places, zero, places, np.full(count, 512, dtype=np.int64)))
    with pytest.raises(ProtocolError, match="pending"):
        pair.a.call("deregister", 0)
    assert pair.a.call("wait", operation) == [None]
    pair.a.call("deregister", 0)


def test_a_closed_channel_refuses(world: World) -> None:
    pair = connected(world)
    pending = pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1 * MIB)))
    pair.a.call("close_channel", pair.channel)
    pair.a.call("close_channel", pair.channel)
    assert pair.a.call("done", pending)
    for name, arguments in (("put", columns((0, 0, 0, 0, 1))), ("flush", ()), ("signal", (0, 1))):
        with pytest.raises((ProtocolError, PeerLost)):
            pair.a.call(name, pair.channel, *arguments)


def test_device_memory_is_refused_with_a_reason(world: World) -> None:
    end = world.end("a")
    with pytest.raises(TransportUnavailable):
        end.call("register_meta")


# -- dead peers -------------------------------------------------------------------------------------------------


def test_a_peer_killed_in_mid_put_is_lost_and_others_are_not(processes: World) -> None:
    doomed = connected(processes, (52 * MIB,), names=("a", "doomed"))
    other = processes.end("b")
    other.call("adopt", 52 * MIB)
    other.call("write", 0, bytes([POISON]) * (52 * MIB))
    to_other = doomed.a.call("connect", *other.call("published"))
    assert doomed.a.call("wait", doomed.a.call("flush", to_other)) == [None]
    operations = doomed.a.call("put", doomed.channel, *slices(52 * MIB)), doomed.a.call("flush", doomed.channel)
    signal = doomed.a.call("signal", doomed.channel, 0, 1)
    processes.process("doomed").kill()
    errors = doomed.a.call("wait", *operations, signal)
    assert [error and error[0] for error in errors] == ["PeerLost"] * 3, "the put ended before the kill"
    for name, arguments in (("put", columns((0, 0, 0, 0, 1))), ("flush", ()), ("signal", (0, 1))):
        with pytest.raises(PeerLost):
            doomed.a.call(name, doomed.channel, *arguments)
    pair = Pair(doomed.a, other, to_other, -1, doomed.source, [bytes([POISON]) * (52 * MIB)])
    batch = scattered(np.random.default_rng(), 300, (512, 4096), 52 * MIB)
    pair.put(batch)
    pair.assert_put(batch)
    doomed.a.call("wait_drained", doomed.channel)
    doomed.a.call("close_channel", doomed.channel)


def test_an_idle_channel_notices_that_the_peer_died(processes: World) -> None:
    """A receiver that has sent nothing must learn it too: it holds pages that the dead peer may have written."""
    pair = connected(processes, names=("a", "doomed"))
    pair.a.call("step", 50)
    assert not pair.a.call("drained", pair.channel)
    processes.process("doomed").kill()
    pair.a.call("wait_drained", pair.channel)
    with pytest.raises(PeerLost):
        pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1)))


def test_nothing_lands_after_drained(processes: World) -> None:
    """The receiver sleeps while the writer fills every buffer between them and dies; then it drains."""
    pair = connected(processes, (52 * MIB,), names=("a", "doomed"))
    # Here "doomed" is the writer: b towards a.
    assert pair.b.call("wait", pair.b.call("flush", pair.back)) == [None]
    assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
    pair.a.call("freeze", True)
    pair.b.call("put", pair.back, *slices(52 * MIB))
    pair.b.call("step", 200)
    processes.process("doomed").kill()
    assert not pair.a.call("drained", pair.channel)
    pair.a.call("freeze", False)
    pair.a.call("wait_drained", pair.channel)
    landed = pair.a.call("read", 0)
    assert landed != pair.source[0], "the writer wrote nothing: the test shows nothing"
    pair.a.call("step", 2000)
    assert pair.a.call("read", 0) == landed


def test_close_with_a_dead_and_with_a_frozen_peer(processes: World) -> None:
    dead = connected(processes, (8 * MIB,), names=("a", "doomed"))
    dead.a.call("put", dead.channel, *slices(8 * MIB))
    processes.process("doomed").kill()
    dead.a.call("close")
    dead.a.call("open")
    frozen = connected(processes, (8 * MIB,), names=("a", "b"))
    frozen.b.call("freeze", True)
    pending = frozen.a.call("put", frozen.channel, *slices(8 * MIB))
    frozen.a.call("step", 3)
    frozen.a.call("close")
    assert frozen.a.call("done", pending)
    frozen.a.call("close")


def test_closing_under_a_pending_put_harms_nobody(processes: World) -> None:
    """What a transport has not yet taken apart must not bring its process down: seen in one close of three."""
    for _ in range(12):
        pair = connected(processes, (2 * MIB,))
        pending = pair.a.call("put", pair.channel, *slices(2 * MIB))
        pair.a.call("step", 1)
        pair.a.call("close")
        assert pair.a.call("done", pending)
        processes.close_transports()


def test_nothing_is_left_behind(processes: World) -> None:
    """File descriptors and threads, over several lives of a transport that has really moved bytes."""
    counts = []
    for _ in range(4):
        pair = connected(processes, make="allocate")
        pair.put(columns((0, 0, 0, 0, 4096)))
        pair.a.call("view", pair.channel, 0)
        pair.a.call("close_channel", pair.channel)
        processes.close_transports()
        counts.append((pair.a.call("census"), pair.b.call("census")))
    assert counts[1] == counts[2] == counts[3], counts
