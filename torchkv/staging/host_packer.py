"""Packs and unpacks pieces in host memory, on the progress thread, and computes their checksums on both sides.

Work is done in steps of at most ``copy_loops.STEP_BYTES``, or one page pair if that is larger; each step yields its
bytes. Nothing is checked here: callers have checked page ids against pool and grant, the piece against the grant, and
the stage against the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.cuda.page_ids import DevicePages
from torchkv.host import convert_loops, copy_loops
from torchkv.host.checksum import PagePattern, page_sums
from torchkv.host.copy_loops import SHORT_RUN, STEP_BYTES
from torchkv.layout.component import Conversion
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.descriptors import PagePairs, expand, page_pairs
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.pieces import Mismatch, Piece, PieceLayout, PieceSection
from torchkv.layout.plan_segment import PlanSegment, StridedRuns
from torchkv.protocol.actions import Scatter
from torchkv.staging.packer import GatherJob, Packer, mismatch

__all__ = ["HostPacker", "Side", "copy", "find_bad", "write_sums"]

# A step ends with the chunk that fills half of it, so a step of whole chunks never exceeds STEP_BYTES.
CHUNK_BYTES = STEP_BYTES // 2

# (component, layer) -> its address, or a stride in bytes
OfTensor = Callable[[str, int], int]


@dataclass(frozen=True, slots=True)
class Side:
    """This rank's side of a piece.

    sending: whether this rank is the sender. pages: int64 page ids: on the sender of sender pages
    [piece.start, piece.start + piece.num_pages), on the receiver of all the grant's pages. ptr: address of this rank's
    tensor of a component and layer. page_stride: bytes from one of its pages to the next. limit_tokens: tokens of the
    grant. scales: of the receiver's pages, for the side that converts (`Conversion.by_side`).
    """

    sending: bool
    piece: Piece
    plan: PairPlan
    pages: Int64Array
    ptr: OfTensor
    page_stride: OfTensor
    limit_tokens: int
    scales: Scales = NO_SCALES
    _offsets: dict[tuple[int, int], Int64Array] = field(default_factory=dict)  # by offset of the segment, page stride

    def offsets(self, section: PieceSection, page_stride: int) -> Int64Array:
        """Byte offsets, int64 ``[pairs]``, from a layer's address to each page pair of the section's segment."""
        key = (section.offset, page_stride)
        if key not in self._offsets:
            segment, pairs = section.segment, self.pairs(section.segment)
            if self.sending:
                index, inside = pairs.src_index, segment.src_base + pairs.src_token * segment.src_token_stride
            else:
                index, inside = pairs.dst_index, segment.dst_base + pairs.dst_token * segment.dst_token_stride
            self._offsets[key] = self.pages[index] * page_stride + inside
        return self._offsets[key]

    def pairs(self, segment: PlanSegment) -> PagePairs:
        return page_pairs(
            segment,
            num_src_pages=self.piece.num_pages,
            start=self.piece.start,
            limit_tokens=self.limit_tokens,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
        )

    def pattern(self, segment: PlanSegment) -> PagePattern:
        """Where the bytes of a pair lie on this side, in packed order. Runs that are contiguous here are merged."""
        n0, s0, d0, n1, s1, d1, run = segment.side_rows(sending=self.sending)
        if not self.sending:
            s0, s1 = d0, d1
        for _ in range(2):
            if n1 == 1 or s1 == run:
                n0, s0, n1, s1, run = 1, 0, n0, s0, run * n1
        return PagePattern(n0, s0, n1, s1, run)

    def converts(self, segment: PlanSegment) -> Conversion | None:
        """How this side converts the segment; None if its pages have the dtype of the stage."""
        conversion = segment.conversion
        return conversion if conversion is not None and conversion.by_side(sending=self.sending) else None

    def sums(self, section: PieceSection, layer: int, first: int, last: int, sums: Int64Array, *, packed: int) -> None:
        """Computes the checksums of pairs [first, last) of one layer into ``sums[first:last]``.

        packed: address of the layer in the stage. The side that converts sums up the bytes there, since its pages have
        others.
        """
        component = section.segment.component
        if self.converts(section.segment) is not None:
            nbytes = section.segment.stage_nbytes
            page_sums(packed, _packed(section), first, last, PagePattern(1, 0, 1, 0, nbytes), sums)
            return
        offsets = self.offsets(section, self.page_stride(component, layer))
        page_sums(self.ptr(component, layer), offsets, first, last, self.pattern(section.segment), sums)


def copy(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    """Packs the sender's pages into a stage, or unpacks a stage into the receiver's pages.

    layout: of the piece, by the plan, under the grant. stage: address of at least ``layout.nbytes`` bytes.
    """
    return _in_steps(_copied(layout, side, stage))


def write_sums(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    """Computes the checksums from the sender's pages and stores them in the stage. Arguments as for `copy`.

    The pages must not be overwritten between `copy` and this.
    """
    return _in_steps(_summed(layout, side, stage))


def find_bad(layout: PieceLayout, side: Side, stage: int) -> Generator[int, None, Mismatch | None]:
    """Computes the checksums from the receiver's pages and compares them with the stage's, after `copy`.

    Ends at the first page pair that differs (by layer, then by segment of the plan, then by page) and returns it, or
    None: ``bad = yield from find_bad(...)``. Arguments as for `copy`.
    """
    bad: list[Mismatch] = []
    yield from _in_steps(_compared(layout, side, stage, bad))
    return bad[0] if bad else None


def _in_steps(chunks: Iterator[int]) -> Iterator[int]:
    """Joins chunks into steps. Yields the bytes of each step."""
    step = 0
    for nbytes in chunks:
        step += nbytes
        if step >= CHUNK_BYTES:
            yield step
            step = 0
    if step:
        yield step


def _chunks(section: PieceSection) -> Iterator[tuple[int, int, int]]:
    """Cuts the page pairs of one layer into chunks: (first pair, end, bytes)."""
    size = section.segment.stage_nbytes
    step = max(1, CHUNK_BYTES // size)
    for first in range(0, section.pairs, step):
        last = min(first + step, section.pairs)
        yield first, last, (last - first) * size


class _Copy(NamedTuple):
    """One chunk of a layer. run: copies it, given the addresses of the source and the destination tensor."""

    nbytes: int
    run: Callable[[int, int], None]


def _copies(section: PieceSection, side: Side, page_stride: int) -> list[_Copy]:
    """The chunks of one layer of a section. Layers with equal page strides have equal chunks."""
    n0, s0, n1, s1, run = side.pattern(section.segment)
    offsets = side.offsets(section, page_stride)
    packed = _packed(section)
    if side.sending:
        rows, src, dst = StridedRuns(n0, s0, n1 * run, n1, s1, run, run), offsets, packed
    else:
        rows, src, dst = StridedRuns(n0, n1 * run, s0, n1, run, s1, run), packed, offsets
    if rows.per_pair > 1 or run >= SHORT_RUN:
        return [_Copy(nbytes, _pairs_copy(src, dst, first, last, rows)) for first, last, nbytes in _chunks(section)]
    segment = replace(section.segment, rows=rows)
    return [
        _Copy(nbytes, _spans_copy(*expand(segment, src[first:last], dst[first:last])))
        for first, last, nbytes in _chunks(section)
    ]


def _packed(section: PieceSection) -> Int64Array:
    """Offset of each page pair from the beginning of its layer in the stage."""
    return np.arange(section.pairs, dtype=np.int64) * section.segment.stage_nbytes


def _converted(
    section: PieceSection, side: Side, layer: int, conversion: Conversion, pages: int, packed: int
) -> Iterator[int]:
    """Converts one layer of a section. pages, packed: addresses of its tensor, and of its place in the stage."""
    segment = section.segment
    n0, s0, n1, s1, run = side.pattern(segment)
    offsets, places = side.offsets(section, side.page_stride(segment.component, layer)), _packed(section)
    src_size, dst_size = conversion.src.itemsize, conversion.dst.itemsize
    if side.sending:
        run = run // src_size * dst_size
        rows = StridedRuns(n0, s0, n1 * run, n1, s1, run, run)
        where = pages, packed, offsets, places
    else:
        short = run // dst_size * src_size
        rows = StridedRuns(n0, n1 * short, s0, n1, short, s1, run)
        where = packed, pages, places, offsets
    dtypes, scales = (conversion.src, conversion.dst), side.scales.of(segment.component, layer, segment.heads)
    for first, last, nbytes in _chunks(section):
        convert_loops.convert_pairs(dtypes, *where, first, last, rows, conversion.head_elements, scales)
        yield nbytes


def _pairs_copy(
    src: Int64Array, dst: Int64Array, first: int, last: int, rows: StridedRuns
) -> Callable[[int, int], None]:
    return lambda src_ptr, dst_ptr: copy_loops.copy_pairs(src_ptr, dst_ptr, src, dst, first, last, rows)


def _spans_copy(src: Int64Array, dst: Int64Array, length: Int64Array) -> Callable[[int, int], None]:
    return lambda src_ptr, dst_ptr: copy_loops.copy_spans(src_ptr, dst_ptr, src, dst, length, 0, len(length))


def _copied(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    for section in layout.sections:
        component = section.segment.component
        conversion = side.converts(section.segment)
        copies: dict[int, list[_Copy]] = {}
        for number, layer in enumerate(section.layers):
            pages, packed = side.ptr(component, layer), stage + section.offset + number * section.layer_stride
            if conversion is not None:
                yield from _converted(section, side, layer, conversion, pages, packed)
                continue
            stride = side.page_stride(component, layer)
            if stride not in copies:
                copies[stride] = _copies(section, side, stride)
            for part in copies[stride]:
                part.run(*((pages, packed) if side.sending else (packed, pages)))
                yield part.nbytes


def _summed(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    for section in layout.sections:
        sums = np.empty(section.pairs, np.int64)
        for number, layer in enumerate(section.layers):
            for first, last, nbytes in _chunks(section):
                packed = stage + section.offset + number * section.layer_stride
                side.sums(section, layer, first, last, sums, packed=packed)
                yield nbytes
            _copy_block(sums.ctypes.data, stage + section.sums + number * section.sums_stride, sums.nbytes)


def _compared(layout: PieceLayout, side: Side, stage: int, bad: list[Mismatch]) -> Iterator[int]:
    """Compares checksums, and ends with the first mismatch, which it appends to ``bad``."""
    stored = [np.empty((len(section.layers), section.pairs), np.int64) for section in layout.sections]
    for section, written in zip(layout.sections, stored, strict=True):
        for number, row in enumerate(written):
            _copy_block(stage + section.sums + number * section.sums_stride, row.ctypes.data, row.nbytes)
    # By layer first, because the error names the first layer that is wrong, of any component.
    order = sorted(
        (layer, which, number)
        for which, section in enumerate(layout.sections)
        for number, layer in enumerate(section.layers)
    )
    for layer, which, number in order:
        section = layout.sections[which]
        sums = np.empty(section.pairs, np.int64)
        for first, last, nbytes in _chunks(section):
            packed = stage + section.offset + number * section.layer_stride
            side.sums(section, layer, first, last, sums, packed=packed)
            wrong = np.flatnonzero(sums[first:last] != stored[which][number, first:last])
            if len(wrong):
                position = side.pairs(section.segment).dst_index[first + wrong[0]]
                bad.append(Mismatch(layer, section.segment.component, int(position)))
                return
            yield nbytes


def _copy_block(src: int, dst: int, nbytes: int) -> None:
    start = np.zeros(1, np.int64)
    copy_loops.copy_pairs(src, dst, start, start, 0, 1, (1, 0, 0, 1, 0, 0, nbytes))


class HostPacker(Packer):
    """The `Packer` of a rank whose cache is in host memory: the progress thread copies, step by step."""

    def gather(self, job: GatherJob) -> Iterator[int]:
        assert not isinstance(job.pages, DevicePages)
        side = self._side(job, job.pages[job.piece_pages], job.scales, sending=True)
        yield from copy(job.layout, side, job.stage.ptr)
        if job.checked:
            yield from write_sums(job.layout, side, job.stage.ptr)

    def scatter(self, job: Scatter) -> Iterator[int]:
        assert self._receiving is not None
        side = self._side(job, job.pages, self._local.scales, sending=False)
        at = self._receiving.span(job.stage).ptr
        yield from copy(job.layout, side, at)
        if job.checked:
            bad = yield from find_bad(job.layout, side, at)
            if bad is not None:
                raise mismatch(job, bad)

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool, scales: Scales = NO_SCALES) -> None:
        """Does nothing: the copy loops were compiled when the cache was registered."""

    def _side(self, job: GatherJob | Scatter, pages: Int64Array, scales: Scales, *, sending: bool) -> Side:
        local = self._local
        return Side(sending, job.piece, job.plan, pages, local.ptr, local.page_stride, job.num_tokens, scales)
