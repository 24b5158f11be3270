"""What the state machines ask their driver to do. They never do it themselves.

Not frozen: some are made on the caller's critical path, and a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from torchkv.errors import KVError
from torchkv.pieces import Piece, PieceLayout
from torchkv.plan import PairPlan
from torchkv.staging import Signal, Stage, Stream
from torchkv.transport import Int64Array
from torchkv.wire import Message

__all__ = ["Account", "Action", "BoundGrant", "Halt", "Scatter", "SendOp", "Settle", "Start", "Tell", "Ticket"]

Ticket: TypeAlias = Any  # the driver's own handle of a pending call; the protocol only hands it back


@dataclass(eq=False, slots=True)
class SendOp:
    """One verb towards one destination. ``start`` and ``num_pages`` count this rank's pages after the prefix.

    ``prefixes`` is shared by all destinations of one call: rank -> prefix tokens, as far as grants have told.
    ``state``: it moves the layers' state, one slot, which counts as one page.
    """

    request: str
    dst: int
    prefixes: dict[int, int]
    layers: tuple[int, ...]
    start: int
    num_pages: int
    ticket: Ticket
    payload: Any = None  # the driver's: page ids and the event that gates them
    state: bool = False
    moved: bool = False  # set by the driver when bytes moved; cleared when the receiver has been told


@dataclass(eq=False, slots=True, kw_only=True)
class BoundGrant:
    """A receiver's permission to write: ``pages`` are its page ids, in order of position after the prefix.

    state_slot: where state may be written, if the receiver has any.
    """

    dst: int
    generation: int
    request: str
    prefix_tokens: int
    pages: Int64Array = field(repr=False)
    plan: PairPlan = field(repr=False)
    state_slot: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.plan.dst_page_size

    def of_state(self) -> BoundGrant:
        """The same permission for the slot alone: one page of one token, without a prefix."""
        assert self.plan.state is not None
        slots = [] if self.state_slot is None else [self.state_slot]
        pages = np.array(slots, dtype=np.int64)
        return replace(self, prefix_tokens=0, pages=pages, plan=self.plan.state, state_slot=None)


@dataclass(slots=True)
class Tell:
    """Send ``message`` to ``rank``, reliably and in order."""

    rank: int
    message: Message


@dataclass(slots=True)
class Start:
    """Transfer ``op`` under ``grant`` once its event is ready; report with ``op_finished`` exactly once."""

    op: SendOp
    grant: BoundGrant


@dataclass(slots=True)
class Halt:
    """Stop ``op``: post nothing more, and report ``op_finished`` when nothing of it can land any more."""

    op: SendOp


@dataclass(eq=False, slots=True, kw_only=True)
class Scatter:
    """Unpack a stage that rank ``src`` has written into this rank's pages; report with ``scattered`` exactly once.

    layout: of ``piece``, by ``plan``. pages: the grant's page ids. num_tokens: the grant's. checked: compare the
    checksums that lie in the stage too. state: it is state, and the pages are the slot. signal: the stage is being
    written, and this comes behind that; `written` says whether it was seen to. stream: the piece passes through the
    stage like that. stopped: the receive has failed, so wait no longer.
    """

    request: str
    src: int
    generation: int
    serial: int
    stage: Stage
    piece: Piece
    layout: PieceLayout
    plan: PairPlan = field(repr=False)
    pages: Int64Array = field(repr=False)
    num_tokens: int
    checked: bool
    state: bool
    signal: Signal | None = None
    stream: Stream | None = None
    written: bool = True
    stopped: bool = False


@dataclass(slots=True)
class Settle:
    """Complete the call behind ``ticket``, with ``error`` or successfully."""

    ticket: Ticket
    error: KVError | None = None
    aux: bytes = b""


@dataclass(slots=True)
class Account:
    """Bytes have moved for the call behind ``ticket``, on ``path``."""

    ticket: Ticket
    nbytes: int
    path: str


Action: TypeAlias = Tell | Start | Halt | Scatter | Settle | Account
