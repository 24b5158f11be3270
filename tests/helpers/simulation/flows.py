"""The requests of a random scenario, as the applications on both sides intend and perform them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.helpers.references.page_transfer import Pool
from tests.helpers.simulation.cluster import Rank
from torchkv.engine.work import KVWork
from torchkv.protocol.receive_request import ReceiverRequest

__all__ = ["Flow", "Gate", "Receiving", "Sending"]


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
    works: list[KVWork] = field(default_factory=list)
    reqs: dict[int, object] = field(default_factory=dict)  # by destination: the engine's sender requests
    failed: bool = False

    def bound_to(self, dst: int, generation: int) -> bool:
        req = self.reqs.get(dst)
        grant = getattr(req, "grant", None)
        return grant is not None and grant.generation == generation


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
