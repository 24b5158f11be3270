"""What the resident loop takes for a request, by how many loops it has a mailbox of: the real compiled functions.

A writer and a reader in one process, without threads; the other loops are connected to both, and send nothing. Each
turn of a loop looks into every mailbox, of which there are `MAX_PEERS`; requests of other ranks go through Python.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torchkv.bench.scale.loops import Pair
from torchkv.core.core import Core
from torchkv.core.loop.codes import OP_DONE, RECEIVED, SENT
from torchkv.core.loop.limits import MAX_PEERS
from torchkv.errors import KVError

__all__ = ["LoopCost", "loop_cost"]

TURNS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCost:
    """turn: seconds of CPU of a turn with nothing to do, called from Python, as a loop with a thread of its own is not.

    request: of all turns of both loops for one request of a page of 256 bytes in each of 32 layers. turns: how many.
    """

    loops: int
    turn: float
    request: float
    turns: float


def loop_cost(loops: int, *, requests: int) -> LoopCost:
    """loops: in the group, of which two are busy. Raises ``KVError`` if a request does not arrive."""
    assert 2 <= loops <= MAX_PEERS
    pair = Pair(layers=32, pages=1)
    others = [Core(rank) for rank in range(2, loops)]
    try:
        for other in others:
            for mine in (pair.writer, pair.reader):
                mine.peers.connect(other.rank, other.peers.descriptor())
                other.peers.connect(mine.rank, mine.peers.descriptor())
        began = time.thread_time()
        for _ in range(TURNS):
            pair.reader.runner.step()
        turn = (time.thread_time() - began) / TURNS
        seconds, turns = 0.0, 0
        for generation in range(1, requests + 1):
            flow = _begin(pair, generation)
            began = time.thread_time()
            while pair.writer.runner.step() | pair.reader.runner.step():
                turns += 2
            seconds += time.thread_time() - began
            _end(pair, flow)
        return LoopCost(loops=loops, turn=turn, request=seconds / requests, turns=turns / requests)
    finally:
        for core in (pair.writer, pair.reader, *others):
            core.close()


def _begin(pair: Pair, generation: int) -> int:
    pair.dst[:] = 0xAB
    flow = pair.receive(1, generation=generation)
    name = f"request {generation}"
    sent = pair.wait(name=name)
    pair.start(sent, [0])
    pair.writer.sends.finish(sent, 1, b"")
    pair.grant(flow, [0], name=name)
    return flow


def _end(pair: Pair, flow: int) -> None:
    ended = {notice.kind: notice.index for core in (pair.writer, pair.reader) for notice in core.events.take()}
    pair.writer.sends.op_results([ended.get(OP_DONE, -1)])
    if ended.get(RECEIVED) != flow or SENT not in ended or (pair.dst != pair.src).any():
        raise KVError(f"a request of the resident loop has not arrived: {ended}")
    pair.writer.sends.end(ended[SENT])
    pair.reader.receives.close(flow)
    pair.reader.receives.free(flow)
