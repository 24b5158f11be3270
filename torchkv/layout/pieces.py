"""Which bytes a stage holds: a verb is cut into pieces, and each page pair of a piece has a fixed place in its stage.

A *stage* is a span of the receiver's staging ring that is granted to one writer. A *verb* is one send call: sender
pages [start, start + num_pages) of some layers. A `Cutter` cuts a verb into pieces that fit into the stages granted for
it. A `Piece` is a few integers, and both sides compute its `PieceLayout` from the same plan, so the writer only has to
tell the receiver the piece.

Segments that always owe the same pairs, such as those of keys and values, form a group (`PairPlan.groups`), which a
kernel can pack in one launch. A stage is packed in this order: group by group, in a group layer by layer, in a layer
segment by segment, in a segment pair by pair (those that the writer owes), in a pair row by row. If checksums are asked
for, one int64 for each of these pairs follows, in the same order.

For example, a piece of layers 0 and 1 in which "k" and "v" each owe 3 pairs of 512 bytes, with checksums::

    bytes    0 to 1535   layer 0, "k", pairs 0, 1, 2
    bytes 1536 to 3071   layer 0, "v"
    bytes 3072 to 4607   layer 1, "k"
    bytes 4608 to 6143   layer 1, "v"
    bytes 6144 to 6239   12 checksums, in the same order

The section of "k" has ``offset=0, pairs=3, sums=6144, group=2, layer_stride=3072, sums_stride=48``; that of "v" differs
in ``offset=1536`` and ``sums=6168``.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torchkv.errors import ProtocolError
from torchkv.layout.pair_plan import PairPlan, first_page_outside
from torchkv.layout.plan_segment import PlanSegment
from torchkv.layout.stage_format import ALIGNMENT

__all__ = [
    "Cutter",
    "Mismatch",
    "Piece",
    "PieceLayout",
    "PieceSection",
    "check_piece",
    "pair_ordinals",
    "piece_layout",
]

SUM_NBYTES = 8  # of one checksum


class Piece(NamedTuple):
    """What goes through one stage: some layers of sender pages [start, start + num_pages).

    layers: global ids, ascending. Pages are counted from the end of the receiver's prefix.
    """

    layers: tuple[int, ...]
    start: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class PieceSection:
    """One segment's share of a piece, and where it lies in the stage.

    layers: those layers of the segment that are in the piece. offset: where the first of them begins, in bytes from the
    start of the stage; a multiple of ``ALIGNMENT`` for the first segment of a group. pairs: page pairs of each layer.
    sums: offset of the int64 checksums ``[pairs]`` of the first layer, a multiple of 8; 0 without checksums. group:
    number of segments in this segment's group.
    """

    segment: PlanSegment
    layers: tuple[int, ...]
    offset: int
    pairs: int
    sums: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in the stage, without checksums."""
        return len(self.layers) * self.layer_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer in the stage."""
        return self.pairs * self.segment.stage_nbytes

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer of the segment to the next: layer i begins at ``offset + i * layer_stride``."""
        return self.group * self.layer_nbytes

    @property
    def sums_stride(self) -> int:
        """The checksums of layer i begin at ``sums + i * sums_stride``."""
        return self.group * self.pairs * SUM_NBYTES


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """Where everything lies in a stage. nbytes: that the piece takes, with padding and checksums."""

    sections: tuple[PieceSection, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """Bytes of the receiver's pages that the piece fills."""
        return sum(len(each.layers) * each.pairs * each.segment.pair_nbytes for each in self.sections)

    @property
    def packed(self) -> int:
        """Bytes in the stage, without padding and checksums; other than ``payload`` where pages are converted."""
        return sum(section.nbytes for section in self.sections)


def pair_ordinals(plan: PairPlan, segment: PlanSegment, start: int, num_pages: int, limit_tokens: int) -> range:
    """`Stripe.ordinals` of the pairs that ``segment`` owes of sender pages [start, start + num_pages)."""
    per_page = plan.src_page_size // segment.tokens
    return segment.stripe.ordinals(start=start, num_src_pages=num_pages, per_page=per_page, limit_tokens=limit_tokens)


def piece_layout(plan: PairPlan, piece: Piece, *, limit_tokens: int, checksum: bool) -> PieceLayout:
    """How ``piece`` is packed under a grant of ``limit_tokens`` tokens.

    Segments that owe nothing of these pages have no section.
    """
    groups = list(_groups(plan, piece.layers, piece.start, piece.num_pages, limit_tokens))
    blocks = [(len(segments) * len(layers) * pairs, segments[0].stage_nbytes) for segments, layers, pairs in groups]
    places, nbytes = _place(blocks, checksum=checksum)
    sections = []
    for (segments, layers, pairs), (offset, sums) in zip(groups, places, strict=True):
        for segment in segments:
            sections.append(PieceSection(segment, layers, offset, pairs, sums, len(segments)))
            offset += pairs * segment.stage_nbytes
            sums += pairs * SUM_NBYTES if checksum else 0
    return PieceLayout(tuple(sections), nbytes)


class Mismatch(NamedTuple):
    """The first place at which received bytes differ from the bytes sent. position: of the page id in the grant."""

    layer: int
    component: str
    position: int


class _Group(NamedTuple):
    """Segments that are packed together. layers: those of theirs that are packed. pairs: owed in each layer."""

    segments: tuple[PlanSegment, ...]
    layers: tuple[int, ...]
    pairs: int


def _groups(plan: PairPlan, layers: Iterable[int], start: int, num_pages: int, limit_tokens: int) -> Iterator[_Group]:
    """The groups that owe any pair of ``layers`` in sender pages [start, start + num_pages)."""
    wanted = frozenset(layers)
    for segments in plan.groups:
        held = tuple(filter(wanted.__contains__, segments[0].layers))
        if held and (pairs := len(pair_ordinals(plan, segments[0], start, num_pages, limit_tokens))):
            yield _Group(segments, held, pairs)


def _place(blocks: Iterable[tuple[int, int]], *, checksum: bool) -> tuple[list[tuple[int, int]], int]:
    """Places blocks of (pairs, bytes of a pair): (offset, offset of checksums) of each, and the bytes of all."""
    offsets, counts, end = [], [], 0
    for pairs, pair_nbytes in blocks:
        offsets.append(_round_up(end, ALIGNMENT))
        counts.append(pairs)
        end = offsets[-1] + pairs * pair_nbytes
    if not checksum:
        return [(offset, 0) for offset in offsets], end
    end = _round_up(end, SUM_NBYTES)
    places = []
    for offset, pairs in zip(offsets, counts, strict=True):
        places.append((offset, end))
        end += pairs * SUM_NBYTES
    return places, end


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def check_piece(plan: PairPlan, piece: Piece, *, limit_tokens: int, checksum: bool = False) -> PieceLayout:
    """The `piece_layout` of a piece that a peer has named.

    limit_tokens: tokens of the grant. Raises ``ProtocolError`` for a piece that no correct writer sends. Does not check
    whether the layout fits into the stage.
    """
    layers, start, num_pages = piece
    unknown = next((layer for layer in layers if layer not in plan.segments_of), None)
    if unknown is not None:
        raise ProtocolError(
            f"a stage with layer {unknown}, of which this writer owes no pages; it owes {_shown(plan.layers)}"
        )
    if not layers or any(map(operator.ge, layers, layers[1:])):
        raise ProtocolError(f"a stage's layers must ascend, and be one at least, not {_shown(layers)}")
    if start < 0 or num_pages < 1:
        raise ProtocolError(f"a stage of {num_pages} pages from page {start} on, layers {_shown(layers)}")
    outside = first_page_outside(start, num_pages, plan.src_page_size, limit_tokens)
    if outside is not None:
        raise ProtocolError(
            f"a stage of sender pages {start} to {start + num_pages - 1}, layers {_shown(layers)}: page {outside} of "
            f"{plan.src_page_size} tokens lies outside the grant of {limit_tokens} tokens"
        )
    layout = piece_layout(plan, piece, limit_tokens=limit_tokens, checksum=checksum)
    if not layout.sections:
        raise ProtocolError(
            f"a stage of sender pages {start} to {start + num_pages - 1}, layers {_shown(layers)}: this writer owes "
            "nothing of these, other ranks write them"
        )
    return layout


def _shown(layers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''}]"


