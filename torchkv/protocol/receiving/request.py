"""The record of one `recv_pages` call, and of each of its writers. `receiver` drives them.

One writer, as its receiver knows it. Attestations and unpacked stages add to its coverage. It is quiescent as soon as
one of three proofs has come:

    WRITING --Seal: flushed everything--------------------+
       |                                                  v
       +--Revoke sent, Quiesced received: drained--> QUIESCENT
       |                                                  ^
       +--its process has ended, its writes have landed---+

Invariant: while a writer is not quiescent, bytes of it may still land where it was allowed to write. So the pages of a
failed request go to another request only when all of its writers are ``harmless``: quiescent, or known to write to the
staging ring only, and so unable to reach the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torchkv.arrays import Int64Array
from torchkv.errors import KVError
from torchkv.layout.pair_plan import PairPlan, seal_matches
from torchkv.protocol.actions import Scatter, Work
from torchkv.protocol.coverage import LayerCoverage

__all__ = ["ReceiverRequest", "Writer"]


@dataclass(eq=False, slots=True)
class Writer:
    """One contributing writer: what it owes, what has arrived from it, and whether it may still write."""

    plan: PairPlan
    attested: LayerCoverage = field(default_factory=LayerCoverage)  # tokens after the prefix that have arrived
    states: set[int] = field(default_factory=set)  # layers whose state has arrived
    sealed: int | None = None  # the page count of its seal, in its own pages
    aux: bytes = b""
    quiescent: bool = False
    ring_only: bool = False  # set when the request fails: its promise to use the staging ring only held at that moment

    def cover(self, layers: Iterable[int], lo: int, hi: int, *, state: bool) -> None:
        """Tokens [lo, hi) of these layers, or their state, have arrived. Skips layers that this writer does not owe."""
        if state:
            self.states.update(self._owing(layers, state=True))
        else:
            self.attested.add(self._owing(layers, state=False), lo, hi)

    def has(self, layers: Iterable[int], lo: int, hi: int, *, state: bool) -> bool:
        """Whether all that `cover` would add has arrived."""
        owing = self._owing(layers, state=state)
        if state:
            return self.states.issuperset(owing)
        return lo >= hi or self.attested.first_gap([(owing, [(lo, hi)])]) is None

    def _owing(self, layers: Iterable[int], *, state: bool) -> list[int]:
        """Those of these layers that this writer owes, or whose state it owes."""
        plan = self.plan.state if state else self.plan
        assert plan is not None
        return [layer for layer in layers if layer in plan.segments_of]

    def missing(self, layers: Collection[int] | None, num_tokens: int) -> str | None:
        """Names the first thing that this writer owes and that has not arrived; None if there is nothing.

        layers: look at these only; None: at all. num_tokens: of the grant. Before the seal the writer owes the whole
        grant, after it no more than the pages that it sealed.
        """
        limit = num_tokens if self.sealed is None else min(num_tokens, self.sealed * self.plan.src_page_size)
        gap = self.attested.first_gap(self.plan.owed(num_tokens, limit, layers=layers))
        if gap is not None:
            return f"layer {gap[0]}, token {gap[1]} after the prefix"
        assert self.plan.state is not None
        state = self.plan.state
        wanted = state.layers if layers is None else [layer for layer in layers if layer in state.segments_of]
        for layer in wanted:
            if layer not in self.states:
                return f"layer {layer}'s state"
        return None

    @property
    def harmless(self) -> bool:
        """Whether nothing that this writer still writes can land on the request's pages."""
        return self.quiescent or self.ring_only


