"""Launches of the checksum kernel: its arguments, its tile sizes, and which compiled kernel a geometry needs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton

from torchkv.errors import ProtocolError
from torchkv.host import checksum
from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.launch import divisor, has_parts, row_counts
from torchkv.layout.kernel_geometry import Geometry

__all__ = ["SumAddresses", "launch_sums", "sum_kernel"]


class SumTile(NamedTuple):
    """words: of a tile, which a block sums at once. columns: the most of them from one pair. warps: of a block."""

    words: int
    columns: int
    warps: int


# One column per thread, which computes the column's keys once.
TILE = SumTile(2048, 256, 8)

MAX_ITEMS = 1 << 30  # sums of one launch: with one tile more they still count in 32 bits


class SumAddresses(NamedTuple):
    """Device addresses of one launch.

    jobs: the first row of the job table. ids: page ids. sums: the first sum. mismatches: one int64 per block, or 0 when
    sums are written. errors: see `torchkv.kernels.copies.error_words`.
    """

    jobs: int
    ids: int
    sums: int
    mismatches: int
    errors: int


class _SumParams(NamedTuple):
    """What a geometry contributes to a launch.

    seed: that the sums begin with. integers: the kernel's runtime arguments from ``words`` on.
    """

    seed: int
    integers: tuple[int, ...]


@lru_cache(maxsize=1024)
def _sum_params(geometry: Geometry, mode: int) -> _SumParams:
    _, s0, d0, n1, s1, d1, run = geometry.rows
    per_row = run // geometry.unit
    side = geometry.src if mode == checksum_kernel.WRITE else geometry.dst
    stripe = geometry.stripe
    seed = checksum.seed(geometry.pair_nbytes)
    integers = (
        geometry.rows.per_pair * per_row,
        per_row,
        *divisor(per_row),
        n1,
        *divisor(n1),
        *((s0, s1) if mode == checksum_kernel.WRITE else (d0, d1)),
        *divisor(stripe.per_unit),
        stripe.holder * stripe.per_unit,
        stripe.per_unit * (stripe.holders - 1),
        side.per_page,
        *divisor(side.per_page),
        geometry.tokens * side.token_stride,
        side.page_stride,
        side.base,
        side.num_pages,
    )
    return _SumParams(seed - (seed >> 63 << 64), integers)


def _constants(geometry: Geometry, mode: int) -> tuple[int, ...]:
    unit, rows = geometry.unit, row_counts(geometry.rows.n0, geometry.rows.n1)
    columns = min(max(triton.next_power_of_2(geometry.pair_nbytes // unit), 32), TILE.columns)
    return mode, unit, rows, int(has_parts(geometry)), TILE.words // columns, columns


def launch_sums(
    mode: int, geometry: Geometry, addresses: SumAddresses, *, num_jobs: int, ranks: range, start: int, blocks: int
) -> None:
    """Enqueues the checksums of ``num_jobs`` jobs on the current stream of the current device.

    mode: ``checksum.WRITE`` or ``VERIFY`` of `torchkv.kernels`. ranks: positions in the writer's stripe of the page
    pairs. start: the first page id's position, in pages of this side. blocks: the largest number of thread blocks.
    Raises ``ProtocolError`` for counts out of range; addresses are not checked.
    """
    if blocks < 1:
        raise ProtocolError(f"blocks must be at least 1, not {blocks}")
    items = num_jobs * len(ranks)
    if items > MAX_ITEMS:
        raise ProtocolError(f"{items} checksums in one launch are more than {MAX_ITEMS}; use smaller stages")
    if not items:
        return
    params = _sum_params(geometry, mode)
    integers = (
        *addresses,
        params.seed,
        items,
        len(ranks),
        *divisor(len(ranks)),
        ranks.start,
        start,
        *params.integers,
    )
    kernel = sum_kernel(geometry, mode)
    *_, pairs, _ = kernel.constants
    kernel.launch(min(blocks, -(-items // pairs)), integers)


def sum_kernel(geometry: Geometry, mode: int) -> CompiledKernel:
    """The compiled kernel that checksums of ``geometry`` need."""
    return CompiledKernel(
        checksum_kernel.sum_pairs, checksum_kernel.NUM_INTEGERS, _constants(geometry, mode), TILE.warps
    )
