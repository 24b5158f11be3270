"""State in the simulated world: races over a slot, and mutants of the protocol that must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from torchkv_loopback import Faults

from tests.helpers.references.memory import Shadow, guarded, slot_bytes, slot_snapshot
from tests.helpers.simulation import requests
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from tests.helpers.simulation.requests import done
from tests.helpers.simulation.scenario import Scenario
from torchkv.errors import KVError, PageOutOfRange, TransferCancelled, TransferTimeout
from torchkv.layout.layer_groups import SLOTS
from torchkv.layout.layout import KVLayout, State
from torchkv.protocol.actions import BoundGrant
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.request import ReceiverRequest, Writer

SLOW = Faults(min_delay=0.05, max_delay=0.4, survive=1.0)
STATES = (State("ssm", (4, 3), torch.int16, shard_dim=0), State("flat", (5,), torch.uint8, layers=(1,)))
SEEDS = range(2000, 2150)
Patch = pytest.MonkeyPatch


def hybrid() -> KVLayout:
    return KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=4, page_size=4, dtype=torch.int16, states=STATES)


def cluster(*layouts: tuple[str, KVLayout]) -> Cluster:
    return Cluster([Place(name, layout, num_slots=4) for name, layout in layouts], seed=requests.seed(), faults=SLOW)


def pair() -> Cluster:
    return cluster(("p", hybrid()), ("d", hybrid()))


def flying(world: Cluster) -> int:
    return sum(world.world.in_flight.values())


# -- races ------------------------------------------------------------------------------------------------------------


def _abort_race(world: Cluster) -> list[str]:
    """A full hit: only state is in flight. The receiver cancels, and reuses the slot as soon as it may."""
    writer, reader = world[0], world[1]
    memory = guarded(world, 1)
    rx = reader.recv_pages("old", [], 0, prefix_tokens=8, state_slot=2)
    for layer in (0, 1):
        writer.send_state("old", layer, 3, 1)
    assert world.run(lambda: flying(world) > 0, limit=5)
    world.pause(0)
    cancel = reader.cancel("old")
    world.run(limit=0.001)
    error = rx.exception()
    assert isinstance(error, TransferCancelled), "the call fails at once"
    if not cancel.is_completed():  # else the protocol is broken: nothing has proved the writer quiescent
        assert reader.quarantined(slots=True) == {2: (0,)}
        assert error.pages_safe is False
        with pytest.raises(PageOutOfRange, match=r"slot 2 is quarantined: ranks \[0\]"):
            reader.recv_pages("new", [1], 0, state_slot=2)
    world.run(limit=0.5)
    world.resume(0)
    assert world.run(lambda: cancel.is_completed() and not flying(world), limit=20)
    world.run(limit=5)
    memory.check_free("afterwards")
    return memory.problems


def assert_transfer(world: Cluster, name: str) -> None:
    """A new request succeeds, and every byte is right."""
    world.observers.clear()
    memory = Shadow(world[1], np.random.default_rng())
    sources = {0: (world[0].cache.layout, slot_snapshot(world[0]), 1)}
    rx = world[1].recv_pages(name, [1, 2], 0, state_slot=2)
    sent = world[0].send_pages(name, [5, 6], 1)
    finished = world[0].finish(name, 1, state_slot=1)
    assert world.run(done(rx, sent, finished), limit=20)
    assert rx.exception() is None
    memory.check_state(name, 2, sources, [0, 1])
    assert memory.problems == []
    slot_bytes(world[1])["flat", 1][2, -1] ^= 1  # negative control of this comparison
    memory.check_state(name, 2, sources, [0, 1])
    assert memory.problems == [f"{name} on rank 1: 1 wrong bytes in ('flat', 1)"]


def test_late_writes_of_a_cancelled_requests_state_never_reach_the_slots_next_owner() -> None:
    world = pair()
    assert _abort_race(world) == []
    assert world[1].quarantined(slots=True) == {}
    world[0].cancel("old")
    assert_transfer(world, "new")


def test_the_race_over_a_slot_is_real(monkeypatch: Patch) -> None:
    """Negative control: with a receiver that frees the slot at once, the next owner's state is destroyed."""

    def free_at_once(self: ReceiveEndings, req: object) -> None:
        self.end(req)

    monkeypatch.setattr(ReceiveEndings, "end_if_quiescent", free_at_once)
    problems = _abort_race(pair())
    assert problems
    assert all("slot 2" in problem and "free, but written to" in problem for problem in problems)


