"""The record of one sender request. `sender` shows its states, and drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchkv.errors import KVError, PeerLost, ProtocolError, TransferTimeout, fresh
from torchkv.protocol.actions import ANYBODY, BoundGrant, SendOp, Work
from torchkv.protocol.coverage import LayerCoverage
from torchkv.protocol.messages import Attest

__all__ = ["Finish", "SenderRequest", "not_posted", "receiver_name"]


@dataclass(slots=True)
class Finish:
    """The caller's ``finish`` call, kept until the request can be sealed."""

    work: Work
    aux: bytes


@dataclass(eq=False, slots=True)
class SenderRequest:
    """What this rank sends to one receiver under one request name, from the first verb to the verdict or the cancel.

    `sender` shows its states.
    """

    request: str
    dst: int
    receiver: str  # who that is, in messages
    begun_at: float
    grant: BoundGrant | None = None
    queue: deque[SendOp] = field(default_factory=deque)  # ops that wait for the grant
    # Ops that were started and have not ended, each with its index on the resident loop if it is there.
    running: dict[SendOp, int | None] = field(default_factory=dict)
    num_pages: int = 0  # one past the highest page that was sent, counted after the prefix
    chunks: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)  # sent, and not added to `pages` yet
    pages: LayerCoverage | None = None  # made when it is asked for
    states: set[int] = field(default_factory=set)  # layers whose state was sent
    told: list[Attest] = field(default_factory=list)  # what the loop has told over a connection that may break
    finish: Finish | None = None
    sealed_at: float | None = None
    progress_at: float = 0.0  # once sealed: when the receiver last showed progress
    error: KVError | None = None  # set once, when the request fails: then this record is a tombstone
    # The grant meant for this request has come and is void: it was revoked before the first verb, or came after the
    # failure. Once failed, this request refuses no other grant: the next one is for the next request of this name.
    grant_spent: bool = False
    revoked: bool = False  # the receiver has sent Revoke and waits for Quiesced
    undrainable: bool = False  # a channel broke during a transfer: bytes may still land after it, unseen by this rank
    cancels: list[Work] = field(default_factory=list)  # works of ``cancel`` calls, complete when the request ends
    ended: bool = False
    fresh: bool = False  # bound by Python, and no op has begun since
    # On the resident loop; None while Python serves the request. Without a grant it waits there, with its ``queue``.
    flow: int | None = None
    loop_path: str = "direct"  # on which its bytes go there, unless a verb says otherwise
    loop_stages: bool = False  # whether verbs can say that they are to be staged
    loop_staged: bool = False  # whether one has
    loop_promised: bool = False  # the receiver is promised that all of it is staged
    loop_may_lose: bool = False  # what it tells the receiver goes through a connection, which may break
    loop_wrote: bool = False  # a verb has said nothing
    loop_layers: tuple[int, ...] = ()  # those of its plan there
    serial: int = 0  # that the loop's journal knows it by; 0: nothing is recorded
    latest: Any = None  # of its verbs, as the engine can do it again for other layers
    # Bytes that the loop had copied, and when that was seen first, or when an op was last seen to wait for its event.
    moved: tuple[int, float] = (-1, 0.0)
    # Set when it is taken back: whether what the loop had staged for it has come to an end, so that later bytes come
    # later. None if nothing was under way.
    landing: Callable[[], bool] | None = None
    gated: int = 0  # `RequestFlows.gated` when last seen

    @property
    def waits(self) -> bool:
        """Whether a grant that comes now is meant for this request."""
        return self.grant is None and not self.grant_spent

    @property
    def drained(self) -> bool:
        """Whether this rank writes nothing more and reads its source pages no more."""
        return not self.running

    def in_doubt(self) -> PeerLost | None:
        """Why nobody will know what has become of bytes that the loop had staged; None if somebody does, or will."""
        try:
            if self.landing is not None:
                self.landing()
        except PeerLost as error:
            return error
        return None

    @property
    def about_to_seal(self) -> bool:
        """Whether the request is finished and a single op is still running: its end allows the seal."""
        return self.finish is not None and self.error is None and not self.queue and len(self.running) == 1

    def overdue(self, now: float, *, timeout: float, grant_timeout: float) -> KVError | None:
        """The error of a request that has waited too long for its receiver; None for any other. Limits in seconds."""
        if self.grant is None and now >= self.begun_at + grant_timeout:
            return self._late(not_posted(self.dst, self.receiver), grant_timeout, "grant_timeout")
        if self.sealed_at is not None and now >= self.progress_at + timeout:
            return self._late(f"{self.receiver} has not reported its verdict", timeout, "timeout")
        return None

    def _late(self, omission: str, limit: float, option: str) -> TransferTimeout:
        return TransferTimeout(
            f"request {self.request!r}: {omission} within {limit:g} s (Options.{option}); "
            f"cancel({self.request!r}) and retry, or raise the limit"
        )

    def check_open(self) -> None:
        """Raises the error of a tombstone, and ``ProtocolError`` after ``finish``: both take no further verbs."""
        if self.error is not None:
            raise fresh(self.error)
        if self.finish is not None:
            raise ProtocolError(
                f"request {self.request!r} to {self.receiver} is finished already; wait for its finish() work to "
                f"complete before using the name again, or cancel({self.request!r})"
            )

    def add_sent(self, op: SendOp) -> None:
        """Records the pages, or the state, of ``op`` as sent: `finish` compares them with what is owed."""
        if op.state:
            self.states.update(op.layers)
            return
        if not op.num_pages:  # an empty chunk must not count the pages before its start as sent
            return
        end = op.start + op.num_pages
        # Not added to `pages` here: this is the critical path of a verb, and only `finish` reads them.
        self.chunks.append((op.layers, op.start, end))
        if end > self.num_pages:
            self.num_pages = end

    def forget_sent(self) -> None:
        """Forgets what `add_sent` has recorded."""
        self.chunks.clear()
        self.told.clear()
        self.pages = None
        self.num_pages = 0

    def sent_all_of(self, layers: tuple[int, ...]) -> bool:
        """Whether every page up to the highest one was sent of all these layers, in verbs that each sent all pages.

        So are nearly all requests, and this costs a verb less than to ask `sent`, which says it of all others.
        """
        covered: set[int] = set()
        for held, lo, hi in self.chunks:
            if lo or hi != self.num_pages:
                return False
            covered.update(held)
        return covered.issuperset(layers)

    def sent(self) -> LayerCoverage:
        """Which of this rank's pages were sent, by layer, counted after the prefix."""
        if self.pages is None:
            self.pages = LayerCoverage()
        spans: dict[tuple[int, int], list[int]] = {}
        for layers, lo, hi in self.chunks:
            spans.setdefault((lo, hi), []).extend(layers)
        for (lo, hi), spanned in spans.items():
            self.pages.add(spanned, lo, hi)
        self.chunks.clear()
        return self.pages


def receiver_name(dst: int, name: Callable[[int], str]) -> str:
    """A receiver, or `ANYBODY`, in messages. name: what they call a rank, see `GroupMap.name`."""
    return "whoever grants it" if dst == ANYBODY else name(dst)


def not_posted(dst: int, receiver: str) -> str:
    """Who has not granted the request that goes to ``dst``, in messages."""
    return "no rank has posted recv_pages" if dst == ANYBODY else f"{receiver} has not posted recv_pages"
