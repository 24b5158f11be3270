"""Conformance tests of endings: cancel, deregister, close, the death of a peer, and what a transport leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from torchkv.errors import PeerLost, ProtocolError, TransferCancelled, make_error
from torchkv.testing.ends import Ends
from torchkv.testing.pair import MIB, POISON, Pair, assert_same, columns, connected, scattered, slices

__all__ = ["EndingTests"]

_LARGE = 52 * MIB  # in spans of 512 bytes more than 100,000: no transport posts them all in one round
_TOO_SOON = (
    "a put of 100,000 spans ended before it could be {}: put() and a round of progress() must return after about a "
    "millisecond, and post the rest of a large batch in later rounds"
)


class EndingTests:
    """Part of `torchkv.testing.TransportConformance`."""

    # -- cancel ------------------------------------------------------------------------------------------------

    def test_cancel_stops_a_put_midway(self, ends: Ends) -> None:
        pair = connected(ends, (_LARGE,))
        pair.a.call("wait", pair.a.call("flush", pair.channel))  # else connecting may take all of the first round
        count = _LARGE // 512
        zero = np.zeros(count, dtype=np.int64)
        places = np.random.default_rng().permutation(count) * 512
        pair.a.call("freeze", True)
        operation = pair.a.call("put", pair.channel, zero, places, zero, places, np.full(count, 512, dtype=np.int64))
        pair.a.call("step", 1)
        pair.a.call("cancel", operation)
        pair.a.call("freeze", False)
        (error,) = pair.a.call("wait", operation)
        assert error is not None, _TOO_SOON.format("cancelled")
        assert isinstance(make_error(*error), TransferCancelled)
        first = pair.received()[0]
        mixed = np.frombuffer(first, np.uint8).reshape(-1, 512)
        from_source = (mixed == np.frombuffer(pair.source[0], np.uint8).reshape(-1, 512)).all(axis=1)
        assert not from_source.all(), "all of a cancelled put was written"
        assert (from_source | (mixed == POISON).all(axis=1)).all(), "a span is neither written nor untouched"
        assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
        pair.a.call("step", 200)
        pair.b.call("step", 200)
        assert_same("landed after the cancelled put was done", pair.received()[0], first)
        pair.target = [first]
        pair.put(columns((0, 0, 0, 0, 4096)))  # the channel lives on
        pair.assert_put(columns((0, 0, 0, 0, 4096)))

    def test_cancel_before_anything_is_posted(self, ends: Ends) -> None:
        """Several puts wait in line; the last ones are cancelled, and those before them are not."""
        pair = connected(ends, (_LARGE,))
        pair.a.call("freeze", True)
        batches = [columns((0, i * 4096, 0, i * 4096, 4096)) for i in range(3)]
        operations = [pair.a.call("put", pair.channel, *batch) for batch in (slices(_LARGE), *batches)]
        for operation in operations[2:]:
            pair.a.call("cancel", operation)
        pair.a.call("freeze", False)
        errors = pair.a.call("wait", *operations, pair.a.call("flush", pair.channel))
        assert [errors[0], errors[1], errors[-1]] == [None] * 3
        for error in errors[2:4]:
            assert error is None or isinstance(make_error(*error), TransferCancelled)
        pair.assert_put(slices(_LARGE))

    def test_cancel_after_the_end_changes_nothing(self, ends: Ends) -> None:
        pair = connected(ends)
        operation = pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 4096)))
        assert pair.a.call("wait", operation) == [None]
        pair.a.call("cancel", operation)
        assert pair.a.call("wait", operation) == [None]

    # -- deregister ----------------------------------------------------------------------------------------------

    def test_deregistered_regions_are_refused_and_indices_are_not_used_again(self, ends: Ends) -> None:
        pair = connected(ends)
        pair.a.call("deregister", 0)
        with pytest.raises(ProtocolError):
            pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1)))
        with pytest.raises(ProtocolError):
            pair.a.call("deregister", 0)
        assert pair.a.call("adopt" if ends.lane.foreign_memory else "allocate", 1 * MIB) == 1
        pair.source.append(np.random.default_rng().bytes(1 * MIB))
        pair.a.call("write", 1, pair.source[1])
        batch = columns((1, 10, 0, 20, 70_000))
        pair.put(batch)
        pair.assert_put(batch)

    def test_a_region_in_use_cannot_be_deregistered(self, ends: Ends) -> None:
        pair = connected(ends, (_LARGE,))
        pair.a.call("freeze", True)
        operation = pair.a.call("put", pair.channel, *slices(_LARGE))
        with pytest.raises(ProtocolError, match="pending"):
            pair.a.call("deregister", 0)
        pair.a.call("freeze", False)
        assert pair.a.call("wait", operation) == [None]
        pair.a.call("deregister", 0)

    # -- close ---------------------------------------------------------------------------------------------------

    def test_a_closed_channel_refuses(self, ends: Ends) -> None:
        pair = connected(ends)
        pending = pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1 * MIB)))
        pair.a.call("close_channel", pair.channel)
        pair.a.call("close_channel", pair.channel)
        assert pair.a.call("done", pending)
        for name, arguments in (("put", columns((0, 0, 0, 0, 1))), ("flush", ())):
            with pytest.raises((ProtocolError, PeerLost)):
                pair.a.call(name, pair.channel, *arguments)

    def test_a_closed_transport_refuses(self, ends: Ends) -> None:
        kinds = ends.end("a").call("close_and_use")
        assert kinds == dict.fromkeys(kinds, "ProtocolError")

    # -- dead peers ----------------------------------------------------------------------------------------------

    def test_a_peer_killed_in_mid_put_is_lost_and_others_are_not(self, process_ends: Ends) -> None:
        ends = process_ends
        doomed = connected(ends, (_LARGE,), names=("a", "doomed"))
        other = ends.end("b")
        other.call("adopt" if ends.lane.foreign_memory else "allocate", _LARGE)
        other.call("write", 0, bytes([POISON]) * _LARGE)
        to_other = doomed.a.call("connect", *other.call("published"))
        flushes = [doomed.a.call("flush", channel) for channel in (to_other, doomed.channel)]
        assert doomed.a.call("wait", *flushes) == [None, None]
        doomed.a.call("freeze", True)
        operations = doomed.a.call("put", doomed.channel, *slices(_LARGE)), doomed.a.call("flush", doomed.channel)
        doomed.a.call("step", 1)
        ends.process("doomed").kill()
        doomed.a.call("freeze", False)
        errors = doomed.a.call("wait", *operations)
        assert errors != [None, None], _TOO_SOON.format("hit by the peer's death")
        assert [error and error[0] for error in errors] == ["PeerLost"] * 2
        for name, arguments in (("put", columns((0, 0, 0, 0, 1))), ("flush", ())):
            with pytest.raises(PeerLost):
                doomed.a.call(name, doomed.channel, *arguments)
        pair = Pair(doomed.a, other, to_other, -1, doomed.source, [bytes([POISON]) * _LARGE])
        batch = scattered(np.random.default_rng(), 300, (512, 4096), _LARGE)
        pair.put(batch)
        pair.assert_put(batch)
        doomed.a.call("wait_drained", doomed.channel)
        doomed.a.call("close_channel", doomed.channel)

    def test_an_idle_channel_notices_that_the_peer_died(self, process_ends: Ends) -> None:
        """A receiver that has sent nothing must learn it too: it holds pages that the dead peer may have written."""
        pair = connected(process_ends, names=("a", "doomed"))
        pair.a.call("step", 50)
        assert not pair.a.call("drained", pair.channel)
        process_ends.process("doomed").kill()
        pair.a.call("wait_drained", pair.channel)
        with pytest.raises(PeerLost):
            pair.a.call("put", pair.channel, *columns((0, 0, 0, 0, 1)))

    def test_nothing_lands_after_drained(self, process_ends: Ends) -> None:
        """The receiver stands still while the writer fills every buffer between them and dies; then it drains."""
        pair = connected(process_ends, (_LARGE,), names=("a", "doomed"))
        # "doomed" is the writer here: b towards a.
        assert pair.b.call("wait", pair.b.call("flush", pair.back)) == [None]
        assert pair.a.call("wait", pair.a.call("flush", pair.channel)) == [None]
        pair.a.call("freeze", True)
        pair.b.call("put", pair.back, *slices(_LARGE))
        pair.b.call("step", 200)
        process_ends.process("doomed").kill()
        pair.a.call("freeze", False)
        pair.a.call("wait_drained", pair.channel)
        landed = pair.a.call("read", 0)
        wrote_something = landed != pair.source[0]
        assert wrote_something, "the writer wrote nothing: the test shows nothing"
        pair.a.call("step", 2000)
        assert_same("landed after drained", pair.a.call("read", 0), landed)

    def test_a_new_process_takes_the_place_of_a_dead_one(self, process_ends: Ends) -> None:
        pair = connected(process_ends, names=("a", "doomed"))
        process_ends.process("doomed").kill()
        pair.a.call("wait_drained", pair.channel)
        peer = process_ends.end("doomed")
        make = "adopt" if process_ends.lane.foreign_memory else "allocate"
        assert peer.call(make, 1 * MIB) == 0
        peer.call("write", 0, pair.target[0])
        channel = pair.a.call("connect", *peer.call("published"))
        back = peer.call("connect", *pair.a.call("published"))
        again = Pair(pair.a, peer, channel, back, pair.source, pair.target)
        again.put(columns((0, 3, 0, 5, 100_000)))
        again.assert_put(columns((0, 3, 0, 5, 100_000)))

    def test_close_with_a_dead_and_with_a_frozen_peer(self, process_ends: Ends) -> None:
        """Closing waits for no peer."""
        dead = connected(process_ends, (8 * MIB,), names=("a", "doomed"))
        dead.a.call("put", dead.channel, *slices(8 * MIB))
        process_ends.process("doomed").kill()
        dead.a.call("close")
        dead.a.call("open")
        frozen = connected(process_ends, (8 * MIB,), names=("a", "b"))
        frozen.b.call("freeze", True)
        pending = frozen.a.call("put", frozen.channel, *slices(8 * MIB))
        frozen.a.call("step", 3)
        frozen.a.call("close")
        assert frozen.a.call("done", pending)
        frozen.a.call("close")

    # -- what is left behind -------------------------------------------------------------------------------------

    def test_closing_under_a_pending_put_harms_nobody(self, process_ends: Ends) -> None:
        """What a transport has not yet taken apart must not bring its process down: seen in one close of three."""
        for _ in range(12):
            pair = connected(process_ends, (2 * MIB,))
            pending = pair.a.call("put", pair.channel, *slices(2 * MIB))
            pair.a.call("step", 1)
            pair.a.call("close")
            assert pair.a.call("done", pending)
            process_ends.close_transports()

    def test_nothing_is_left_behind(self, process_ends: Ends) -> None:
        """File descriptors and threads, over several lives of a transport that has really moved bytes."""
        counts = []
        for _ in range(4):
            pair = connected(process_ends, make="allocate")
            pair.put(columns((0, 0, 0, 0, 4096)))
            pair.a.call("view", pair.channel, 0)
            pair.a.call("close_channel", pair.channel)
            process_ends.close_transports()
            counts.append((pair.a.call("census"), pair.b.call("census")))
        assert counts[1] == counts[2] == counts[3], f"(file descriptors, threads) of both ends, by life: {counts}"
