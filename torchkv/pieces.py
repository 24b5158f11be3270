"""Which bytes a stage holds: a verb cut into pieces, and where in its stage each page pair of a piece lies.

A stage is a span of the receiver's staging ring. Both sides compute a piece's layout from the same plan, so nothing but
the `Piece` has to travel. Slabs that are alike, such as keys and values, make a group. Packed are the groups one after
the other; in a group layer after layer, slab after slab, pair after pair (of the writer's stripe), row after row; then,
if asked for, a checksum of each of these pairs, in the same order. So kernels can do a group at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from torchkv.errors import ProtocolError
from torchkv.plan import PairPlan, first_page_outside
from torchkv.slab import Slab
from torchkv.staging import ALIGNMENT

__all__ = [
    "ALIGNMENT",
    "Cutter",
    "Piece",
    "PieceLayout",
    "Segment",
    "check_piece",
    "pair_ranks",
    "piece_layout",
    "slab_groups",
]

SUM_NBYTES = 8


class Piece(NamedTuple):
    """What goes through one stage: these layers (global ids, ascending) of sender pages [start, start + num_pages).

    Pages are counted from the end of the receiver's prefix.
    """

    layers: tuple[int, ...]
    start: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One slab's share of a stage.

    slab: narrowed to the piece's layers. offset: of its first layer, in bytes from the start of the stage; a multiple
    of ``ALIGNMENT`` for the first slab of a group. pairs: page pairs of each layer. sums: offset of the int64 checksums
    ``[pairs]`` of its first layer, a multiple of 8; 0 if there are none. group: slabs of its group, which take turns.
    """

    slab: Slab
    offset: int
    pairs: int
    sums: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of pages, without checksums."""
        return len(self.slab.layers) * self.layer_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer."""
        return self.pairs * self.slab.pair_nbytes

    @property
    def layer_stride(self) -> int:
        """Layer i of the slab begins ``i * layer_stride`` behind ``offset``."""
        return self.group * self.layer_nbytes

    @property
    def sums_stride(self) -> int:
        """The checksums of layer i begin ``i * sums_stride`` behind ``sums``."""
        return self.group * self.pairs * SUM_NBYTES


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """Where everything lies in a stage. nbytes: of the stage that are used, gaps and checksums included."""

    segments: tuple[Segment, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """Bytes of pages."""
        return sum(segment.nbytes for segment in self.segments)


def pair_ranks(plan: PairPlan, slab: Slab, start: int, num_pages: int, limit_tokens: int) -> range:
    """`Slab.pairs` of sender pages [start, start + num_pages)."""
    return slab.pairs(num_src_pages=num_pages, start=start, limit_tokens=limit_tokens, src_page_size=plan.src_page_size)


def piece_layout(plan: PairPlan, piece: Piece, *, limit_tokens: int, checksum: bool) -> PieceLayout:
    """How ``piece`` is packed under a grant of ``limit_tokens`` tokens. Slabs that owe nothing there take no room."""
    groups = [
        (group, pairs)
        for group in _narrowed(plan, piece.layers)
        if (pairs := len(pair_ranks(plan, group[0], piece.start, piece.num_pages, limit_tokens)))
    ]
    blocks = [(len(group) * len(group[0].layers) * pairs, group[0].pair_nbytes) for group, pairs in groups]
    places, nbytes = _place(blocks, checksum=checksum)
    segments = []
    for (group, pairs), (offset, sums) in zip(groups, places, strict=True):
        for slab in group:
            segments.append(Segment(slab, offset, pairs, sums, len(group)))
            offset += pairs * slab.pair_nbytes
            sums += pairs * SUM_NBYTES if checksum else 0
    return PieceLayout(tuple(segments), nbytes)


def slab_groups(plan: PairPlan) -> Iterator[list[Slab]]:
    """Neighbouring slabs of equal layers, stripe, window and bytes of a pair: they owe the same pairs, always."""
    for _, group in groupby(plan.slabs, _likeness):
        yield list(group)


def _likeness(slab: Slab) -> tuple[object, ...]:
    return slab.layers, slab.pair_nbytes, slab.holders, slab.index, slab.unit, slab.tokens, slab.window


def _narrowed(plan: PairPlan, layers: Iterable[int]) -> Iterator[list[Slab]]:
    """The groups narrowed to ``layers``; without those that have none of them."""
    wanted = frozenset(layers)
    for group in slab_groups(plan):
        kept = tuple(layer for layer in group[0].layers if layer in wanted)
        if kept:
            yield [slab if kept == slab.layers else replace(slab, layers=kept) for slab in group]


def _place(blocks: Iterable[tuple[int, int]], *, checksum: bool) -> tuple[list[tuple[int, int]], int]:
    """(offset, offset of the checksums) of blocks of (pairs, bytes of a pair), and the bytes that all take."""
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
    """The `piece_layout` of a piece that a peer names. Refuses what no honest writer sends: raises ``ProtocolError``.

    limit_tokens: tokens of the grant. Whether the layout fits into the stage is for the caller to check.
    """
    layers, start, num_pages = piece
    owed = frozenset(plan.layers)
    strange = next((layer for layer in layers if layer not in owed), None)
    if strange is not None:
        raise ProtocolError(
            f"a stage with layer {strange}, of which this writer owes no pages; it owes {_some(plan.layers)}"
        )
    if not layers or any(layers[i] >= layers[i + 1] for i in range(len(layers) - 1)):
        raise ProtocolError(f"a stage's layers must ascend, and be one at least, not {_some(layers)}")
    if start < 0 or num_pages < 1:
        raise ProtocolError(f"a stage of {num_pages} pages from page {start} on, layers {_some(layers)}")
    outside = first_page_outside(start, num_pages, plan.src_page_size, limit_tokens)
    if outside is not None:
        raise ProtocolError(
            f"a stage of sender pages {start} to {start + num_pages - 1}, layers {_some(layers)}: page {outside} of "
            f"{plan.src_page_size} tokens lies outside the grant of {limit_tokens} tokens"
        )
    layout = piece_layout(plan, piece, limit_tokens=limit_tokens, checksum=checksum)
    if not layout.segments:
        raise ProtocolError(
            f"a stage of sender pages {start} to {start + num_pages - 1}, layers {_some(layers)}: of these this "
            "writer owes nothing, other ranks write them"
        )
    return layout


def _some(layers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''}]"


