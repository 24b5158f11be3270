"""Runs of the resident loop in plain Python, whole and broken: ``python -m tests.helpers.simulation.broken_loops``.

To be run with ``NUMBA_DISABLE_JIT=1``, for then the loop's functions are ordinary ones that can be replaced. Faults
that only a writer that lies would show are in `MOMENTS`, or left to tests/unit/core.

    trace SEED [network|calls|staged|single]   prints what happens in one run
    break NAME [gpu|network|gpus apart|gpus staged|calls|staged|single]   breaks it; fails unless some seed shows it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.apart import PAGES, Apart, kinds
from tests.helpers.fakes.loop_gpu import FakeEvent, LoopGpu
from tests.helpers.simulation.loop_runs import RUNS, loop_scenario
from tests.helpers.staged_apart import StagedApart
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core import core
from torchkv.core.core import Core
from torchkv.core.loop import (
    copying,
    grants,
    launching,
    loop,
    mailbox,
    network,
    receiving,
    rounds,
    sending,
    staging,
    stripes,
    unpacking,
)
from torchkv.core.loop.codes import (
    BOUND,
    DECIDED,
    DONE,
    OPEN,
    RECEIVED,
    SEAL,
    SEALED,
    STAGED,
    WAITING,
    WRITTEN,
)
from torchkv.core.loop.limits import MAX_EVENTS, MAX_FLOWS, RECORD_NBYTES, UNPACKINGS
from torchkv.core.peers import LoopPeers, NetworkLane
from torchkv.core.receives import Receives, with_slot
from torchkv.engine.resident.flows import Flows
from torchkv.engine.resident.routes import Routes, _Positions
from torchkv.host.atomics import copy_bytes, load, store
from torchkv.kernels.copies import ScaleTable
from torchkv.kernels.launch import ConvertParams
from torchkv.transfer.peer_connection import PeerConnection

__all__ = ["KINDS", "MOMENTS"]

SEEDS = range(150)


def swap(owner: object, **functions: Callable[..., Any] | property) -> None:
    """Replaces functions of a module, or methods of a class."""
    for name, function in functions.items():
        assert hasattr(owner, name)
        setattr(owner, name, function)


def _seals_while_it_copies() -> None:
    def seal_if_done(world: Any, flow: int) -> None:
        send = world["sends"][flow]
        if send["state"] == OPEN and send["num_pages"] >= 0 and send["due"] == 0:
            send["due"] = 1
            mailbox.owe(world, SEAL, 0, flow, send["generation"])

    swap(sending, seal_if_done=seal_if_done)
    swap(loop, seal_if_done=seal_if_done)


def _copies_on_when_taken_back() -> None:
    def take_back(self: Core, flow: int, ops: list[int]) -> bool:
        sealed = bool(self.world["sends"][flow]["state"] == SEALED)
        for index in ops:
            self._free_ops.append(index)
        self._free_sends.append(flow)
        return sealed

    swap(Core, take_back_send=take_back)


def _forgets_what_has_arrived() -> None:
    swap(Flows, _add=lambda self, req, coverage=True: self.core.receives.state(req.flow, coverage=coverage))


def _loses_what_finds_no_room() -> None:
    real = sending.pay_seal
    swap(loop, pay_seal=lambda *arguments: bool(real(*arguments)) or True)


def _forgets_commands_when_taken_back() -> None:
    def settle(world: Any) -> None:
        world["command_head"] = world["command_tail"]

    swap(loop, settle=settle)


def _copies_what_it_is_to_convert() -> None:
    swap(sending, converts=lambda seg: False)


def _scales_all_heads_alike() -> None:
    real = stripes.conversion
    swap(copying, conversion=lambda seg: (*real(seg)[:-1], 1))


def _gives_kernels_one_scale_a_job() -> None:
    real = ScaleTable.of

    def alike(rows: Any, device: torch.device) -> ScaleTable:
        return real([row if row is None else row[:1].repeat(len(row)) for row in rows], device)

    swap(ScaleTable, of=alike)


def _counts_stages_as_pages() -> None:
    """A kernel that packs, or unpacks, takes what it reads or writes there for pages of the receiver."""
    swap(ConvertParams, stage_nbytes=lambda self, mode: self.dst_nbytes)


def _takes_states_for_pages() -> None:
    real = _Positions.__init__
    swap(_Positions, __init__=lambda self, plan, first=0: real(self, plan))


def _writes_to_another_slot() -> None:
    real = with_slot
    swap(core, with_slot=lambda pages, slot: real(pages, None if slot is None else slot ^ 1))


def _forgets_states_that_have_arrived() -> None:
    real = Receives.state

    def state(self: Receives, flow: int, *, coverage: bool = True) -> Any:
        found = real(self, flow, coverage=coverage)
        for writer in found.writers:
            writer.states = [False] * len(writer.states)
        return found

    swap(Receives, state=state)


def _takes_no_piece_for_a_narrower_one() -> None:
    """The receiver reads a piece as if it held the elements of its pages."""
    swap(unpacking, sizes=lambda seg: (1, 1, 1), converts=lambda seg: False)


def _copies_the_window_wrongly() -> None:
    swap(
        stripes,
        first_owed=lambda granted, window, unit, src_page, dst_page: max(0, granted - unit) if window >= 0 else 0,
    )


def _leaves_a_page_to_other_holders() -> None:
    real = stripes.owed_pairs

    def fewer(granted: int, src_page: int, dst_page: int, start: int, count: int, stripe: int) -> tuple[int, int]:
        begin, stop = real(granted, src_page, dst_page, start, count, stripe)
        return begin, max(begin, stop - 1) if load(stripe + 16) > 1 else stop

    swap(sending, owed_pairs=fewer)


def _drops_an_op() -> None:
    real = copying.queue_op

    def queue(world: Any, index: int) -> None:
        if index % 3:
            real(world, index)

    swap(loop, queue_op=queue)
    swap(grants, queue_op=queue)


def _binds_the_grant_of_any_name() -> None:
    def waiting(world: Any, peer: int, hash0: int, hash1: int) -> int:
        for flow, send in enumerate(world["sends"]):
            if send["state"] == WAITING and send["peer"] == peer:
                return flow
        return -1

    swap(grants, _waiting=waiting)


def _leaves_a_grant_that_it_has_met() -> None:
    real = grants.meet

    def meet(world: Any, flow: int, prefixed: int) -> bool:
        pending = range(world["event_head"], world["event_tail"])
        events = [world["events"][number & (MAX_EVENTS - 1)] for number in pending]
        kinds = [int(event["kind"]) for event in events]
        met = bool(real(world, flow, prefixed))
        for event, kind in zip(events, kinds, strict=True):
            event["kind"] = kind
        return met

    swap(grants, meet=meet)


def _drops_ops_that_wait() -> None:
    swap(loop, park=lambda world, index: None)


def _announces_what_is_only_enqueued() -> None:
    real = launching.landed

    def landed(world: Any, send: Any, op: Any) -> bool:
        if real(world, send, op):
            return True
        if op["posted"] == 0:
            return False
        op["posted"], op["at"] = 0, op["until"]
        send["flying"] -= 1
        world["flying"] -= 1
        return True

    swap(sending, landed=landed)


def _forgets_what_is_under_way() -> None:
    swap(Core, flying=lambda self, index: 0)


def _expects_seals_for_ever() -> None:
    swap(loop, withdraw_hint=lambda world, send: None)


def _reuses_page_ids_at_once() -> None:
    real = launching.place_ids

    def place(world: Any, send: Any, op: Any) -> bool:
        send["ids_posted"] = 0
        return bool(real(world, send, op))

    swap(launching, place_ids=place)


def _announces_what_is_only_put() -> None:
    real = sending._put

    def put(world: Any, send: Any, op: Any, budget: int) -> int:
        done = int(real(world, send, op, budget))
        op["arrived"], op["mark"] = op["at"], 0
        return done

    swap(sending, _put=put)


def _puts_before_the_event() -> None:
    swap(sending, is_open=lambda world, send, op: True)


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
    swap(Core, put=lambda self, index: 0)


def _reuses_the_memory_of_records() -> None:
    def room(world: Any, peer: Any) -> int:
        return 2 if peer["endpoint"] and not peer["failed"] else 0

    swap(network, RECORDS=1)
    swap(mailbox, record_room=room)


def _notes_nothing_that_python_was_told() -> None:
    swap(LoopPeers, takes_grant=lambda self, rank, flow, generation: True)


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


def _binds_a_grant_twice() -> None:
    real = grants.on_part

    def on_part(world: Any, source: int) -> None:
        peer, flow = world["peers"][source], int(world["record"]["flows"])
        store(peer["arrivals"] + 8 * flow, 0)
        real(world, source)

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


def _frees_what_is_only_told() -> None:
    real = sending.tell_pieces

    def tell(world: Any, peer: Any) -> bool:
        told = bool(real(world, peer))
        if peer["piece_head"] == peer["piece_tail"]:
            peer["freed"] = peer["packed"]
        return told

    swap(loop, tell_pieces=tell)


def _counts_credits_twice() -> None:
    def on_credit(world: Any, source: int) -> None:
        peer, until = world["peers"][source], world["record"]["lo"]
        peer["freed"] = min(peer["packed"], peer["freed"] + 2 * (until - peer["freed"]))

    swap(loop, on_credit=on_credit)


def _tells_of_pieces_that_are_only_put() -> None:
    real = sending.tell_pieces

    def tell(world: Any, peer: Any) -> bool:
        flushed, peer["flushed"] = int(peer["flushed"]), 1 << 62
        told = bool(real(world, peer))
        peer["flushed"] = flushed
        return told

    swap(loop, tell_pieces=tell)


def _unpacks_for_failed_requests() -> None:
    swap(Receives, stop_unpacking=lambda self, flow: None)


def _unpacks_pieces_of_any_generation() -> None:
    real = unpacking._unpack

    def unpack(world: Any, source: int, at: int) -> bool:
        record = world["record"]
        flow = record["flows"] & 0xFFFFFFFF
        if flow < MAX_FLOWS:
            record["generation"] = world["receives"][flow]["generation"]
        return bool(real(world, source, at))

    swap(unpacking, _unpack=unpack)


def _unpacks_beyond_the_stage() -> None:
    real = unpacking.on_staged

    def on_staged(world: Any, source: int) -> bool:
        peer = world["peers"][source]
        size, peer["ring_nbytes"] = int(peer["ring_nbytes"]), 1 << 40
        known = bool(real(world, source))
        peer["ring_nbytes"] = size
        return known

    swap(loop, on_staged=on_staged)


def _loses_pieces_that_python_serves() -> None:
    real = Receives.close

    def close(self: Receives, flow: int) -> None:
        real(self, flow)
        self._memory[0]["receives"][flow]["unpacks"] = 0

    swap(Receives, close=close)


def _seals_before_its_pieces_are_unpacked() -> None:
    swap(loop, follow=receiving.on_record)


def _counts_what_is_only_launched() -> None:
    real = unpacking.land

    def land(world: Any) -> bool:
        for number in range(world["unpack_head"], world["unpack_tail"]):
            world["unpackings"][number & (UNPACKINGS - 1)]["launched"] = 0
        return bool(real(world))

    swap(loop, land=land)


def _ends_requests_that_kernels_still_write_to() -> None:
    real = Receives.stop_unpacking

    def stop_unpacking(self: Receives, flow: int) -> bool:
        real(self, flow)
        self._memory[0]["receives"][flow]["unpacking"] = self._memory[0]["receives"][flow]["stopped"] = 0
        return False

    swap(Receives, stop_unpacking=stop_unpacking)


def _puts_what_is_not_packed() -> None:
    real = staging._launch
    swap(staging, _launch=lambda *arguments: min(1, real(*arguments)))


def _decides_without_the_others() -> None:
    def on_done(world: Any, source: int, flow: int, generation: int) -> bool:
        world["votes"][source][flow] = generation
        index = world["rounds_of"][source][flow] - 1
        if index < 0 or world["awaited"][source][flow] != generation:
            return False
        world["rounds_of"][source][flow] = 0
        if world["rounds"][index]["missing"] > 0:
            world["rounds"][index]["missing"] = 0
            mailbox.owe(world, DECIDED, 0, index, 0)
        return True

    swap(rounds, on_done=on_done)
    swap(loop, on_done=on_done)


def _tells_one_rank_of_a_round() -> None:
    real = rounds.pay_decided

    def pay(world: Any, index: int) -> bool:
        world["rounds"][index]["next"] = max(1, world["rounds"][index]["next"])
        return bool(real(world, index))

    swap(loop, pay_decided=pay)


def _ends_what_only_the_leader_may_end() -> None:
    real = loop._pay_one

    def pay(world: Any, kind: int, rank: int, flow: int, generation: int) -> bool:
        if kind == DONE and rank != world["rank"]:
            receiving.succeed(world, flow)
        return bool(real(world, kind, rank, flow, generation))

    swap(loop, _pay_one=pay)


def _one_seal_is_enough() -> None:
    real = receiving._on_seal

    def on_seal(world: Any, receive: Any, number: int, flow: int) -> bool:
        writers, receive["num_writers"] = receive["num_writers"], 1
        try:
            return bool(real(world, receive, 0 if number == 0 else number, flow))
        finally:
            receive["num_writers"] = writers

    swap(receiving, _on_seal=on_seal)


def _takes_records_of_any_generation() -> None:
    real = receiving.on_record

    def on_record(world: Any, source: int) -> bool:
        flow = world["record"]["flows"] & 0xFFFFFFFF
        if world["receives"][flow]["state"] == OPEN:
            world["record"]["generation"] = world["receives"][flow]["generation"]
        return bool(real(world, source))

    swap(receiving, on_record=on_record)
    swap(unpacking, on_record=on_record)


def _a_record_of_an_earlier_request() -> str:
    pair = Pair()
    flow = pair.receive(1, generation=2)
    pair.tell(head=WRITTEN | pair.layers << 32, flows=flow, generation=1, hi=TOKENS, nbytes=8)
    pair.tell(head=SEAL, flows=flow, generation=1, lo=1)
    _, heard = pair.run()
    return "it completes a later one" if any(notice.kind == RECEIVED for notice in heard) else ""


def _a_grant_that_a_message_overtakes() -> str:
    apart = Apart()
    apart.meet()
    flow = apart.receive(1)
    apart.wait()
    apart.grant(flow, [1])
    apart.reader.runner.step()
    with apart.writer.runner.standing_still():
        new = apart.writer.peers.takes_grant(1, flow, 1)
    told, _ = apart.run(60)
    return "it binds a request on the loop, too" if new and BOUND in kinds(told) else ""


def _pages_that_are_written_late() -> str:
    gpu = LoopGpu()
    apart, event = Apart(gpu=gpu), FakeEvent(gpu)
    apart.start(apart.send(apart.receive(1), [3]), [5], gate=event.gate)
    apart.run(20)
    apart.src[:, 5] = 0x77
    event.happen()
    apart.run(60)
    return "" if (apart.dst[:, 3] == 0x77).all() else "older bytes"


def _pieces_through_a_small_stage() -> str:
    """A reader that takes turns seldom, and a stage of a few pages."""
    for seed in range(10):
        apart = StagedApart(seed, nbytes=1024)
        pages = list(range(PAGES))
        send = apart.stage(apart.accept(pages), pages)
        apart.start(send, pages[::-1])
        for turn in range(600):
            apart.writer.runner.step()
            apart.world.advance(apart.world.now + 1e-4)
            if turn % 5 == 0:
                apart.reader.runner.step()
        if not torch.equal(apart.dst, apart.expected(pages[::-1])):
            return f"seed {seed}: other bytes"
    return ""


def _a_piece_of_an_earlier_request() -> str:
    apart = StagedApart()
    flow = apart.accept([0, 1], 2)
    head = STAGED | 1 << 32
    apart.message(apart.record(head=head, flows=flow, generation=1, hi=2 * TOKENS, nbytes=PAGE))
    apart.run(5)
    return "" if (apart.dst == 0xAB).all() else "it was unpacked"


def _a_piece_beyond_the_stage() -> str:
    apart = StagedApart()
    flow = apart.accept([0, 1])
    head, beyond = STAGED | 1 << 32, {"spare": 1024 - TOKENS}
    apart.message(apart.record(head=head, flows=flow, generation=1, hi=2 * TOKENS, nbytes=PAGE, **beyond))
    apart.run(5)
    return "" if (apart.dst == 0xAB).all() else "it was unpacked"


# What runs of the simulation show seldom, or never if they are honest. name -> (breaks it, looks for what is wrong)
MOMENTS: dict[str, tuple[Callable[[], None], Callable[[], str]]] = {
    "no generation check": (_takes_records_of_any_generation, _a_record_of_an_earlier_request),
    "no note of what Python was told": (_notes_nothing_that_python_was_told, _a_grant_that_a_message_overtakes),
    "grants that bind twice": (_binds_a_grant_twice, _a_grant_that_a_message_overtakes),
    "positions that are free when told": (_frees_what_is_only_told, _pieces_through_a_small_stage),
    "credits that count twice": (_counts_credits_twice, _pieces_through_a_small_stage),
    "puts before the event": (_puts_before_the_event, _pages_that_are_written_late),
    "pieces told before they arrive": (_tells_of_pieces_that_are_only_put, _pieces_through_a_small_stage),
    "pieces of any generation": (_unpacks_pieces_of_any_generation, _a_piece_of_an_earlier_request),
    "pieces beyond the stage": (_unpacks_beyond_the_stage, _a_piece_beyond_the_stage),
}

# name -> (breaks it, whether to look at runs in which nothing may fail)
GPU_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "announces what is only enqueued": (_announces_what_is_only_enqueued, True),
    "expects seals for ever": (_expects_seals_for_ever, False),
    "forgets what is under way": (_forgets_what_is_under_way, False),
    "reuses page ids at once": (_reuses_page_ids_at_once, False),
}

NETWORK_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
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

GPUS_APART_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "announces what is only put": (_announces_what_is_only_put, True),
    "forgets puts under way": (_forgets_puts_under_way, False),
}

GPUS_STAGED_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "counts what is only launched": (_counts_what_is_only_launched, True),
    "ends requests that kernels still write to": (_ends_requests_that_kernels_still_write_to, False),
    "puts what is not packed": (_puts_what_is_not_packed, True),
    "seals before its pieces are unpacked": (_seals_before_its_pieces_are_unpacked, True),
    "unpacks for failed requests": (_unpacks_for_failed_requests, False),
}

CALLS_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "announces what is only put": (_announces_what_is_only_put, True),
    "sends records through any lane": (_sends_records_through_any_lane, True),
    "drives any lane": (_drives_any_lane, True),
}

STAGED_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "tells of pieces that are only put": (_tells_of_pieces_that_are_only_put, True),
    "unpacks for failed requests": (_unpacks_for_failed_requests, False),
    "loses pieces that Python serves": (_loses_pieces_that_python_serves, True),
}

BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "seal before flush": (_seals_while_it_copies, False),
    "attest by the first writer only": (_one_seal_is_enough, False),
    "copies on when taken back": (_copies_on_when_taken_back, False),
    "forgets what has arrived": (_forgets_what_has_arrived, True),
    "loses what finds no room": (_loses_what_finds_no_room, True),
    "forgets commands when taken back": (_forgets_commands_when_taken_back, True),
    "copies the window wrongly": (_copies_the_window_wrongly, True),
    "leaves a page to other holders": (_leaves_a_page_to_other_holders, True),
    "drops an op": (_drops_an_op, True),
    "drops ops that wait": (_drops_ops_that_wait, True),
    "binds the grant of any name": (_binds_the_grant_of_any_name, True),
    "decides without the others": (_decides_without_the_others, False),
    "ends what only the leader may end": (_ends_what_only_the_leader_may_end, False),
    "tells one rank of a round": (_tells_one_rank_of_a_round, True),
}


SINGLE_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "leaves a grant that it has met": (_leaves_a_grant_that_it_has_met, False),
}


CONVERTS_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "copies what it is to convert": (_copies_what_it_is_to_convert, True),
    "scales all heads alike": (_scales_all_heads_alike, True),
}


STATES_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "takes states for pages": (_takes_states_for_pages, True),
    "writes to another slot": (_writes_to_another_slot, True),
    "forgets states that have arrived": (_forgets_states_that_have_arrived, True),
}


CONVERTS_STAGED_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "scales all heads alike": (_scales_all_heads_alike, True),
    "takes no piece for a narrower one": (_takes_no_piece_for_a_narrower_one, True),
}


CONVERTS_GPUS_STAGED_BREAKS: dict[str, tuple[Callable[[], None], bool]] = {
    "gives kernels one scale a job": (_gives_kernels_one_scale_a_job, True),
    "counts stages as pages": (_counts_stages_as_pages, True),
}


KINDS = {  # of `RUNS`: what breaks them
    "": BREAKS,
    "gpu": GPU_BREAKS,
    "network": NETWORK_BREAKS,
    "gpus apart": GPUS_APART_BREAKS,
    "gpus staged": GPUS_STAGED_BREAKS,
    "calls": CALLS_BREAKS,
    "staged": STAGED_BREAKS,
    "single": SINGLE_BREAKS,
    "converts": CONVERTS_BREAKS,
    "converts staged": CONVERTS_STAGED_BREAKS,
    "converts gpus staged": CONVERTS_GPUS_STAGED_BREAKS,
    "states": STATES_BREAKS,
}


def main(command: str, argument: str, kind: str = "") -> None:
    if command == "trace":
        print(*map(repr, scenario_trace(int(argument), kind)), sep="\n")
        return
    if argument in MOMENTS:
        damage, look = MOMENTS[argument]
        assert not look()
        damage()
        print(look() or sys.exit(f"nothing wrong was found with a loop that has {argument}"))
        return
    damage, benign = KINDS[kind][argument]
    damage()
    for seed in SEEDS:
        try:
            problems = loop_scenario(seed, benign=benign, **RUNS[kind]).run()
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            problems = [repr(error)]
        if problems:
            print(f"seed {seed}: {problems[0]}")
            return
    sys.exit(f"{len(SEEDS)} seeds found nothing wrong with a loop that {argument}")


def scenario_trace(seed: int, kind: str) -> list[tuple[object, ...]]:
    run = loop_scenario(seed, **RUNS[kind])
    assert run.run() == []
    return run.trace


if __name__ == "__main__":
    main(*sys.argv[1:])
