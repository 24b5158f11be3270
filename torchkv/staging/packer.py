"""Moving pieces between this rank's pages and its staging memory; `HostPacker` does it on host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchkv import hostpack
from torchkv.devicepages import DevicePages
from torchkv.errors import ChecksumMismatch
from torchkv.pieces import Piece, PieceLayout
from torchkv.plan import PairPlan
from torchkv.protocol.actions import BoundGrant, Scatter, SendOp
from torchkv.route import LocalPages
from torchkv.stagememory import Room, SendStages, StageMemory
from torchkv.staging import Stream
from torchkv.transport import Int64Array

__all__ = ["Early", "HostPacker", "Packer", "Staging", "mismatch"]


class Early(NamedTuple):
    """How the receiver's GPU learns how far a stage is written. address, value: of its signal, see `Signal`.

    stream: how the piece passes through the stage, if it does.
    """

    address: int
    value: int
    stream: Stream | None = None


class Packer(ABC):
    """Belongs to the progress thread. Its iterators yield bytes dealt with, 0 while something else does the work.

    An iterator that was begun must be run to its end, or until it raises: until then, something may still read the
    pages or write the stage, or the other way round.

    elsewhere: whether something else does the work, so that the thread spends its time on what to tell it next. Then
    peers should hear of each piece at once, not at the end of the thread's round. signals: whether that can also raise
    signals, and wait for them. channels: how many of a stream it can serve, 0 if none.
    """

    elsewhere = False
    signals = False

    @property
    def channels(self) -> int:
        return 0

    def ready(self, plan: PairPlan, *, checksum: bool) -> bool:
        """Whether pieces of ``plan`` are gathered without loading anything first, as they are from the second on."""
        return True

    def __init__(self, local: LocalPages, receiving: StageMemory | None) -> None:
        """receiving: this rank's ring, if it has one."""
        self._local = local
        self._receiving = receiving

    @abstractmethod
    def gather(
        self,
        op: SendOp,
        grant: BoundGrant,
        pages: Int64Array | DevicePages,
        piece: Piece,
        layout: PieceLayout,
        room: Room,
        *,
        checksum: bool,
        early: Early | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        """Packs ``piece`` of ``op`` into ``room``. pages: page ids of the whole op.

        checksum: with checksums, for which ``layout`` has room. early: the receiver may be told of the piece once the
        iterator has yielded; unless it is streamed, the rest then happens without it. A stream ends early if it is
        ``stopped``. Raises ``PageOutOfRange``, ``TransportUnavailable``.
        """

    @abstractmethod
    def scatter(self, job: Scatter) -> Iterator[int]:
        """Unpacks a stage of this rank's receiving ring into its pages, and compares checksums if the job says so.

        Waits for the job's signal, if it has one, unless it is stopped meanwhile; ``job.written`` says whether it came.
        Raises ``ChecksumMismatch``, ``TransportUnavailable``.
        """

    @abstractmethod
    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool) -> None:
        """Loads what pieces of ``plan`` will need, before any of them comes."""


@dataclass(frozen=True, slots=True)
class Staging:
    """What a rank stages with. receiving: its ring, if it has one."""

    packer: Packer
    sending: SendStages
    receiving: StageMemory | None

    def release(self) -> None:
        """Lets go of the memory of both."""
        self.sending.release()
        if self.receiving is not None:
            self.receiving.release()


class HostPacker(Packer):
    """See `Packer`. On the progress thread itself, step by step."""

    def gather(
        self,
        op: SendOp,
        grant: BoundGrant,
        pages: Int64Array | DevicePages,
        piece: Piece,
        layout: PieceLayout,
        room: Room,
        *,
        checksum: bool,
        early: Early | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        assert not isinstance(pages, DevicePages)
        assert early is None
        first = piece.start - op.start
        side = self._side(True, piece, grant.plan, pages[first : first + piece.num_pages], grant.num_tokens)
        yield from hostpack.copy(layout, side, room.ptr)
        if checksum:
            yield from hostpack.write_sums(layout, side, room.ptr)

    def scatter(self, job: Scatter) -> Iterator[int]:
        assert self._receiving is not None
        side = self._side(False, job.piece, job.plan, job.pages, job.num_tokens)
        at = self._receiving.room(job.stage).ptr
        yield from hostpack.copy(job.layout, side, at)
        if job.checked:
            bad = yield from hostpack.find_bad(job.layout, side, at)
            if bad is not None:
                raise mismatch(job, bad)

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool) -> None:
        """Everything was compiled when the cache was registered."""

    def _side(self, sending: bool, piece: Piece, plan: PairPlan, pages: Int64Array, limit_tokens: int) -> hostpack.Side:
        local = self._local
        return hostpack.Side(sending, piece, plan, pages, local.ptr, local.page_stride, limit_tokens)


def mismatch(job: Scatter, bad: hostpack.Mismatch) -> ChecksumMismatch:
    page = job.pages[bad.position]
    where = f"component {bad.component!r}, page {page} (number {bad.position} of the grant)"
    if job.state:
        where = f"state {bad.component!r}, slot {page}"
    return ChecksumMismatch(
        f"request {job.request!r} from rank {job.src}: layer {bad.layer}, {where} does not hold what was sent; the "
        f"request has failed, send it again",
        retryable=True,
    )
