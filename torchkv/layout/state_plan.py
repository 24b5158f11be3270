"""Which bytes of state go where: one slot of a state, seen as a page of one token, cut as tensor parallelism cuts it.

So whatever moves pages moves slots too. A state is cut along one dimension, each of its shard groups by itself: rank r
of T holds elements ``[r * g / T, (r + 1) * g / T)`` of a group of ``g``, and its groups lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torchkv.component import State
from torchkv.layout import KVLayout
from torchkv.ranges import overlap, split_by_holders, uncovered
from torchkv.slab import Rows, Slab

__all__ = ["gap", "intersects", "slabs"]


def slabs(writer: int, writers: Sequence[tuple[int, KVLayout]], reader: KVLayout) -> list[Slab]:
    """What rank ``writer`` of ``writers`` (rank, layout; in rank order) owes the reader of each state."""
    found: list[Slab] = []
    mine = dict(writers)[writer]
    for state in reader.states:
        for (span, holders), layers in _segments(state, mine, writers, reader).items():
            # One slot cannot be striped as pages are, so holders of the same part take turns by layer.
            if own := tuple(layers[holders.index(writer) :: len(holders)]):
                found += _cut(state, own, span, mine, reader)
    return found


def intersects(writer: KVLayout, reader: KVLayout) -> bool:
    """Whether the two layouts share a byte of any state."""
    return any(
        overlap(_span(state, writer), _span(state, reader))
        and not _layers(state, writer).isdisjoint(_layers(state, reader))
        for state in reader.states
    )


def gap(writers: Iterable[KVLayout], reader: KVLayout) -> str | None:
    """The first part of a state that the reader holds and no writer does, in words, or None."""
    held = list(writers)
    for state in reader.states:
        for layer in reader.state_layers(state.name):
            spans = [_span(state, layout) for layout in held if layer in _layers(state, layout)]
            missing = uncovered(_span(state, reader), spans)
            if missing:
                return f"state {state.name!r}, layer {layer}, shard elements {missing.start} to {missing.stop - 1}"
    return None


def _segments(
    state: State, mine: KVLayout, writers: Sequence[tuple[int, KVLayout]], reader: KVLayout
) -> dict[tuple[range, tuple[int, ...]], list[int]]:
    """(part of the first shard group, ranks that hold it) -> layers, for what ``mine`` and the reader share."""
    segments: dict[tuple[range, tuple[int, ...]], list[int]] = {}
    shared = overlap(_span(state, mine), _span(state, reader))
    if not shared:
        return segments
    held = [(rank, _span(state, layout), _layers(state, layout)) for rank, layout in writers]
    for layer in sorted(_layers(state, mine) & _layers(state, reader)):
        present = [(rank, part) for rank, span, layers in held if layer in layers and (part := overlap(span, shared))]
        for part, holders in split_by_holders(shared, present):
            segments.setdefault((part, holders), []).append(layer)
    return segments


def _layers(state: State, layout: KVLayout) -> frozenset[int]:
    """The layers of which ``layout`` holds this state; none if it does not know it."""
    known = any(own.name == state.name for own in layout.states)
    return frozenset(layout.state_layers(state.name)) if known else frozenset()


def _span(state: State, layout: KVLayout) -> range:
    """What ``layout`` holds of the state's first shard group; the other groups are cut in the same ratio."""
    if not state.groups:
        return range(1)
    local = state.groups[0] // layout.tp_size
    return range(layout.tp_rank * local, (layout.tp_rank + 1) * local)


def _cut(state: State, layers: tuple[int, ...], span: range, src: KVLayout, dst: KVLayout) -> Iterator[Slab]:
    """Where ``span`` (of the first shard group) and its likes in the other groups lie in a slot of either side."""
    if state.shard_dim is None or span == _span(state, src) == _span(state, dst):
        yield _slab(state, layers, range(1), 0, 0, Rows.folded([], src.state_nbytes(state.name)), is_page=True)
        return
    dim = state.shard_dim
    inner = math.prod(state.shape[dim + 1 :]) * state.dtype.itemsize
    outer = math.prod(state.shape[:dim])
    row = [state.shape[dim] // layout.tp_size * inner for layout in (src, dst)]
    before = 0
    for group in state.groups:
        # Exact: the span's ends are multiples of (first group / tp_size) of some rank, and tp_size divides each group.
        lo, hi = (edge * group // state.groups[0] for edge in (span.start, span.stop))
        at = [
            (before // layout.tp_size + lo - layout.tp_rank * group // layout.tp_size) * inner for layout in (src, dst)
        ]
        rows = Rows.folded([(outer, row[0], row[1])], (hi - lo) * inner)
        yield _slab(state, layers, range(before + lo, before + hi), at[0], at[1], rows, is_page=False)
        before += group


def _slab(
    state: State, layers: tuple[int, ...], part: range, src_base: int, dst_base: int, rows: Rows, *, is_page: bool
) -> Slab:
    """part: global elements along the shard dimension."""
    return Slab(
        component=state.name,
        layers=layers,
        heads=part,
        holders=1,
        index=0,
        unit=1,
        tokens=1,
        src_base=src_base,
        dst_base=dst_base,
        src_token_stride=0,
        dst_token_stride=0,
        rows=rows,
        is_page=is_page,
    )
