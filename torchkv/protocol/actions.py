"""What the state machines ask the engine to do: send a message, start a transfer, complete a work.

A state machine does no I/O. It appends actions to its list ``actions``, and the engine takes and performs them.

The dataclasses are not frozen: some are made on the caller's critical path, and a frozen dataclass takes three times as
long to make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import KVError
from torchkv.protocol.messages import Message
from torchkv.protocol.receiving.stage_allocator import Stage

if TYPE_CHECKING:
    from torchkv.layout.pair_plan import PairPlan
    from torchkv.layout.pieces import Piece, PieceLayout

__all__ = [
    "ANYBODY",
    "Account",
    "Action",
    "BoundGrant",
    "Halt",
    "Key",
    "Scatter",
    "SendOp",
    "Settle",
    "SettleCopied",
    "Split",
    "Start",
    "Tell",
    "Work",
]

Work: TypeAlias = Any  # the `KVWork` of a pending call; the protocol only hands it back (tests use strings)
Key: TypeAlias = tuple[str, int]  # a request's name, and its receiver or `ANYBODY`

ANYBODY = -1  # in place of a receiver: whoever grants the request


@dataclass(eq=False, slots=True)
class SendOp:
    """One verb towards one destination.

    dst: a rank, or `ANYBODY`. layers: global ids. start, num_pages: which of this rank's pages, counted after the
    receiver's prefix. from_prompt: counted from the beginning of the prompt, until the grant tells of the prefix.
    prefixes: receiver rank -> its prefix in tokens, as far as grants have come; all ops of one verb share this dict,
    unless they count from the prompt. source_pages: the engine's `SourcePages`, opaque here. state: the op moves the
    state of the layers, one slot, which counts as one page. whole: the layouts must match page for page.
    """

    request: str
    dst: int
    prefixes: dict[int, int]
    layers: tuple[int, ...]
    start: int
    num_pages: int
    work: Work
    source_pages: Any = None
    state: bool = False
    from_prompt: bool = False
    whole: bool = False
    verb: str = ""  # as which the resident loop records the op, if at all
    withdrawn: Work = None  # the work of the `withdraw` call that stops this op, while its request goes on
    moved: bool = False  # set by the engine when bytes have moved; cleared when `Alive` is sent to the receiver
    # Whether what the resident loop had under way for the op when it was taken back has ended; None if nothing was.
    # Until then its bytes may land, so the op neither begins again nor ends.
    landed: Callable[[], bool] | None = None

    @classmethod
    def of_states(cls, request: str, dst: int, layers: tuple[int, ...], work: Work, source_pages: Any) -> SendOp:
        """The states of these layers. source_pages: the slot that holds them."""
        return cls(request, dst, {}, layers, 0, 1, work, source_pages, state=True)


@dataclass(eq=False, slots=True, kw_only=True)
class BoundGrant:
    """A receiver's permission to write to its pages, as its writer keeps it. Without one nothing is written.

    dst: the receiver. generation: of its ``recv_pages`` call. prefix_tokens: tokens that it holds already. pages: its
    page ids [n], in order of position after the prefix. plan: what this writer owes it. state_slot: the slot that state
    may be written to, if its layout has state. flow: the receiver's, if its resident loop serves the request.
    absent_tokens: the end of the prefix that it does not hold, but needs not: verbs count from before that.
    """

    dst: int
    generation: int
    request: str
    prefix_tokens: int
    pages: Int64Array = field(repr=False)
    plan: PairPlan = field(repr=False)
    state_slot: int | None = None
    flow: int | None = None
    absent_tokens: int = 0

    @property
    def held_tokens(self) -> int:
        """The prefix as the receiver's caller gave it: what its verbs count from."""
        return self.prefix_tokens - self.absent_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.plan.dst_page_size

    def of_state(self) -> BoundGrant:
        """A grant of the state slot alone, for ops with ``state``: one page of one token, with no prefix."""
        assert self.plan.state is not None
        slots = [] if self.state_slot is None else [self.state_slot]
        pages = np.array(slots, dtype=np.int64)
        return replace(self, prefix_tokens=0, absent_tokens=0, pages=pages, plan=self.plan.state, state_slot=None)


@dataclass(slots=True)
class Tell:
    """Send ``message`` to ``rank``, reliably and in order."""

    rank: int
    message: Message


@dataclass(slots=True)
class Start:
    """Transfer ``op`` under ``grant`` once its gate has passed. Report with `Sender.op_finished`, exactly once."""

    op: SendOp
    grant: BoundGrant


@dataclass(slots=True)
class Halt:
    """Stop ``op``: post nothing more, and call `Sender.op_finished` when nothing of it can land any more."""

    op: SendOp


@dataclass(eq=False, slots=True, kw_only=True)
class Scatter:
    """Unpack a stage written by rank ``src`` into this rank's pages. Report with `Stages.scattered`, exactly once.

    serial: names the stage among those of this writer and generation. piece: the layers and pages that the stage holds.
    layout: where each lies in the stage. plan: between the two ranks. pages: the receiver's page ids. num_tokens:
    tokens that the grant covers. checked: the stage holds checksums too; compare them. state: the stage holds state,
    and ``pages`` is the slot. stopped: set here when the request fails; what has not begun is then not unpacked.
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
    stopped: bool = False


@dataclass(slots=True)
class Settle:
    """Complete one part of ``work``, with ``error`` or successfully. aux: the sender's bytes, for a receive.

    nbytes, path: as in `Account`, what it moved that has not been added yet. first: of a request that has succeeded at
    its receiver, when its first verb was called.
    """

    work: Work
    error: KVError | None = None
    aux: bytes = b""
    nbytes: int = 0
    path: str = "none"
    first: float | None = None


@dataclass(slots=True)
class SettleCopied:
    """The resident loop has copied these ops of one request: complete one part of the work of each, successfully.

    nbytes: what each has moved, on the path ``path``. One action for many ops, because they often end together, and
    layer by layer there are many.
    """

    works: list[Work]
    nbytes: list[int]
    path: str


@dataclass(slots=True)
class Split:
    """``work`` has so many parts more: it goes to several receivers, as its grant has shown."""

    work: Work
    more: int


@dataclass(slots=True)
class Account:
    """Add ``nbytes`` moved on ``path`` to what ``work`` reports."""

    work: Work
    nbytes: int
    path: str


Action: TypeAlias = Tell | Start | Halt | Scatter | Settle | SettleCopied | Split | Account
