"""Pieces that kernels pack into a stage, and unpack from it, where pages lie on a GPU. Compiled.

A *pack table* is a launch table (see `launching.FIELDS`) of one side of a plan: its jobs have this side's addresses
only. Both sides order jobs alike, so that a piece holds the same bytes at the same places for both: job after job, of
each the page pairs that its writer owes. The first job of each of `PairPlan.groups` begins at a multiple of `GRAIN`, as
do pieces. Which jobs a kernel does together is each side's own matter.
"""

from __future__ import annotations

from torchkv.core.loop.launching import ALIGNED, PAIR_NBYTES, ROWS, STRIPE, launch_rows
from torchkv.core.loop.limits import GRAIN, LAUNCH_FIELDS
from torchkv.core.loop.state.world import World
from torchkv.core.loop.stripes import owed_pairs
from torchkv.host.atomics import load
from torchkv.host.jit import compiled

__all__ = ["Extent", "launch_piece"]

# What a piece holds: the layers at positions [first, last), of the writer's pages a first one and how many; then tokens
# of the grant, and the page sizes of writer and receiver.
Extent = tuple[int, int, int, int, int, int, int]


@compiled
def launch_piece(world: World, table: int, extent: Extent, start: int, src_ids: int, dst_ids: int, stage: int) -> int:
    """Enqueues the kernels that pack a piece at the address ``stage``, or unpack it from there: as the table says.

    start: the position of the first of ``src_ids``. How many launches; less than 0 if the driver has refused one: -1
    less those before.
    """
    first, last, page, count, granted, src_page, dst_page = extent
    launched = 0
    at = stage
    for number in range(load(table)):
        group = table + 8 + 8 * LAUNCH_FIELDS * number
        pairs = owed_pairs(granted, src_page, dst_page, page, count, group + STRIPE)
        rows = load(group + ROWS)
        jobs = load(rows + 8 * first), load(rows + 8 * last)
        if load(group + ALIGNED) != 0:
            at = (at + GRAIN - 1) // GRAIN * GRAIN
        if jobs[0] == jobs[1] or pairs[0] == pairs[1]:
            continue
        done = launch_rows(world, group, jobs, pairs, start, src_ids, dst_ids, at)
        if done < 0:
            return done - launched
        launched += done
        at += (jobs[1] - jobs[0]) * (pairs[1] - pairs[0]) * load(group + PAIR_NBYTES)
    return launched