class Cutter:
    """Cuts one verb into pieces, in order, each as large as the stage that is there for it.

    layers: global ids; those that are not owed are ignored. start, num_pages: sender pages after the prefix, none
    wholly outside the grant of ``limit_tokens`` tokens.
    """

    def __init__(
        self, plan: PairPlan, layers: Iterable[int], start: int, num_pages: int, *, limit_tokens: int, checksum: bool
    ) -> None:
        self._plan = plan
        self._start = start
        self._end = start + num_pages
        self._limit_tokens = limit_tokens
        self._checksum = checksum
        self._groups = [
            group for group in _narrowed(plan, layers) if pair_ranks(plan, group[0], start, num_pages, limit_tokens)
        ]
        self._layers = sorted({layer for group in self._groups for layer in group[0].layers})
        self._next = 0  # position in _layers of the first that is not wholly cut
        self._page = start  # of that layer, the first that is not cut
        # Of each group: its first slab, pairs of one layer with all pages of the verb, which is what most pieces are
        # made of, and bytes of a pair in all its slabs.
        self._whole = [
            (
                group[0],
                len(pair_ranks(plan, group[0], start, num_pages, limit_tokens)),
                group[0].pair_nbytes,
                len(group),
            )
            for group in self._groups
        ]
        alike: dict[int, int] = {}  # layers with the same slabs take as much
        for layer in self._layers:
            if id(plan.slabs_of[layer]) not in alike:
                alike[id(plan.slabs_of[layer])] = self._one_page(layer)
        one_page = [alike[id(plan.slabs_of[layer])] for layer in self._layers]
        self._least = [0] * (len(one_page) + 1)  # by position: the most that one page of it or of a later one takes
        for position in reversed(range(len(one_page))):
            self._least[position] = max(one_page[position], self._least[position + 1])
        self._nbytes = self._left()

    @property
    def done(self) -> bool:
        """Whether nothing is left to cut."""
        return self._next == len(self._layers)

    @property
    def least(self) -> int:
        """Bytes of a stage that suffice for any piece still to come: one page of the largest layer. 0 when done."""
        return self._least[self._next]

    @property
    def nbytes(self) -> int:
        """About the bytes of stages still to come, never less than ``least``: what to ask for."""
        return self._nbytes

    def _left(self) -> int:
        if self.done:
            return 0
        whole = self._next + (self._page > self._start)
        rest = self._size(self._next, whole, self._page, self._end)
        return max(rest + self._size(whole, len(self._layers), self._start, self._end), self.least)

    def cut(self, room: int) -> Piece:
        """The largest next piece that fits into ``room`` bytes.

        Whole layers if one fits at least, else as many pages of one layer as fit. Raises ``ProtocolError`` if not
        even one page does, which cannot be where ``room`` is at least ``least``.
        """
        assert not self.done, "nothing is left to cut"
        first = self._next
        count = self._whole_layers(room) if self._page == self._start else 0
        if count:
            self._next += count
            piece = Piece(tuple(self._layers[first : self._next]), self._start, self._end - self._start)
        else:
            piece = self._cut_pages(room)
        self._nbytes = self._left()
        return piece

    def _whole_layers(self, room: int) -> int:
        """How many whole layers fit."""
        left = len(self._layers) - self._next

        def fits(count: int) -> bool:
            return self._size(self._next, self._next + count, self._start, self._end) <= room

        # Layers are mostly of one size: guess from the next one, and search only if that was wrong.
        one = self._size(self._next, self._next + 1, self._start, self._end)
        guess = min(left, room // one)
        if fits(guess) and (guess == left or not fits(guess + 1)):
            return guess
        return bisect_right(range(1, left + 1), False, key=lambda count: not fits(count))

    def _cut_pages(self, room: int) -> Piece:
        layer, start = self._layers[self._next], self._page
        ends = range(start + 1, self._end + 1)
        count = bisect_right(ends, room, key=lambda end: self._size(self._next, self._next + 1, start, end))
        # Pages that owe nothing take no room, so the largest piece takes those behind it along, and what is left of a
        # layer always owes something.
        if not count or not self._size(self._next, self._next + 1, start, start + count):
            raise ProtocolError(f"a stage of {room} bytes for layer {layer}, page {start}: {self.least} suffice")
        self._page += count
        if self._page == self._end:
            self._next += 1
            self._page = self._start
        return Piece((layer,), start, count)

    def _size(self, first: int, last: int, start: int, end: int) -> int:
        """``nbytes`` of the layout of pages [start, end) of the layers at positions [first, last)."""
        if first == last:
            return 0
        low, high = self._layers[first], self._layers[last - 1]
        whole = start == self._start and end == self._end
        blocks = []
        for slab, pairs, pair_nbytes, size in self._whole:
            layers = bisect_right(slab.layers, high) - bisect_left(slab.layers, low)
            if layers and not whole:
                pairs = len(pair_ranks(self._plan, slab, start, end - start, self._limit_tokens))
            if layers and pairs:
                blocks.append((size * layers * pairs, pair_nbytes))
        return _place(blocks, checksum=self._checksum)[1]

    def _one_page(self, layer: int) -> int:
        """The most that one page of ``layer`` takes."""
        per_page = [
            (len(group) * (self._plan.src_page_size // group[0].tokens), group[0].pair_nbytes)
            for group in self._groups
            if layer in group[0].layers
        ]
        return _place(per_page, checksum=self._checksum)[1]
