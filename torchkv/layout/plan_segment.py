"""A segment: a part of a plan in which every page pair is copied in the same way.

A `PlanSegment` covers a range of heads of one component, in some layers. Three terms describe what is copied:

* A *page pair* is the largest run of consecutive tokens that lies inside one page of the sender and one page of the
  receiver: as many tokens as the smaller page. Sender pages of 16 tokens and receiver pages of 64 tokens have pairs of
  16 tokens, four for each receiver page.
* A *row* is one contiguous run of bytes of a page pair. The rows of a pair lie at regular distances on both sides, so
  seven integers describe them all (`StridedRuns`). They are the same for every pair of the segment.
* A *stripe* is one writer's share of the pairs if several writers hold the same heads (`Stripe`).

`torchkv.layout.pair_plan` has an example with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchkv.layout.component import Conversion

__all__ = ["PlanSegment", "StridedRuns", "Stripe", "Window", "first_owed"]


class StridedRuns(NamedTuple):
    """The rows of one page pair: ``n0 * n1`` runs of ``run`` bytes, at regular strides on both sides.

    For a < n0 and b < n1, the bytes ``[a * s0 + b * s1, ... + run)`` of the source go to the destination's bytes
    ``[a * d0 + b * d1, ... + run)``; both count from the beginning of the pair.
    """

    n0: int
    s0: int
    d0: int
    n1: int
    s1: int
    d1: int
    run: int

    @classmethod
    def folded(cls, dims: list[tuple[int, int, int]], run: int) -> StridedRuns:
        """Runs of ``run`` bytes, repeated along ``dims``, in as few and as long rows as possible.

        dims: at most two of (count, source stride, destination stride), outermost first. A dimension that is
        contiguous on both sides becomes a part of the run.
        """
        left = [dim for dim in dims if dim[0] > 1]
        for _ in dims:
            for dim in left:
                count, src, dst = dim
                if src == dst == run:
                    run *= count
                    left.remove(dim)
                    break
        # A single remaining dimension goes innermost: kernels loop tightly over n1.
        outer, inner = [(1, 0, 0)] * (2 - len(left)) + left
        return cls(*outer, *inner, run)

    def in_bytes(self, src_size: int, dst_size: int) -> StridedRuns:
        """The same runs in bytes, where this counts elements. src_size, dst_size: bytes of one element on each side."""
        n0, s0, d0, n1, s1, d1, run = self
        return StridedRuns(n0, s0 * src_size, d0 * dst_size, n1, s1 * src_size, d1 * dst_size, run * dst_size)

    @property
    def per_pair(self) -> int:
        """Rows of one page pair."""
        return self.n0 * self.n1


class Window(NamedTuple):
    """The sliding window of a segment's layers, with what is needed to find the first token inside it.

    tokens: length of the window. src_page_size, dst_page_size: in tokens. unit: of the `Stripe`, in tokens; the first
    token that is owed is a multiple of it.
    """

    tokens: int
    src_page_size: int
    dst_page_size: int
    unit: int


class Stripe(NamedTuple):
    """Which page pairs of a segment one writer owes.

    tokens: of a page pair. per_unit: page pairs of one unit. holders, holder: ``holders`` writers hold the segment's
    heads; this one is number ``holder`` of them and owes unit u iff ``u % holders == holder``. window: of layers that
    have a sliding window; pairs before it are not owed.

    Tokens, pairs and units are counted from the end of the receiver's prefix. The *ordinal* of a pair is its number
    among the pairs of this writer's units: with 3 holders and units of 2 pairs, holder 1 owes the pairs 2, 3, 8, 9, 14,
    15, ..., which have the ordinals 0, 1, 2, 3, 4, 5, ... A range of ordinals thus stands for any number of pairs.
    """

    tokens: int
    per_unit: int
    holders: int = 1
    holder: int = 0
    window: Window | None = None

    @property
    def unit(self) -> int:
        """Tokens of one unit."""
        return self.per_unit * self.tokens

    def pair(self, ordinal: int) -> int:
        """The number of the pair with this ordinal."""
        return self.holder * self.per_unit + ordinal + ordinal // self.per_unit * self.per_unit * (self.holders - 1)

    def ordinals(self, *, start: int, num_src_pages: int, per_page: int, limit_tokens: int) -> range:
        """Ordinals of the owed pairs of sender pages [start, start + num_src_pages).

        start: counted from the end of the prefix. per_page: pairs of one sender page. limit_tokens: tokens of the
        grant; pairs beyond it are left out, and so are pairs before the window. Takes the same time for any number of
        pages.
        """
        first = max(start * per_page, first_owed(limit_tokens, self.window) // self.tokens)
        end = max(first, min((start + num_src_pages) * per_page, limit_tokens // self.tokens))
        return range(self._before(first), self._before(end))

    def _before(self, pair: int) -> int:
        """How many pairs of this writer's units have a smaller number than ``pair``."""
        if self.holders == 1:
            return pair
        full, rest = divmod(pair, self.per_unit * self.holders)
        return full * self.per_unit + min(max(rest - self.holder * self.per_unit, 0), self.per_unit)

    def owed(self, granted_tokens: int, limit_tokens: int | None = None) -> list[tuple[int, int]]:
        """The tokens that this writer owes, as ascending intervals [lo, hi).

        granted_tokens: of the grant; they decide where a window begins. limit_tokens: leaves out the tokens from this
        one on, without moving the window.
        """
        limit = granted_tokens if limit_tokens is None else limit_tokens
        first = first_owed(granted_tokens, self.window)
        if self.holders == 1:
            return [(first, limit)] if first < limit else []
        size = self.unit
        unit = first // size
        unit += (self.holder - unit) % self.holders
        return [(lo, min(lo + size, limit)) for lo in range(unit * size, limit, self.holders * size)]