@dataclass(eq=False, slots=True)
class ReceiverRequest:
    """One `recv_pages` call, which is one generation of a request.

    pages: page ids [n] of this rank, in order of position after the prefix. num_tokens: that they hold. total: the
    caller's total deadline in seconds, or None for the two of Options. group: the layer group that it is the part of,
    if the layout has any. parts: the parts of all groups, this one included, which fail together; empty without groups.
    absent_tokens: the end of the prefix, which is absent pages.
    """

    request: str
    generation: int
    pages: Int64Array
    prefix_tokens: int
    num_tokens: int
    writers: dict[int, Writer]
    work: Work
    begun_at: float
    total: float | None
    progress_at: float | None = None  # when a writer last showed progress; None before the first sign of it
    alive_told_at: float = 0.0  # when sealed writers were last told that this request is alive
    state_slot: int | None = None
    scattering: set[Scatter] = field(default_factory=set)  # stages that are being unpacked into the pages
    unpacking: bool = False  # it has failed, and the resident loop's kernels still unpack into the pages
    complete_at: float | None = None  # when all bytes were here; the instance's verdict may still be missing
    asked: bool = False  # complete, and this rank has asked the instance's leader to fail the request
    error: KVError | None = None  # set once, when the request fails
    ended: bool = False  # the leases have ended, or those of a part will with the others'
    cancels: list[Work] = field(default_factory=list)  # works of ``cancel`` calls, complete when the request ends
    flow: int | None = None  # on the resident loop; None while Python serves the request
    reserved: int | None = None  # the flow that it has, or had: no other request gets it before this one has ended
    arrived: int = 0  # bytes that the loop had seen arrive at the last tick
    loop_path: str = "direct"  # on which they come there
    serial: int = 0  # that the loop's journal knows it by; 0: nothing is recorded
    group: str | None = None
    parts: Sequence[ReceiverRequest] = ()
    absent_tokens: int = 0

    @property
    def live(self) -> bool:
        """Whether it has neither failed nor ended."""
        return self.error is None and not self.ended

    @property
    def all_ended(self) -> bool:
        """Whether the leases of the whole call have ended: its pages may be used again."""
        return self.ended and all(part.ended for part in self.parts)

    def forget(self) -> None:
        """Lets go of whatever knows this request, once `all_ended`: so both are freed without a garbage collector."""
        self.work, self.parts = None, ()
        if self.error is not None:
            self.error._pages_safe = None  # from now on they are

    @property
    def aux(self) -> bytes:
        """The aux bytes of the writers. Those that sent any sent the same: `Receiver.on_seal` sees to it."""
        for writer in self.writers.values():
            if writer.aux:
                return writer.aux
        return b""

    def pending_writers(self) -> tuple[int, ...]:
        """Ranks whose writes may still land on the pages."""
        return tuple(rank for rank, writer in self.writers.items() if not writer.harmless)

    def bad_seal(self, writer: Writer, name: str) -> str | None:
        """Why the seal of a writer does not match the grant, or None if it does. name: of the writer, in messages."""
        granted, sealed, plan = len(self.pages), writer.sealed, writer.plan
        if not sealed:
            owes = any(owed for _, owed in plan.owed(self.num_tokens))
        else:
            owes = not seal_matches(sealed, plan.src_page_size, granted, plan.dst_page_size)
        if not owes:
            return None
        return (
            f"request {self.request!r}: {name} sealed {sealed} pages of {plan.src_page_size} tokens, but {granted} "
            f"pages of {plan.dst_page_size} tokens are granted behind a prefix of {self.prefix_tokens} tokens; send "
            f"exactly the pages after the prefix"
        )

    def first_missing(self, name: Callable[[int], str]) -> str:
        """Names what has not arrived, though all writers have sealed. name: what messages call a rank."""
        for rank, writer in self.writers.items():
            if missing := writer.missing(None, self.num_tokens):
                return f"{missing} from {name(rank)}"
        return f"{len(self.scattering)} stages to be unpacked"

    def deadline(self, *, timeout: float, grant_timeout: float) -> tuple[float, str]:
        """When the request fails unless something happens, and the words for the error. Limits in seconds."""
        if self.complete_at is not None:
            # Only the leader times out complete ranks: one of them must not fail while it declares success.
            return float("inf"), ""
        if self.total is not None:
            return self.begun_at + self.total, f"not complete within recv_pages(timeout={self.total:g})"
        progress_at = self.progress_at
        if self.parts:  # a layer group may be sent after the others
            moved = [part.progress_at for part in self.parts if part.progress_at is not None]
            progress_at = max(moved, default=None)
        if progress_at is None:
            text = f"no byte and no seal within {grant_timeout:g} s (Options.grant_timeout)"
            return self.begun_at + grant_timeout, text
        return progress_at + timeout, f"no progress for {timeout:g} s (Options.timeout)"
