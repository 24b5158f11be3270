"""What one writer has to copy to one reader, computed from their layouts: offsets only, no memory.

`compile_plan` intersects the layouts of a writer and a reader. The result, a `PairPlan`, consists of a few
`PlanSegment`: (page pairs) x (rows) x (bytes of a row), never a list of all pages. It is computed once for each pair of
layouts and serves every request; page ids are added when one is sent. Tokens and pages are counted from the end of the
prefix that the reader holds already. For transports that need a list of byte ranges, `torchkv.layout.descriptors` makes
one from a segment and page ids.

**Example: tensor parallelism 4 to 2.** A model has 8 kv heads of dim 128 in bfloat16 (256 bytes per token and head).
Pages hold 16 tokens in the order NHD on both sides. Writer 3 of 4 holds heads 6 and 7, in pages of
[16 tokens, 2 heads, 128]: 8 KiB. Reader 1 of 2 holds heads 4 to 7, in pages of [16, 4, 128]: 16 KiB. What they share is
one segment for "k" and a similar one for "v", each for all layers::

    heads=range(6, 8)
    stripe=Stripe(tokens=16, per_unit=1, holders=1, ...)  # a pair is one page of each side; one rank has these heads
    src_base=0                                            # heads 6 and 7 are the whole sender page
    dst_base=512                                          # in the receiver page, heads 4 and 5 lie before them
    src_token_stride=512, dst_token_stride=1024           # 2 heads, and 4 heads, of 256 bytes
    rows=StridedRuns(n0=1, s0=0, d0=0, n1=16, s1=512, d1=1024, run=512)

So of each page, 16 rows of 512 bytes are copied in each layer: row t from byte ``512 * t`` of the sender's page to byte
``512 + 1024 * t`` of the receiver's. With equal layouts on both sides the rows of a page fold into one, and ``is_page``
is true. Writers 0 and 1 hold heads 0 to 3: their plans with this reader are empty.

**Example: replicated heads.** If this model had 2 kv heads, writers 0 and 1 of 4 would both hold head 0. They send
alternate pages to a reader that holds it: ``Stripe(tokens=16, per_unit=1, holders=2, holder=0)`` and ``holder=1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

from torchkv.errors import LayoutMismatch
from torchkv.layout import state_plan
from torchkv.layout.component import Conversion
from torchkv.layout.layout import KVLayout, first_difference, first_refusal
from torchkv.layout.plan_segment import PlanSegment, StridedRuns, Stripe, Window
from torchkv.layout.ranges import overlap, split_by_holders, uncovered

__all__ = [
    "PairPlan",
    "compile_plan",
    "contributing",
    "coverage_gap",
    "first_page_outside",
    "largest_grant",
    "refusal",
    "seal_matches",
]

_Writers = tuple[tuple[int, KVLayout], ...]  # (number, layout), in rank order


@dataclass(frozen=True)
class PairPlan:
    """Everything that one writer owes one reader: the bytes that this writer, and no other, has to write.

    segments: of pages. layers: global ids of the layers in which pages are owed, ascending. src_page_size,
    dst_page_size: in tokens. state: the plan of a state slot, which is treated as a page of one token; None in that
    plan itself.
    """

    segments: tuple[PlanSegment, ...]
    layers: tuple[int, ...]
    src_page_size: int
    dst_page_size: int
    state: PairPlan | None = None

    @cached_property
    def page_for_page(self) -> bool:
        """Whether every page pair is exactly one whole page on both sides."""
        return all(segment.is_page for segment in self.segments)

    @cached_property
    def converts(self) -> bool:
        """Whether any pages are converted to another dtype, so that nothing can just copy their bytes."""
        return any(segment.conversion is not None for segment in self.segments)

    @cached_property
    def owes_state(self) -> bool:
        """Whether the writer owes any state."""
        return self.state is not None and bool(self.state.segments)

    @cached_property
    def segments_of(self) -> Mapping[int, tuple[PlanSegment, ...]]:
        """The segments of each layer. Layers with the same segments share one tuple."""
        held = [frozenset(segment.layers) for segment in self.segments]
        shared: dict[tuple[int, ...], tuple[PlanSegment, ...]] = {}
        found = {}
        for layer in self.layers:
            numbers = tuple(number for number, layers in enumerate(held) if layer in layers)
            found[layer] = shared.setdefault(numbers, tuple(self.segments[number] for number in numbers))
        return found

    @cached_property
    def stripes_of(self) -> Mapping[int, tuple[Stripe, ...]]:
        """The distinct stripes of each layer's segments. Layers with the same segments share one tuple."""
        found = self.segments_of  # read once: two threads may compute it at the same time, each with tuples of its own
        stripes = {id(own): tuple(dict.fromkeys(segment.stripe for segment in own)) for own in found.values()}
        return {layer: stripes[id(own)] for layer, own in found.items()}

    @cached_property
    def groups(self) -> tuple[tuple[PlanSegment, ...], ...]:
        """Neighbouring segments that always owe the same pairs: of equal layers, stripe and bytes of a staged pair."""
        alike = groupby(self.segments, lambda each: (each.layers, each.stripe, each.stage_nbytes, each.conversion))
        return tuple(tuple(group) for _, group in alike)

    @cached_property
    def staged_page_nbytes(self) -> int:
        """Bytes of one page of the sender in a stage, of the layer of which it has most; 0 if nothing is owed."""
        pages = (
            sum(self.src_page_size // segment.tokens * segment.stage_nbytes for segment in self.segments_of[layer])
            for layer in self.layers
        )
        return max(pages, default=0)

    @property
    def parts(self) -> tuple[PairPlan, ...]:
        """The plan of the pages and the plan of state, without those that owe nothing."""
        return tuple(plan for plan in (self, self.state) if plan is not None and plan.segments)

    def nbytes(self, num_tokens: int, layers: Iterable[int] | None = None) -> int:
        """Bytes of the receiver's pages owed in ``layers`` (default: all) for a grant of ``num_tokens`` tokens."""
        wanted = frozenset(self.layers if layers is None else layers)
        total = 0
        for segment in self.segments:
            tokens = sum(hi - lo for lo, hi in segment.stripe.owed(num_tokens))
            total += tokens * (segment.pair_nbytes // segment.tokens) * len(wanted.intersection(segment.layers))
        return total

    def segments_for(self, layers: Iterable[int]) -> tuple[PlanSegment, ...]:
        """The segments that have any of ``layers`` (global ids), narrowed to them. Other layers are ignored."""
        wanted = frozenset(layers)
        narrowed = []
        for segment in self.segments:
            kept = tuple(layer for layer in segment.layers if layer in wanted)
            if kept:
                narrowed.append(segment if kept == segment.layers else replace(segment, layers=kept))
        return tuple(narrowed)

    @cached_property
    def _alike(self) -> tuple[tuple[tuple[int, ...], tuple[Stripe, ...]], ...]:
        """The layers, ascending, of each distinct set of stripes."""
        layers: dict[tuple[Stripe, ...], list[int]] = {}
        for layer in self.layers:
            layers.setdefault(self.stripes_of[layer], []).append(layer)
        return tuple((tuple(alike), stripes) for stripes, alike in layers.items())

    def owed(
        self, granted_tokens: int, limit_tokens: int | None = None, *, layers: Iterable[int] | None = None
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """Yields (layers, the tokens that each of them owes as merged intervals [lo, hi)), each layer once.

        granted_tokens: of the grant; they decide where a window begins. limit_tokens: leaves out the tokens from this
        one on. layers: only these.
        """
        wanted = None if layers is None else frozenset(layers)
        for alike, stripes in self._alike:
            kept = alike if wanted is None else tuple(layer for layer in alike if layer in wanted)
            if kept:
                yield kept, _intervals(stripes, granted_tokens, limit_tokens)


def _intervals(stripes: Sequence[Stripe], granted_tokens: int, limit_tokens: int | None) -> list[tuple[int, int]]:
    """The tokens that any of the stripes owes, as merged intervals [lo, hi)."""
    if len(stripes) == 1:
        return stripes[0].owed(granted_tokens, limit_tokens)
    intervals = sorted(interval for stripe in stripes for interval in stripe.owed(granted_tokens, limit_tokens))
    merged: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return merged


def compile_plan(writer: int, writers: Mapping[int, KVLayout], reader: KVLayout) -> PairPlan:
    """What rank ``writer`` owes ``reader`` when all of ``writers`` (group rank -> layout) send to it.

    The other writers matter where several hold the same heads; of their ranks only the order does. So plans are cached
    by that and the layouts: as many are compiled, and kept, for one pair of instances as for a thousand alike. Raises
    `LayoutMismatch` if the layout of any writer cannot be reconciled with the reader's.
    """
    ranks = sorted(writers)
    try:
        return _compile(ranks.index(writer), tuple(enumerate(writers[rank] for rank in ranks)), reader)
    except _Unlike as unlike:
        number, (field, ours, theirs) = unlike.args
        rank = ranks[number]
        raise LayoutMismatch(
            f"rank {rank} cannot write to this receiver: {field} is {ours!r} on rank {rank} and {theirs!r} on "
            "the receiver; register layouts of the same model"
        ) from None


class _Unlike(Exception):
    """The layout of a writer, by its number, cannot be reconciled with the reader's: their `first_difference`."""


@lru_cache(maxsize=1024)
def _compile(writer: int, writers: _Writers, reader: KVLayout) -> PairPlan:
    """writer: its number among ``writers``, which are numbered from 0."""
    mine = writers[writer][1]
    for number, layout in writers:
        if (difference := first_difference(layout, reader)) is not None:
            raise _Unlike(number, difference)
        if (refused := first_refusal(layout, reader)) is not None:
            name, *dtypes = refused
            raise _Unlike(number, (f"component {name!r}: dtype", *dtypes))
    senders = [layout for _, layout in writers if _intersects(layout, reader)]
    # The same for all writers, whose page sizes may differ: so they agree on who owes which tokens.
    unit = max([reader.page_size, *(layout.page_size for layout in senders)])
    segments = [
        _segment(name, layers, heads, holders, writer=writer, unit=unit, src=mine, dst=reader)
        for name in (component.name for component in reader.components)
        for (heads, holders, _), layers in _shared_heads(name, mine, writers, reader).items()
    ]
    # `PairPlan.groups` are made of neighbours, and segments with different windows never owe the same pairs.
    segments.sort(key=lambda segment: segment.stripe.window or ())
    state = _pair_plan(state_plan.segments(writer, writers, reader), 1, 1)
    return replace(_pair_plan(segments, mine.page_size, reader.page_size), state=state)


def _pair_plan(segments: Sequence[PlanSegment], src_page_size: int, dst_page_size: int) -> PairPlan:
    owed_layers = tuple(sorted({layer for segment in segments for layer in segment.layers}))
    return PairPlan(tuple(segments), owed_layers, src_page_size, dst_page_size)


def _shared_heads(
    name: str, mine: KVLayout, writers: _Writers, reader: KVLayout
) -> dict[tuple[range, tuple[int, ...], int | None], tuple[int, ...]]:
    """What ``mine`` and ``reader`` share of component ``name``: (heads, ranks that hold them, window) -> layers."""
    shared = overlap(mine.component_heads(name), reader.component_heads(name))
    wanted = frozenset(reader.component_layers(name))
    layers = [layer for layer in mine.component_layers(name) if layer in wanted]
    if not shared or not layers:
        return {}
    held = [(rank, layout.component_heads(name), frozenset(layout.component_layers(name))) for rank, layout in writers]
    found: dict[tuple[range, tuple[int, ...], int | None], list[int]] = {}
    for layer in layers:
        present = [(rank, common) for rank, heads, ids in held if layer in ids and (common := overlap(heads, shared))]
        for heads, holders in split_by_holders(shared, present):
            found.setdefault((heads, holders, reader.window(layer)), []).append(layer)
    return {key: tuple(ids) for key, ids in found.items()}


def _segment(
    name: str,
    layers: tuple[int, ...],
    heads: range,
    holders: tuple[int, ...],
    *,
    writer: int,
    unit: int,
    src: KVLayout,
    dst: KVLayout,
) -> PlanSegment:
    """The segment of ``heads``, between pages of ``src`` and of ``dst``. unit: of the stripe, in tokens."""
    dim, (src_size, dst_size) = dst.component(name).dim, (side.component(name).dtype.itemsize for side in (src, dst))
    tokens = min(src.page_size, dst.page_size)
    src_token, src_head = _strides(src, name, dim)  # in elements, which both sides count alike
    dst_token, dst_head = _strides(dst, name, dim)
    folded = StridedRuns.folded([(tokens, src_token, dst_token), (len(heads), src_head, dst_head)], dim)
    whole = folded.per_pair == 1 and folded.run * dst_size == dst.page_nbytes(name)
    whole = whole and folded.run * src_size == src.page_nbytes(name)
    reach = dst.window(layers[0])
    window = None if reach is None else Window(reach, src.page_size, dst.page_size, unit)
    return PlanSegment(
        component=name,
        layers=layers,
        heads=heads,
        stripe=Stripe(tokens, unit // tokens, len(holders), holders.index(writer), window),
        src_base=(heads.start - src.component_heads(name).start) * src_head * src_size,
        dst_base=(heads.start - dst.component_heads(name).start) * dst_head * dst_size,
        src_token_stride=src_token * src_size,
        dst_token_stride=dst_token * dst_size,
        rows=folded.in_bytes(src_size, dst_size),
        is_page=whole and src.page_size == dst.page_size,
        conversion=_conversion(name, tokens, heads, src, dst),
    )


def _conversion(name: str, tokens: int, heads: range, src: KVLayout, dst: KVLayout) -> Conversion | None:
    """How a page pair of ``tokens`` tokens is converted; None if both sides have one dtype."""
    ours, theirs = src.component(name), dst.component(name)
    if ours.dtype is theirs.dtype:
        return None
    # The packed order, see `StridedRuns.folded`: the tokens of a head lie together if they do on both sides.
    together = all(_strides(side, name, ours.dim)[0] == ours.dim for side in (src, dst))
    return Conversion(ours.dtype, theirs.dtype, len(heads), ours.dim * (tokens if together else 1))


def _strides(layout: KVLayout, name: str, dim: int) -> tuple[int, int]:
    """Elements from one token to the next, and from one head to the next, inside a page. dim: elements of one head."""
    if layout.order == "NHD":
        return len(layout.component_heads(name)) * dim, dim
    return dim, layout.page_size * dim


def contributing(writers: Mapping[int, KVLayout], reader: KVLayout) -> tuple[int, ...]:
    """The ranks of ``writers`` (group rank -> layout) that share pages or state with ``reader``, ascending."""
    return tuple(rank for rank in sorted(writers) if _intersects(writers[rank], reader))


def refusal(writers: Mapping[int, KVLayout], reader: KVLayout) -> str | None:
    """Why the first of ``writers`` (rank -> layout) cannot send pages to ``reader``, because of the dtype of pages.

    A clause for an error message; None if all can.
    """
    for rank, layout in sorted(writers.items()):
        if (refused := first_refusal(layout, reader)) is not None:
            name, theirs, own = refused
            return (
                f"component {name!r} is {theirs} on the sender, rank {rank}, and {own} on the receiver, which does not "
                f"accept that: give the receiver's component accept=({theirs},)"
            )
    return None


@lru_cache(maxsize=1024)
def _intersects(writer: KVLayout, reader: KVLayout) -> bool:
    if first_refusal(writer, reader) is not None:
        return False
    for component in reader.components:
        name = component.name
        if (
            any(own.name == name for own in writer.components)
            and overlap(writer.component_heads(name), reader.component_heads(name))
            and not set(writer.component_layers(name)).isdisjoint(reader.component_layers(name))
        ):
            return True
    return state_plan.intersects(writer, reader)


def coverage_gap(writers: Mapping[int, KVLayout], reader: KVLayout) -> str | None:
    """The first part of the reader's pages or state that no writer holds, as a clause for an error message.

    None if every byte has a writer. writers: group rank -> layout.
    """
    if (refused := refusal(writers, reader)) is not None:
        return refused
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
    state_gap = state_plan.gap(layouts, reader)
    return None if state_gap is None else f"{who} {state_gap}"


def seal_matches(num_src_pages: int, src_page_size: int, num_dst_pages: int, dst_page_size: int) -> bool:
    """Whether ``num_src_pages`` sent pages fit a grant of ``num_dst_pages`` pages: they differ by less than one page.

    The sender's seal, a message that ends a request, names its number of pages. Page sizes are in tokens.
    """
    difference = abs(num_src_pages * src_page_size - num_dst_pages * dst_page_size)
    return difference < max(src_page_size, dst_page_size)


def largest_grant(num_src_pages: int, src_page_size: int, dst_page_size: int) -> int:
    """Tokens of the largest grant that ``num_src_pages`` sender pages fit (see `seal_matches`)."""
    most = num_src_pages * src_page_size + max(src_page_size, dst_page_size) - 1
    return most // dst_page_size * dst_page_size


def first_page_outside(start: int, num_pages: int, page_size: int, grant_tokens: int) -> int | None:
    """The first of sender pages [start, start + num_pages) that lies entirely outside the grant, or None.

    Pages are counted from the end of the prefix. Page i lies outside iff ``i * page_size >= grant_tokens``.
    """
    outside = max(start, -(-grant_tokens // page_size))
    return outside if outside < start + num_pages else None
