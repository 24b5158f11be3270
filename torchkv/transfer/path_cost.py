"""What moving bytes costs: puts against the staging ring on a channel, copy engines against a kernel between two GPUs.

Formulas only. What a channel costs is measured by `probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from torchkv.pieces import pair_ranks
from torchkv.plan import PairPlan
from torchkv.slab import Slab
from torchkv.transport import Int64Array

__all__ = [
    "ASSUMED",
    "GPU_PACK_SECONDS",
    "Choice",
    "Costs",
    "Load",
    "cheapest",
    "copy_engine_pays",
    "count_runs",
    "engine_seconds",
    "kernel_seconds",
    "load_of",
    "put_seconds",
    "runs_between",
    "staged_seconds",
]

# Measured between two H200 over NVLink. cuMemcpyBatchAsync moved many spans of 32 KiB, 128 KiB, 512 KiB, 2 MiB and
# 8 MiB at 52, 152, 277, 355 and 380 GB/s: so much for each span, and the link's rate for its bytes, meets all five
# within 3%. Few spans show what a batch costs in itself: 1, 2 and 4 of 2 MiB went at 193, 262 and 312 GB/s.
BATCH_SECONDS = 4.5e-6
SPAN_SECONDS = 0.55e-6
LINK_RATE = 392e9  # bytes a second, of one large copy
# The copy kernel with 16 blocks, whatever the length of its runs; a layer of 4 MiB took 13.3 us.
LAUNCH_SECONDS = 1.5e-6
KERNEL_RATE = 354.6e9

# Gathering slices of 512 bytes on one H200 with 16 blocks: 543 GB/s, see docs/measurements. Scattering takes as long.
GPU_PACK_SECONDS = 1 / 540e9

# Two processes of one host with two cores, which others used too; from the verb until `finish` is done, best of 200.
# One page, 16 KiB in two puts, took 0.9 ms longer over TCP and 1.4 ms over CMA when it was staged: for the ask, the
# grant, the word that it is there, and the steps between. A MiB through rings of 256 KiB, in 16 pieces, took 0.8 and
# 0.7 ms more than through large rings for each piece after the first: so long a part of a small ring is taken.
STAGING_SECONDS = 1.2e-3
PIECE_SECONDS = 0.75e-3
PIECES = 4  # of one verb that share the rings
LARGEST_PIECE = 4 << 20  # on a host


def engine_seconds(*, spans: int, nbytes: int) -> float:
    """What the copy engines take for one batch of ``spans`` descriptors, of ``nbytes`` bytes in all."""
    return BATCH_SECONDS + spans * SPAN_SECONDS + nbytes / LINK_RATE


def kernel_seconds(*, nbytes: int) -> float:
    """What the copy kernel takes for ``nbytes`` bytes."""
    return LAUNCH_SECONDS + nbytes / KERNEL_RATE


def copy_engine_pays(*, spans: int, nbytes: int) -> bool:
    """Whether the copy engines are at least as fast as the kernel.

    That is so for 15 MiB and more in spans of 2 MiB and more, on average. Then they are the better way, as they leave
    all multiprocessors to the model.
    """
    return engine_seconds(spans=spans, nbytes=nbytes) <= kernel_seconds(nbytes=nbytes)


def count_runs(pages: Int64Array) -> int:
    """Of how many runs of consecutive ids ``pages``, int64 ``[n]`` with n > 0, consists."""
    return 1 + int(np.count_nonzero(pages[1:] - pages[:-1] != 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a channel costs, in seconds.

    descriptor: of each put, beside its bytes. byte: of each byte put in bulk. pack: of each byte gathered from short
    runs, or scattered to them, in the memory at its ends.
    """

    descriptor: float
    byte: float
    pack: float


# By device type, for channels that nobody has measured. A put over shared memory takes 0.33 to 0.43 us, and 5 GB/s is a
# guess; CUDA IPC takes 4.1 us a put, and carries 390 GB/s between two H200.
ASSUMED = {
    "cpu": Costs(descriptor=0.4e-6, byte=1 / 5e9, pack=1 / 5e9),
    "cuda": Costs(descriptor=4.1e-6, byte=1 / 390e9, pack=GPU_PACK_SECONDS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one verb moves: ``nbytes`` bytes, which are about so many ``descriptors`` where they are put one by one."""

    descriptors: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The path of one verb, and why: what it would take by puts and, where it can be staged, staged, in seconds."""

    path: str
    load: Load
    put: float
    staged: float | None


def put_seconds(load: Load, costs: Costs) -> float:
    """What puts take, one for each descriptor."""
    return load.descriptors * costs.descriptor + load.nbytes * costs.byte


def staged_seconds(nbytes: int, costs: Costs, *, ring: int, mapped: bool) -> float:
    """What ``nbytes`` bytes take through staging memory; ring: bytes of the smaller one of the two rings, not 0.

    A piece is scattered while the next is gathered and put; only the last one's scatter comes on top. mapped: pieces
    are gathered straight into the receiver's ring, at the rate of whichever of the two is slower, without a put.
    """
    piece = max(1, min(LARGEST_PIECE, ring // PIECES))
    last = min(nbytes, piece) * costs.pack
    byte = max(costs.byte, costs.pack) if mapped else costs.byte + costs.pack
    return STAGING_SECONDS + max(nbytes * byte, nbytes / piece * PIECE_SECONDS) + last


def cheapest(load: Load, costs: Costs, *, page_for_page: bool, ring: int, mapped: bool = False) -> Choice:
    """The path that costs least where the pages are not mapped.

    ring, mapped: as for `staged_seconds`; no ring, 0, if it cannot be staged.
    """
    put = put_seconds(load, costs)
    staged = staged_seconds(load.nbytes, costs, ring=ring, mapped=mapped) if ring else None
    path = "runs" if page_for_page else "slices"
    return Choice(path="staged" if staged is not None and staged < put else path, load=load, put=put, staged=staged)


def runs_between(src: Int64Array, dst: Int64Array, plan: PairPlan, start: int) -> int:
    """The most runs that sender pages ``src`` form together with the granted pages ``dst``, whatever their slab.

    A run is contiguous on both sides. start: of ``src``, in sender pages after the prefix.
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
    seamless: Callable[[Slab], bool],
) -> Load:
    """What sender pages [start, start + num_pages) of ``layers`` are under a grant of ``limit_tokens`` tokens.

    An estimate, that expands nothing. runs: see `runs_between`; None if the pages are to be taken for scattered.
    seamless: whether nothing lies between the pairs of consecutive pages, on either side.
    """
    descriptors = nbytes = 0
    for slab in plan.slabs_for(layers):
        pairs = len(pair_ranks(plan, slab, start, num_pages, limit_tokens))
        spans = pairs * slab.rows.per_pair
        if runs is not None and slab.rows.per_pair == 1 and seamless(slab):
            stripes = 0 if slab.holders == 1 else pairs // (slab.unit // slab.tokens)
            spans = min(spans, runs + stripes)
        descriptors += spans * len(slab.layers)
        nbytes += pairs * slab.pair_nbytes * len(slab.layers)
    return Load(descriptors=descriptors, nbytes=nbytes)
