"""What a sender knows of one (request, destination), and the checks of a verb against the receiver's grant."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchkv.errors import KVError, PageOutOfRange, ProtocolError, TransferTimeout
from torchkv.plan import first_page_outside
from torchkv.protocol.actions import BoundGrant, SendOp, Ticket
from torchkv.protocol.coverage import LayerCoverage

__all__ = ["Finish", "Life", "check_grant", "check_prefix", "check_prefixes", "check_range", "check_slot", "extent"]


@dataclass(slots=True)
class Finish:
    """The caller's ``finish``, kept until the seal can go out."""

    ticket: Ticket
    aux: bytes


@dataclass(eq=False, slots=True)
class Life:
    """A sender's life of (request, dst); `sender` says how it goes on, and when it ends."""

    request: str
    dst: int
    born: float
    grant: BoundGrant | None = None
    gone: KVError | None = None  # why a grant that came before its first verb was revoked
    queue: deque[SendOp] = field(default_factory=deque)
    running: dict[SendOp, None] = field(default_factory=dict)
    num_pages: int = 0  # one past the highest page given
    chunks: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)  # given, and not in `pages` yet
    pages: LayerCoverage = field(default_factory=LayerCoverage)
    states: set[int] = field(default_factory=set)  # layers whose state was given
    finish: Finish | None = None
    sealed_at: float | None = None
    heard: float = 0.0  # when the receiver last showed progress, once sealed
    error: KVError | None = None
    refused: bool = False  # its grant has come, without a life or after it had failed: once failed, it gets no other
    revoked: bool = False  # the receiver waits for Quiesced
    tainted: bool = False  # a channel broke under this life: bytes may land after it
    cancels: list[Ticket] = field(default_factory=list)

    @property
    def drained(self) -> bool:
        """Whether this rank writes nothing more and reads its source pages no more."""
        return not self.running

    @property
    def about_to_seal(self) -> bool:
        """Whether nothing but the end of a single op is missing for the seal."""
        return self.finish is not None and self.error is None and not self.queue and len(self.running) == 1

    def overdue(self, now: float, *, timeout: float, grant_timeout: float) -> KVError | None:
        """What it has failed with by now because it waits for its receiver, if it has. Limits in seconds."""
        if self.grant is None and self.gone is not None and now >= self.born + timeout:
            return self.gone
        if self.grant is None and now >= self.born + grant_timeout:
            return self._late("has not posted recv_pages", grant_timeout, "grant_timeout")
        if self.sealed_at is not None and now >= self.heard + timeout:
            return self._late("has not reported its verdict", timeout, "timeout")
        return None

    def _late(self, what: str, limit: float, option: str) -> TransferTimeout:
        return TransferTimeout(
            f"request {self.request!r}: rank {self.dst} {what} within {limit:g} s (Options.{option}); "
            f"cancel({self.request!r}) and retry, or raise the limit"
        )

    def check_open(self) -> None:
        """Raises the error of a tombstone, or ``ProtocolError`` if the life is finished."""
        if self.error is not None:
            raise self.error
        if self.finish is not None:
            raise ProtocolError(
                f"request {self.request!r} to rank {self.dst} is finished already; wait for its finish() work to "
                f"complete before using the name again, or cancel({self.request!r})"
            )

    def add_given(self, op: SendOp) -> None:
        """Counts the pages of ``op`` among those that the seal will promise."""
        if op.state:
            self.states.update(op.layers)
            return
        if not op.num_pages:  # an empty chunk promises nothing, wherever it starts
            return
        end = op.start + op.num_pages
        # Only noted: this is the critical path of a verb, and nobody asks before `finish`.
        self.chunks.append((op.layers, op.start, end))
        self.num_pages = max(self.num_pages, end)

    def given(self) -> LayerCoverage:
        """Which of this rank's pages were given, counted after the prefix."""
        for layers, lo, hi in self.chunks:
            self.pages.add(layers, lo, hi)
        self.chunks.clear()
        return self.pages


def check_grant(op: SendOp, grant: BoundGrant) -> None:
    """Raises ``PageOutOfRange`` for pages outside the grant, ``ProtocolError`` for receivers with unlike prefixes."""
    if not op.state:
        check_range(grant, op.start, op.num_pages)
        check_prefix(op, grant)


def check_prefix(op: SendOp, grant: BoundGrant) -> None:
    """Notes the prefix of one of the op's receivers. Raises ``ProtocolError`` if another one's is unlike it."""
    op.prefixes[grant.dst] = grant.prefix_tokens
    if len(op.prefixes) > 1:
        check_prefixes(op.request, op.prefixes)


def check_prefixes(request: str, prefixes: Mapping[int, int]) -> None:
    """One verb towards several receivers means one suffix, so their prefixes (rank -> tokens) must be equal."""
    if len(set(prefixes.values())) > 1:
        raise ProtocolError(
            f"request {request!r}: its receivers hold unequal prefixes (rank -> tokens: {prefixes}); "
            f"use one call a receiver, each with the pages after its own prefix"
        )


def check_range(grant: BoundGrant, start: int, num_pages: int) -> None:
    """Raises ``PageOutOfRange`` if one of the sender's pages [start, start + num_pages) lies outside the grant."""
    plan = grant.plan
    if (start + num_pages - 1) * plan.src_page_size < len(grant.pages) * plan.dst_page_size:
        return  # the last one begins inside: the common case, on a verb's critical path
    outside = first_page_outside(start, num_pages, plan.src_page_size, grant.num_tokens)
    if outside is not None:
        raise PageOutOfRange(
            f"request {grant.request!r} to rank {grant.dst}: page {outside} (counted after the prefix, "
            f"{grant.plan.src_page_size} tokens each) lies outside the grant of {len(grant.pages)} pages of "
            f"{grant.plan.dst_page_size} tokens behind a prefix of {grant.prefix_tokens} tokens; "
            f"send only pages after the prefix"
        )


def check_slot(grant: BoundGrant, num_slots: int) -> None:
    """Raises ``ProtocolError`` for a grant without the slot that state needs, or with one that its rank lacks."""
    slot, state = grant.state_slot, grant.plan.state
    owes = state is not None and state.slabs
    if (slot is None and owes) or (slot is not None and slot >= num_slots):
        raise ProtocolError(f"grant of rank {grant.dst} names state slot {slot}, it has {num_slots} slots")


def extent(life: Life | None, grant: BoundGrant | None) -> str:
    """How much was sent and granted, to end a complaint with."""
    if life is None or grant is None:
        return "; send it, or cancel"
    return (
        f": {life.num_pages} pages of {grant.plan.src_page_size} tokens were sent, {len(grant.pages)} pages of "
        f"{grant.plan.dst_page_size} tokens are granted behind a prefix of {grant.prefix_tokens} tokens; send the "
        f"rest, or cancel"
    )
