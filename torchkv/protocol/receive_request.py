"""What a receiver knows of one `recv_pages` call and of each of its writers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torchkv.errors import KVError
from torchkv.plan import PairPlan
from torchkv.protocol.actions import Scatter, Ticket
from torchkv.protocol.coverage import LayerCoverage
from torchkv.transport import Int64Array

__all__ = ["Receive", "Writer"]


@dataclass(eq=False, slots=True)
class Writer:
    """What one contributing writer owes and has attested."""

    plan: PairPlan
    attested: LayerCoverage = field(default_factory=LayerCoverage)  # tokens visible here
    states: set[int] = field(default_factory=set)  # layers whose state is visible here
    sealed: int | None = None  # its page count
    aux: bytes = b""
    quiescent: bool = False
    confined: bool = False  # when the receive failed, it wrote through the staging ring only

    def cover(self, layers: Iterable[int], lo: int, hi: int, *, state: bool) -> None:
        """Tokens [lo, hi) of these layers, or their state, are here; what is not owed changes nothing."""
        if state:
            assert self.plan.state is not None
            self.states.update(layer for layer in layers if layer in self.plan.state.slabs_of)
            return
        self.attested.add([layer for layer in layers if layer in self.plan.slabs_of], lo, hi)

    def missing(self, layers: Collection[int] | None, num_tokens: int) -> str | None:
        """The first of what it owes of ``layers`` (None: of all) and is not here, in words; None if all is here."""
        limit = num_tokens if self.sealed is None else min(num_tokens, self.sealed * self.plan.src_page_size)
        gap = self.attested.first_gap(self.plan.owed(num_tokens, limit, layers=layers))
        if gap is not None:
            return f"layer {gap[0]}, token {gap[1]} after the prefix"
        assert self.plan.state is not None
        state = self.plan.state
        wanted = state.layers if layers is None else [layer for layer in layers if layer in state.slabs_of]
        for layer in wanted:
            if layer not in self.states:
                return f"layer {layer}'s state"
        return None

    @property
    def harmless(self) -> bool:
        """Whether nothing that it still writes can land on the receive's pages."""
        return self.quiescent or self.confined


@dataclass(eq=False, slots=True)
class Receive:
    """One `recv_pages` call: a generation of a request."""

    request: str
    generation: int
    pages: Int64Array
    prefix_tokens: int
    num_tokens: int
    writers: dict[int, Writer]
    ticket: Ticket
    born: float
    total: float | None  # one deadline for everything, if the caller gave one
    heard: float | None = None  # when a writer last showed progress
    told_alive: float = 0.0
    state_slot: int | None = None
    scattering: set[Scatter] = field(default_factory=set)  # stages that are being unpacked into its pages
    complete_at: float | None = None
    error: KVError | None = None
    ended: bool = False
    cancels: list[Ticket] = field(default_factory=list)

    @property
    def aux(self) -> bytes:
        for writer in self.writers.values():
            if writer.aux:
                return writer.aux
        return b""

    def pending_writers(self) -> tuple[int, ...]:
        """Writers whose writes may still land."""
        return tuple(rank for rank, writer in self.writers.items() if not writer.harmless)
