"""Packing and unpacking pieces on the GPU that holds the pages: launches only, and how the kernels report.

One rank sees of a transfer its own pages and the packed stage. So geometries here are one-sided: where the other side's
strides would be, there are zeros, and the other side's layout cannot spoil what this one allows: wide words, long rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from torchkv import kernels, pagecopy, pagesum
from torchkv.errors import ProtocolError
from torchkv.hostpack import Mismatch
from torchkv.kernels import Flow
from torchkv.pieces import Piece, PieceLayout, Segment, pair_ranks
from torchkv.plan import PairPlan
from torchkv.route import LocalPages
from torchkv.slab import Rows, Slab
from torchkv.slabgeometry import Geometry, geometry
from torchkv.stagememory import Room
from torchkv.staging import Stream
from torchkv.sumlaunch import SumAddresses, launch_sums, sum_variant
from torchkv.variants import Variant

__all__ = ["PagePacker", "mismatch_slots"]

MAX_BLOCKS = 256  # of a launch that verifies: each has a slot of its own
RANK_BITS = 31  # of a mismatch's code; see `torchkv.pagesum`


class _Run(NamedTuple):
    """Jobs of a group that one launch does. segment: the group's first. position: of the first job in the group."""

    segment: Segment
    position: int
    first_job: int
    num_jobs: int
    geometry: Geometry


def mismatch_slots() -> torch.Tensor:
    """A fresh ``mismatches`` argument: int64 ``[MAX_BLOCKS]`` zeros, in pinned host memory where there is a GPU.

    For one stream at a time: launches that overlap need slots of their own. Zeroed again, it is as good as new.
    """
    return torch.zeros(MAX_BLOCKS, dtype=torch.int64, pin_memory=torch.cuda.is_available())


