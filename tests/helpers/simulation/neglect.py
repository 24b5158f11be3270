"""Grants that a rank's Python leaves where the loop put them, though a request or a refusal is there for them."""

from __future__ import annotations

from tests.helpers.simulation.cluster import Rank
from torchkv.core.loop.codes import GRANTED
from torchkv.core.loop.limits import MAX_UNCLAIMED
from torchkv.engine.engine import TICK
from torchkv.protocol.actions import ANYBODY
from torchkv.protocol.messages import name_hashes

__all__ = ["Neglect"]

PATIENCE = 4 * TICK  # virtual seconds in which Python has to take in such a grant: on a tick, at the latest
STEPS = 50  # that the rank has, at least, in that time: of some its Python sleeps through, and paused ranks have none


class Neglect:
    """Of one rank: `observe` it after each of its steps, then look at ``problems``."""

    def __init__(self, rank: Rank) -> None:
        self.problems: list[str] = []
        self._rank = rank
        self._since: dict[tuple[int, int], tuple[float, int]] = {}  # by receiver and generation

    def observe(self, now: float) -> None:
        flows = self._rank.engine.flows
        if flows is None or not flows.notices.has_unclaimed:
            self._since.clear()
            return
        before, self._since = self._since, {}
        for key, name in self._wanted().items():
            since, steps = before.get(key, (now, 0))
            self._since[key] = since, steps + 1
            if steps >= STEPS and now - since > PATIENCE and not self.problems:
                self.problems.append(f"rank {self._rank.rank} leaves the grant {key} of {name!r}, which is waited for")

    def _wanted(self) -> dict[tuple[int, int], str]:
        """Of those that are left: the name."""
        engine = self._rank.engine
        assert engine.flows is not None
        core, sender = engine.flows.core, engine.sender
        keys = {key for key, req in sender.requests.by_key.items() if req.waits and req.flow is None}
        keys |= set(sender.grants.unmet._refusals)
        names = {name_hashes(name): name for name, _ in keys}
        wanted = {}
        for number in range(core.world["unclaimed_head"], core.world["unclaimed_tail"]):
            event = core.world["unclaimed"][number & (MAX_UNCLAIMED - 1)]
            record, src = event["record"], core.events._ranks[event["source"]]
            name = names.get((record["lo"], record["hi"]))
            if event["kind"] == GRANTED and name is not None and {(name, src), (name, ANYBODY)} & keys:
                wanted[src, int(record["generation"])] = name
        return wanted
