"""Launches of the page-copy kernel: its arguments, its tile, and compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torchkv import pagecopy
from torchkv.slabgeometry import Geometry, Side
from torchkv.staging import MAX_CHANNELS, SLOTS, Stream
from torchkv.variants import Variant

__all__ = ["Addresses", "Flow", "divisor", "launch", "launch_stream", "shape", "variants"]


class Tile(NamedTuple):
    """words: that a block moves at once. warps: that do it. table: look rows up where a tile touches at most so many.

    ``table=0`` locates every word by itself, which takes twice the instructions.
    """

    words: int
    warps: int
    table: int


# The best of some thirty that were measured between two H200 (docs/measurements), for one layer as for eighty: 16 of
# these blocks fill nine tenths of the link, and 32 KiB are few enough for all blocks to end together.
TILE = Tile(2048, 8, 256)
STREAM_WARPS = 16  # a block of a stream now and then waits for all its stores: more warps, sooner busy again

MAX_WORDS = (1 << 31) - 1 - (1 << 16)  # of one job in one launch: a tile more is still an int32


class Addresses(NamedTuple):
    """Of the job table's first row, both sides' page ids, the stage (0 where there is none) and the error slot.

    guard: of the signal word that says that the stage is written, when it stands at ``expected``; 0: it is.
    """

    jobs: int
    src_ids: int
    dst_ids: int
    stage: int
    errors: int
    guard: int = 0
    expected: int = 0


class Flow(NamedTuple):
    """What a gather on one GPU and a scatter on another, launched each with its own ``state``, have in common.

    shape: the stage has ``SLOTS * channels`` slots of ``chunk`` bytes. Chunks are numbered through all jobs, and a
    job's last one may be partly filled. Block b of either kernel is channel b and does chunks b, b + channels,
    b + 2 * channels, and so on; its k-th lies in slot ``k % SLOTS * channels + b``.

    words: address of int64 ``[2, MAX_CHANNELS]`` in the receiver's device memory, which both GPUs reach: of each
    channel how far it is packed, and how far unpacked, as ``base`` plus a number of chunks. base: above all that any of
    them has held before; they only rise.
    state: address of int64 ``[MAX_CHANNELS]`` in this GPU's own memory: of each channel the chunks that are done. Zeros
    before the first launch; a launch goes on where the last one has stopped. patience: so many times a block looks in
    vain for what it needs to go on; then it stops.
    """

    words: int
    base: int
    shape: Stream
    state: int
    patience: int

    def integers(self, mode: int, unit: int, job_nbytes: int, first_chunk: int) -> tuple[int, ...]:
        """Runtime arguments of the kernel, from ``wait_at`` on. unit: bytes of a word."""
        packed, unpacked = self.words, self.words + 8 * MAX_CHANNELS
        tiles = self.shape.chunk // (TILE.words * unit)
        wait_at, publish_at = (unpacked, packed) if mode == pagecopy.GATHER else (packed, unpacked)
        counts = self.patience, first_chunk, tiles, self.shape.chunks(job_nbytes)
        return wait_at, publish_at, self.state, self.base, *counts


NO_STREAM = (0,) * 8  # in place of `Flow.integers`


class Shape(NamedTuple):
    """What a geometry contributes to a launch.

    unit: bytes of a word. rows, parts: kernel constants. integers: runtime arguments, from ``words_per_pair`` on.
    """

    unit: int
    rows: int
    parts: bool
    words_per_pair: int
    words_per_row: int
    pair_nbytes: int
    integers: tuple[int, ...]


@lru_cache(maxsize=1024)
def shape(geometry: Geometry) -> Shape:
    """The kernel's view of ``geometry``, computed once."""
    n0, s0, d0, n1, s1, d1, run = geometry.rows
    unit = geometry.unit
    per_row = run // unit
    per_pair = geometry.rows.per_pair * per_row
    src, dst = geometry.src, geometry.dst
    integers = (
        per_pair,
        *divisor(per_pair),
        per_row,
        *divisor(per_row),
        n1,
        *divisor(n1),
        s0,
        d0,
        s1,
        d1,
        *divisor(geometry.per_unit),
        geometry.index * geometry.per_unit,
        geometry.per_unit * (geometry.holders - 1),
        *_side(src, geometry.tokens),
        *_side(dst, geometry.tokens),
    )
    return Shape(
        unit=unit,
        rows=0 if n0 * n1 == 1 else 1 if n0 == 1 else 2,
        parts=geometry.holders > 1 or src.per_page > 1 or dst.per_page > 1,
        words_per_pair=per_pair,
        words_per_row=per_row,
        pair_nbytes=geometry.pair_nbytes,
        integers=integers,
    )


