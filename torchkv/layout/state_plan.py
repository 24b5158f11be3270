"""What one writer has to copy to one reader of their `State` tensors, as segments of a plan.

A state slot is treated as a page of one token, so every path that copies pages copies slots as well. A state is split
along one dimension, each shard group separately: of a group of g elements, rank r of T holds
``[r * g / T, (r + 1) * g / T)``, and a rank's parts of the groups lie one after the other.

For example, a convolution state of shape (3, 36) with the shard groups q, k and v of 12 elements each is split over
T = 2. Rank 1 holds elements 6 to 11 of each group, as a tensor (3, 18). To a reader with T = 1 it owes three segments:
elements 6 to 11, 18 to 23 and 30 to 35, each in 3 rows of 6 elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torchkv.layout.component import State
from torchkv.layout.layout import KVLayout
from torchkv.layout.plan_segment import PlanSegment, StridedRuns, Stripe
from torchkv.layout.ranges import overlap, split_by_holders, uncovered

__all__ = ["gap", "intersects", "segments"]


def segments(writer: int, writers: Sequence[tuple[int, KVLayout]], reader: KVLayout) -> list[PlanSegment]:
    """The segments that rank ``writer`` owes ``reader``, of all states. writers: (rank, layout), in rank order."""
    found: list[PlanSegment] = []
    mine = dict(writers)[writer]
    for state in reader.states:
        for (part, holders), layers in _shared_parts(state, mine, writers, reader).items():
            # A single slot cannot be striped as pages are: of writers that hold the same part, each sends some layers.
            if own := tuple(layers[holders.index(writer) :: len(holders)]):
                found += _part_segments(state, own, part, mine, reader)
    return found


def intersects(writer: KVLayout, reader: KVLayout) -> bool:
    """Whether the two layouts share any part of any state."""
    return any(
        overlap(_span(state, writer), _span(state, reader))
        and not _layers(state, writer).isdisjoint(_layers(state, reader))
        for state in reader.states
    )


def gap(writers: Iterable[KVLayout], reader: KVLayout) -> str | None:
    """The first part of the reader's states that no writer holds, as words for an error message, or None."""
    held = list(writers)
    for state in reader.states:
        for layer in reader.state_layers(state.name):
            spans = [_span(state, layout) for layout in held if layer in _layers(state, layout)]
            missing = uncovered(_span(state, reader), spans)
            if missing:
                return f"state {state.name!r}, layer {layer}, shard elements {missing.start} to {missing.stop - 1}"
    return None


def _shared_parts(
    state: State, mine: KVLayout, writers: Sequence[tuple[int, KVLayout]], reader: KVLayout
) -> dict[tuple[range, tuple[int, ...]], list[int]]:
    """What ``mine`` and ``reader`` share of a state: (part of the first shard group, ranks that hold it) -> layers."""
    found: dict[tuple[range, tuple[int, ...]], list[int]] = {}
    shared = overlap(_span(state, mine), _span(state, reader))
    if not shared:
        return found
    held = [(rank, _span(state, layout), _layers(state, layout)) for rank, layout in writers]
    for layer in sorted(_layers(state, mine) & _layers(state, reader)):
        present = [(rank, part) for rank, span, layers in held if layer in layers and (part := overlap(span, shared))]
        for part, holders in split_by_holders(shared, present):
            found.setdefault((part, holders), []).append(layer)
    return found


def _layers(state: State, layout: KVLayout) -> frozenset[int]:
    """The layers whose slots of this state ``layout`` holds; none if the layout has no such state."""
    known = any(own.name == state.name for own in layout.states)
    return frozenset(layout.state_layers(state.name)) if known else frozenset()


def _span(state: State, layout: KVLayout) -> range:
    """The elements of the first shard group that ``layout`` holds; other groups are split in the same ratio."""
    if not state.groups:
        return range(1)
    local = state.groups[0] // layout.tp_size
    return range(layout.tp_rank * local, (layout.tp_rank + 1) * local)


def _part_segments(
    state: State, layers: tuple[int, ...], part: range, src: KVLayout, dst: KVLayout
) -> Iterator[PlanSegment]:
    """One segment for each shard group. part: of the first group; the corresponding part of the others is taken too."""
    if state.shard_dim is None or part == _span(state, src) == _span(state, dst):
        yield _segment(
            state, layers, range(1), 0, 0, StridedRuns.folded([], src.state_nbytes(state.name)), is_page=True
        )
        return
    dim = state.shard_dim
    inner = math.prod(state.shape[dim + 1 :]) * state.dtype.itemsize
    outer = math.prod(state.shape[:dim])
    row = [state.shape[dim] // layout.tp_size * inner for layout in (src, dst)]
    before = 0
    for group in state.groups:
        # Exact: the ends of ``part`` are multiples of (first group / tp_size) of some rank, and tp_size divides groups.
        lo, hi = (edge * group // state.groups[0] for edge in (part.start, part.stop))
        at = [
            (before // layout.tp_size + lo - layout.tp_rank * group // layout.tp_size) * inner for layout in (src, dst)
        ]
        rows = StridedRuns.folded([(outer, row[0], row[1])], (hi - lo) * inner)
        yield _segment(state, layers, range(before + lo, before + hi), at[0], at[1], rows, is_page=False)
        before += group


def _segment(
    state: State,
    layers: tuple[int, ...],
    part: range,
    src_base: int,
    dst_base: int,
    rows: StridedRuns,
    *,
    is_page: bool,
) -> PlanSegment:
    """A segment of a state. part: global elements along the shard dimension."""
    return PlanSegment(
        component=state.name,
        layers=layers,
        heads=part,
        stripe=Stripe(tokens=1, per_unit=1),
        src_base=src_base,
        dst_base=dst_base,
        src_token_stride=0,
        dst_token_stride=0,
        rows=rows,
        is_page=is_page,
    )
