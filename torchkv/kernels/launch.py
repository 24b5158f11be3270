"""Launches of the kernels that copy and convert pages: their arguments, their tiles, and which one a geometry needs.

`torchkv.kernels.copies` checks what callers pass. This module turns checked arguments into the integers and constants
of `torchkv.kernels.page_copy.copy`, or of `torchkv.kernels.page_convert.convert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from torchkv.host.convert_loops import KINDS
from torchkv.kernels import page_convert, page_copy
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.steps import Steps, steps_of
from torchkv.layout.kernel_geometry import Geometry, PageAddressing

__all__ = [
    "Addresses",
    "KernelParams",
    "divisor",
    "has_parts",
    "kernel_for",
    "kernel_params",
    "launch",
    "row_counts",
    "tickets_of",
]


class Tile(NamedTuple):
    """How much a block copies at once. words: of a tile, in all steps. warps: of a block."""

    words: int
    warps: int


# Of some fifty tiles measured between two H200 (docs/measurements/2026-11-27-gpu.md): 16 such blocks fill the link as
# 132 do, and 8 of them nine tenths of it. 64 KiB are few enough for all blocks to end at about the same time.
TILE = Tile(4096, 16)
# Conversions compute more, and take more registers: their threads take fewer steps, so that a block has no more of them
# than one that copies.
CONVERT_TILE = Tile(2048, 16)
CONVERT_STEPS = 4

NATIVE = (8, 9)  # the compute capability since which GPUs convert all dtypes themselves

_UNTOLD = 0, 0  # the completion word, and its number, of kernels that do not tell of their end

MAX_WORDS = (1 << 31) - 1 - (1 << 16)  # of one job in one launch: with one tile more it is still an int32


class Addresses(NamedTuple):
    """Device addresses of one launch; 0 for those that its mode does not use.

    jobs: the first row of the job table. src_ids, dst_ids: page ids. stage: the packed bytes. errors: see
    `torchkv.kernels.copies.error_words`. tickets: those of the current stream. scales: of the first job, see
    `torchkv.kernels.page_convert`.
    """

    jobs: int
    src_ids: int
    dst_ids: int
    stage: int
    errors: int
    tickets: int = 0
    scales: int = 0


class KernelParams(NamedTuple):
    """What a geometry contributes to a launch.

    constants: of its kernel. words_per_pair: of one step. tile: words of one step that a block copies at once.
    unit: bytes of a word in a stage, or where no stage is used, in the receiver's pages. pair_nbytes: of a pair, there.
    integers: the kernel's runtime arguments from ``words_per_pair`` on.
    """

    constants: tuple[int, ...]
    words_per_pair: int
    tile: int
    unit: int
    pair_nbytes: int
    integers: tuple[int, ...]


@lru_cache(maxsize=1024)
def kernel_params(geometry: Geometry, mode: int) -> KernelParams:
    """The kernel's arguments for ``geometry``, computed once. mode: of `launch`. Raises ``TransportUnavailable``."""
    if geometry.conversion is not None:
        return _convert_params(geometry, mode)
    unit, rows = geometry.unit, geometry.rows
    steps = steps_of(rows, src_unit=unit, dst_unit=unit)
    constants = unit, row_counts(steps.n0, steps.n1), int(has_parts(geometry)), steps.number
    integers = _rows(geometry, mode, steps, rows.run // unit, unit)
    return _params(geometry, mode, steps, TILE, constants, unit, integers)


def _convert_params(geometry: Geometry, mode: int) -> KernelParams:
    assert geometry.conversion is not None
    src_dtype, dst_dtype, heads, head_elements = geometry.conversion
    elements, rows = geometry.elements, geometry.rows
    units = elements * src_dtype.itemsize, elements * dst_dtype.itemsize
    of_head, per_row = head_elements // elements, rows.run // units[1]

    def of_one_head(steps: Steps) -> bool:
        """Whether a word of any step is of the same head, so that it has the same scale."""
        return steps.words % (of_head * heads) == 0 or of_head % (steps.number * steps.words) == 0

    steps = steps_of(rows, src_unit=units[0], dst_unit=units[1], most=CONVERT_STEPS, will_do=of_one_head)
    unit = units[0] if mode == page_copy.SCATTER else units[1]
    constants = KINDS[src_dtype, dst_dtype], elements, int(has_parts(geometry)), steps.number
    order = rows.n1 * per_row, per_row
    integers = *_rows(geometry, mode, steps, per_row, unit), *order, *divisor(of_head), heads, *divisor(heads)
    return _params(geometry, mode, steps, CONVERT_TILE, constants, unit, integers)


def _params(
    geometry: Geometry,
    mode: int,
    steps: Steps,
    tile: Tile,
    constants: tuple[int, ...],
    unit: int,
    rows: tuple[int, ...],
) -> KernelParams:
    """constants: of the kernel, those between its mode and its tile. unit: see `KernelParams`.

    rows: the kernel's arguments from ``words_per_pair`` up to those of `_places`.
    """
    words = tile.words // max(steps.number, 2)  # each with an address of its own, which takes registers
    pair_nbytes = steps.size * steps.number * unit
    return KernelParams(
        constants=(mode, *constants, words),
        words_per_pair=steps.size,
        tile=words,
        unit=unit,
        pair_nbytes=pair_nbytes,
        integers=(*rows, *_places(geometry, mode, pair_nbytes)),
    )


def row_counts(n0: int, n1: int) -> int:
    """How many of a pair's two row counts exceed 1."""
    return 0 if n0 * n1 == 1 else 1 if n0 == 1 else 2


def has_parts(geometry: Geometry) -> bool:
    """Whether pairs are striped, or smaller than a page."""
    return geometry.stripe.holders > 1 or geometry.src.per_page > 1 or geometry.dst.per_page > 1


def _rows(geometry: Geometry, mode: int, steps: Steps, per_row: int, unit: int) -> tuple[int, ...]:
    """The kernels' arguments from ``words_per_pair`` on: a pair's rows in the first step, and how far the next one is.

    per_row: words of a row in all steps. unit: bytes of a word in a stage, where rows lie one behind the other.
    """
    _, s0, d0, n1, s1, d1, _ = geometry.rows
    packed = n1 * per_row * unit, per_row * unit, steps.words * unit
    src = packed if mode == page_copy.SCATTER else (s0, s1, steps.src)
    dst = packed if mode == page_copy.GATHER else (d0, d1, steps.dst)
    strides = (stride for both in zip(src, dst, strict=True) for stride in both)
    return (
        steps.size,
        *divisor(steps.size),
        steps.per_row,
        *divisor(steps.per_row),
        steps.n1,
        *divisor(steps.n1),
        *strides,
    )


def _places(geometry: Geometry, mode: int, pair_nbytes: int) -> tuple[int, ...]:
    """The kernels' last arguments: which pairs this holder has, and where they lie on both sides.

    pair_nbytes: of a pair in a stage, which has pair behind pair.
    """
    stripe, src, dst = geometry.stripe, geometry.src, geometry.dst
    first_pair, jump = stripe.holder * stripe.per_unit, stripe.per_unit * (stripe.holders - 1)
    if mode == page_copy.SCATTER:
        src = replace(src, page_stride=pair_nbytes)
    elif mode == page_copy.GATHER:
        dst = replace(dst, page_stride=pair_nbytes)
    return *divisor(stripe.per_unit), first_pair, jump, *_side(src, geometry.tokens), *_side(dst, geometry.tokens)


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
    ``addresses.scales`` must be set if the geometry has a conversion. Enqueues several launches where a job has more
    than `MAX_WORDS` words.
    """
    params, kernel = kernel_params(geometry, mode), kernel_for(geometry, mode)
    jobs, src_ids, dst_ids, stage, errors, tickets, scales = addresses
    scaled = () if geometry.conversion is None else (scales,)
    for first, count in _split(ranks, MAX_WORDS // params.words_per_pair):
        words = count * params.words_per_pair
        where = stage + (first - ranks.start) * params.pair_nbytes, len(ranks) * params.pair_nbytes
        counts = num_jobs, first, start, words
        integers = (jobs, src_ids, dst_ids, *where, errors, tickets, *_UNTOLD, *scaled, *counts, *params.integers)
        kernel.launch(min(blocks, num_jobs * -(-words // params.tile)), integers)


_tickets: dict[tuple[int | None, int], torch.Tensor] = {}  # by device and stream


def tickets_of(stream: torch.cuda.Stream | None) -> int:
    """The address of the tickets of the kernels of a stream, see `torchkv.kernels.page_copy`. None: of the interpreter.

    Made at the first call for a stream, which waits for what is on that stream.
    """
    key = (None, 0) if stream is None else (stream.device.index, stream.cuda_stream)
    if (tickets := _tickets.get(key)) is None:
        zeros = torch.zeros(2, dtype=torch.int32)
        if stream is not None:
            with torch.cuda.stream(stream):
                zeros = zeros.to(stream.device)
        tickets = _tickets.setdefault(key, zeros)
    return tickets.data_ptr()


def kernel_for(geometry: Geometry, mode: int = page_copy.DIRECT) -> CompiledKernel:
    """The compiled kernel that copies of ``geometry`` need, on the current device. mode: as for `launch`."""
    constants = kernel_params(geometry, mode).constants
    if geometry.conversion is None:
        return CompiledKernel(page_copy.copy, page_copy.NUM_INTEGERS, constants, TILE.warps)
    native = torch.cuda.is_initialized() and _converts_all(torch.cuda.current_device())
    return CompiledKernel(
        page_convert.convert, page_convert.NUM_INTEGERS, (*constants, int(native)), CONVERT_TILE.warps
    )


@cache  # this is asked for at each launch
def _converts_all(index: int) -> bool:
    """Whether a GPU converts all dtypes itself."""
    return torch.cuda.get_device_capability(index) >= NATIVE


def _split(ranks: range, most: int) -> Iterator[tuple[int, int]]:
    """``ranks`` as (first, count) with count <= most."""
    for first in range(ranks.start, ranks.stop, most):
        yield first, min(most, ranks.stop - first)
