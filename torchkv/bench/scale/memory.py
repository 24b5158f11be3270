"""Bytes that a rank keeps for every peer: of real objects, as `tracemalloc` counts them.

Without what lies outside Python's heap: sockets, ZeroMQ's and UCX's connections, mapped memory.
"""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass

import numpy as np

from torchkv.bench.scale.network import Clock, LinkModel, Network
from torchkv.bench.scale.rank import Meter, SimulatedRank
from torchkv.bench.scale.workload import Workload
from torchkv.layout.group_map import RankInfo
from torchkv.protocol.messages import Attest, ControlFrame, Seal

__all__ = ["PeerMemory", "peer_memory"]

_NUM_PAGES = 4096


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Bytes for each of ``peers``. known: of a peer that is a member. served: more, once a request has come from it."""

    peers: int
    known: float
    served: float


def peer_memory(peers: int, workload: Workload) -> PeerMemory:
    """Of a rank that holds all heads, with so many peers that do, too. Each is an instance of its own."""

    def info(rank: int) -> RankInfo:
        layout = workload.layout(0, 1)  # every rank's metadata has a layout of its own
        return RankInfo(
            rank=rank, incarnation=rank + 1, instance=f"i{rank}", layout=layout, num_pages=_NUM_PAGES, num_slots=0
        )

    network, ranks = Network(Clock(), LinkModel()), dict[int, SimulatedRank]()
    mine = info(0)
    rank = SimulatedRank(mine, [mine], network=network, peers=ranks, meter=Meter(), settled=lambda work, error: None)
    _serve(rank, 0, workload)  # what is made once, whatever the peers
    before = _traced(start=True)
    rank.meet([info(number) for number in range(1, peers + 1)])
    known = _traced() - before
    for number in range(1, peers + 1):
        _serve(rank, number, workload)
    served = _traced() - before - known
    tracemalloc.stop()
    return PeerMemory(peers, known / peers, served / peers)


def _traced(*, start: bool = False) -> int:
    gc.collect()
    if start:
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]


def _serve(rank: SimulatedRank, peer: int, workload: Workload) -> None:
    """One request from ``peer`` to its end, without a network: what it would say goes into the machines."""
    machines, messenger, now = rank.machines, rank.messenger, 0.0
    pages = np.arange(workload.pages, dtype=np.int64)
    req = machines.receiver.posts.post(
        f"request {peer}", pages, (peer,), prefix_tokens=0, total=None, work=_Work(), now=now
    )
    _tell(rank)
    for layers in workload.layer_groups():
        nbytes = workload.nbytes // workload.verbs
        machines.handle(peer, Attest(req.generation, list(layers), 0, workload.tokens, nbytes, "runs"), now)
    machines.handle(peer, Seal(req.generation, workload.pages, b""), now)
    _tell(rank)
    assert req.ended
    assert req.error is None
    if peer:
        messenger.accept(peer, ControlFrame(peer, peer + 1, 1, 0, 1 << 30, None))  # numbers that were never given
        messenger.accept(peer, ControlFrame(peer, peer + 1, 1, 0, 2, None))  # the grant and the verdict


def _tell(rank: SimulatedRank) -> None:
    rank._perform(0.0)
    rank.messenger.frames(0.0)


class _Work:
    receives = True
