"""Gathering a piece from host memory into its stage, scattering it from there, and its checksums on both sides.

Everything goes in steps of at most ``transfer.STEP_BYTES``, or one page pair; each yields the bytes it dealt with.
Nothing is checked here: the callers have checked page ids against pool and grant, the piece against the grant, and the
stage against the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchkv import hostcopy
from torchkv.checksum import PagePattern, page_sums
from torchkv.copytransfer import SHORT_RUN
from torchkv.descriptors import PagePairs, expand, page_pairs
from torchkv.pieces import Piece, PieceLayout, Segment
from torchkv.plan import PairPlan
from torchkv.slab import Rows, Slab
from torchkv.transfer import STEP_BYTES
from torchkv.transport import Int64Array

__all__ = ["Mismatch", "Side", "copy", "find_bad", "write_sums"]

# A step ends with the chunk that fills half of it, so a step of whole chunks never exceeds STEP_BYTES.
CHUNK_BYTES = STEP_BYTES // 2

Place = Callable[[str, int], int]  # (component, layer) -> an address, or a stride in bytes


class Mismatch(NamedTuple):
    """Where the bytes that arrived are not the bytes sent. position: of the receiver's page in the grant."""

    layer: int
    component: str
    position: int


@dataclass(frozen=True, slots=True)
class Side:
    """The pages of one side of a piece.

    sending: whether it is the sender's. pages: int64 ids, of sender pages [piece.start, piece.start + piece.num_pages),
    or of all the grant's pages. ptr, page_stride: of this rank's tensor of a component and layer; addresses, and bytes
    from one page to the next. limit_tokens: tokens of the grant.
    """

    sending: bool
    piece: Piece
    plan: PairPlan
    pages: Int64Array
    ptr: Place
    page_stride: Place
    limit_tokens: int
    _offsets: dict[tuple[int, int], Int64Array] = field(default_factory=dict)  # by offset of the segment, page stride

    def offsets(self, segment: Segment, page_stride: int) -> Int64Array:
        """Bytes from a layer's address to each pair of the segment."""
        key = (segment.offset, page_stride)
        if key not in self._offsets:
            slab, pairs = segment.slab, self.pairs(segment.slab)
            if self.sending:
                index, inside = pairs.src_index, slab.src_base + pairs.src_token * slab.src_token_stride
            else:
                index, inside = pairs.dst_index, slab.dst_base + pairs.dst_token * slab.dst_token_stride
            self._offsets[key] = self.pages[index] * page_stride + inside
        return self._offsets[key]

    def pairs(self, slab: Slab) -> PagePairs:
        return page_pairs(
            slab,
            num_src_pages=self.piece.num_pages,
            start=self.piece.start,
            limit_tokens=self.limit_tokens,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
        )

    def pattern(self, slab: Slab) -> PagePattern:
        """Where the packed bytes of a pair lie on this side, folded where they are contiguous here."""
        n0, s0, d0, n1, s1, d1, run = slab.rows
        if not self.sending:
            s0, s1 = d0, d1
        for _ in range(2):
            if n1 == 1 or s1 == run:
                n0, s0, n1, s1, run = 1, 0, n0, s0, run * n1
        return PagePattern(n0, s0, n1, s1, run)

    def sums(self, segment: Segment, layer: int, first: int, last: int, sums: Int64Array) -> None:
        """Computes ``sums[first:last]`` of one layer of the segment."""
        component = segment.slab.component
        offsets = self.offsets(segment, self.page_stride(component, layer))
        page_sums(self.ptr(component, layer), offsets, first, last, self.pattern(segment.slab), sums)


