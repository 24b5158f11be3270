"""The requests of a random scenario, as the applications on both sides intend and perform them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.helpers.references.page_transfer import Pool
from tests.helpers.simulation.cluster import Rank
from torchkv.core.core import Core
from torchkv.core.loop.limits import MAX_FLOWS, MAX_GPU_SENDS, MAX_OPS
from torchkv.core.runner import Runner
from torchkv.engine.engine import Engine
from torchkv.engine.resident import routes
from torchkv.engine.work import KVWork
from torchkv.protocol.actions import ANYBODY
from torchkv.protocol.receiving.request import ReceiverRequest
from torchkv.protocol.sending.request import SenderRequest

__all__ = ["Flow", "Gate", "Receiving", "Sending", "core_of", "flows_left", "full_speed", "short_runs", "stall"]


@contextmanager
def short_runs() -> Iterator[None]:
    """Lets the resident loop put runs of a few bytes, as those of the simulation are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MIN_RUN", 1)
        yield


def core_of(rank: Rank) -> Core:
    assert rank.engine.flows is not None, "no resident loop here"
    return rank.engine.flows.core


def full_speed(rank: Rank) -> None:
    """Its loop takes every step that it may, each as large as those of a real one."""
    core = core_of(rank)
    core.runner.step = lambda: Runner.step(core.runner)
    core.world["window"], core.world["turn"] = 64, 1 << 20


def stall(rank: Rank) -> Callable[[], None]:
    """The rank's loop gets no processor, until the result is called."""
    core = core_of(rank)
    core.runner.step = lambda: False

    def go_on() -> None:
        core.runner.step = lambda: Runner.step(core.runner)

    return go_on


@dataclass(frozen=True, slots=True)
class Gate:
    """An event of virtual time, for ``event=`` of the verbs."""

    now: Callable[[], float]
    ready_at: float

    def query(self) -> bool:
        return self.now() >= self.ready_at


@dataclass(eq=False, slots=True)
class Flow:
    """One request, as the applications on both sides intend it."""

    name: str
    source: str
    target: str
    tokens: int
    prefix: int
    begins: float
    aux: bytes
    verbs: tuple[str, ...]
    after: Flow | None = None  # the earlier request of the same name
    before: list[Flow] = field(default_factory=list)  # towards the same target, planned earlier


@dataclass(eq=False, slots=True)
class Sending:
    """What one writer sends of a flow."""

    flow: Flow
    rank: Rank
    pages: list[int]
    slot: int | None
    anybody: bool = False  # it does not know the target: it sends to whoever grants the request
    from_prompt: bool = False  # it does not know the prefix
    steady: bool = False  # it sends layer after layer, of the same pages, with one verb
    verb: str = ""  # the latest one
    held: int | None = None  # the page that it gives, of those that its receiver should hold, once it has chosen one
    told: int | None = None  # the prefix in tokens, if it has asked and was told
    works: list[KVWork] = field(default_factory=list)
    # By destination, which may be `ANYBODY`: the engine's sender requests.
    reqs: dict[int, SenderRequest] = field(default_factory=dict)
    failed: bool = False

    @property
    def dst(self) -> int | str | None:
        """A single receiver is named by its rank, or by its instance: both are plain."""
        if self.anybody:
            return None
        ranks = self.rank.engine.group_map.instances.get(self.flow.target, ())
        return ranks[0] if len(ranks) == 1 and len(self.pages) % 2 else self.flow.target

    def pages_behind(self, prefix: int) -> list[int] | None:
        """What it sends to a receiver that holds a prefix of so many tokens; None if it does not send all of that.

        Counting from the prompt it may have met a request that came before or after the one that it meant.
        """
        shift = (prefix - self.flow.prefix) // self.rank.cache.layout.page_size if self.from_prompt else 0
        if shift >= 0:
            return self.pages[shift:]
        return None if shift < -1 or self.held is None else [self.held, *self.pages]

    @property
    def handed_on(self) -> bool:
        """Whether the request to anybody has become others."""
        return ANYBODY in self.reqs and self.reqs[ANYBODY].ended and self.reqs[ANYBODY].error is None

    def bound_to(self, dst: int, generation: int) -> bool:
        req = self.reqs.get(dst)
        return req is not None and req.grant is not None and req.grant.generation == generation


@dataclass(eq=False, slots=True)
class Receiving:
    """What one receiver receives of a flow."""

    flow: Flow
    rank: Rank
    req: ReceiverRequest
    work: KVWork
    before: Pool
    pages: list[int]
    slot: int | None
    layers_done: set[int] = field(default_factory=set)  # those that were reported complete before the end


def flows_left(engine: Engine) -> list[object]:
    """What the resident loop, or its owner, still keeps."""
    flows = engine.flows
    if flows is None:
        return []
    core = flows.core
    quarantined = sum(req.reserved is not None for req in engine.receiver.requests)
    free = [len(core.sends._free), len(core.receives._free) + quarantined, len(core.sends._free_ops)]
    left: list[object] = [*flows._sends, *flows._waiting, *flows._receives, *flows._ops]
    left += [f"a peer is to expect {peer['seals']} seals" for peer in core.world["peers"] if peer["seals"]]
    return left + ([free] if free != [MAX_FLOWS if core.device is None else MAX_GPU_SENDS, MAX_FLOWS, MAX_OPS] else [])