def _side(side: Side, tokens: int) -> tuple[int, ...]:
    part_stride = tokens * side.token_stride
    return side.per_page, *divisor(side.per_page), part_stride, side.page_stride, side.base, side.num_pages


def divisor(number: int) -> tuple[int, int]:
    """(magic, shift) with ``n // number == (2 * n * magic >> 32) >> shift`` for 0 <= n < 2**31.

    With ``shift = ceil(log2(number))`` and ``magic = ceil(2**(31 + shift) / number)``, which is below 2**32, the
    error of the product is less than 1 / number. The magic is given as the int32 with the same bits.
    """
    shift = (number - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // number)
    return magic - (magic >> 31 << 32), shift


def launch(
    mode: int, geometry: Geometry, addresses: Addresses, *, num_jobs: int, ranks: range, start: int, blocks: int
) -> None:
    """Enqueues the pairs of these ranks, for ``num_jobs`` jobs, on the current stream of the current device.

    mode: ``pagecopy.DIRECT``, ``GATHER`` or ``SCATTER``. start: the first page id's position, in sender pages.
    blocks: thread blocks at most. Nothing is checked here.
    """
    what = shape(geometry)
    for first, count in _pieces(ranks, MAX_WORDS // what.words_per_pair):
        words = count * what.words_per_pair
        stage = addresses.stage + (first - ranks.start) * what.pair_nbytes
        counts = num_jobs, first, start, words
        integers = _integers(addresses, stage, len(ranks) * what.pair_nbytes, NO_STREAM, counts, what)
        grid = min(blocks, num_jobs * -(-words // TILE.words))
        _variant(mode, what).launch(grid, integers)


def launch_stream(
    mode: int,
    geometry: Geometry,
    addresses: Addresses,
    stream: Flow,
    *,
    first_chunk: int,
    num_jobs: int,
    ranks: range,
    start: int,
) -> None:
    """Enqueues one side of ``stream``, a ``GATHER`` or a ``SCATTER``, as `launch` does with a packed stage.

    first_chunk: chunks of the stream before the first job's. A job is at most `MAX_WORDS` words.
    """
    if not ranks or not num_jobs:
        return
    what = shape(geometry)
    words = len(ranks) * what.words_per_pair
    assert words <= MAX_WORDS, f"a stream of jobs of {words} words"
    flow = stream.integers(mode, what.unit, len(ranks) * what.pair_nbytes, first_chunk)
    integers = _integers(addresses, addresses.stage, 0, flow, (num_jobs, ranks.start, start, words), what)
    _stream_variant(mode, what).launch(stream.shape.channels, integers)


def _integers(
    addresses: Addresses, stage: int, stage_stride: int, flow: tuple[int, ...], counts: tuple[int, ...], what: Shape
) -> tuple[int, ...]:
    """The kernel's runtime arguments. flow: `Flow.integers` or `NO_STREAM`. counts: from ``num_jobs`` to ``words``."""
    jobs, src_ids, dst_ids, _, *rest = addresses
    return jobs, src_ids, dst_ids, stage, stage_stride, *rest, *flow, *counts, *what.integers


def variants(geometry: Geometry, *modes: int, stream: bool = False) -> list[Variant]:
    """What copies of ``geometry`` launch.

    modes: as for `launch`; direct copies if none are named. stream: also what `launch_stream` does.
    """
    what = shape(geometry)
    found = [_variant(mode, what) for mode in modes or (pagecopy.DIRECT,)]
    return found + [_stream_variant(mode, what) for mode in modes if stream]


def _variant(mode: int, what: Shape) -> Variant:
    return Variant(pagecopy.copy, pagecopy.NUM_INTEGERS, _constants(mode, what), TILE.warps)


def _stream_variant(mode: int, what: Shape) -> Variant:
    return Variant(pagecopy.copy, pagecopy.NUM_INTEGERS, _constants(mode, what, SLOTS), STREAM_WARPS)


def _pieces(ranks: range, most: int) -> Iterator[tuple[int, int]]:
    """``ranks`` as (first, count) with count <= most."""
    for first in range(ranks.start, ranks.stop, most):
        yield first, min(most, ranks.stop - first)


def _constants(mode: int, what: Shape, slots: int = 0) -> tuple[int, ...]:
    tile = TILE
    per_row = what.words_per_row
    touched = tile.words // per_row if tile.words % per_row == 0 else (tile.words - 2) // per_row + 2
    table = tile.table if touched <= tile.table else 0
    return mode, what.unit, what.rows, int(what.parts), tile.words, table, slots
