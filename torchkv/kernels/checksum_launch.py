"""Launches of the checksum kernel: its arguments, its tile, and compiling ahead of time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton

from torchkv import checksum, pagesum
from torchkv.errors import ProtocolError
from torchkv.kernellaunch import divisor, shape
from torchkv.slabgeometry import Geometry
from torchkv.variants import Variant

__all__ = ["SumAddresses", "launch_sums", "sum_variant"]


class SumTile(NamedTuple):
    """words: that a block sums at once. columns: at most so many of one pair. warps: that do it."""

    words: int
    columns: int
    warps: int


# As much in flight as in a tile of the copy kernel, and a column for every thread: it computes the column's keys once.
TILE = SumTile(2048, 256, 8)

MAX_ITEMS = 1 << 30  # sums of one launch: counted in 32 bits, with room for a tile more


class SumAddresses(NamedTuple):
    """Of the job table's first row, the page ids, the first sum, the slots for mismatches and the error slot."""

    jobs: int
    ids: int
    sums: int
    mismatches: int
    errors: int


class _Shape(NamedTuple):
    """What a geometry contributes to a launch. seed: of its checksums. integers: from ``words`` on."""

    seed: int
    integers: tuple[int, ...]


@lru_cache(maxsize=1024)
def _shape(geometry: Geometry, mode: int) -> _Shape:
    what = shape(geometry)
    _, s0, d0, n1, s1, d1, _ = geometry.rows
    side = geometry.src if mode == pagesum.WRITE else geometry.dst
    seed = checksum.seed(geometry.pair_nbytes)
    integers = (
        what.words_per_pair,
        what.words_per_row,
        *divisor(what.words_per_row),
        n1,
        *divisor(n1),
        *((s0, s1) if mode == pagesum.WRITE else (d0, d1)),
        *divisor(geometry.per_unit),
        geometry.index * geometry.per_unit,
        geometry.per_unit * (geometry.holders - 1),
        side.per_page,
        *divisor(side.per_page),
        geometry.tokens * side.token_stride,
        side.page_stride,
        side.base,
        side.num_pages,
    )
    return _Shape(seed - (seed >> 63 << 64), integers)


def _constants(geometry: Geometry, mode: int) -> tuple[int, ...]:
    what, tile = shape(geometry), TILE
    columns = min(max(triton.next_power_of_2(what.words_per_pair), 32), tile.columns)
    return mode, what.unit, what.rows, int(what.parts), tile.words // columns, columns


def launch_sums(
    mode: int, geometry: Geometry, addresses: SumAddresses, *, num_jobs: int, ranks: range, start: int, blocks: int
) -> None:
    """Enqueues the sums of the pairs of these ranks, for ``num_jobs`` jobs, on the current stream of this device.

    mode: ``pagesum.WRITE`` or ``VERIFY``. start: the first page id's position, in pages of this side. blocks: thread
    blocks at most. Raises ``ProtocolError`` for counts out of range; addresses are not checked.
    """
    if blocks < 1:
        raise ProtocolError(f"blocks must be at least 1, not {blocks}")
    items = num_jobs * len(ranks)
    if items > MAX_ITEMS:
        raise ProtocolError(f"{items} checksums in one launch are more than {MAX_ITEMS}; use smaller stages")
    if not items:
        return
    what = _shape(geometry, mode)
    integers = (
        *addresses,
        what.seed,
        items,
        len(ranks),
        *divisor(len(ranks)),
        ranks.start,
        start,
        *what.integers,
    )
    variant = sum_variant(geometry, mode)
    *_, pairs, _ = variant.constants
    variant.launch(min(blocks, -(-items // pairs)), integers)


def sum_variant(geometry: Geometry, mode: int) -> Variant:
    """What sums of ``geometry`` launch."""
    return Variant(pagesum.sum_pairs, pagesum.NUM_INTEGERS, _constants(geometry, mode), TILE.warps)
