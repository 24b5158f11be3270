"""Loops that say, or believe, too early or too late what puts have done, through a network and in stages."""

from __future__ import annotations

from typing import Any

from tests.helpers.simulation.broken.swapping import Break, swap
from torchkv.core.loop import grants, loop, mailbox, network, sending
from torchkv.core.loop.limits import RECORD_NBYTES
from torchkv.core.peers import NetworkLane
from torchkv.core.receives import Receives
from torchkv.core.sends import Sends
from torchkv.engine.resident.routes import Routes
from torchkv.host.atomics import load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.transfer.peer_connection import PeerConnection

__all__ = [
    "CALLS_BREAKS",
    "GPUS_APART_BREAKS",
    "NETWORK_BREAKS",
    "STAGED_BREAKS",
    "tells_of_pieces_that_are_only_put",
    "unpacks_for_failed_requests",
]


def _announces_what_is_only_put() -> None:
    real = sending._put

    def put(world: Any, send: Any, op: Any, budget: int) -> int:
        done = int(real(world, send, op, budget))
        op["arrived"], op["mark"] = op["at"], 0
        return done

    swap(sending, _put=put)


def _takes_the_end_of_puts_for_their_arrival() -> None:
    real = network._reap

    def reap(peer: Any) -> bool:
        changed = bool(real(peer))
        if peer["requests"] == 0:
            peer["flushed"] = peer["puts"]
        return changed

    swap(network, _reap=reap)


def _counts_puts_after_the_flush() -> None:
    real = network._flush

    def flush(world: Any, peer: Any) -> bool:
        peer["flushing"] = peer["puts"]
        return bool(real(world, peer))

    swap(network, _flush=flush)


def _forgets_puts_under_way() -> None:
    swap(Sends, put=lambda self, index: 0)


def _reuses_the_memory_of_records() -> None:
    def room(world: Any, peer: Any) -> int:
        return 2 if peer["endpoint"] and not peer["failed"] else 0

    swap(network, RECORDS=1)
    swap(mailbox, record_room=room)


def _does_not_tell_again() -> None:
    def untold(self: Receives, flow: int) -> tuple[list[int], bool]:
        for writer in self._world["receives"][flow]["writers"]:
            writer["told"] = 0
        return real(self, flow)

    real = Receives.untold
    swap(Receives, untold=untold)


def _does_not_wait_to_be_heard() -> None:
    def greet(world: Any, peer: int) -> None:
        world["peers"][peer]["hears"] = 1

    swap(grants, greet=greet)


def _takes_part_of_a_grant_for_all_of_it() -> None:
    def on_part(world: Any, source: int) -> None:
        record, peer = world["record"], world["peers"][source]
        body = peer["arrivals"] + grants.SLOTS_AT + int(record["flows"]) * mailbox.GRANT_SLOT + record["lo"]
        copy_bytes(body, world["address"] + grants._BEHIND, network.received(world) - RECORD_NBYTES)
        latest = peer["arrivals"] + 8 * record["flows"]
        if load(latest) < record["generation"]:
            store(latest, record["generation"])
            grants.on_grant(world, source, grants.FROM_NETWORK)

    swap(loop, on_part=on_part)


def _says_nothing_of_what_it_has_missed() -> None:
    swap(loop, on_missed=lambda world, source: None)


def _hears_only_while_it_has_flows() -> None:
    hear = loop._hear_network
    swap(loop, _hear_network=lambda world: bool(world["network"] and hear(world)))


def _sends_records_through_any_lane() -> None:
    def serving(self: Routes, rank: int) -> PeerConnection | None:
        connection = self._connections.get(rank)
        usable = connection is not None and connection.channel is not None and not connection.closed
        return connection if usable and connection is not None and self.lane(rank, connection) is not None else None

    swap(Routes, serving=serving)


def _drives_any_lane() -> None:
    swap(NetworkLane, is_driven=property(lambda lane: lane.native is not None))


def tells_of_pieces_that_are_only_put() -> None:
    real = sending.tell_pieces

    def tell(world: Any, peer: Any) -> bool:
        flushed, peer["flushed"] = int(peer["flushed"]), 1 << 62
        told = bool(real(world, peer))
        peer["flushed"] = flushed
        return told

    swap(loop, tell_pieces=tell)


def unpacks_for_failed_requests() -> None:
    swap(Receives, stop_unpacking=lambda self, flow: None)


def _loses_pieces_that_python_serves() -> None:
    real = Receives.close

    def close(self: Receives, flow: int) -> None:
        real(self, flow)
        self._memory[0]["receives"][flow]["unpacks"] = 0

    swap(Receives, close=close)


NETWORK_BREAKS: dict[str, Break] = {
    "announces what is only put": (_announces_what_is_only_put, True),
    "takes the end of puts for their arrival": (_takes_the_end_of_puts_for_their_arrival, True),
    "counts puts after the flush": (_counts_puts_after_the_flush, True),
    "forgets puts under way": (_forgets_puts_under_way, False),
    "reuses the memory of records": (_reuses_the_memory_of_records, True),
    "hears only while it has flows": (_hears_only_while_it_has_flows, True),
    "does not tell again": (_does_not_tell_again, False),
    "does not wait to be heard": (_does_not_wait_to_be_heard, True),
    "takes part of a grant for all of it": (_takes_part_of_a_grant_for_all_of_it, True),
    "says nothing of what it has missed": (_says_nothing_of_what_it_has_missed, True),
}


GPUS_APART_BREAKS: dict[str, Break] = {
    "announces what is only put": (_announces_what_is_only_put, True),
    "forgets puts under way": (_forgets_puts_under_way, False),
}


CALLS_BREAKS: dict[str, Break] = {
    "announces what is only put": (_announces_what_is_only_put, True),
    "sends records through any lane": (_sends_records_through_any_lane, True),
    "drives any lane": (_drives_any_lane, True),
}


STAGED_BREAKS: dict[str, Break] = {
    "tells of pieces that are only put": (tells_of_pieces_that_are_only_put, True),
    "unpacks for failed requests": (unpacks_for_failed_requests, False),
    "loses pieces that Python serves": (_loses_pieces_that_python_serves, True),
}