def test_a_writer_killed_in_the_middle_of_its_state() -> None:
    """Its last pieces may still land: the slot is free only after those."""
    world = pair()
    memory = Shadow(world[1], np.random.default_rng())
    rx = world[1].recv_pages("r", [3], 0, state_slot=1)
    world[0].send_state("r", 0, 2, 1)
    world[0].send_state("r", 1, 2, 1)
    assert world.run(lambda: flying(world) > 0, limit=5)
    world.kill(0)
    free_at: list[int] = []

    def watch(rank: Rank) -> None:
        for released in memory.released().values():
            free_at.append(flying(world))
            memory.reuse(*released)

    world.observers.append(watch)
    assert world.run(done(rx), limit=5)
    world.run(limit=10)
    assert free_at == [0]
    assert world[1].quarantined(slots=True) == {}
    memory.check_free("afterwards")
    assert memory.problems == []


# -- broken protocols -------------------------------------------------------------------------------------------------


def _finish_sends_no_state(patch: Patch) -> None:
    """State that was not sent layer by layer is never sent, and finish does not ask for it."""
    patch.setattr("torchkv.protocol.sending.sender.state_left", lambda *args: ())
    patch.setattr("torchkv.protocol.sending.missing.state_left", lambda *args: ())


def _state_is_optional(patch: Patch) -> None:
    """... and the receiver does not wait for it."""
    _finish_sends_no_state(patch)
    real = Writer.missing

    def missing(self: Writer, layers: Collection[int] | None, num_tokens: int) -> str | None:
        found = real(self, layers, num_tokens)
        return None if found is not None and found.endswith("state") else found

    patch.setattr(Writer, "missing", missing)


def _pages_count_as_state(patch: Patch) -> None:
    """A layer is reported complete as soon as its pages are."""
    real = Writer.missing

    def missing(self: Writer, layers: Collection[int] | None, num_tokens: int) -> str | None:
        found = real(self, layers, num_tokens)
        return None if found is not None and layers is not None and found.endswith("state") else found

    patch.setattr(Writer, "missing", missing)


def _slot_is_free_at_failure(patch: Patch) -> None:
    """The pages of a failed request wait for its writers, its slot does not."""
    fail = ReceiveEndings.fail

    def fail_and_free(self: ReceiveEndings, req: ReceiverRequest, error: KVError, **how: Any) -> None:
        fail(self, req, error, **how)
        if not req.ended and req.state_slot is not None:
            self._leases.marks(SLOTS)[req.state_slot] = 0
            req.state_slot = None

    patch.setattr(ReceiveEndings, "fail", fail_and_free)


def _writes_to_the_slot_next_to_it(patch: Patch) -> None:
    real = BoundGrant.of_state

    def of_state(self: BoundGrant) -> BoundGrant:
        made = real(self)
        made.pages[:] ^= 1
        return made

    patch.setattr(BoundGrant, "of_state", of_state)


@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        (_state_is_optional, "wrong bytes in ('ssm'"),
        (_pages_count_as_state, "wrong bytes in ('ssm'"),
        (_slot_is_free_at_failure, "free, but written to"),
        (_writes_to_the_slot_next_to_it, "free, but written to"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_broken_protocols_of_state_are_caught(
    monkeypatch: Patch, mutant: Callable[[Patch], None], symptom: str
) -> None:
    for seed in SEEDS[:3]:
        assert Scenario(seed, states=STATES).run() == []
    mutant(monkeypatch)
    for number, seed in enumerate(SEEDS):
        if any(symptom in problem for problem in Scenario(seed, states=STATES).run()):
            print(f"caught after {number + 1} seeds")
            return
    pytest.fail(f"{len(SEEDS)} seeds found nothing wrong with a broken protocol")


def test_a_sender_that_forgets_state_never_makes_a_receive_succeed(monkeypatch: Patch) -> None:
    """The receiver waits for the state that it is owed, and the request fails with the layer's name."""
    _finish_sends_no_state(monkeypatch)
    errors = []
    for seed in SEEDS[:8]:
        scenario = Scenario(seed, states=STATES)
        assert scenario.run() == []
        errors += [receiving.work.exception() for receiving in scenario.receivings]
    late = [str(error) for error in errors if isinstance(error, TransferTimeout)]
    assert any("'s state from rank" in text for text in late)
