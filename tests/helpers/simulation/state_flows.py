"""State in a random scenario: which slots send and receive, what is sent before `finish`, what must have arrived."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tests.helpers.references.memory import slot_snapshot
from tests.helpers.simulation.cluster import Rank
from tests.helpers.simulation.flows import Gate, Receiving, Sending
from torchkv.engine.work import KVWork
from torchkv.layout.layout import State

if TYPE_CHECKING:
    from tests.helpers.simulation.scenario import Scenario

__all__ = ["StateFlows", "random_states", "some_states"]

RECV_SLOTS = 3  # slots [0, RECV_SLOTS) receive, the rest sends


def random_states(dice: random.Random) -> list[State]:
    """No state, or one or two: sharded, in shard groups, or whole on every rank; in all layers or in some."""
    layers = dice.choice([None, None, (0,), (1, 2)])
    ssm = State("ssm", (4, 3), torch.int16, shard_dim=0, layers=layers)
    conv = State("conv", (2, 8), torch.uint8, shard_dim=1, shard_groups=dice.choice([(4, 4), (2, 6)]), layers=layers)
    flat = State("flat", (5,), torch.uint8)
    return dice.choice([[], [], [], [ssm], [conv], [flat], [ssm, flat]])


def some_states(seed: int) -> list[State]:
    """As `random_states`, but never none."""
    dice = random.Random(seed)
    while not (states := random_states(dice)):
        pass
    return states


class StateFlows:
    """The state of all flows of ``scenario``. It has its own dice, so that no other choice of a seed depends on it."""

    def __init__(self, scenario: Scenario, dice: random.Random) -> None:
        self.dice = dice
        self._scenario = scenario
        ranks = scenario.cluster.ranks
        self._sources = {rank.rank: slot_snapshot(rank) for rank in ranks}
        self._unused = {rank.rank: list(range(RECV_SLOTS, rank.cache.num_slots)) for rank in ranks}
        self._given: dict[Sending, set[int]] = {}  # layers that are sent before `finish`
        self._heard: dict[Receiving, float | None] = {}  # each request's ``progress_at`` when it was last checked

    # ------------------------------------------------------------------ what applications do

    def source_slot(self, rank: Rank) -> int | None:
        """A slot for each flow, on every rank whose layout has states, whether its layers have any or not."""
        return self._unused[rank.rank].pop() if rank.cache.layout.states else None

    def free(self, rank: Rank) -> list[int | None]:
        """Slots that may receive; [None] where the layout has no state."""
        if not rank.cache.layout.states:
            return [None]
        return [slot for slot in self._scenario.shadows[rank.rank].free_slots() if slot < RECV_SLOTS]

    def plan(self, sending: Sending, start: float, end: float) -> None:
        """Sends the state of some layers between ``start`` and ``end``; `finish` sends the rest."""
        dice, layout = self.dice, sending.rank.cache.layout
        if sending.slot is None:
            return
        layers = [layer for layer in layout.layers if dice.random() < 0.6]
        self._given[sending] = set(layers)
        if layers and dice.random() < 0.3:
            layers.append(dice.choice(layers))  # the same state twice
        for layer in layers:
            self._scenario.cluster.at(dice.uniform(start, end), lambda layer=layer: self._send(sending, layer))

    def left(self, sending: Sending) -> int | None:
        """The slot to pass to `finish`; None where that needs none, in half of those cases."""
        if sending.slot is None:
            return None
        all_given = self._given[sending] == set(sending.rank.cache.layout.layers)
        return None if all_given and self.dice.random() < 0.5 else sending.slot

    def _send(self, sending: Sending, layer: int) -> None:
        rank, dice, now = sending.rank, self.dice, self._scenario.world.now
        event = Gate(rank.clock, now + dice.uniform(0.0, 0.5)) if dice.random() < 0.3 else None

        def verb() -> KVWork:
            assert sending.slot is not None
            return rank.send_state(sending.flow.name, layer, sending.slot, sending.dst, event=event)

        self._scenario.call(sending, verb)

    # ------------------------------------------------------------------ watching

    def check(self, found: Receiving, operation: str, layers: Sequence[int]) -> None:
        """Checks that the slot holds the state of ``layers`` from the writers that had this grant."""
        if found.slot is None:
            return
        sources = {
            sending.rank.rank: (sending.rank.cache.layout, self._sources[sending.rank.rank], sending.slot)
            for sending in self._scenario.sendings
            if sending.bound_to(found.rank.rank, found.req.generation) and sending.slot is not None
        }
        self._scenario.shadows[found.rank.rank].check_state(operation, found.slot, sources, layers)

    def check_layers(self, rank: Rank) -> None:
        """Checks the state of every layer that is reported to be complete, before the request ends."""
        if not rank.cache.layout.stateful:
            return
        receiver = rank.engine.receiver
        for found in self._scenario.receivings:
            req = found.req
            if found.rank is not rank or req.error is not None or req.ended:
                continue
            if req.progress_at == self._heard.get(found):
                continue
            self._heard[found] = req.progress_at
            for layer in sorted(set(rank.cache.layout.layers) - found.layers_done):
                if receiver.layer_done(req, layer):
                    found.layers_done.add(layer)
                    self.check(found, f"layer {layer} of request {found.flow.name}", [layer])