class PagePacker:
    """One rank's own pages under one plan: the sender's, which it gathers, or the receiver's, which it scatters into.

    Makes its tables in device memory once. Its methods enqueue on the current stream of the current device, which must
    be ``pages.device``; they neither synchronise nor allocate device memory. All tensors stay unchanged until the
    kernels are done. Raises ``TransportUnavailable`` for pages that kernels cannot address.
    """

    def __init__(self, plan: PairPlan, pages: LocalPages, *, sending: bool) -> None:
        self._plan = plan
        self._sending = sending
        self._mode = pagesum.WRITE if sending else pagesum.VERIFY
        self._jobs: list[tuple[Slab, int]] = []  # (slab, layer) of each job
        self._geometries: list[Geometry] = []  # of each job; equal ones are one object
        self._numbers: dict[tuple[str, int, int], int] = {}  # (component, first head, layer) -> job
        known: dict[Geometry, Geometry] = {}
        for group in plan.groups:
            for layer in group[0].layers:
                for slab in group:  # as they are packed
                    shape = _one_sided(plan, slab, layer, pages, sending=sending)
                    self._geometries.append(known.setdefault(shape, shape))
                    self._numbers[_key(slab, layer)] = len(self._jobs)
                    self._jobs.append((slab, layer))
        # Of each job, how many right before it have the same geometry: one launch can do them all.
        self._alike = [0] * len(self._jobs)
        for job in range(1, len(self._jobs)):
            if self._geometries[job] is self._geometries[job - 1]:
                self._alike[job] = self._alike[job - 1] + 1
        self._in_order = sorted(range(len(self._jobs)), key=self._order)
        self._table = self._job_table(pages)

    def _order(self, job: int) -> tuple[int, int]:
        """By layer, then as in the plan: the order in which mismatches are told."""
        return self._jobs[job][1], job

    def _job_table(self, pages: LocalPages) -> torch.Tensor:
        """Each job's address, in this side's column, and in the other, which copies never read, its number in order."""
        side = self._mode
        table = torch.empty((len(self._jobs), 2), dtype=torch.int64)
        for number, job in enumerate(self._in_order):
            slab, layer = self._jobs[job]
            table[job, side] = pages.ptr(slab.component, layer)
            table[job, 1 - side] = number
        return table.to(pages.device)

    def variants(self, *, checksum: bool, stream: bool = False) -> list[Variant]:
        """What the other methods launch. checksum, stream: also what checksums and streams need."""
        mode = pagecopy.GATHER if self._sending else pagecopy.SCATTER
        found: list[Variant] = []
        for shape in set(self._geometries):
            found += kernels.variants(shape, mode, stream=stream)
            if checksum:
                found.append(sum_variant(shape, self._mode))
        return found

    # ------------------------------------------------------------------ the sender's

    def gather(
        self,
        layout: PieceLayout,
        piece: Piece,
        ids: torch.Tensor,
        stage: Room,
        *,
        limit_tokens: int,
        errors: torch.Tensor,
        blocks: int,
        stream: Flow | None = None,
    ) -> None:
        """Packs ``piece`` into ``stage``.

        layout: of the piece under a grant of ``limit_tokens`` tokens. ids: int64 ``[piece.num_pages]``, its page ids,
        in device memory; they are checked there. stage: at least ``layout.nbytes`` bytes that the device reaches,
        aligned to 16. errors: see `torchkv.kernels.error_slot`. blocks: thread blocks of a launch at most. Raises
        ``ProtocolError`` for tensors of the wrong kind, and for a stage that is too small.

        stream: see `torchkv.kernels.gather`. The stage then needs ``stream.shape.nbytes`` bytes, however large the
        piece is, and of ``layout`` only the order counts. While `torchkv.kernels.unfinished`, it is to be called again.
        """
        assert self._sending
        self._check(piece, ids, limit_tokens)
        if stream is not None:
            kernels.check_stream(stream)
        for run in self._runs(layout):
            kernels.gather(
                self._table,
                ids,
                stage if stream else _part(stage, run),
                run.geometry,
                first_job=run.first_job,
                num_jobs=run.num_jobs,
                start=piece.start,
                limit_tokens=limit_tokens,
                errors=errors,
                blocks=blocks,
                stream=stream,
                first_chunk=_first_chunk(layout, run, stream.shape) if stream else 0,
            )

    def write_sums(
        self,
        layout: PieceLayout,
        piece: Piece,
        ids: torch.Tensor,
        stage: Room,
        *,
        limit_tokens: int,
        errors: torch.Tensor,
        blocks: int,
    ) -> None:
        """Computes the checksums of ``piece`` from the pages, and stores them where ``layout`` says.

        Arguments and errors as for `gather`.
        """
        assert self._sending
        where = SumAddresses(self._table.data_ptr(), ids.data_ptr(), stage.ptr, mismatches=0, errors=errors.data_ptr())
        self._check_sums(layout, piece, ids, stage, limit_tokens)
        self._sum(layout, piece, where, limit_tokens=limit_tokens, blocks=blocks)

    # ------------------------------------------------------------------ the receiver's

    def scatter(
        self,
        layout: PieceLayout,
        piece: Piece,
        ids: torch.Tensor,
        stage: Room,
        *,
        limit_tokens: int,
        errors: torch.Tensor,
        blocks: int,
        guard: tuple[int, int] = (0, 0),
        stream: Flow | None = None,
    ) -> None:
        """Unpacks ``piece`` from ``stage``. ids: of the grant's pages, from the first on; the rest as for `gather`.

        guard: see `torchkv.kernels.scatter`.
        """
        assert not self._sending
        self._check(piece, ids, limit_tokens)
        if stream is not None:
            kernels.check_stream(stream)
        for run in self._runs(layout):
            kernels.scatter(
                self._table,
                stage if stream else _part(stage, run),
                ids,
                run.geometry,
                num_src_pages=piece.num_pages,
                first_job=run.first_job,
                num_jobs=run.num_jobs,
                start=piece.start,
                limit_tokens=limit_tokens,
                errors=errors,
                blocks=blocks,
                guard=guard,
                stream=stream,
                first_chunk=_first_chunk(layout, run, stream.shape) if stream else 0,
            )

    def verify_sums(
        self,
        layout: PieceLayout,
        piece: Piece,
        ids: torch.Tensor,
        stage: Room,
        *,
        limit_tokens: int,
        errors: torch.Tensor,
        mismatches: torch.Tensor,
        blocks: int,
    ) -> None:
        """Computes the checksums of ``piece`` from the pages it was scattered into, and compares them with ``stage``'s.

        mismatches: see `mismatch_slots`; `first_mismatch` reads it. The rest as for `scatter`.
        """
        assert not self._sending
        if mismatches.dtype is not torch.int64 or not mismatches.is_contiguous() or not mismatches.numel():
            raise ProtocolError(f"mismatches must be int64 slots, not {mismatches.dtype} {tuple(mismatches.shape)}")
        where = SumAddresses(
            self._table.data_ptr(), ids.data_ptr(), stage.ptr, mismatches.data_ptr(), errors=errors.data_ptr()
        )
        self._check_sums(layout, piece, ids, stage, limit_tokens)
        self._sum(layout, piece, where, limit_tokens=limit_tokens, blocks=min(blocks, mismatches.numel()))

    def first_mismatch(self, mismatches: torch.Tensor, piece: Piece, *, limit_tokens: int) -> Mismatch | None:
        """Of the pages of ``piece`` that `verify_sums` found wrong, the first: by layer, component and position.

        Read it after the kernels are done. It is the same however many blocks there were.
        """
        codes = mismatches[mismatches != 0]
        if not codes.numel():
            return None
        number, rank = divmod(int(codes.min()) - 1, 1 << RANK_BITS)
        slab, layer = self._jobs[self._in_order[number]]
        pair = _pair(slab, rank + self._ranks(slab, piece, limit_tokens).start)
        return Mismatch(layer, slab.component, pair * slab.tokens // self._plan.dst_page_size)

    # ------------------------------------------------------------------ both

    def _sum(self, layout: PieceLayout, piece: Piece, where: SumAddresses, *, limit_tokens: int, blocks: int) -> None:
        """where: with the addresses of the whole job table and of the stage."""
        for run in self._runs(layout):
            segment = run.segment
            assert segment.sums, "a layout without checksums"
            launch_sums(
                self._mode,
                run.geometry,
                where._replace(
                    jobs=where.jobs + 16 * run.first_job,
                    sums=where.sums + segment.sums + 8 * run.position * segment.pairs,
                ),
                num_jobs=run.num_jobs,
                ranks=self._ranks(segment.slab, piece, limit_tokens),
                start=piece.start if self._sending else 0,
                blocks=blocks,
            )

    def _runs(self, layout: PieceLayout) -> Iterator[_Run]:
        """Neighbouring jobs of equal geometry: one run a group, unless layers were left out or pages lie unlike."""
        at = 0
        while at < len(layout.segments):
            segment = layout.segments[at]
            group = [each.slab for each in layout.segments[at : at + segment.group]]
            at += segment.group
            layers = segment.layers
            head, tail = self._numbers[_key(group[0], layers[0])], self._numbers[_key(group[-1], layers[-1])]
            count = len(layers) * len(group)
            if tail - head == count - 1 and self._alike[tail] >= count - 1:  # as nearly always
                yield _Run(segment, 0, head, count, self._geometries[head])
                continue
            jobs = [self._numbers[_key(slab, layer)] for layer in layers for slab in group]
            first = 0
            for end in range(1, len(jobs) + 1):
                if end == len(jobs) or jobs[end] != jobs[end - 1] + 1 or not self._alike[jobs[end]]:
                    yield _Run(segment, first, jobs[first], end - first, self._geometries[jobs[first]])
                    first = end

    def _ranks(self, slab: Slab, piece: Piece, limit_tokens: int) -> range:
        return pair_ranks(self._plan, slab, piece.start, piece.num_pages, limit_tokens)

    def _check(self, piece: Piece, ids: torch.Tensor, limit_tokens: int) -> None:
        """That there is an id wherever the kernels look for one."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
            raise ProtocolError(f"page ids must be contiguous int64 [n], not {ids.dtype} {tuple(ids.shape)}")
        need = piece.num_pages if self._sending else -(-limit_tokens // self._plan.dst_page_size)
        if ids.numel() != need and (self._sending or ids.numel() < need):
            raise ProtocolError(f"{ids.numel()} page ids for {need} pages of a piece")

    def _check_sums(self, layout: PieceLayout, piece: Piece, ids: torch.Tensor, stage: Room, limit_tokens: int) -> None:
        """What `torchkv.kernels` checks for copies."""
        self._check(piece, ids, limit_tokens)
        if stage.nbytes < layout.nbytes:
            raise ProtocolError(f"a stage of {stage.nbytes} bytes for a piece that takes {layout.nbytes}")
        if stage.ptr % 8:
            raise ProtocolError(f"a stage with checksums must be aligned to 8 bytes, not at {stage.ptr:#x}")


def _key(slab: Slab, layer: int) -> tuple[str, int, int]:
    return slab.component, slab.heads.start, layer


def _pair(slab: Slab, rank: int) -> int:
    """The pair of this rank within the stripe, numbered from the prefix; see `torchkv.slabgeometry`."""
    per_unit = slab.unit // slab.tokens
    return slab.index * per_unit + rank + rank // per_unit * per_unit * (slab.holders - 1)


def _part(stage: Room, run: _Run) -> Room:
    """Where a run's pairs are packed."""
    nbytes = run.segment.layer_nbytes
    return stage.part(run.segment.offset + run.position * nbytes, run.num_jobs * nbytes)


def _first_chunk(layout: PieceLayout, run: _Run, stream: Stream) -> int:
    """Chunks of a stream of all of ``layout`` before the run's first job."""
    before = 0
    for segment in layout.segments:
        if segment is run.segment:
            break
        before += len(segment.layers) * stream.chunks(segment.layer_nbytes)
    return before + run.position * stream.chunks(run.segment.layer_nbytes)


def _one_sided(plan: PairPlan, slab: Slab, layer: int, pages: LocalPages, *, sending: bool) -> Geometry:
    """The geometry between this rank's pages and the packed order."""
    place = pages.placements[slab.component, layer]
    if sending:
        seen = replace(slab, dst_base=0, dst_token_stride=0, rows=_rows(slab.rows, sending=True))
    else:
        seen = replace(slab, src_base=0, src_token_stride=0, rows=_rows(slab.rows, sending=False))
    return geometry(
        seen,
        src_page_stride=place.page_stride if sending else 0,
        dst_page_stride=0 if sending else place.page_stride,
        src_page_size=plan.src_page_size,
        dst_page_size=plan.dst_page_size,
        num_src_pages=place.num_pages if sending else 0,
        num_dst_pages=0 if sending else place.num_pages,
        addresses=[pages.ptr(slab.component, layer)],
    )


def _rows(rows: Rows, *, sending: bool) -> Rows:
    """One side's rows, in packed order; those that lie one behind the other there are one."""
    dims = [(rows.n1, rows.s1 if sending else rows.d1), (rows.n0, rows.s0 if sending else rows.d0)]
    run = rows.run
    while dims and (dims[0][0] == 1 or dims[0][1] == run):
        run *= dims.pop(0)[0]
    (n1, inner), (n0, outer) = [*dims, (1, 0), (1, 0)][:2]
    return Rows(n0, outer, 0, n1, inner, 0, run) if sending else Rows(n0, 0, outer, n1, 0, inner, run)
