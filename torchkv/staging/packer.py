"""What packs pages into stages and unpacks stages into pages: `Packer`, for which there is a host and a CUDA kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchkv.arrays import Int64Array
from torchkv.cuda.page_ids import DevicePages
from torchkv.errors import ChecksumMismatch
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.pieces import Mismatch, Piece, PieceLayout
from torchkv.layout.stage_format import MemorySpan
from torchkv.protocol.actions import Scatter
from torchkv.staging.memory import SendStages, StageMemory
from torchkv.transfer.peer_connection import LocalPages

__all__ = ["GatherJob", "Packer", "Staging", "mismatch"]


@dataclass(eq=False, slots=True, kw_only=True)
class GatherJob:
    """Pack a piece of a verb into a stage: what `Scatter` is on the receiver.

    dst, generation, num_tokens: of the grant. stage: the memory to pack into, in the receiver's ring where that is
    mapped here, else in this rank's own. piece: what to pack; layout: where in the stage, by ``plan``. pages: page ids
    of the whole verb; start: of the first of them, counted in sender pages after the prefix. checked: write the
    checksums too. scales: of the receiver's pages, for pages that are converted. stopped: set when the transfer has
    failed: a gather that waits for its kernels to be loaded then ends.
    """

    dst: int
    generation: int
    stage: MemorySpan
    piece: Piece
    layout: PieceLayout
    plan: PairPlan = field(repr=False)
    pages: Int64Array | DevicePages = field(repr=False)
    start: int
    num_tokens: int
    checked: bool
    scales: Scales = field(default=NO_SCALES, repr=False)
    stopped: bool = False

    @property
    def piece_pages(self) -> slice:
        """The part of ``pages`` that belongs to the piece."""
        first = self.piece.start - self.start
        return slice(first, first + self.piece.num_pages)


class Packer(ABC):
    """Gathers pieces of this rank's pages into stages, and scatters stages. Used by the progress thread only.

    Its iterators yield the bytes that a step has copied, 0 while a GPU does the work. An iterator that was begun must
    be run until it ends or raises: until then, pages and stage may still be read or written.

    asynchronous: whether a GPU does the work. Then the peer is told of each piece at once, not at the end of the
    thread's round, because the copies go on meanwhile.
    """

    asynchronous = False

    def __init__(self, local: LocalPages, receiving: StageMemory | None) -> None:
        """receiving: this rank's receive ring, if it has one."""
        self._local = local
        self._receiving = receiving

    @abstractmethod
    def gather(self, job: GatherJob) -> Iterator[int]:
        """Packs a piece into its stage. Raises ``PageOutOfRange``, ``TransportUnavailable``."""

    @abstractmethod
    def scatter(self, job: Scatter) -> Iterator[int]:
        """Unpacks a stage of this rank's receive ring into its pages, and compares checksums if the job is ``checked``.

        Raises ``ChecksumMismatch``, ``TransportUnavailable``.
        """

    @abstractmethod
    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool, scales: Scales = NO_SCALES) -> None:
        """Loads the kernels for pieces of ``plan``, before the first piece.

        sending: for gathers, else for scatters. scales: of the receiver's pages, as in the jobs that will come. Raises
        ``TransportUnavailable`` for pieces that cannot be packed.
        """


@dataclass(frozen=True, slots=True)
class Staging:
    """What a rank needs for the staged path. sending: its send ring. receiving: its receive ring, if it has one."""

    packer: Packer
    sending: SendStages
    receiving: StageMemory | None

    def release(self) -> None:
        """Drops the memory of both rings."""
        self.sending.release()
        if self.receiving is not None:
            self.receiving.release()


def mismatch(job: Scatter, bad: Mismatch) -> ChecksumMismatch:
    """The error for a stage that does not hold what was sent. bad: the first page pair that differs."""
    page = job.pages[bad.position]
    where = f"component {bad.component!r}, page {page} (number {bad.position} of the grant)"
    if job.state:
        where = f"state {bad.component!r}, slot {page}"
    return ChecksumMismatch(
        f"request {job.request!r} from rank {job.src}: layer {bad.layer}, {where} does not hold what was sent; the "
        f"request has failed, send it again",
        retryable=True,
    )
