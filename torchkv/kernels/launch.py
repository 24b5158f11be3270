"""Launches of the page-copy kernel: its arguments, its tile sizes, and which compiled kernels a geometry needs.

`torchkv.kernels.copies` checks what callers pass. This module turns checked arguments into the integers and constants
of `torchkv.kernels.page_copy.copy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torchkv.host.convert_loops import KINDS
from torchkv.kernels import page_convert, page_copy
from torchkv.kernels.compiled import CompiledKernel
from torchkv.layout.kernel_geometry import Geometry, PageAddressing

__all__ = [
    "Addresses",
    "ConvertParams",
    "convert_params",
    "divisor",
    "kernel_params",
    "kernels_for",
    "launch",
    "launch_convert",
]


class Tile(NamedTuple):
    """How much a block copies at once.

    words: of a tile. warps: of a block. table: if a tile touches at most this many rows, their addresses are computed
    once per row and looked up per word. With ``table=0`` they are computed per word, which takes twice the
    instructions.
    """

    words: int
    warps: int
    table: int


# The best of some thirty tiles measured between two H200 (docs/measurements), for one layer as for eighty: 16 such
# blocks fill nine tenths of the link, and 32 KiB per tile are few enough for all blocks to end at about the same time.
TILE = Tile(2048, 8, 256)

# The fastest of six whose blocks take no more registers of a multiprocessor than those of `TILE`, which have to fit
# beside a model's kernels (docs/measurements/2026-11-27-gpu.md).
CONVERT_TILE = Tile(1024, 16, 0)

MAX_WORDS = (1 << 31) - 1 - (1 << 16)  # of one job in one launch: with one tile more it is still an int32


class Addresses(NamedTuple):
    """Device addresses of one launch; 0 for those that its mode does not use.

    jobs: the first row of the job table. src_ids, dst_ids: page ids. stage: the packed bytes.
    errors: see `torchkv.kernels.copies.error_words`. scales: of the first job, see `torchkv.kernels.page_convert`.
    """

    jobs: int
    src_ids: int
    dst_ids: int
    stage: int
    errors: int
    scales: int = 0


class KernelParams(NamedTuple):
    """What a geometry contributes to a launch.

    unit: bytes of a word. rows: how many of a pair's two row counts exceed 1. parts: whether pairs are striped or
    smaller than a page. integers: the kernel's runtime arguments from ``words_per_pair`` on.
    """

    unit: int
    rows: int
    parts: bool
    words_per_pair: int
    words_per_row: int
    pair_nbytes: int
    integers: tuple[int, ...]


@lru_cache(maxsize=1024)
def kernel_params(geometry: Geometry) -> KernelParams:
    """The kernel's arguments for ``geometry``, computed once."""
    n0, n1 = geometry.rows.n0, geometry.rows.n1
    unit = geometry.unit
    per_row = geometry.rows.run // unit
    return KernelParams(
        unit=unit,
        rows=0 if n0 * n1 == 1 else 1 if n0 == 1 else 2,
        parts=_has_parts(geometry),
        words_per_pair=geometry.rows.per_pair * per_row,
        words_per_row=per_row,
        pair_nbytes=geometry.pair_nbytes,
        integers=(*_rows(geometry, per_row), *_places(geometry)),
    )


def _has_parts(geometry: Geometry) -> bool:
    return geometry.stripe.holders > 1 or geometry.src.per_page > 1 or geometry.dst.per_page > 1


def _rows(geometry: Geometry, per_row: int) -> tuple[int, ...]:
    """The kernels' arguments from ``words_per_pair`` on: a pair's rows, of ``per_row`` words each."""
    _, s0, d0, n1, s1, d1, _ = geometry.rows
    per_pair = geometry.rows.per_pair * per_row
    return per_pair, *divisor(per_pair), per_row, *divisor(per_row), n1, *divisor(n1), s0, d0, s1, d1


def _places(geometry: Geometry) -> tuple[int, ...]:
    """The kernels' last arguments: which pairs this holder has, and where they lie on both sides."""
    stripe = geometry.stripe
    first_pair, jump = stripe.holder * stripe.per_unit, stripe.per_unit * (stripe.holders - 1)
    sides = *_side(geometry.src, geometry.tokens), *_side(geometry.dst, geometry.tokens)
    return *divisor(stripe.per_unit), first_pair, jump, *sides


def _side(side: PageAddressing, tokens: int) -> tuple[int, ...]:
    part_stride = tokens * side.token_stride
    return side.per_page, *divisor(side.per_page), part_stride, side.page_stride, side.base, side.num_pages


