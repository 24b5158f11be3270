"""What a receiver knows of one `recv_pages` call and of each of its writers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchkv.errors import KVError
from torchkv.plan import PairPlan
from torchkv.protocol.actions import Ticket
from torchkv.protocol.coverage import Coverage
from torchkv.transport import Int64Array

__all__ = ["Receive", "Writer"]


@dataclass(eq=False, slots=True)
class Writer:
    """What one contributing writer owes and has attested."""

    plan: PairPlan
    attested: dict[int, Coverage] = field(default_factory=dict)  # layer -> tokens visible here
    sealed: int | None = None  # its page count
    aux: bytes = b""
    quiescent: bool = False
    confined: bool = False  # when the receive failed, it wrote through the staging ring only

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
    scattering: int = 0  # stages that are being unpacked into its pages
    complete_at: float | None = None
    error: KVError | None = None
    ended: bool = False
    cancels: list[Ticket] = field(default_factory=list)

    @property
    def aux(self) -> bytes:
        return next((writer.aux for writer in self.writers.values() if writer.aux), b"")

    def pending_writers(self) -> tuple[int, ...]:
        """Writers whose writes may still land."""
        return tuple(rank for rank, writer in self.writers.items() if not writer.harmless)
