"""Moving pieces between this rank's pages and its staging memory; `HostPacker` does it on host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchkv import hostpack
from torchkv.devicepages import DevicePages
from torchkv.errors import ChecksumMismatch
from torchkv.pieces import Piece, PieceLayout
from torchkv.plan import PairPlan
from torchkv.protocol.actions import BoundGrant, Scatter, SendOp
from torchkv.route import LocalPages
from torchkv.stagememory import SendStages, StageMemory
from torchkv.staging import Stage
from torchkv.transport import Int64Array

__all__ = ["HostPacker", "Packer", "Staging", "mismatch"]


class Packer(ABC):
    """Belongs to the progress thread. Its iterators yield bytes dealt with, 0 while something else does the work.

    An iterator that was begun must be run to its end, or until it raises: until then, something may still read the
    pages or write the stage, or the other way round.
    """

    def __init__(self, local: LocalPages, sending: SendStages, receiving: StageMemory | None) -> None:
        """receiving: this rank's ring, if it has one."""
        self._local = local
        self._sending = sending
        self._receiving = receiving

    @abstractmethod
    def gather(
        self,
        op: SendOp,
        grant: BoundGrant,
        pages: Int64Array | DevicePages,
        piece: Piece,
        layout: PieceLayout,
        stage: Stage,
        *,
        checksum: bool,
    ) -> Iterator[int]:
        """Packs ``piece`` of ``op`` into ``stage``, of this rank's sending ring. pages: page ids of the whole op.

        checksum: with checksums, for which ``layout`` has room. Raises ``PageOutOfRange``, ``TransportUnavailable``.
        """

    @abstractmethod
    def scatter(self, job: Scatter) -> Iterator[int]:
        """Unpacks a stage of this rank's receiving ring into its pages, and compares checksums if the job says so.

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
        stage: Stage,
        *,
        checksum: bool,
    ) -> Iterator[int]:
        assert not isinstance(pages, DevicePages)
        first = piece.start - op.start
        for step in (hostpack.gather, hostpack.write_sums) if checksum else (hostpack.gather,):
            yield from step(
                layout,
                piece,
                grant.plan,
                pages=pages[first : first + piece.num_pages],
                ptr=self._local.ptr,
                page_stride=self._page_stride,
                stage=self._sending.take().ptr + stage.offset,
                limit_tokens=grant.num_tokens,
            )

    def scatter(self, job: Scatter) -> Iterator[int]:
        assert self._receiving is not None
        place: dict[str, Any] = {
            "pages": job.pages,
            "ptr": self._local.ptr,
            "page_stride": self._page_stride,
            "stage": self._receiving.ptr + job.stage.offset,
            "limit_tokens": job.num_tokens,
        }
        yield from hostpack.scatter(job.layout, job.piece, job.plan, **place)
        if job.checked:
            bad = yield from hostpack.find_bad(job.layout, job.piece, job.plan, **place)
            if bad is not None:
                raise mismatch(job, bad)

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool) -> None:
        """Everything was compiled when the cache was registered."""

    def _page_stride(self, component: str, layer: int) -> int:
        return self._local.placements[component, layer].page_stride


def mismatch(job: Scatter, bad: hostpack.Mismatch) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"request {job.request!r} from rank {job.src}: layer {bad.layer}, component {bad.component!r}, page "
        f"{job.pages[bad.position]} (number {bad.position} of the grant) does not hold what was sent; the request has "
        f"failed, send it again",
        retryable=True,
    )
