"""Plans of state against the slow reference: every byte in its place, written once, nothing else written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.references.state import compare, held_layers, keys, read_bytes, state_plan
from torchkv.layout import state_plan as planning
from torchkv.layout.component import Component, State
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, contributing, coverage_gap
from torchkv.layout.pieces import Cutter, check_piece, piece_layout
from torchkv.layout.plan_segment import StridedRuns
from torchkv.layout.ranges import overlap, split_by_holders, uncovered

RELAXED = settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def layout(
    rank: int = 0, size: int = 1, layers: tuple[int, ...] = (0,), states: tuple[State, ...] = (), num_layers: int = 4
) -> KVLayout:
    return KVLayout(
        [], num_layers=num_layers, page_size=4, tp_rank=rank, tp_size=size, layers=layers, states=states or (SSM,)
    )


def instance(size: int, **given: object) -> dict[int, KVLayout]:
    """Group rank -> layout of a tensor-parallel instance. Ranks have gaps, unlike tp_rank."""
    return {3 + 2 * rank: layout(rank, size, **given) for rank in range(size)}


SSM = State("ssm", (12, 5, 2), torch.float32, shard_dim=0)
CONV = State("conv", (3, 36), torch.bfloat16, shard_dim=1, shard_groups=(12, 12, 12))  # [q|k|v]
UNLIKE = State("unlike", (2, 48, 3), torch.uint8, shard_dim=1, shard_groups=(12, 24, 12))
FLAT = State("flat", (7,), torch.uint8)


def check(writers: Mapping[int, KVLayout], reader: KVLayout) -> None:
    assert coverage_gap(writers, reader) is None
    assert compare(writers, reader, rng=np.random.default_rng()) == (0, 0)


# Tensor parallelism, both ways


@pytest.mark.parametrize("state", [SSM, CONV, UNLIKE, FLAT], ids=lambda state: state.name)
@pytest.mark.parametrize(
    ("src", "dst"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (6, 4), (4, 6), (12, 1), (1, 12)]
)
def test_resharding_across_tensor_parallel_sizes(src: int, dst: int, state: State) -> None:
    for rank in range(dst):
        check(instance(src, states=(state,)), layout(rank, dst, states=(state,)))


def test_trap_shards_are_mapped_by_division_not_modulo() -> None:
    """Rank r of T holds [r * n / T, (r + 1) * n / T), for any size of the other side. Here: 6 writers, 4 readers."""
    writers = instance(6)
    parts = {
        (rank, dst): [
            (segment.heads.start, segment.heads.stop) for segment in state_plan(rank, writers, layout(dst, 4)).segments
        ]
        for rank in writers
        for dst in range(4)
    }
    assert {key: found for key, found in parts.items() if found} == {
        (3, 0): [(0, 2)],
        (5, 0): [(2, 3)],
        (5, 1): [(3, 4)],
        (7, 1): [(4, 6)],
        (9, 2): [(6, 8)],
        (11, 2): [(8, 9)],
        (11, 3): [(9, 10)],
        (13, 3): [(10, 12)],
    }


def test_trap_every_shard_group_is_cut_by_itself() -> None:
    """The second of two writers holds the second halves of q, k and v, not the second half of their concatenation."""
    segments = state_plan(5, instance(2, states=(CONV,)), layout(states=(CONV,))).segments
    assert [(segment.heads.start, segment.heads.stop) for segment in segments] == [(6, 12), (18, 24), (30, 36)]
    assert [segment.src_base for segment in segments] == [0, 12, 24]  # bytes: 6 elements of 2 each
    assert [segment.dst_base for segment in segments] == [12, 36, 60]
    assert {segment.rows for segment in segments} == {StridedRuns(1, 0, 0, 3, 36, 72, 12)}


def test_a_slot_that_is_alike_on_both_sides_is_one_run() -> None:
    for state, size in ((SSM, 1), (CONV, 2), (UNLIKE, 4), (FLAT, 1)):
        reader = layout(size - 1, size, states=(state,))
        (segment,) = state_plan(2 * size + 1, instance(size, states=(state,)), reader).segments
        assert segment.is_page
        assert segment.rows == StridedRuns(1, 0, 0, 1, 0, 0, reader.state_nbytes(state.name))
    plan = state_plan(5, instance(2, states=(SSM, CONV)), layout(states=(SSM, CONV)))
    assert not any(segment.is_page for segment in plan.segments)
    assert {segment.rows.per_pair for segment in plan.segments if segment.component == "ssm"} == {1}, (
        "the outer dimension"
    )
    assert {segment.rows.per_pair for segment in plan.segments if segment.component == "conv"} == {3}, "an inner one"


# Several holders, layers, stages


@pytest.mark.parametrize(("holders", "layers"), [(1, 3), (2, 1), (2, 4), (3, 4), (3, 7), (4, 9)])
def test_holders_of_the_same_part_take_turns_by_layer(holders: int, layers: int) -> None:
    ids = tuple(range(layers))
    writers = {2 + 3 * i: layout(0, 1, ids, (FLAT,), num_layers=layers) for i in range(holders)}
    reader = layout(0, 1, ids, (FLAT,), num_layers=layers)
    shares = [state_plan(rank, writers, reader).layers for rank in writers]
    assert sorted(itertools.chain(*shares)) == list(ids), "each layer once"
    assert max(map(len, shares)) - min(map(len, shares)) <= 1, "and fairly"
    check(writers, reader)


def test_replicas_among_sharded_writers_share_only_what_both_hold() -> None:
    writers = {0: layout(0, 1, (0, 1)), 1: layout(1, 2, (0, 1)), 2: layout(2, 3, (1,))}
    check(writers, layout(0, 1, (0, 1)))
    assert contributing(writers, layout(0, 12, (0, 1))) == (0,)


def test_trap_state_pairs_by_layer_id_under_uneven_pp() -> None:
    """Prefill stages of 7 and 8 layers, decode stages of 5; every fourth layer has no state, as in hybrid models."""
    recurrent = tuple(layer for layer in range(15) if layer % 4 != 3)
    states = (State("ssm", (4,), torch.uint8, layers=recurrent), State("conv", (6,), torch.int16, layers=recurrent))
    writers = {r: layout(0, 1, layers, states, 15) for r, layers in enumerate((tuple(range(7)), tuple(range(7, 15))))}
    for stage in range(3):
        reader = layout(0, 1, tuple(range(5 * stage, 5 * stage + 5)), states, 15)
        check({rank: writers[rank] for rank in contributing(writers, reader)}, reader)
    check(writers, layout(0, 1, tuple(range(15)), states, 15))


def test_each_stage_writes_its_own_layers_to_any_stage_of_the_reader() -> None:
    some = State("some", (4,), torch.uint8, layers=(0, 2, 3))
    writers = {0: layout(0, 1, (0, 1), (SSM, some)), 1: layout(0, 1, (2, 3), (SSM, some))}
    assert [state_plan(rank, writers, layout(0, 1, (0, 1, 2, 3), (SSM, some))).layers for rank in (0, 1)] == [
        (0, 1),
        (2, 3),
    ]
    for layers in ((0, 1, 2, 3), (0,), (1, 2), (3,)):
        reader = layout(0, 1, layers, (SSM, some))
        check({rank: writers[rank] for rank in contributing(writers, reader)}, reader)
    assert contributing(writers, layout(0, 1, (1,), (some,))) == (), "that layer has no such state"


# Everything at once


@st.composite
def topologies(draw: st.DrawFn) -> tuple[dict[int, KVLayout], KVLayout]:
    """Up to three instances of writers, each with its own layers and TP size, and a reader that they may not cover."""
    num_layers = draw(st.integers(1, 4))
    sizes = draw(st.sampled_from([(1, 2, 4), (1, 3), (2, 3, 6), (4, 6), (3, 4), (1, 1), (2, 2), (6,)]))
    multiple = math.lcm(*sizes)
    some_layers = st.lists(st.integers(0, num_layers - 1), min_size=1, unique=True).map(tuple)
    states = []
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        dim, groups = None, None
        if draw(st.integers(0, 3)):
            dim = draw(st.integers(0, len(shape) - 1))
            groups = tuple(multiple * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 3))))
            shape[dim] = sum(groups)
            groups = None if len(groups) == 1 and draw(st.booleans()) else groups
        dtype = draw(st.sampled_from(DTYPES))
        states.append(State(f"s{number}", shape, dtype, dim, groups, draw(st.none() | some_layers)))

    def part(rank: int, size: int) -> KVLayout:
        return layout(rank, size, draw(some_layers), tuple(states), num_layers)

    given = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from(sizes))
        whole = part(0, size)
        given += [replace_rank(whole, rank) for rank in range(size) if draw(st.integers(0, 5))]
    ranks = draw(st.permutations(range(len(given) + 2)))
    size = draw(st.sampled_from(sizes))
    return dict(zip(ranks, given, strict=False)), part(draw(st.integers(0, size - 1)), size)


def replace_rank(one: KVLayout, rank: int) -> KVLayout:
    return layout(rank, one.tp_size, one.layers, one.states, one.num_layers)


def missing(writers: Mapping[int, KVLayout], reader: KVLayout) -> str | None:
    """The first part that no writer holds, computed from bytes, in the words of `state_plan.gap`."""
    for state, layer in keys(reader):
        held = {int(b) for w in writers.values() if layer in held_layers(w, state) for b in read_bytes(w, state)}
        # For each position along the first group that the reader holds, the global elements at that position.
        numbers = np.arange(math.prod(state.shape)).reshape(state.shape)
        if state.shard_dim is None:
            lines = {0: numbers.ravel()}
        else:
            first = (state.shard_groups or (state.shape[state.shard_dim],))[0]
            own = np.split(np.arange(first), reader.tp_size)[reader.tp_rank]
            lines = {int(at): np.take(numbers, at, axis=state.shard_dim).ravel() for at in own}
        lacking = [at for at, line in lines.items() if int(line[0]) * state.dtype.itemsize not in held]
        if lacking:
            run = next(i for i in itertools.count() if lacking[0] + i not in lacking)
            return f"state {state.name!r}, layer {layer}, shard elements {lacking[0]} to {lacking[0] + run - 1}"
    return None


@RELAXED
@given(pair=topologies(), seed=st.integers(0, 1 << 60))
def test_any_pair_moves_exactly_the_right_bytes(pair: tuple[dict[int, KVLayout], KVLayout], seed: int) -> None:
    writers, reader = pair
    assert compare(writers, reader, rng=np.random.default_rng(seed)) == (0, 0)
    assert planning.gap(writers.values(), reader) == missing(writers, reader)


@RELAXED
@given(pair=topologies())
def test_who_contributes_and_how_much(pair: tuple[dict[int, KVLayout], KVLayout]) -> None:
    writers, reader = pair
    for rank, writer in writers.items():
        shared = {
            (state.name, layer): len(np.intersect1d(read_bytes(writer, state), read_bytes(reader, state)))
            for state, layer in keys(reader)
            if layer in held_layers(writer, state)
        }
        assert planning.intersects(writer, reader) == any(shared.values())
        assert planning.intersects(reader, writer) == any(shared.values())
        alone = state_plan(rank, {rank: writer}, reader)
        assert alone.nbytes(1) == sum(shared.values())
        assert alone.layers == tuple(sorted({layer for (_, layer), nbytes in shared.items() if nbytes}))
        assert {(segment.component, layer) for segment in alone.segments for layer in segment.layers} == {
            key for key, nbytes in shared.items() if nbytes
        }
    assert contributing(writers, reader) == tuple(
        sorted(rank for rank, writer in writers.items() if planning.intersects(writer, reader))
    )


@RELAXED
@given(pair=topologies(), max_nbytes=st.integers(1, 400), checksum=st.booleans())
def test_pieces_of_state_hold_all_of_it_once(
    pair: tuple[dict[int, KVLayout], KVLayout], max_nbytes: int, checksum: bool
) -> None:
    """As a slot is one page, no piece cuts a layer. The receiver accepts each piece, and nothing is left out."""
    writers, reader = pair
    for rank in writers:
        plan = state_plan(rank, writers, reader)
        cutter = Cutter(plan, reader.layers, 0, 1, limit_tokens=1, checksum=checksum)
        layers: list[int] = []
        payload = 0
        while not cutter.done:
            space = max(max_nbytes, cutter.least)
            piece = cutter.cut(space)
            check_piece(plan, piece, limit_tokens=1)
            made = piece_layout(plan, piece, limit_tokens=1, checksum=checksum)
            assert made.nbytes <= space
            assert (piece.start, piece.num_pages) == (0, 1)
            layers += piece.layers
            payload += made.payload
        assert layers == list(plan.layers)
        assert payload == plan.nbytes(1)


# Negative controls


def mutants(plan: PairPlan) -> list[PairPlan]:
    def each(**change: object) -> PairPlan:
        return replace(plan, segments=tuple(replace(segment, **change) for segment in plan.segments))

    first = plan.segments[0]
    return [
        each(src_base=first.src_base + 1),
        each(dst_base=first.dst_base + 1),
        each(rows=first.rows._replace(run=first.rows.run - 1)),
        each(rows=first.rows._replace(s1=first.rows.s1 + 1)),
        each(rows=first.rows._replace(n1=first.rows.n1 - 1)),
        replace(plan, segments=plan.segments[:-1]),
        replace(plan, segments=(*plan.segments, first)),
    ]


@pytest.mark.parametrize("which", range(7))
def test_negative_control_a_wrong_plan_is_noticed(which: int) -> None:
    writers, reader = {0: layout(1, 2, states=(UNLIKE,))}, layout(2, 4, states=(UNLIKE,))
    rng = np.random.default_rng()
    assert compare(writers, reader, rng=rng) == (0, 0)
    wrong = compare(writers, reader, rng=rng, plan_for=lambda *pair: mutants(state_plan(*pair))[which])
    assert sum(wrong) > 0


def test_negative_control_groups_cut_as_one_are_noticed() -> None:
    """A plan that ignores the shard groups of a convolution state moves wrong bytes."""

    def ungrouped(one: KVLayout) -> KVLayout:
        plain = tuple(replace(state, shard_groups=None) for state in one.states)
        return layout(one.tp_rank, one.tp_size, one.layers, plain)

    writers, reader = instance(2, states=(CONV,)), layout(states=(CONV,))
    wrong = compare(
        writers,
        reader,
        rng=np.random.default_rng(),
        plan_for=lambda rank, others, to: state_plan(
            rank, {r: ungrouped(other) for r, other in others.items()}, ungrouped(to)
        ),
    )
    assert wrong[0] > 0


def test_pages_and_state_of_one_layout_are_planned_apart() -> None:
    """A component and a state in the same layers: neither plan has segments of the other."""
    both = KVLayout([Component("k", 4, 2, torch.uint8)], num_layers=2, page_size=4, states=[SSM])
    plan = state_plan(0, {0: both}, both)
    assert {segment.component for segment in plan.segments} == {"ssm"}
    assert plan.state is None
    assert (plan.src_page_size, plan.dst_page_size) == (1, 1)


# Ranges


@given(a=st.tuples(st.integers(0, 9), st.integers(0, 9)), b=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_overlap(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert set(overlap(range(*a), range(*b))) == set(range(*a)) & set(range(*b))


_spans = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda at: range(at[0], sum(at))), max_size=4)


@given(wanted=st.tuples(st.integers(0, 9), st.integers(0, 9)), spans=_spans)
def test_uncovered_is_the_first_gap(wanted: tuple[int, int], spans: list[range]) -> None:
    lacking = [at for at in range(*wanted) if not any(at in span for span in spans)]
    found = uncovered(range(*wanted), spans)
    if not lacking:
        assert not found
        return
    run = next(i for i in itertools.count() if lacking[0] + i not in lacking)
    assert found == range(lacking[0], lacking[0] + run)


@given(spans=_spans)
def test_split_by_holders_is_a_partition(spans: list[range]) -> None:
    shared = range(18)
    found = list(split_by_holders(shared, list(enumerate(spans))))
    assert [at for part, _ in found for at in part] == list(shared)
    for part, holders in found:
        assert all(set(holders) == {rank for rank, span in enumerate(spans) if at in span} for at in part)
    assert all(before[1] != after[1] for before, after in itertools.pairwise(found)), "maximal"
