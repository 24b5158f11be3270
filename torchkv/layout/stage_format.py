"""A slab: the part of a plan in which every page pair has the same geometry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Rows", "Slab", "Window", "first_owed", "owed_pairs"]


class Rows(NamedTuple):
    """The runs of one page pair: for a in n0, b in n1, ``run`` bytes at a * s0 + b * s1 -> a * d0 + b * d1."""

    n0: int
    s0: int
    d0: int
    n1: int
    s1: int
    d1: int
    run: int

    @classmethod
    def folded(cls, dims: list[tuple[int, int, int]], run: int) -> Rows:
        """``run`` bytes, repeated along each (count, src stride, dst stride) of at most two, outermost first.

        What is contiguous on both sides becomes part of the run.
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

    @property
    def per_pair(self) -> int:
        """Runs of one page pair."""
        return self.n0 * self.n1


class Window(NamedTuple):
    """A sliding window of ``tokens`` tokens, between pages of these sizes; what is owed begins on a ``unit``."""

    tokens: int
    src_page_size: int
    dst_page_size: int
    unit: int


@dataclass(frozen=True, slots=True)
class Slab:
    """Heads of one component, in some layers, that the same ranks among the writers hold.

    component: its name. layers, heads: global ids. holders, index: this writer is number ``index`` of ``holders``
    and writes unit u of ``unit`` tokens iff ``u % holders == index``. tokens: per page pair, the smaller page size.
    src_base, dst_base: byte offset, inside a page, of the first head of token 0. src_token_stride,
    dst_token_stride: bytes from one token to the next. rows: the runs of a pair. is_page: a pair is exactly one
    whole page on both sides. window: of layers that have a sliding window; what lies before it is not owed. place: all
    that decides which pairs are owed, and where they begin in their pages.
    """

    component: str
    layers: tuple[int, ...]
    heads: range
    holders: int
    index: int
    unit: int
    tokens: int
    src_base: int
    dst_base: int
    src_token_stride: int
    dst_token_stride: int
    rows: Rows
    is_page: bool
    window: Window | None = None
    place: tuple[object, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stripe = (self.holders, self.index, self.unit, self.tokens, self.window)
        strides = (self.src_base, self.dst_base, self.src_token_stride, self.dst_token_stride)
        object.__setattr__(self, "place", stripe + strides)

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one page pair in one layer."""
        return self.rows.per_pair * self.rows.run

    def pairs(self, *, num_src_pages: int, start: int, limit_tokens: int, src_page_size: int) -> range:
        """See `owed_pairs`. src_page_size: in tokens."""
        return owed_pairs(
            start=start,
            num_src_pages=num_src_pages,
            per_page=src_page_size // self.tokens,
            tokens=self.tokens,
            limit_tokens=limit_tokens,
            window=self.window,
            per_unit=self.unit // self.tokens,
            holders=self.holders,
            index=self.index,
        )

    def owed(self, granted_tokens: int, limit_tokens: int | None = None) -> list[tuple[int, int]]:
        """Token intervals [lo, hi) of a grant of ``granted_tokens`` tokens in this writer's stripe, ascending.

        limit_tokens: none beyond these; where a window begins is a matter of the grant alone.
        """
        limit = granted_tokens if limit_tokens is None else limit_tokens
        first = 0 if self.window is None else first_owed(granted_tokens, self.window)
        if self.holders == 1:
            return [(first, limit)] if first < limit else []
        unit = first // self.unit
        unit += (self.index - unit) % self.holders
        starts = range(unit * self.unit, limit, self.holders * self.unit)
        return [(lo, min(lo + self.unit, limit)) for lo in starts]


def first_owed(granted_tokens: int, window: Window | None) -> int:
    """The first token, a multiple of the window's ``unit``, that is owed of a grant of so many tokens.

    No message says how long the prompt is, L tokens behind the prefix. Both sides know the grant, g tokens, and the
    page sizes, Ps of the sender and Pr of the receiver. The sender's N pages match the grant iff
    |N*Ps - g| < max(Ps, Pr) (see `plan.seal_matches`), so N - 1 >= (g - max(Ps, Pr)) // Ps. In the last of them there
    is one token at least, so L >= (N - 1)*Ps + 1.

    The next token, at position L, attends to positions > L - tokens. One more to either side is allowed for: a
    receiver may compute the prompt's last token again, and a model may not count a token as part of its own window. So
    positions from L - 1 - tokens on are owed, which is (g - max(Ps, Pr)) // Ps * Ps - tokens for the shortest prompt.
    """
    if window is None:
        return 0
    tokens, src_page_size, dst_page_size, unit = window
    shortest = (granted_tokens - max(src_page_size, dst_page_size)) // src_page_size * src_page_size + 1
    return max(0, (shortest - 1 - tokens) // unit * unit)


def owed_pairs(
    *,
    start: int,
    num_src_pages: int,
    per_page: int,
    tokens: int,
    limit_tokens: int,
    window: Window | None,
    per_unit: int,
    holders: int,
    index: int,
) -> range:
    """The pairs of sender pages [start, start + num_src_pages) that a writer owes, as ranks within its stripe.

    start: counted after the prefix. per_page: pairs of ``tokens`` tokens in a sender page. limit_tokens: tokens of the
    grant; pairs beyond it are left out, and those before the window. The stripe has units of ``per_unit`` pairs, those
    with ``unit % holders == index``; its pairs are numbered without gaps. Costs the same for any number of pages.
    """
    first = max(start * per_page, first_owed(limit_tokens, window) // tokens)
    end = max(first, min((start + num_src_pages) * per_page, limit_tokens // tokens))
    if holders == 1:
        return range(first, end)

    def before(pair: int) -> int:
        full, rest = divmod(pair, per_unit * holders)
        return full * per_unit + min(max(rest - index * per_unit, 0), per_unit)

    return range(before(first), before(end))
