"""What the applications of a random scenario mean to do with a request, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oracle import Pool
from simulation import Rank

from torchkv.protocol.receive import Receive
from torchkv.work import KVWork

__all__ = ["Flow", "Gate", "Receiving", "Sending"]


@dataclass(frozen=True, slots=True)
class Gate:
    """An event in virtual time."""

    now: Callable[[], float]
    ready_at: float

    def query(self) -> bool:
        return self.now() >= self.ready_at


@dataclass(eq=False, slots=True)
class Flow:
    """One life of a request name, as the applications on both sides mean it."""

    name: str
    source: str
    target: str
    tokens: int
    prefix: int
    begins: float
    aux: bytes
    verbs: tuple[str, ...]
    after: Flow | None = None  # the earlier life of the same name


@dataclass(eq=False, slots=True)
class Sending:
    """A writer's share of a flow."""

    flow: Flow
    rank: Rank
    pages: list[int]
    slot: int | None
    works: list[KVWork] = field(default_factory=list)
    lives: dict[int, object] = field(default_factory=dict)  # by destination: the sender's lives
    failed: bool = False

    def bound_to(self, dst: int, generation: int) -> bool:
        life = self.lives.get(dst)
        grant = getattr(life, "grant", None)
        return grant is not None and grant.generation == generation


@dataclass(eq=False, slots=True)
class Receiving:
    """A reader's share of a flow."""

    flow: Flow
    rank: Rank
    receive: Receive
    work: KVWork
    before: Pool
    pages: list[int]
    slot: int | None
    layers_done: set[int] = field(default_factory=set)  # of which it was said, before the end, that all is here
