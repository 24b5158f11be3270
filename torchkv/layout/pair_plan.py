"""Which bytes go where, for one writer and one reader: offsets only, no memory.

A plan is the intersection of two layouts, kept factored as (page pairs) x (rows) x (run of bytes). Positions are
tokens counted from the end of the reader's prefix. Paths that need descriptors `expand` the factors with numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from torchkv import stateplan
from torchkv.descriptors import PagePairs, expand, page_pairs, pair_offsets
from torchkv.errors import LayoutMismatch
from torchkv.layout import KVLayout, first_difference
from torchkv.ranges import overlap, split_by_holders, uncovered
from torchkv.slab import Rows, Slab, Window

__all__ = [
    "PagePairs",
    "PairPlan",
    "Rows",
    "Slab",
    "Window",
    "compile_plan",
    "contributing",
    "coverage_gap",
    "expand",
    "first_page_outside",
    "largest_grant",
    "page_pairs",
    "pair_offsets",
    "seal_matches",
]

_Writers = tuple[tuple[int, KVLayout], ...]  # (group rank, layout), in rank order


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Everything that one writer owes one reader.

    layers: global ids of the layers in which pages are owed, ascending. src_page_size, dst_page_size: in tokens.
    state: the same for one slot of state, seen as a page of one token; None in that plan itself. page_for_page: every
    transfer is of whole pages on both sides. slabs_of: by layer; layers with the same slabs share one tuple.
    stripes_of: the same, without slabs that owe the same tokens as another. groups: the slabs, those together that are
    neighbours and owe the same pairs, always: of equal layers, stripe, window and bytes of a pair.
    """

    slabs: tuple[Slab, ...]
    layers: tuple[int, ...]
    src_page_size: int
    dst_page_size: int
    state: PairPlan | None = None
    page_for_page: bool = field(init=False, repr=False, compare=False)
    slabs_of: Mapping[int, tuple[Slab, ...]] = field(init=False, repr=False, compare=False)
    stripes_of: Mapping[int, tuple[Slab, ...]] = field(init=False, repr=False, compare=False)
    groups: tuple[tuple[Slab, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = [frozenset(slab.layers) for slab in self.slabs]
        shared: dict[tuple[int, ...], tuple[Slab, ...]] = {}  # by their numbers
        stripes: dict[int, tuple[Slab, ...]] = {}  # by the address of such a tuple
        slabs_of, stripes_of = {}, {}
        for layer in self.layers:
            numbers = tuple(number for number, layers in enumerate(held) if layer in layers)
            slabs = shared.setdefault(numbers, tuple(self.slabs[number] for number in numbers))
            unlike = {(slab.holders, slab.index, slab.unit, slab.window): slab for slab in slabs}
            slabs_of[layer], stripes_of[layer] = slabs, stripes.setdefault(id(slabs), tuple(unlike.values()))
        object.__setattr__(self, "page_for_page", all(slab.is_page for slab in self.slabs))
        object.__setattr__(self, "slabs_of", slabs_of)
        object.__setattr__(self, "stripes_of", stripes_of)
        object.__setattr__(self, "groups", tuple(tuple(group) for _, group in groupby(self.slabs, _likeness)))

    @property
    def empty(self) -> bool:
        """True if the two layouts share nothing, neither pages nor state."""
        return not self.slabs and (self.state is None or self.state.empty)

    @property
    def parts(self) -> tuple[PairPlan, ...]:
        """The plan of the pages and that of state, as far as anything is owed."""
        return tuple(plan for plan in (self, self.state) if plan is not None and plan.slabs)

    def nbytes(self, num_tokens: int, layers: Iterable[int] | None = None) -> int:
        """Bytes owed, in ``layers`` or in all, for a grant of ``num_tokens`` tokens. State is not counted."""
        wanted = frozenset(self.layers if layers is None else layers)
        total = 0
        for slab in self.slabs:
            tokens = sum(hi - lo for lo, hi in slab.owed(num_tokens))
            total += tokens * (slab.pair_nbytes // slab.tokens) * len(wanted.intersection(slab.layers))
        return total

    def slabs_for(self, layers: Iterable[int]) -> tuple[Slab, ...]:
        """The slabs narrowed to ``layers`` (global ids); layers that are not owed are ignored."""
        wanted = frozenset(layers)
        narrowed = []
        for slab in self.slabs:
            kept = tuple(layer for layer in slab.layers if layer in wanted)
            if kept:
                narrowed.append(slab if kept == slab.layers else replace(slab, layers=kept))
        return tuple(narrowed)

    def owed(
        self, granted_tokens: int, limit_tokens: int | None = None, *, layers: Iterable[int] | None = None
    ) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Each layer, or each of ``layers``, in which pages are owed, and the tokens of it that are owed.

        As intervals [lo, hi), merged. granted_tokens: of the grant; they say where a window begins. limit_tokens: none
        beyond these, if given.
        """
        known: dict[int, list[tuple[int, int]]] = {}  # most layers owe the same
        for layer in self.layers if layers is None else layers:
            slabs = self.stripes_of.get(layer)
            if slabs is None:
                continue
            if id(slabs) not in known:
                known[id(slabs)] = self._intervals(slabs, granted_tokens, limit_tokens)
            yield layer, known[id(slabs)]

    @staticmethod
    def _intervals(slabs: Sequence[Slab], granted_tokens: int, limit_tokens: int | None) -> list[tuple[int, int]]:
        if len(slabs) == 1:
            return slabs[0].owed(granted_tokens, limit_tokens)
        intervals = sorted(interval for slab in slabs for interval in slab.owed(granted_tokens, limit_tokens))
        merged: list[tuple[int, int]] = []
        for lo, hi in intervals:
            if merged and lo <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
            else:
                merged.append((lo, hi))
        return merged


def _likeness(slab: Slab) -> tuple[object, ...]:
    return slab.layers, slab.pair_nbytes, slab.holders, slab.index, slab.unit, slab.tokens, slab.window


def compile_plan(writer: int, writers: Mapping[int, KVLayout], reader: KVLayout) -> PairPlan:
    """What rank ``writer`` writes into ``reader``'s pages when ``writers`` (group rank -> layout) send together.

    Cached. Raises `LayoutMismatch` if the layouts cannot be reconciled.
    """
    return _compile(writer, tuple(sorted(writers.items())), reader)


@lru_cache(maxsize=1024)
def _compile(writer: int, writers: _Writers, reader: KVLayout) -> PairPlan:
    mine = dict(writers)[writer]
    for rank, layout in writers:
        difference = first_difference(layout, reader)
        if difference is not None:
            field, ours, theirs = difference
            raise LayoutMismatch(
                f"rank {rank} cannot write to this receiver: {field} is {ours!r} on rank {rank} and {theirs!r} on "
                "the receiver; register layouts of the same model"
            )
    senders = [layout for _, layout in writers if _intersects(layout, reader)]
    unit = max([reader.page_size, *(layout.page_size for layout in senders)])
    slabs = [
        _slab(name, layers, heads, holders, writer=writer, unit=unit, src=mine, dst=reader)
        for name in (component.name for component in reader.components)
        for (heads, holders, _), layers in _segments(name, mine, writers, reader).items()
    ]
    slabs.sort(key=lambda slab: slab.window or ())  # so that slabs which owe the same pairs are neighbours
    state = _pair_plan(stateplan.slabs(writer, writers, reader), 1, 1)
    return replace(_pair_plan(slabs, mine.page_size, reader.page_size), state=state)


def _pair_plan(slabs: Sequence[Slab], src_page_size: int, dst_page_size: int) -> PairPlan:
    owed_layers = tuple(sorted({layer for slab in slabs for layer in slab.layers}))
    return PairPlan(tuple(slabs), owed_layers, src_page_size, dst_page_size)


def _segments(
    name: str, mine: KVLayout, writers: _Writers, reader: KVLayout
) -> dict[tuple[range, tuple[int, ...], int | None], tuple[int, ...]]:
    """(heads, ranks that hold them, window) -> layers, for what ``mine`` and ``reader`` share of component ``name``."""
    shared = overlap(mine.component_heads(name), reader.component_heads(name))
    wanted = frozenset(reader.component_layers(name))
    layers = [layer for layer in mine.component_layers(name) if layer in wanted]
    if not shared or not layers:
        return {}
    held = [(rank, layout.component_heads(name), frozenset(layout.component_layers(name))) for rank, layout in writers]
    segments: dict[tuple[range, tuple[int, ...], int | None], list[int]] = {}
    for layer in layers:
        present = [(rank, common) for rank, heads, ids in held if layer in ids and (common := overlap(heads, shared))]
        for heads, holders in split_by_holders(shared, present):
            segments.setdefault((heads, holders, reader.window(layer)), []).append(layer)
    return {key: tuple(ids) for key, ids in segments.items()}


def _slab(
    name: str,
    layers: tuple[int, ...],
    heads: range,
    holders: tuple[int, ...],
    *,
    writer: int,
    unit: int,
    src: KVLayout,
    dst: KVLayout,
) -> Slab:
    width = src.component(name).head_nbytes
    tokens = min(src.page_size, dst.page_size)
    src_token, src_head = _strides(src, name, width)
    dst_token, dst_head = _strides(dst, name, width)
    rows = Rows.folded([(tokens, src_token, dst_token), (len(heads), src_head, dst_head)], width)
    whole = rows.per_pair == 1 and rows.run == src.page_nbytes(name) == dst.page_nbytes(name)
    window = dst.window(layers[0])
    return Slab(
        component=name,
        layers=layers,
        heads=heads,
        holders=len(holders),
        index=holders.index(writer),
        unit=unit,
        tokens=tokens,
        src_base=(heads.start - src.component_heads(name).start) * src_head,
        dst_base=(heads.start - dst.component_heads(name).start) * dst_head,
        src_token_stride=src_token,
        dst_token_stride=dst_token,
        rows=rows,
        is_page=whole and src.page_size == dst.page_size,
        window=None if window is None else Window(window, src.page_size, dst.page_size, unit),
    )


def _strides(layout: KVLayout, name: str, width: int) -> tuple[int, int]:
    """Bytes from one token to the next and from one head to the next, inside a page."""
    if layout.order == "NHD":
        return len(layout.component_heads(name)) * width, width
    return width, layout.page_size * width


def contributing(writers: Mapping[int, KVLayout], reader: KVLayout) -> tuple[int, ...]:
    """Ranks among ``writers`` whose layout shares pages or state with ``reader``'s, ascending."""
    return tuple(rank for rank in sorted(writers) if _intersects(writers[rank], reader))


@lru_cache(maxsize=1024)
def _intersects(writer: KVLayout, reader: KVLayout) -> bool:
    for component in reader.components:
        name = component.name
        if (
            any(own.name == name for own in writer.components)
            and overlap(writer.component_heads(name), reader.component_heads(name))
            and not set(writer.component_layers(name)).isdisjoint(reader.component_layers(name))
        ):
            return True
    return stateplan.intersects(writer, reader)


def coverage_gap(writers: Mapping[int, KVLayout], reader: KVLayout) -> str | None:
    """What the reader holds and none of the writers does: the first such (component, layer, heads), in words.

    None if every byte of pages and state has a writer.
    """
    layouts = list(writers.values())
    who = f"none of the writing ranks {sorted(writers)} holds"
    for component in reader.components:
        name = component.name
        having = [layout for layout in layouts if any(own.name == name for own in layout.components)]
        held = [(layout.component_heads(name), frozenset(layout.component_layers(name))) for layout in having]
        for layer in reader.component_layers(name):
            gap = uncovered(reader.component_heads(name), [heads for heads, ids in held if layer in ids])
            if gap:
                return f"{who} component {name!r}, layer {layer}, heads {gap.start} to {gap.stop - 1}"
    state_gap = stateplan.gap(layouts, reader)
    return None if state_gap is None else f"{who} {state_gap}"


def seal_matches(num_src_pages: int, src_page_size: int, num_dst_pages: int, dst_page_size: int) -> bool:
    """Whether a seal of so many sender pages fits a grant of so many receiver pages (page sizes in tokens)."""
    difference = abs(num_src_pages * src_page_size - num_dst_pages * dst_page_size)
    return difference < max(src_page_size, dst_page_size)


def largest_grant(num_src_pages: int, src_page_size: int, dst_page_size: int) -> int:
    """Tokens of the largest grant that a seal of so many sender pages matches (see `seal_matches`)."""
    most = num_src_pages * src_page_size + max(src_page_size, dst_page_size) - 1
    return most // dst_page_size * dst_page_size


def first_page_outside(start: int, num_pages: int, page_size: int, grant_tokens: int) -> int | None:
    """The first of sender pages [start, start + num_pages) that lies wholly outside the grant, or None.

    Pages are counted from the end of the prefix; page i lies outside iff ``i * page_size >= grant_tokens``.
    """
    outside = max(start, -(-grant_tokens // page_size))
    return outside if outside < start + num_pages else None