class Cutter:
    """Cuts one verb into pieces, in order, each as large as fits into a stage of a given size.

    layers: global ids; layers that are not owed are ignored. start, num_pages: the verb's sender pages, counted from
    the end of the prefix; none may lie entirely outside the grant of ``limit_tokens`` tokens.
    """

    def __init__(
        self, plan: PairPlan, layers: Iterable[int], start: int, num_pages: int, *, limit_tokens: int, checksum: bool
    ) -> None:
        self._plan = plan
        self._start = start
        self._end = start + num_pages
        self._limit_tokens = limit_tokens
        self._checksum = checksum
        self._groups = list(_groups(plan, layers, start, num_pages, limit_tokens))
        self._layers = sorted({layer for group in self._groups for layer in group.layers})
        self._next = 0  # position in _layers of the first layer of which something is left
        self._page = start  # the first page left of that layer
        one_page: list[int] = []
        alike: dict[int, int] = {}  # by the id of a layer's segments: layers that share them take equally many bytes
        for layer in self._layers:
            segments = id(plan.segments_of[layer])
            if segments not in alike:
                alike[segments] = self._one_page(layer)
            one_page.append(alike[segments])
        # For each position in _layers: the most bytes that one page of that layer or of any later one takes.
        self._least = [*accumulate([0, *reversed(one_page)], max)][::-1]
        self._nbytes = self._left()

    @property
    def done(self) -> bool:
        """Whether nothing is left to cut."""
        return self._next == len(self._layers)

    @property
    def least(self) -> int:
        """Bytes of a stage that are enough for some piece, whatever is cut next: one page of the largest layer left."""
        return self._least[self._next]

    @property
    def nbytes(self) -> int:
        """About how many bytes of stages all that is left takes, at least ``least``: what to ask the receiver for."""
        return self._nbytes

    def _left(self) -> int:
        if self.done:
            return 0
        whole = self._next + (self._page > self._start)
        rest = self._size(self._next, whole, self._page, self._end)
        return max(rest + self._size(whole, len(self._layers), self._start, self._end), self.least)

    def cut(self, max_nbytes: int) -> Piece:
        """The next piece: the largest that fits into ``max_nbytes`` bytes.

        As many whole layers as fit, or else as many pages of the next layer as fit. Raises ``ProtocolError`` if not
        even one page fits, which cannot happen if ``max_nbytes`` is at least ``least``.
        """
        assert not self.done, "nothing is left to cut"
        first = self._next
        count = self._whole_layers(max_nbytes) if self._page == self._start else 0
        if count:
            self._next += count
            piece = Piece(tuple(self._layers[first : self._next]), self._start, self._end - self._start)
        else:
            piece = self._cut_pages(max_nbytes)
        self._nbytes = self._left()
        return piece

    def _whole_layers(self, max_nbytes: int) -> int:
        """How many whole layers fit into ``max_nbytes`` bytes."""
        left = len(self._layers) - self._next

        def fits(count: int) -> bool:
            return self._size(self._next, self._next + count, self._start, self._end) <= max_nbytes

        # Most layers take equally many bytes: guess from the next one, and search only if the guess is wrong.
        one = self._size(self._next, self._next + 1, self._start, self._end)
        guess = min(left, max_nbytes // one)
        if fits(guess) and (guess == left or not fits(guess + 1)):
            return guess
        return bisect_right(range(1, left + 1), False, key=lambda count: not fits(count))

    def _cut_pages(self, max_nbytes: int) -> Piece:
        layer, start = self._layers[self._next], self._page
        ends = range(start + 1, self._end + 1)
        count = bisect_right(ends, max_nbytes, key=lambda end: self._size(self._next, self._next + 1, start, end))
        # Pages of which nothing is owed take no bytes. So the largest piece includes those that follow its last owed
        # page, and if anything of a layer is left, it owes something.
        if not count or not self._size(self._next, self._next + 1, start, start + count):
            raise ProtocolError(f"a stage of {max_nbytes} bytes for layer {layer}, page {start}: {self.least} suffice")
        self._page += count
        if self._page == self._end:
            self._next += 1
            self._page = self._start
        return Piece((layer,), start, count)

    def _size(self, first: int, last: int, start: int, end: int) -> int:
        """``nbytes`` of the `PieceLayout` of pages [start, end) of the layers at positions [first, last)."""
        if first == last:
            return 0
        low, high = self._layers[first], self._layers[last - 1]
        whole = start == self._start and end == self._end
        blocks = []
        for segments, held, pairs in self._groups:
            layers = bisect_right(held, high) - bisect_left(held, low)
            if layers and not whole:
                pairs = len(pair_ordinals(self._plan, segments[0], start, end - start, self._limit_tokens))
            if layers and pairs:
                blocks.append((len(segments) * layers * pairs, segments[0].stage_nbytes))
        return _place(blocks, checksum=self._checksum)[1]

    def _one_page(self, layer: int) -> int:
        """The most bytes that one page of ``layer`` takes."""
        per_page = [
            (len(segments) * (self._plan.src_page_size // segments[0].tokens), segments[0].stage_nbytes)
            for segments, held, _ in self._groups
            if layer in held
        ]
        return _place(per_page, checksum=self._checksum)[1]
