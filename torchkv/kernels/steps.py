"""How a thread moves several words for one address: the steps in which the words of a page pair are copied.

The words of a pair are divided into equal steps. A word of a later step lies a fixed distance behind the same word of
the step before, on both sides and in a stage. So kernels compute the addresses of the first step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchkv.layout.plan_segment import StridedRuns

__all__ = ["MOST", "Steps", "steps_of"]

MOST = 8  # steps of a copy: so many loads of 16 bytes are under way in each thread
SIDE_BY_SIDE = 32  # words in each step, at least: those of a warp, so that steps split no wide access


class Steps(NamedTuple):
    """``number`` of steps. n0, n1, per_row: row counts as of `StridedRuns`, and words of a row, of the first step.

    src, dst: bytes from a step to the next, on both sides. words: how many words a stage has between two steps.
    """

    number: int
    n0: int
    n1: int
    per_row: int
    src: int
    dst: int
    words: int

    @property
    def size(self) -> int:
        """Words of a step."""
        return self.n0 * self.n1 * self.per_row


def steps_of(
    rows: StridedRuns,
    *,
    src_unit: int,
    dst_unit: int,
    most: int = MOST,
    will_do: Callable[[Steps], bool] = lambda steps: True,
) -> Steps:
    """As many steps as a pair's rows, or the words of each row, can be divided into, up to ``most``; a power of two.

    src_unit, dst_unit: bytes of a word on both sides. will_do: what else steps must fulfil.
    """
    number = most
    while number > 1:
        for steps in _divided(rows, number, src_unit, dst_unit):
            if will_do(steps):
                return steps
        number //= 2
    return Steps(1, rows.n0, rows.n1, rows.run // dst_unit, 0, 0, 0)


def _divided(rows: StridedRuns, number: int, src_unit: int, dst_unit: int) -> Iterator[Steps]:
    """The ways to make so many steps."""
    n0, s0, d0, n1, s1, d1, run = rows
    per_row = run // dst_unit
    if n1 % number == 0 and n1 // number * per_row >= SIDE_BY_SIDE:
        n = n1 // number
        yield Steps(number, n0, n, per_row, n * s1, n * d1, n * per_row)
    if n0 % number == 0 and n1 * per_row >= SIDE_BY_SIDE:
        n = n0 // number
        yield Steps(number, n, n1, per_row, n * s0, n * d0, n * n1 * per_row)
    if per_row % number == 0 and per_row // number >= SIDE_BY_SIDE:
        n = per_row // number
        yield Steps(number, n0, n1, n, n * src_unit, n * dst_unit, n)
