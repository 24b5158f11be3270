"""What the loop and its copiers copy together: see `torchkv.core.loop.copying`.

All fields are int64, unless they are arrays: see `world`.
"""

from __future__ import annotations

from typing import TypedDict

from torchkv.arrays import Int64Array

__all__ = ["Copier", "Job"]


class Job(TypedDict):
    """A slice of a copy. claim: number of the job << 16 | the next chunk. chunks: how many it has. called: jobs so far,
    on which copiers sleep. before: chunks that copiers had copied before it.

    pairs: of a chunk; count: in all. src, dst: addresses that their offsets count from. n0 to run: the runs of a pair,
    see `torchkv.host.copy_loops.copy_pairs`; n0 is 0 where pairs have lengths of their own. seg: the segment that
    converts them, or 0.
    """

    claim: int
    chunks: int
    called: int
    before: int
    pairs: int
    count: int
    src: int
    dst: int
    seg: int
    n0: int
    s0: int
    d0: int
    n1: int
    s1: int
    d1: int
    run: int


class Copier(TypedDict):
    """A thread, which alone writes this. copied: chunks so far. asleep: 1 while it may be. rest: of two cache lines."""

    copied: int
    asleep: int
    rest: Int64Array
