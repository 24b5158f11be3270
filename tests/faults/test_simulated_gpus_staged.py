"""The runs of the resident loop in `test_simulated_loops` that pack pages of GPUs for a network, and unpack them.

Kernels do, which end some time after they were launched, and the GPU's driver breaks now and then.
"""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.helpers.simulation.cluster import Cluster, Place
from tests.helpers.simulation.loop_runs import clean_run, note_staged
from tests.helpers.simulation.requests import done, layout, send
from torchkv.protocol.receiving.receiver import Receiver
from torchkv.protocol.receiving.request import ReceiverRequest

clean = partial(clean_run, gpu=True, network=True, staged=True)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are packed and unpacked to their end, and are taken back at either side while kernels are under way."""
    seen, landed = note_staged(monkeypatch), Receiver.landed

    def on_landed(self: Receiver, req: ReceiverRequest) -> None:
        seen["landed"] += 1
        landed(self, req)

    monkeypatch.setattr(Receiver, "landed", on_landed)
    for seed in range(60):
        scenario = clean(seed)
        seen["launched"] += sum(gpu.log.count("launch") for gpu in scenario.cluster.gpus.values())
    assert min(seen[what] for what in ("received", "taken back with bytes", "landing")) > 5, seen
    assert seen["landed"] > 1, seen
    assert seen["launched"] > 200, seen


def test_kernels_that_pack_for_a_receiver_that_has_ended_are_waited_for() -> None:
    """They read the writer's pages, and write to its half of the stage, although nothing can be put any more."""
    readers = [Place("d", layout(rank, 2)) for rank in (0, 1)]
    world = Cluster([Place("p", layout()), *readers], seed=3, gpu=True, network=True, apart=True)
    writer, gpu = world[0].engine, world.gpus[0]
    assert world.network is not None
    assert writer.flows is not None
    world.network.pieces, world.network.slowness = 0.0, 1.0

    for number in range(4):  # until both have granted a stage
        received = [world[rank].recv_pages(f"before {number}", [3, 7, 1], 0) for rank in (1, 2)]
        works = send(world[0], [0, 1, 2], "d", f"before {number}")
        assert world.run(done(*received, *works), limit=10)
        world.run(limit=0.2)
    ring = writer.staging.sending.ring
    for rank in (1, 2):
        world[rank].recv_pages("r", [3, 7, 1], 0)
    world.run(limit=0.1)
    world._gpu_due[0] = math.inf
    sent = send(world[0], [0, 1, 2], "d", "r")[0]
    world.run(limit=0.05)
    assert gpu.pending
    for rank in (1, 2):
        world.kill(rank)
        writer.flows.core.world["peers"][rank]["failed"] = -1  # as a put before these would have shown
    world.run(limit=30)
    assert gpu.pending
    assert not sent.is_completed()
    assert len(ring.stages) == 2
    world._gpu_due[0] = 0.0
    assert world.run(lambda: not gpu.pending and sent.is_completed() and not ring.stages, limit=30)