@dataclass(frozen=True)
class PlanSegment:
    """A range of heads of one component, in some layers, whose page pairs are all copied in the same way.

    component: its name; the name of a state in the plan of a state. layers, heads: global ids; for a state, ``heads``
    are global elements along its shard dimension. stripe: which page pairs this writer owes.
    src_base, dst_base: byte offset, inside a page, of the first of these heads of the page's first token.
    src_token_stride, dst_token_stride: bytes from one token to the next inside a page. rows: of each pair.
    is_page: whether each pair is exactly one whole page on both sides. conversion: where the two sides have unlike
    dtypes. Then source strides and ``src_base`` count the sender's bytes, all else the receiver's, also ``rows.run``.
    """

    component: str
    layers: tuple[int, ...]
    heads: range
    stripe: Stripe
    src_base: int
    dst_base: int
    src_token_stride: int
    dst_token_stride: int
    rows: StridedRuns
    is_page: bool
    conversion: Conversion | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one page pair: the smaller page size."""
        return self.stripe.tokens

    @cached_property
    def place(self) -> tuple[object, ...]:
        """All that decides which pairs are owed and where they begin in their pages.

        Segments with equal places have equal pair offsets, such as those of keys and values of the same shape.
        """
        return (self.stripe, self.src_base, self.dst_base, self.src_token_stride, self.dst_token_stride)

    @cached_property
    def pair_nbytes(self) -> int:
        """Bytes of one page pair in one layer, in the receiver's pages."""
        return self.rows.per_pair * self.rows.run

    @cached_property
    def stage_nbytes(self) -> int:
        """Bytes of one page pair in one layer, in a stage."""
        if self.conversion is None:
            return self.pair_nbytes
        return self.pair_nbytes // self.conversion.dst.itemsize * self.conversion.wire.itemsize

    def side_rows(self, *, sending: bool) -> StridedRuns:
        """``rows`` with ``run`` in bytes of the sender's, or else of the receiver's pages."""
        if self.conversion is None or not sending:
            return self.rows
        src, dst = self.conversion.src.itemsize, self.conversion.dst.itemsize
        return self.rows._replace(run=self.rows.run // dst * src)


def first_owed(granted_tokens: int, window: Window | None) -> int:
    """The first token of a grant that is owed, counted from the end of the prefix; 0 without a window.

    A layer with a sliding window needs only the last tokens of a prompt, but no message says how long the prompt is.
    So both sides compute a bound from what both know: the grant of g tokens, the sender's pages of Ps tokens and the
    receiver's pages of Pr tokens.

    Let L be the tokens of the prompt after the prefix, in N sender pages. The N pages match the grant iff
    |N*Ps - g| < max(Ps, Pr) (see `torchkv.layout.pair_plan.seal_matches`), so N - 1 >= (g - max(Ps, Pr)) // Ps. The
    last page holds at least one token, so L >= (N - 1)*Ps + 1.

    The next token, at position L, attends to positions > L - tokens. One more position is allowed for on either side: a
    receiver may compute the prompt's last token again, and a model may not count a token as part of its own window. So
    positions from L - 1 - tokens on are owed: for the shortest possible prompt, from
    (g - max(Ps, Pr)) // Ps * Ps - tokens on. The result is that number, rounded down to a multiple of ``window.unit``.
    """
    if window is None:
        return 0
    tokens, src_page_size, dst_page_size, unit = window
    shortest = (granted_tokens - max(src_page_size, dst_page_size)) // src_page_size * src_page_size + 1
    return max(0, (shortest - 1 - tokens) // unit * unit)