def divisor(number: int) -> tuple[int, int]:
    """(magic, shift) with ``n // number == (2 * n * magic >> 32) >> shift`` for 0 <= n < 2**31.

    With ``shift = ceil(log2(number))`` and ``magic = ceil(2**(31 + shift) / number)``, which is below 2**32, the
    error of the product is less than 1 / number. The magic is returned as the int32 with the same bits.
    """
    shift = (number - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // number)
    return magic - (magic >> 31 << 32), shift


def launch(
    mode: int, geometry: Geometry, addresses: Addresses, *, num_jobs: int, ranks: range, start: int, blocks: int
) -> None:
    """Enqueues a copy of ``num_jobs`` jobs on the current stream of the current device. Checks nothing.

    mode: ``page_copy.DIRECT``, ``GATHER`` or ``SCATTER``. ranks: positions in the writer's stripe of the page pairs.
    start: the first page id's position, in sender pages after the prefix. blocks: the largest number of thread blocks.
    Enqueues several launches where a job has more than `MAX_WORDS` words.
    """
    params = kernel_params(geometry)
    jobs, src_ids, dst_ids, stage, errors, _ = addresses
    for first, count in _split(ranks, MAX_WORDS // params.words_per_pair):
        words = count * params.words_per_pair
        where = stage + (first - ranks.start) * params.pair_nbytes, len(ranks) * params.pair_nbytes
        integers = (jobs, src_ids, dst_ids, *where, errors, num_jobs, first, start, words, *params.integers)
        grid = min(blocks, num_jobs * -(-words // TILE.words))
        _kernel(mode, params).launch(grid, integers)


class ConvertParams(NamedTuple):
    """What a geometry with a conversion contributes to a launch.

    kind: see `torchkv.host.convert_loops.KINDS`. elements: of a word. parts, words_per_pair: as in `KernelParams`.
    src_nbytes, dst_nbytes: bytes of a pair before and after. integers: the kernel's runtime arguments from
    ``words_per_pair`` on.
    """

    kind: int
    elements: int
    parts: bool
    words_per_pair: int
    src_nbytes: int
    dst_nbytes: int
    integers: tuple[int, ...]

    def stage_nbytes(self, mode: int) -> int:
        """Bytes of a pair in the stage that a ``GATHER`` writes, or a ``SCATTER`` reads."""
        return self.dst_nbytes if mode == page_copy.GATHER else self.src_nbytes


@lru_cache(maxsize=1024)
def convert_params(geometry: Geometry) -> ConvertParams:
    """The arguments of the converting kernel for ``geometry``, computed once. Raises ``TransportUnavailable``."""
    assert geometry.conversion is not None
    src_dtype, dst_dtype, heads, head_elements = geometry.conversion
    elements = geometry.elements
    per_row = geometry.rows.run // dst_dtype.itemsize // elements
    per_pair = geometry.rows.per_pair * per_row
    scaling = *divisor(head_elements // elements), heads, *divisor(heads)
    return ConvertParams(
        kind=KINDS[src_dtype, dst_dtype],
        elements=elements,
        parts=_has_parts(geometry),
        words_per_pair=per_pair,
        src_nbytes=per_pair * elements * src_dtype.itemsize,
        dst_nbytes=per_pair * elements * dst_dtype.itemsize,
        integers=(*_rows(geometry, per_row), *scaling, *_places(geometry)),
    )


def launch_convert(
    mode: int, geometry: Geometry, addresses: Addresses, *, num_jobs: int, ranks: range, start: int, blocks: int
) -> None:
    """As `launch`, for a geometry with a conversion. ``addresses.scales`` must be set."""
    params = convert_params(geometry)
    nbytes = params.stage_nbytes(mode)
    jobs, src_ids, dst_ids, stage, errors, scales = addresses
    for first, count in _split(ranks, MAX_WORDS // params.words_per_pair):
        words = count * params.words_per_pair
        where = stage + (first - ranks.start) * nbytes, len(ranks) * nbytes
        integers = (jobs, src_ids, dst_ids, *where, errors, scales, num_jobs, first, start, words, *params.integers)
        grid = min(blocks, num_jobs * -(-words // CONVERT_TILE.words))
        _convert_kernel(mode, params).launch(grid, integers)


def kernels_for(geometry: Geometry, *modes: int) -> list[CompiledKernel]:
    """The compiled kernels that copies of ``geometry`` need.

    modes: as for `launch`; default, direct copies.
    """
    if geometry.conversion is not None:
        return [_convert_kernel(mode, convert_params(geometry)) for mode in modes or (page_copy.DIRECT,)]
    params = kernel_params(geometry)
    return [_kernel(mode, params) for mode in modes or (page_copy.DIRECT,)]


def _kernel(mode: int, params: KernelParams) -> CompiledKernel:
    return CompiledKernel(page_copy.copy, page_copy.NUM_INTEGERS, _constants(mode, params), TILE.warps)


def _convert_kernel(mode: int, params: ConvertParams) -> CompiledKernel:
    constants = mode, params.kind, params.elements, int(params.parts), CONVERT_TILE.words
    return CompiledKernel(page_convert.convert, page_convert.NUM_INTEGERS, constants, CONVERT_TILE.warps)


def _split(ranks: range, most: int) -> Iterator[tuple[int, int]]:
    """``ranks`` as (first, count) with count <= most."""
    for first in range(ranks.start, ranks.stop, most):
        yield first, min(most, ranks.stop - first)


def _constants(mode: int, params: KernelParams) -> tuple[int, ...]:
    """The kernel's constants, in its order."""
    tile = TILE
    per_row = params.words_per_row
    touched = tile.words // per_row if tile.words % per_row == 0 else (tile.words - 2) // per_row + 2
    table = tile.table if touched <= tile.table else 0
    return mode, params.unit, params.rows, int(params.parts), tile.words, table
