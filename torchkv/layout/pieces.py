"""Which bytes a stage holds: a verb cut into pieces, and where in its stage each page pair of a piece lies.

A stage is a span of the receiver's staging ring. Both sides compute a piece's layout from the same plan, so nothing but
the `Piece` has to travel. Slabs that are alike, such as keys and values, make a group. Packed are the groups one after
the other; in a group layer after layer, slab after slab, pair after pair (of the writer's stripe), row after row; then,
if asked for, a checksum of each of these pairs, in the same order. So kernels can do a group at once.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
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

    slab: of the plan. layers: those of the slab that are in the piece. offset: of the first of them, in bytes from the
    start of the stage; a multiple of ``ALIGNMENT`` for the first slab of a group. pairs: page pairs of each layer.
    sums: offset of the int64 checksums ``[pairs]`` of the first layer, a multiple of 8; 0 if there are none. group:
    slabs of its group, which take turns.
    """

    slab: Slab
    layers: tuple[int, ...]
    offset: int
    pairs: int
    sums: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of pages, without checksums."""
        return len(self.layers) * self.layer_nbytes

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
    groups = list(_groups(plan, piece.layers, piece.start, piece.num_pages, limit_tokens))
    blocks = [(len(slabs) * len(layers) * pairs, slabs[0].pair_nbytes) for slabs, layers, pairs in groups]
    places, nbytes = _place(blocks, checksum=checksum)
    segments = []
    for (slabs, layers, pairs), (offset, sums) in zip(groups, places, strict=True):
        for slab in slabs:
            segments.append(Segment(slab, layers, offset, pairs, sums, len(slabs)))
            offset += pairs * slab.pair_nbytes
            sums += pairs * SUM_NBYTES if checksum else 0
    return PieceLayout(tuple(segments), nbytes)


class _Group(NamedTuple):
    """Slabs that are packed together, those of their layers that are, and page pairs of each layer."""

    slabs: tuple[Slab, ...]
    layers: tuple[int, ...]
    pairs: int


def _groups(plan: PairPlan, layers: Iterable[int], start: int, num_pages: int, limit_tokens: int) -> Iterator[_Group]:
    """What is owed of ``layers`` in sender pages [start, start + num_pages)."""
    wanted = frozenset(layers)
    for slabs in plan.groups:
        held = tuple(filter(wanted.__contains__, slabs[0].layers))
        if held and (pairs := len(pair_ranks(plan, slabs[0], start, num_pages, limit_tokens))):
            yield _Group(slabs, held, pairs)


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
    strange = next((layer for layer in layers if layer not in plan.slabs_of), None)
    if strange is not None:
        raise ProtocolError(
            f"a stage with layer {strange}, of which this writer owes no pages; it owes {_some(plan.layers)}"
        )
    if not layers or any(map(operator.ge, layers, layers[1:])):
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
        self._groups = list(_groups(plan, layers, start, num_pages, limit_tokens))
        self._layers = sorted({layer for group in self._groups for layer in group.layers})
        self._next = 0  # position in _layers of the first that is not wholly cut
        self._page = start  # of that layer, the first that is not cut
        one_page: list[int] = []
        alike: dict[int, int] = {}  # layers with the same slabs take as much
        for layer in self._layers:
            slabs = id(plan.slabs_of[layer])
            if slabs not in alike:
                alike[slabs] = self._one_page(layer)
            one_page.append(alike[slabs])
        # By position: the most that one page of that layer or of a later one takes.
        self._least = [*accumulate([0, *reversed(one_page)], max)][::-1]
        self._nbytes = self._left()
        # What a layer takes of one slab, at most.
        self.layer_nbytes = max((pairs * slabs[0].pair_nbytes for slabs, _, pairs in self._groups), default=0)

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
        for slabs, held, pairs in self._groups:
            layers = bisect_right(held, high) - bisect_left(held, low)
            if layers and not whole:
                pairs = len(pair_ranks(self._plan, slabs[0], start, end - start, self._limit_tokens))
            if layers and pairs:
                blocks.append((len(slabs) * layers * pairs, slabs[0].pair_nbytes))
        return _place(blocks, checksum=self._checksum)[1]

    def _one_page(self, layer: int) -> int:
        """The most that one page of ``layer`` takes."""
        per_page = [
            (len(slabs) * (self._plan.src_page_size // slabs[0].tokens), slabs[0].pair_nbytes)
            for slabs, held, _ in self._groups
            if layer in held
        ]
        return _place(per_page, checksum=self._checksum)[1]
