"""Broken loops that random runs seldom show, each with the moment that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.apart import PAGES, Apart
from tests.helpers.fakes.loop_gpu import FakeEvent, LoopGpu
from tests.helpers.notices import kinds
from tests.helpers.records import tell
from tests.helpers.simulation.broken.lanes import tells_of_pieces_that_are_only_put
from tests.helpers.simulation.broken.swapping import swap
from tests.helpers.staged_apart import StagedApart
from torchkv.bench.scale.loops import PAGE, TOKENS, Pair
from torchkv.core.loop import grants, loop, receiving, sending, unpacking
from torchkv.core.loop.codes import BOUND, OPEN, RECEIVED, SEAL, STAGED, WRITTEN
from torchkv.core.loop.limits import MAX_FLOWS
from torchkv.core.peers import LoopPeers
from torchkv.host.atomics import store

__all__ = ["MOMENTS"]


def _puts_before_the_event() -> None:
    swap(sending, is_open=lambda world, send, op: True)


def _notes_nothing_that_python_was_told() -> None:
    swap(LoopPeers, takes_grant=lambda self, rank, flow, generation: True)


def _binds_a_grant_twice() -> None:
    real = grants.on_part

    def on_part(world: Any, source: int) -> None:
        peer, flow = world["peers"][source], int(world["record"]["flows"])
        store(peer["arrivals"] + 8 * flow, 0)
        real(world, source)

    swap(loop, on_part=on_part)


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
    tell(pair.writer, 1, head=WRITTEN | pair.layers << 32, flows=flow, generation=1, hi=TOKENS, nbytes=8)
    tell(pair.writer, 1, head=SEAL, flows=flow, generation=1, lo=1)
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


MOMENTS: dict[str, tuple[Callable[[], None], Callable[[], str]]] = {
    "no generation check": (_takes_records_of_any_generation, _a_record_of_an_earlier_request),
    "no note of what Python was told": (_notes_nothing_that_python_was_told, _a_grant_that_a_message_overtakes),
    "grants that bind twice": (_binds_a_grant_twice, _a_grant_that_a_message_overtakes),
    "positions that are free when told": (_frees_what_is_only_told, _pieces_through_a_small_stage),
    "credits that count twice": (_counts_credits_twice, _pieces_through_a_small_stage),
    "puts before the event": (_puts_before_the_event, _pages_that_are_written_late),
    "pieces told before they arrive": (tells_of_pieces_that_are_only_put, _pieces_through_a_small_stage),
    "pieces of any generation": (_unpacks_pieces_of_any_generation, _a_piece_of_an_earlier_request),
    "pieces beyond the stage": (_unpacks_beyond_the_stage, _a_piece_beyond_the_stage),
}
