"""State in a random scenario: which slots send and receive, what leaves early, and what must have arrived."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from flows import Gate, Receiving, Sending
from memory import slot_snapshot
from simulation import Rank

from torchkv.layout import State
from torchkv.work import KVWork

if TYPE_CHECKING:
    from scenario import Scenario

__all__ = ["StateFlows", "random_states"]

RECV_SLOTS = 3  # slots [0, RECV_SLOTS) receive, the rest sends


def random_states(dice: random.Random) -> list[State]:
    """None, or one or two: sharded, in groups, whole on every rank; in all layers or some."""
    layers = dice.choice([None, None, (0,), (1, 2)])
    ssm = State("ssm", (4, 3), torch.int16, shard_dim=0, layers=layers)
    conv = State("conv", (2, 8), torch.uint8, shard_dim=1, shard_groups=dice.choice([(4, 4), (2, 6)]), layers=layers)
    flat = State("flat", (5,), torch.uint8)
    return dice.choice([[], [], [], [ssm], [conv], [flat], [ssm, flat]])


class StateFlows:
    """The state of all flows of ``scenario``. It has dice of its own: without state, a seed's run is what it was."""

    def __init__(self, scenario: Scenario, dice: random.Random) -> None:
        self.dice = dice
        self._scenario = scenario
        ranks = scenario.cluster.ranks
        self._sources = {rank.rank: slot_snapshot(rank) for rank in ranks}
        self._unused = {rank.rank: list(range(RECV_SLOTS, rank.cache.num_slots)) for rank in ranks}
        self._given: dict[Sending, set[int]] = {}  # layers that are sent before `finish`
        self._heard: dict[Receiving, float | None] = {}  # when something had last come, when it was last looked at

    # ------------------------------------------------------------------ what applications do

    def source_slot(self, rank: Rank) -> int | None:
        """One for each flow, given on every stage, whether its layers have state or not."""
        return self._unused[rank.rank].pop() if rank.cache.layout.states else None

    def free(self, rank: Rank) -> list[int | None]:
        """Slots to receive in; none are needed where there is no state."""
        if not rank.cache.layout.states:
            return [None]
        return [slot for slot in self._scenario.shadows[rank.rank].free_slots() if slot < RECV_SLOTS]

    def plan(self, sending: Sending, start: float, end: float) -> None:
        """Some layers' state leaves between ``start`` and ``end``, the rest with `finish`."""
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
        """What `finish` is given: the slot, unless it is sure to be of no use, and sometimes even then."""
        if sending.slot is None:
            return None
        all_given = self._given[sending] == set(sending.rank.cache.layout.layers)
        return None if all_given and self.dice.random() < 0.5 else sending.slot

    def _send(self, sending: Sending, layer: int) -> None:
        rank, dice, now = sending.rank, self.dice, self._scenario.world.now
        event = Gate(rank._now, now + dice.uniform(0.0, 0.5)) if dice.random() < 0.3 else None

        def verb() -> KVWork:
            assert sending.slot is not None
            return rank.send_state(sending.flow.name, layer, sending.slot, sending.flow.target, event=event)

        self._scenario.call(sending, verb)

    # ------------------------------------------------------------------ watching

    def check(self, found: Receiving, what: str, layers: Sequence[int]) -> None:
        """The slot holds the state of these layers, from whichever writer that had this grant."""
        if found.slot is None:
            return
        sources = {
            sending.rank.rank: (sending.rank.cache.layout, self._sources[sending.rank.rank], sending.slot)
            for sending in self._scenario.sendings
            if sending.bound_to(found.rank.rank, found.receive.generation) and sending.slot is not None
        }
        self._scenario.shadows[found.rank.rank].check_state(what, found.slot, sources, layers)

    def check_layers(self, rank: Rank) -> None:
        """A layer that is said to be here has its state here, whatever else is still to come."""
        if not rank.cache.layout.stateful:
            return
        receiver = rank.engine.receiver
        for found in self._scenario.receivings:
            receive = found.receive
            if found.rank is not rank or receive.error is not None or receive.ended:
                continue
            if receive.heard == self._heard.get(found):
                continue
            self._heard[found] = receive.heard
            for layer in sorted(set(rank.cache.layout.layers) - found.layers_done):
                if receiver.layer_done(receive, layer):
                    found.layers_done.add(layer)
                    self.check(found, f"layer {layer} of request {found.flow.name}", [layer])
