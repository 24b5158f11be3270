"""Launches the kernels that pack a piece into a stage and unpack it, on the GPU that holds the pages.

`CudaPackLauncher` only enqueues; `torchkv.staging.cuda_packer` chooses streams, waits and reports errors.

A rank's kernels see its own pages and the packed stage, never the other rank's pages. So their geometries are
one-sided: the other side's strides are zero. The other side's layout then cannot narrow the words that a kernel loads
and stores, nor shorten its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torchkv.errors import ProtocolError
from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels import copies, page_copy
from torchkv.kernels.checksum_launch import SumAddresses, launch_sums, sum_kernel
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.launch import kernel_for
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.kernel_geometry import Geometry, geometry
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.pieces import Mismatch, Piece, PieceLayout, PieceSection, pair_ordinals
from torchkv.layout.plan_segment import PlanSegment, StridedRuns
from torchkv.layout.stage_format import MemorySpan
from torchkv.transfer.copy_tables import job_ranges
from torchkv.transfer.peer_connection import LocalPages

__all__ = ["AlikeJobs", "CudaPackLauncher", "PieceArgs", "mismatch_buffer"]

MAX_BLOCKS = 256  # of a launch that verifies checksums: each block reports into its own slot
RANK_BITS = 31  # low bits of a mismatch code, the number of the page pair; see `torchkv.kernels.checksum`


class _Launch(NamedTuple):
    """Consecutive jobs of equal geometry, which one launch does.

    section: the first of the group of sections that the jobs belong to. position: of the first job in that group.
    """

    section: PieceSection
    position: int
    first_job: int
    num_jobs: int
    geometry: Geometry


class AlikeJobs(NamedTuple):
    """Consecutive jobs of equal geometry, of one of `PairPlan.groups`.

    layers: of each job, ascending. begins_group: whether the first one is the group's first.
    """

    first_job: int
    layers: list[int]
    geometry: Geometry
    begins_group: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceArgs:
    """What the kernels of one piece are given. All tensors stay unchanged until the kernels are done.

    layout: of ``piece``, under a grant of ``limit_tokens`` tokens. ids: int64 page ids in device memory, where the
    kernels check them; on the sender ``[piece.num_pages]``, on the receiver those of the grant, from its first page on.
    stage: at least ``layout.nbytes`` bytes that the GPU reaches, aligned to 16. errors: see
    `torchkv.kernels.copies.error_words`. blocks: the most thread blocks of a launch.
    """

    layout: PieceLayout
    piece: Piece
    ids: torch.Tensor
    stage: MemorySpan
    limit_tokens: int
    errors: torch.Tensor
    blocks: int


def mismatch_buffer() -> torch.Tensor:
    """A new ``mismatches`` argument: int64 ``[MAX_BLOCKS]`` zeros, in pinned host memory where there is a GPU.

    Launches that may overlap need one each. It can be used again once it is zeroed.
    """
    return torch.zeros(MAX_BLOCKS, dtype=torch.int64, pin_memory=torch.cuda.is_available())


class CudaPackLauncher:
    """Launches the kernels for one rank's pages under one plan: gathers on the sender, scatters on the receiver.

    The constructor makes tables in device memory. The other methods enqueue on the current stream of the current
    device, which must be ``pages.device``; they neither synchronise nor allocate device memory. They raise
    ``ProtocolError`` for tensors of the wrong kind and for a stage that is too small, the constructor
    ``TransportUnavailable`` for pages that kernels cannot address.
    """

    def __init__(self, plan: PairPlan, pages: LocalPages, *, sending: bool, scales: Scales = NO_SCALES) -> None:
        """scales: of the receiver's pages, for those that this side converts."""
        self._plan = plan
        self.sending = sending
        self._mode = checksum_kernel.WRITE if sending else checksum_kernel.VERIFY
        self._jobs: list[tuple[PlanSegment, int]] = []  # (segment, layer) of each job
        self._geometries: list[Geometry] = []  # of each job; equal ones are one object
        self._first_jobs: dict[tuple[str, int, int], int] = {}  # (segment, layer) of a group -> its first segment's job
        known: dict[Geometry, Geometry] = {}
        for group in plan.groups:
            for layer in group[0].layers:
                self._first_jobs[_key(group[0], layer)] = len(self._jobs)
                for segment in group:  # in the order in which they are packed
                    shape = _one_sided(plan, segment, layer, pages, sending=sending)
                    self._geometries.append(known.setdefault(shape, shape))
                    self._jobs.append((segment, layer))
        pairs = enumerate(itertools.pairwise(self._geometries), start=1)
        self._splits = [job for job, (before, shape) in pairs if shape is not before]  # see `job_ranges`
        self._in_order = sorted(range(len(self._jobs)), key=self._order)
        self.table = self._job_table(pages)
        rows = [
            None if shape.conversion is None else scales.of(segment.component, layer, segment.heads)
            for (segment, layer), shape in zip(self._jobs, self._geometries, strict=True)
        ]
        self.scales = copies.ScaleTable.of(rows, pages.device) if any(row is not None for row in rows) else None

    def _order(self, job: int) -> tuple[int, int]:
        """Sorts jobs by layer, then as in the plan: the order in which mismatches are reported."""
        return self._jobs[job][1], job

    def _job_table(self, pages: LocalPages) -> torch.Tensor:
        """int64 ``[jobs, 2]`` on the GPU: the address of each job's pages, and its number in reporting order.

        The address is in this side's column. Copies never read the other one, so the checksum kernel finds the number
        there.
        """
        side = self._mode
        table = torch.empty((len(self._jobs), 2), dtype=torch.int64)
        for number, job in enumerate(self._in_order):
            segment, layer = self._jobs[job]
            table[job, side] = pages.ptr(segment.component, layer)
            table[job, 1 - side] = number
        return table.to(pages.device)

    def kernels_for(self, *, checksum: bool) -> list[CompiledKernel]:
        """The kernels that the other methods launch. checksum: with those for checksums."""
        mode = page_copy.GATHER if self.sending else page_copy.SCATTER
        found: list[CompiledKernel] = []
        for shape in set(self._geometries):
            found.append(kernel_for(shape, mode))
            if checksum:
                found.append(sum_kernel(shape, self._mode))
        return found

    def alike(self) -> list[AlikeJobs]:
        """All jobs, in their order: that in which pieces hold them."""
        found: list[AlikeJobs] = []
        begins = {self._first_jobs[_key(group[0], group[0].layers[0])] for group in self._plan.groups}
        for job, ((_, layer), shape) in enumerate(zip(self._jobs, self._geometries, strict=True)):
            if job in begins or shape is not found[-1].geometry:
                found.append(AlikeJobs(job, [], shape, job in begins))
            found[-1].layers.append(layer)
        return found

    # ------------------------------------------------------------------ sender

    def gather(self, args: PieceArgs) -> None:
        """Packs a piece into its stage."""
        assert self.sending
        self._check(args)
        for each in self._launches(args.layout):
            copies.gather(self._copy_jobs(each, args), args.ids, _part(args.stage, each))

    def write_sums(self, args: PieceArgs) -> None:
        """Computes the checksums of a piece from the pages, and stores them in the stage where the layout says."""
        assert self.sending
        self._sum(args, mismatches=0, blocks=args.blocks)

    # ------------------------------------------------------------------ receiver

    def scatter(self, args: PieceArgs) -> None:
        """Unpacks a piece from its stage."""
        assert not self.sending
        self._check(args)
        for each in self._launches(args.layout):
            copies.scatter(
                self._copy_jobs(each, args),
                _part(args.stage, each),
                args.ids,
                num_src_pages=args.piece.num_pages,
            )

    def verify_sums(self, args: PieceArgs, *, mismatches: torch.Tensor) -> None:
        """Computes the checksums of a piece from the pages it was scattered into, and compares them with the stage's.

        mismatches: from `mismatch_buffer`; `first_mismatch` reads it.
        """
        assert not self.sending
        if mismatches.dtype is not torch.int64 or not mismatches.is_contiguous() or not mismatches.numel():
            raise ProtocolError(f"mismatches must be int64 slots, not {mismatches.dtype} {tuple(mismatches.shape)}")
        self._sum(args, mismatches=mismatches.data_ptr(), blocks=min(args.blocks, mismatches.numel()))

    def first_mismatch(self, mismatches: torch.Tensor, piece: Piece, *, limit_tokens: int) -> Mismatch | None:
        """The first page pair of ``piece`` that `verify_sums` found wrong, by layer, component and position, or None.

        To be read when the kernels are done. The result does not depend on the number of blocks.
        """
        codes = mismatches[mismatches != 0]
        if not codes.numel():
            return None
        number, rank = divmod(int(codes.min()) - 1, 1 << RANK_BITS)
        segment, layer = self._jobs[self._in_order[number]]
        pair = segment.stripe.pair(rank + self._ranks(segment, piece, limit_tokens).start)
        return Mismatch(layer, segment.component, pair * segment.tokens // self._plan.dst_page_size)

    # ------------------------------------------------------------------ both

    def _sum(self, args: PieceArgs, *, mismatches: int, blocks: int) -> None:
        """Launches the checksum kernels. mismatches: an address; 0 where checksums are written."""
        self._check_sums(args)
        where = SumAddresses(
            self.table.data_ptr(), args.ids.data_ptr(), args.stage.ptr, mismatches, errors=args.errors.data_ptr()
        )
        for each in self._launches(args.layout):
            section = each.section
            assert section.sums, "a layout without checksums"
            launch_sums(
                self._mode,
                each.geometry,
                where._replace(
                    jobs=where.jobs + 16 * each.first_job,
                    sums=where.sums + section.sums + 8 * each.position * section.pairs,
                ),
                num_jobs=each.num_jobs,
                ranks=self._ranks(section.segment, args.piece, args.limit_tokens),
                start=args.piece.start if self.sending else 0,
                blocks=blocks,
            )

    def _launches(self, layout: PieceLayout) -> Iterator[_Launch]:
        """One launch for each group of sections; more where the piece leaves layers out, or where geometries differ."""
        at = 0
        while at < len(layout.sections):
            section = layout.sections[at]
            at += section.group
            position = 0
            for first_job, num_jobs in job_ranges(self._jobs_of(section), self._splits):
                yield _Launch(section, position, first_job, num_jobs, self._geometries[first_job])
                position += num_jobs

    def _jobs_of(self, section: PieceSection) -> list[range]:
        """The jobs of a whole group of sections, given its first one: a consecutive job per section for each layer."""
        head, tail = (
            self._first_jobs[_key(section.segment, layer)] for layer in (section.layers[0], section.layers[-1])
        )
        if tail - head == (len(section.layers) - 1) * section.group:  # the common case: no layer is left out
            return [range(head, tail + section.group)]
        jobs = (self._first_jobs[_key(section.segment, layer)] for layer in section.layers)
        return [range(job, job + section.group) for job in jobs]

    def _copy_jobs(self, each: _Launch, args: PieceArgs) -> copies.CopyJobs:
        return copies.CopyJobs(
            table=self.table,
            geometry=each.geometry,
            first_job=each.first_job,
            num_jobs=each.num_jobs,
            start=args.piece.start,
            limit_tokens=args.limit_tokens,
            errors=args.errors,
            blocks=args.blocks,
            scales=self.scales,
        )

    def _ranks(self, segment: PlanSegment, piece: Piece, limit_tokens: int) -> range:
        return pair_ordinals(self._plan, segment, piece.start, piece.num_pages, limit_tokens)

    def _check(self, args: PieceArgs) -> None:
        """Raises ``ProtocolError`` unless there is a page id wherever the kernels read one."""
        ids = args.ids
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
            raise ProtocolError(f"page ids must be contiguous int64 [n], not {ids.dtype} {tuple(ids.shape)}")
        need = args.piece.num_pages if self.sending else -(-args.limit_tokens // self._plan.dst_page_size)
        if ids.numel() != need and (self.sending or ids.numel() < need):
            raise ProtocolError(f"{ids.numel()} page ids for {need} pages of a piece")

    def _check_sums(self, args: PieceArgs) -> None:
        """Checks for checksum kernels what `torchkv.kernels.copies` checks for copies."""
        self._check(args)
        stage = args.stage
        if stage.nbytes < args.layout.nbytes:
            raise ProtocolError(f"a stage of {stage.nbytes} bytes for a piece that takes {args.layout.nbytes}")
        if stage.ptr % 8:
            raise ProtocolError(f"a stage with checksums must be aligned to 8 bytes, not at {stage.ptr:#x}")


def _key(segment: PlanSegment, layer: int) -> tuple[str, int, int]:
    return segment.component, segment.heads.start, layer


def _part(stage: MemorySpan, each: _Launch) -> MemorySpan:
    """Where the pairs of a launch are packed."""
    nbytes = each.section.layer_nbytes
    return stage.part(each.section.offset + each.position * nbytes, each.num_jobs * nbytes)


def _one_sided(plan: PairPlan, segment: PlanSegment, layer: int, pages: LocalPages, *, sending: bool) -> Geometry:
    """The geometry between this rank's pages and the packed order: see the module's text."""
    placement = pages.placements[segment.component, layer]
    rows, conversion = _rows(segment.side_rows(sending=sending), sending=sending), segment.conversion
    if conversion is not None and not conversion.by_side(sending=sending):
        conversion = None  # this side's pages have the dtype of the stage
    if conversion is not None and sending:
        rows = rows._replace(run=rows.run // conversion.src.itemsize * conversion.dst.itemsize)
    if sending:
        seen = replace(segment, dst_base=0, dst_token_stride=0, rows=rows, conversion=conversion)
    else:
        seen = replace(segment, src_base=0, src_token_stride=0, rows=rows, conversion=conversion)
    return geometry(
        seen,
        src_page_stride=placement.page_stride if sending else 0,
        dst_page_stride=0 if sending else placement.page_stride,
        src_page_size=plan.src_page_size,
        dst_page_size=plan.dst_page_size,
        num_src_pages=placement.num_pages if sending else 0,
        num_dst_pages=0 if sending else placement.num_pages,
        addresses=[pages.ptr(segment.component, layer)],
    )


def _rows(rows: StridedRuns, *, sending: bool) -> StridedRuns:
    """The rows of one side in packed order; rows that are contiguous on this side are merged."""
    dims = [(rows.n1, rows.s1 if sending else rows.d1), (rows.n0, rows.s0 if sending else rows.d0)]
    run = rows.run
    while dims and (dims[0][0] == 1 or dims[0][1] == run):
        run *= dims.pop(0)[0]
    (n1, inner), (n0, outer) = [*dims, (1, 0), (1, 0)][:2]
    return StridedRuns(n0, outer, 0, n1, inner, 0, run) if sending else StridedRuns(n0, 0, outer, n1, 0, inner, run)
