"""Chooses the path of a verb by cost: puts or staging.

`torchkv.engine.joining.probe` measures what a channel costs. Here are the formulas, and costs for what is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.pieces import Cutter, pair_ordinals
from torchkv.layout.plan_segment import PlanSegment
from torchkv.transfer.peer_connection import Costs, LocalPages, PeerConnection

__all__ = [
    "ASSUMED",
    "BETWEEN_GPUS",
    "GPU_PACK_SECONDS",
    "Choice",
    "Load",
    "cheapest",
    "choose",
    "count_runs",
    "is_cheaper_packed",
    "load_of",
    "put_seconds",
    "puts_keep_up",
    "runs_between",
    "staged_seconds",
]

# Seconds a byte. Gathering slices of 512 bytes on one H200 with 16 blocks: 543 GB/s, see docs/measurements. Scattering
# takes as long.
GPU_PACK_SECONDS = 1 / 540e9

# Two processes of one host with two cores, which others used too; from the verb until `finish` is done, best of 200.
# One page, 16 KiB in two puts, took 0.9 ms longer over TCP and 1.4 ms over CMA when it was staged: the messages
# StageAsk, StageGrant and Staged, and the steps between them. A MiB through rings of 256 KiB, in 16 pieces, took 0.8
# and 0.7 ms more than through large rings for each piece after the first: so long is a stage of a small ring taken.
STAGING_SECONDS = 1.2e-3
PIECE_SECONDS = 0.75e-3
PIECES = 4  # pieces of one verb that share the ring
LARGEST_PIECE = 4 << 20  # bytes, on a host


def count_runs(pages: Int64Array) -> int:
    """The number of runs of consecutive page ids in ``pages``, int64 ``[n]`` with n > 0."""
    return 1 + int(np.count_nonzero(pages[1:] - pages[:-1] != 1))


# By device type, for channels that were not measured. A put over shared memory takes 0.33 to 0.43 us, and 5 GB/s is a
# guess; CUDA IPC takes 4.1 us a put, and carries 390 GB/s between two H200.
ASSUMED = {
    "cpu": Costs(descriptor=0.4e-6, byte=1 / 5e9, pack=1 / 5e9),
    "cuda": Costs(descriptor=4.1e-6, byte=1 / 390e9, pack=GPU_PACK_SECONDS),
}
# The same, between GPUs of different hosts: a guess, for links of 400 Gbit/s.
BETWEEN_GPUS = Costs(descriptor=0.4e-6, byte=1 / 50e9, pack=GPU_PACK_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one verb moves: its bytes, and about how many descriptors they take on the put paths."""

    descriptors: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The path of one verb, and why. put, staged: estimated seconds by puts and staged; None if it cannot be staged."""

    path: str
    load: Load
    put: float
    staged: float | None


def put_seconds(load: Load, costs: Costs) -> float:
    """Seconds that puts take, one for each descriptor."""
    return load.descriptors * costs.descriptor + load.nbytes * costs.byte


def staged_seconds(nbytes: int, costs: Costs, *, ring: int, mapped: bool) -> float:
    """Seconds that ``nbytes`` bytes take on the staged path.

    ring: bytes of the smaller of the two rings, not 0. mapped: whether pieces are gathered straight into the receiver's
    ring, at the slower of the rates of gather and link, without a put. A piece is scattered while the next is gathered
    and put, so only the scatter of the last piece adds time.
    """
    piece = max(1, min(LARGEST_PIECE, ring // PIECES))
    last = min(nbytes, piece) * costs.pack
    byte = max(costs.byte, costs.pack) if mapped else costs.byte + costs.pack
    return STAGING_SECONDS + max(nbytes * byte, nbytes / piece * PIECE_SECONDS) + last


def is_cheaper_packed(plan: PairPlan, costs: Costs) -> bool:
    """Whether the writer's loop should pack runs and put whole pieces, instead of one put for each run.

    It should if packing a byte costs less than the puts that this saves; the receiver unpacks meanwhile. Of pages that
    are scattered: adjacent ones are put together. An estimate for the plan's layers together, per token.
    """
    puts, nbytes = _per_token(plan)
    return puts * costs.descriptor > nbytes * costs.pack


def puts_keep_up(plan: PairPlan, costs: Costs) -> bool:
    """Whether one put for each run takes no longer than the bytes do in bulk: packing could not double the rate.

    An estimate, as `is_cheaper_packed`.
    """
    puts, nbytes = _per_token(plan)
    return puts * costs.descriptor <= nbytes * costs.byte


def _per_token(plan: PairPlan) -> tuple[float, float]:
    """Puts, if each run is one, and bytes of a token in all layers together."""
    puts = sum(len(segment.layers) * segment.rows.per_pair / segment.tokens for segment in plan.segments)
    nbytes = sum(len(segment.layers) * segment.pair_nbytes / segment.tokens for segment in plan.segments)
    return puts, nbytes


def cheapest(load: Load, costs: Costs, *, page_for_page: bool, ring: int, mapped: bool = False) -> Choice:
    """The cheapest path where the pages are not mapped.

    page_for_page: whether puts write whole pages. ring, mapped: as for `staged_seconds`; ring is 0 if the verb cannot
    be staged.
    """
    put = put_seconds(load, costs)
    staged = staged_seconds(load.nbytes, costs, ring=ring, mapped=mapped) if ring else None
    path = "runs" if page_for_page else "slices"
    return Choice(path="staged" if staged is not None and staged < put else path, load=load, put=put, staged=staged)


def runs_between(src: Int64Array, dst: Int64Array, plan: PairPlan, start: int) -> int:
    """An upper bound for the runs, contiguous on both sides, from sender pages ``src`` to the granted pages ``dst``.

    start: of ``src``, in sender pages after the prefix.
    """
    first = start * plan.src_page_size // plan.dst_page_size
    last = -(-(start + len(src)) * plan.src_page_size // plan.dst_page_size)
    return count_runs(src) + count_runs(dst[first:last]) - 1


def load_of(
    plan: PairPlan,
    layers: Iterable[int],
    *,
    start: int,
    num_pages: int,
    limit_tokens: int,
    runs: int | None,
    seamless: Callable[[PlanSegment], bool],
) -> Load:
    """Estimates the load of sender pages [start, start + num_pages) of ``layers``, without making descriptors.

    limit_tokens: tokens of the grant. runs: see `runs_between`; None to assume scattered pages. seamless: whether the
    segment's page pairs of consecutive pages are adjacent in memory on both sides.
    """
    descriptors = nbytes = 0
    for segment in plan.segments_for(layers):
        pairs = len(pair_ordinals(plan, segment, start, num_pages, limit_tokens))
        spans = pairs * segment.rows.per_pair
        if runs is not None and segment.rows.per_pair == 1 and seamless(segment):
            stripes = 0 if segment.stripe.holders == 1 else pairs // segment.stripe.per_unit
            spans = min(spans, runs + stripes)
        descriptors += spans * len(segment.layers)
        nbytes += pairs * segment.pair_nbytes * len(segment.layers)
    return Load(descriptors=descriptors, nbytes=nbytes)


def choose(
    plan: PairPlan,
    layers: tuple[int, ...],
    *,
    local: LocalPages,
    connection: PeerConnection,
    start: int,
    num_pages: int,
    limit_tokens: int,
    runs: int | None,
    ring: int,
) -> Choice:
    """The cheapest path of a verb that cannot take the direct path. Arguments as for `load_of` and `cheapest`."""
    load = load_of(
        plan,
        layers,
        start=start,
        num_pages=num_pages,
        limit_tokens=limit_tokens,
        runs=runs,
        seamless=lambda segment: _seamless(plan, local, connection, segment),
    )
    costs = connection.costs or ASSUMED[local.device.type]
    mapped = connection.staging_view is not None
    choice = cheapest(load, costs, page_for_page=plan.page_for_page, ring=ring, mapped=mapped)
    if choice.path != "staged":
        return choice
    cutter = Cutter(plan, layers, start, num_pages, limit_tokens=limit_tokens, checksum=False)
    if cutter.least <= ring:
        return choice
    return cheapest(load, costs, page_for_page=plan.page_for_page, ring=0)


def _seamless(plan: PairPlan, local: LocalPages, connection: PeerConnection, segment: PlanSegment) -> bool:
    """Whether consecutive pages are adjacent in memory on both sides. Looks at the first layer of the segment only."""
    key = segment.component, segment.layers[0]
    src, dst = local.placements[key].page_stride, connection.placements[key].page_stride
    pairs = plan.src_page_size // segment.tokens, plan.dst_page_size // segment.tokens
    return (src, dst) == (pairs[0] * segment.pair_nbytes, pairs[1] * segment.pair_nbytes)