def copy(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    """Packs the sender's pages into its stage, or unpacks a stage into the receiver's.

    layout: of the piece, by the plan, under the grant. stage: address of the stage, ``layout.nbytes`` long.
    """
    return _in_steps(_copied(layout, side, stage))


def write_sums(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    """Computes the checksums from the sender's pages and stores them in the stage; arguments as for `copy`.

    The pages must not be overwritten between the two.
    """
    return _in_steps(_summed(layout, side, stage))


def find_bad(layout: PieceLayout, side: Side, stage: int) -> Generator[int, None, Mismatch | None]:
    """Computes the checksums from the receiver's pages and compares; ``bad = yield from find_bad(...)``.

    Returns the first page pair that differs (by layer, then by slab of the plan, then by page), or None. Ends there.
    Arguments as for `copy`, after it.
    """
    bad: list[Mismatch] = []
    yield from _in_steps(_compared(layout, side, stage, bad))
    return bad[0] if bad else None


def _in_steps(chunks: Iterator[int]) -> Iterator[int]:
    """Joins chunks, as many as make a step."""
    step = 0
    for nbytes in chunks:
        step += nbytes
        if step >= CHUNK_BYTES:
            yield step
            step = 0
    if step:
        yield step


def _chunks(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """The pairs of one layer of a segment, as (first, last, bytes)."""
    size = segment.slab.pair_nbytes
    step = max(1, CHUNK_BYTES // size)
    for first in range(0, segment.pairs, step):
        last = min(first + step, segment.pairs)
        yield first, last, (last - first) * size


class _Copy(NamedTuple):
    """A part of one layer. ``run`` copies it between two addresses: of the source and of the destination."""

    nbytes: int
    run: Callable[[int, int], None]


def _copies(segment: Segment, side: Side, page_stride: int) -> list[_Copy]:
    """What one layer of a segment takes; the same for all layers with this page stride."""
    n0, s0, n1, s1, run = side.pattern(segment.slab)
    offsets = side.offsets(segment, page_stride)
    packed = np.arange(segment.pairs, dtype=np.int64) * segment.slab.pair_nbytes
    if side.sending:
        rows, src, dst = Rows(n0, s0, n1 * run, n1, s1, run, run), offsets, packed
    else:
        rows, src, dst = Rows(n0, n1 * run, s0, n1, run, s1, run), packed, offsets
    if rows.per_pair > 1 or run >= SHORT_RUN:
        return [_Copy(nbytes, _pairs_copy(src, dst, first, last, rows)) for first, last, nbytes in _chunks(segment)]
    slab = replace(segment.slab, rows=rows)
    return [
        _Copy(nbytes, _spans_copy(*expand(slab, src[first:last], dst[first:last])))
        for first, last, nbytes in _chunks(segment)
    ]


def _pairs_copy(src: Int64Array, dst: Int64Array, first: int, last: int, rows: Rows) -> Callable[[int, int], None]:
    return lambda src_ptr, dst_ptr: hostcopy.copy_pairs(src_ptr, dst_ptr, src, dst, first, last, rows)


def _spans_copy(src: Int64Array, dst: Int64Array, length: Int64Array) -> Callable[[int, int], None]:
    return lambda src_ptr, dst_ptr: hostcopy.copy_spans(src_ptr, dst_ptr, src, dst, length, 0, len(length))


def _copied(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    for segment in layout.segments:
        component = segment.slab.component
        copies: dict[int, list[_Copy]] = {}
        for number, layer in enumerate(segment.layers):
            stride = side.page_stride(component, layer)
            if stride not in copies:
                copies[stride] = _copies(segment, side, stride)
            pages, packed = side.ptr(component, layer), stage + segment.offset + number * segment.layer_stride
            for part in copies[stride]:
                part.run(*((pages, packed) if side.sending else (packed, pages)))
                yield part.nbytes


def _summed(layout: PieceLayout, side: Side, stage: int) -> Iterator[int]:
    for segment in layout.segments:
        sums = np.empty(segment.pairs, np.int64)
        for number, layer in enumerate(segment.layers):
            for first, last, nbytes in _chunks(segment):
                side.sums(segment, layer, first, last, sums)
                yield nbytes
            _copy_block(sums.ctypes.data, stage + segment.sums + number * segment.sums_stride, sums.nbytes)


def _compared(layout: PieceLayout, side: Side, stage: int, bad: list[Mismatch]) -> Iterator[int]:
    """Ends with the first mismatch, which it appends to ``bad``."""
    stored = [np.empty((len(segment.layers), segment.pairs), np.int64) for segment in layout.segments]
    for segment, written in zip(layout.segments, stored, strict=True):
        for number, row in enumerate(written):
            _copy_block(stage + segment.sums + number * segment.sums_stride, row.ctypes.data, row.nbytes)
    # By layer first: whoever reads the error looks for the first layer that is wrong, of whatever component.
    order = sorted(
        (layer, which, number)
        for which, segment in enumerate(layout.segments)
        for number, layer in enumerate(segment.layers)
    )
    for layer, which, number in order:
        segment = layout.segments[which]
        sums = np.empty(segment.pairs, np.int64)
        for first, last, nbytes in _chunks(segment):
            side.sums(segment, layer, first, last, sums)
            wrong = np.flatnonzero(sums[first:last] != stored[which][number, first:last])
            if len(wrong):
                position = side.pairs(segment.slab).dst_index[first + wrong[0]]
                bad.append(Mismatch(layer, segment.slab.component, int(position)))
                return
            yield nbytes


def _copy_block(src: int, dst: int, nbytes: int) -> None:
    start = np.zeros(1, np.int64)
    hostcopy.copy_pairs(src, dst, start, start, 0, 1, (1, 0, 0, 1, 0, 0, nbytes))
