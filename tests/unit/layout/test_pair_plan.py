"""Plans against the slow reference: every byte in its place, every byte written once, nothing else written."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.layouts import divides, group, instances, mla
from tests.helpers.plans import check, owed_of
from tests.helpers.references.page_transfer import compare, gqa, held_heads, held_layers, holders_of, one_segment
from torchkv.errors import LayoutMismatch
from torchkv.layout import pair_plan
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.layout import Component, KVLayout, State
from torchkv.layout.pair_plan import PairPlan, compile_plan, contributing, coverage_gap
from torchkv.layout.plan_segment import StridedRuns, Stripe

RELAXED = settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def keys(tp_rank: int, tp_size: int, heads: int) -> KVLayout:
    component = Component("k", heads, 1, torch.uint8)
    return KVLayout([component], num_layers=1, page_size=2, tp_rank=tp_rank, tp_size=tp_size)


# The example of the module's docstring


def test_the_example_of_tensor_parallelism_4_to_2() -> None:
    model = {"num_layers": 2, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    writers = {rank: gqa(rank, 4, **model) for rank in range(4)}
    plan = compile_plan(3, writers, gqa(1, 2, **model))
    assert [segment.component for segment in plan.segments] == ["k", "v"]
    assert {segment.heads for segment in plan.segments} == {range(6, 8)}
    assert {segment.place for segment in plan.segments} == {(Stripe(tokens=16, per_unit=1), 0, 512, 512, 1024)}
    assert {segment.rows for segment in plan.segments} == {StridedRuns(1, 0, 0, 16, 512, 1024, 512)}
    assert contributing(writers, gqa(1, 2, **model)) == (2, 3)
    assert [compile_plan(rank, writers, gqa(1, 2, **model)).parts for rank in (0, 1)] == [(), ()]


def test_the_example_of_replicated_heads() -> None:
    model = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    writers = {rank: gqa(rank, 4, **model) for rank in range(4)}
    for writer in (0, 1):
        plan = compile_plan(writer, writers, gqa(0, 2, **model))
        assert {segment.stripe for segment in plan.segments} == {Stripe(16, 1, holders=2, holder=writer)}
    assert [Stripe(16, 2, holders=3, holder=1).pair(ordinal) for ordinal in range(6)] == [2, 3, 8, 9, 14, 15]


# Who sends which heads


def test_ownership_for_every_tp_size_and_head_count() -> None:
    """TP sizes 1 to 16 on both sides and 1 to 32 heads: plans have the heads and stripes of the reference."""
    combos = [
        (heads, senders, readers)
        for heads in range(1, 33)
        for senders in range(1, 17)
        for readers in range(1, 17)
        if divides(heads, senders) and divides(heads, readers)
    ]
    assert len(combos) == 853
    for heads, senders, readers in combos:
        writers = group(keys, senders, heads=heads)
        reader = keys(random.randrange(readers), readers, heads)
        owners: dict[int, dict[int, int]] = {head: {} for head in held_heads(reader, "k")}
        for writer in writers:
            for segment in compile_plan(writer, writers, reader).segments:
                for head in segment.heads:
                    assert segment.stripe.holders == len(holders_of(writers, "k", 0, head))
                    assert owners[head].setdefault(segment.stripe.holder, writer) == writer
        for head, by_index in owners.items():
            assert [by_index[i] for i in sorted(by_index)] == holders_of(writers, "k", 0, head), (heads, senders)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
def test_bytes_for_tensor_parallel_pairs(heads: int) -> None:
    sizes = [size for size in (1, 2, 3, 4, 8) if divides(size, heads)]
    for senders in sizes:
        for readers in sizes:
            writers = group(gqa, senders, num_layers=1, num_kv_heads=heads)
            reader = gqa(random.randrange(readers), readers, num_layers=1, num_kv_heads=heads)
            check(writers, reader, num_tokens=9)


DIVISION_TRAPS = [
    (1, 4, 2), (1, 8, 2), (1, 8, 4), (1, 16, 2), (1, 16, 4),
    (1, 16, 8), (2, 8, 4), (2, 16, 4), (2, 16, 8), (4, 16, 8),
]  # fmt: skip


def modulo_mapping(writer: int, writers: Mapping[int, KVLayout], reader: KVLayout) -> PairPlan:
    """A known mistake: the head of a replica is taken as rank % heads instead of rank // replicas."""
    heads = reader.component("k").heads
    if reader.tp_size <= heads:
        return compile_plan(writer, writers, reader)
    wrong = KVLayout.gqa(
        num_layers=reader.num_layers,
        num_kv_heads=heads,
        head_dim=2,
        page_size=reader.page_size,
        dtype=torch.int16,
        tp_rank=reader.tp_rank % heads,
        tp_size=heads,
    )
    return compile_plan(writer, writers, wrong)


@pytest.mark.parametrize(("senders", "readers", "heads"), DIVISION_TRAPS)
def test_trap_heads_are_mapped_by_division_not_modulo(senders: int, readers: int, heads: int) -> None:
    writers = group(gqa, senders, num_layers=1, num_kv_heads=heads)
    caught = 0
    for rank in range(readers):
        reader = gqa(rank, readers, num_layers=1, num_kv_heads=heads)
        check(writers, reader, num_tokens=4)
        wrong, _ = compare(writers, reader, rng=np.random.default_rng(), num_tokens=4, plan_for=modulo_mapping)
        caught += wrong > 0
    assert caught, "the reference must notice the modulo mapping"


def test_trap_global_heads_are_not_local_heads_times_tp_size() -> None:
    """With replicated heads, a rank's number of heads times tp_size is more than the model's heads."""
    layout = gqa(5, 16, num_kv_heads=4)
    assert layout.heads == range(1, 2)
    assert layout.component("k").heads == 4
    check(group(gqa, 16, num_kv_heads=4), gqa(1, 2, num_kv_heads=4))


def test_replicated_heads_are_sent_once() -> None:
    """16 ranks hold 4 heads: each page of each head has one writer, and a head's holders send equally many pages."""
    writers = group(gqa, 16, num_layers=1)
    reader = gqa(num_layers=1)
    plans = [compile_plan(rank, writers, reader) for rank in writers]
    assert {segment.stripe.holders for plan in plans for segment in plan.segments} == {4}
    assert sum(plan.nbytes(64) for plan in plans) == 64 * 2 * 4 * 2 * 2
    assert len({plan.nbytes(64) for plan in plans}) == 1
    check(writers, reader, num_tokens=64)


# Layers


def test_trap_k_and_v_pair_by_layer_id_under_uneven_pp() -> None:
    """Pipeline stages of 7 and 8 layers, the last one with a draft layer, and a decode rank that holds all layers."""
    stages = {0: gqa(num_layers=15, layers=range(7)), 1: gqa(num_layers=15, layers=range(7, 16))}
    check(stages, gqa(num_layers=15, layers=range(16)))
    plan = compile_plan(1, stages, gqa(num_layers=15, layers=range(16)))
    assert plan.layers == tuple(range(7, 16))
    assert {segment.layers for segment in plan.segments} == {tuple(range(7, 16))}


@pytest.mark.parametrize("draft_side", ["writer", "reader", "both"])
def test_trap_draft_layers_on_one_side(draft_side: str) -> None:
    """If only the receiver has a draft layer, it stays uncovered; no V of another layer is written into it."""
    writer = gqa(num_layers=3, layers=range(4) if draft_side != "reader" else None)
    reader = gqa(num_layers=3, layers=range(4) if draft_side != "writer" else None)
    assert compare({0: writer}, reader, rng=np.random.default_rng(), num_tokens=9) == (0, 0)
    gap = coverage_gap({0: writer}, reader)
    if draft_side == "reader":
        assert gap is not None
        assert "'k', layer 3" in gap
    else:
        assert gap is None


def test_pp_and_tp_at_once() -> None:
    writers = {
        2 * stage + rank: gqa(rank, 2, num_layers=3, layers=layers)
        for stage, layers in enumerate([(0,), (1, 2)])
        for rank in range(2)
    }
    for rank in range(4):
        check(writers, gqa(rank, 4, num_layers=3))
    assert contributing(writers, gqa(0, 4, num_layers=3, layers=[0])) == (0,)


def test_overlapping_stages_share_the_doubly_held_layer() -> None:
    writers = {0: gqa(num_layers=3, layers=(0, 1)), 1: gqa(num_layers=3, layers=(1, 2))}
    check(writers, gqa(num_layers=3), num_tokens=32)
    plan = compile_plan(0, writers, gqa(num_layers=3))
    assert owed_of(plan, 0, 16) == [(0, 16)]
    assert owed_of(plan, 1, 16) == [(0, 4), (8, 12)]
    assert owed_of(plan, 2, 16) == []


def test_components_absent_from_some_layers() -> None:
    def layout(rank: int, size: int) -> KVLayout:
        return KVLayout(
            [
                Component("k", 4, 2, torch.uint8),
                Component("index", 1, 5, torch.float32, sharded=False, layers=(1, 3)),
                Component("draft_k", 2, 3, torch.uint8, layers=(4,)),
            ],
            num_layers=4,
            page_size=4,
            layers=range(5),
            tp_rank=rank,
            tp_size=size,
        )

    writers = {rank: layout(rank, 2) for rank in range(2)}
    check(writers, layout(0, 1))
    check(writers, layout(1, 2))
    assert {segment.layers for segment in compile_plan(0, writers, layout(0, 1)).segments_for([3, 4, 99])} == {
        (3, 4),
        (3,),
        (4,),
    }


# Geometry


def test_trap_components_of_unlike_layers_pair_by_layer_id_under_uneven_pp() -> None:
    """A model with several compressed caches, each in some of its layers, in pipeline stages of 7 and 8 layers."""

    def layout(layers: range) -> KVLayout:
        components = [
            Component("dense", 1, 5, torch.uint8, sharded=False, layers=(0, 14)),
            Component("by4", 1, 3, torch.int16, sharded=False, layers=tuple(range(1, 14, 2))),
            Component("by128", 1, 7, torch.uint8, sharded=False, layers=tuple(range(2, 14, 2))),
        ]
        return KVLayout(components, num_layers=15, page_size=2, layers=layers)

    writers = {0: layout(range(7)), 1: layout(range(7, 15))}
    check(writers, layout(range(15)))
    for layers in (range(5), range(5, 10), range(10, 15)):
        reader = layout(layers)
        check({rank: writers[rank] for rank in contributing(writers, reader)}, reader)


def test_trap_k_and_v_of_unlike_width() -> None:
    check(group(gqa, 2, v_head_dim=5), gqa(v_head_dim=5))
    check({0: gqa(v_head_dim=5)}, gqa(1, 4, v_head_dim=5, order="HND"))


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (1, 16), (16, 1), (4, 4), (1, 1)])
@pytest.mark.parametrize("orders", ["NN", "NH", "HN", "HH"])
def test_page_sizes_and_orders(sizes: tuple[int, int], orders: str) -> None:
    order = {"N": "NHD", "H": "HND"}
    writers = group(gqa, 2, num_layers=1, page_size=sizes[0], order=order[orders[0]])
    reader = gqa(1, 4, num_layers=1, page_size=sizes[1], order=order[orders[1]])
    check(writers, reader, num_tokens=70)
    whole = {0: gqa(num_layers=1, page_size=sizes[0], order=order[orders[0]])}
    check(whole, gqa(num_layers=1, page_size=sizes[1], order=order[orders[1]]), num_tokens=70, shuffled=False)


def test_mla_is_striped_over_replicas_in_units_of_the_larger_page() -> None:
    writers = {rank: mla(tp_rank=rank, tp_size=4, page_size=4) for rank in range(4)}
    reader = mla(page_size=16)
    check(writers, reader, num_tokens=150)
    plan = compile_plan(2, writers, reader)
    assert owed_of(plan, 0, 160) == [(32, 48), (96, 112)]
    assert plan.nbytes(160) == 2 * 32 * 10
    assert not plan.page_for_page
    assert compile_plan(2, writers, mla()).page_for_page


def test_writers_of_unlike_page_sizes_share_one_unit() -> None:
    writers = {0: mla(page_size=4, tp_size=2), 1: mla(page_size=8, tp_rank=1, tp_size=2)}
    reader = mla(page_size=2)
    check(writers, reader, num_tokens=40)
    assert {compile_plan(rank, writers, reader).segments[0].stripe.unit for rank in (0, 1)} == {8}


def test_hybrid_of_sharded_and_replicated_components() -> None:
    def layout(rank: int, size: int) -> KVLayout:
        components = [Component("k", 2, 3, torch.uint8), Component("latent", 1, 7, torch.uint8, sharded=False)]
        return KVLayout(components, num_layers=1, page_size=2, tp_rank=rank, tp_size=size)

    writers = {rank: layout(rank, 2) for rank in range(2)}
    check(writers, layout(0, 1))
    assert owed_of(compile_plan(0, writers, layout(0, 1)), 0, 8) == [(0, 8)]
    assert [segment.stripe.owed(8) for segment in compile_plan(0, writers, layout(0, 1)).segments] == [
        [(0, 8)],
        [(0, 2), (4, 6)],
    ]


def test_rows_collapse_as_far_as_both_sides_allow() -> None:
    def rows(writer: KVLayout, reader: KVLayout) -> StridedRuns:
        return one_segment(writer, reader).rows

    page = 4 * 4 * 4  # tokens x heads x bytes of a head
    assert rows(gqa(), gqa()) == (1, 0, 0, 1, 0, 0, page)
    assert rows(gqa(1, 2), gqa()) == (1, 0, 0, 4, 8, 16, 8)
    assert rows(gqa(1, 2, order="HND"), gqa(order="HND")) == (1, 0, 0, 1, 0, 0, page // 2)
    assert rows(gqa(), gqa(order="HND")) == (4, 16, 4, 4, 4, 16, 4)
    assert rows(gqa(num_kv_heads=1), gqa(num_kv_heads=1, order="HND")) == (1, 0, 0, 1, 0, 0, page // 4)
    assert rows(gqa(order="HND"), gqa(order="HND", page_size=8)) == (1, 0, 0, 4, 16, 32, 16)
    assert rows(gqa(), gqa(page_size=8)) == (1, 0, 0, 1, 0, 0, page)
    assert rows(gqa(page_size=1, order="HND"), gqa(page_size=1)) == (1, 0, 0, 1, 0, 0, page // 4)


def test_is_page_only_for_whole_pages_on_both_sides() -> None:
    assert one_segment(gqa(), gqa()).is_page
    assert one_segment(gqa(2, 4), gqa(2, 4)).is_page
    assert one_segment(gqa(num_kv_heads=1), gqa(num_kv_heads=1, order="HND")).is_page
    assert not one_segment(gqa(), gqa(page_size=8)).is_page
    assert not one_segment(gqa(), gqa(order="HND")).is_page
    assert not one_segment(gqa(0, 2), gqa()).is_page
    assert not one_segment(gqa(order="HND"), gqa(0, 2, order="HND")).is_page


# Everything at once


@RELAXED
@given(
    pair=instances(),
    tokens=st.integers(0, 14),
    shuffled=st.booleans(),
    chunk=st.none() | st.integers(1, 3),
    seed=st.integers(0, 1 << 60),
)
def test_any_pair_moves_exactly_the_right_bytes(
    pair: tuple[dict[int, KVLayout], KVLayout], tokens: int, shuffled: bool, chunk: int | None, seed: int
) -> None:
    check(*pair, num_tokens=tokens, shuffled=shuffled, chunk=chunk, rng=np.random.default_rng(seed))


@RELAXED
@given(pair=instances(), limit=st.integers(0, 6))
def test_owed_is_exactly_the_tokens_that_pairs_cover(pair: tuple[dict[int, KVLayout], KVLayout], limit: int) -> None:
    writers, reader = pair
    tokens = limit * max(reader.page_size, *(layout.page_size for layout in writers.values()))
    for rank in writers:
        plan = compile_plan(rank, writers, reader)
        nbytes = 0
        covered: dict[int, set[int]] = {layer: set() for layer in range(4)}
        for segment in plan.segments:
            pairs = page_pairs(
                segment,
                num_src_pages=tokens // plan.src_page_size,
                start=0,
                limit_tokens=tokens,
                src_page_size=plan.src_page_size,
                dst_page_size=plan.dst_page_size,
            )
            nbytes += len(pairs) * segment.pair_nbytes * len(segment.layers)
            first = pairs.dst_index * plan.dst_page_size + pairs.dst_token
            for layer in segment.layers:
                covered[layer] |= {int(token) + i for token in first for i in range(segment.tokens)}
        assert plan.nbytes(tokens) == nbytes
        for layer, wanted in covered.items():
            owed = owed_of(plan, layer, tokens)
            assert {token for lo, hi in owed for token in range(lo, hi)} == wanted
            assert all(before[1] < after[0] for before, after in itertools.pairwise(owed)), "merged"


def mutants(plan: PairPlan) -> list[PairPlan]:
    def each(**change: object) -> PairPlan:
        return replace(plan, segments=tuple(replace(segment, **change) for segment in plan.segments))

    first = plan.segments[0]
    rows = first.rows
    return [
        each(src_base=first.src_base + 1),
        each(dst_base=first.dst_base + 1),
        each(rows=rows._replace(run=rows.run - 1)),
        each(rows=rows._replace(s1=rows.s1 + 1)),
        each(rows=rows._replace(d1=rows.d1 - 1)),
        each(stripe=first.stripe._replace(holders=2)),
        replace(plan, segments=plan.segments[:-1]),
        replace(plan, segments=(*plan.segments, first)),
    ]


@pytest.mark.parametrize("which", range(8))
def test_negative_control_a_wrong_plan_is_noticed(which: int) -> None:
    writers = {0: gqa(1, 2)}
    reader = gqa(2, 4)
    compared = {"rng": np.random.default_rng(), "num_tokens": 12}
    assert compare(writers, reader, **compared) == (0, 0)
    wrong, miscounted = compare(writers, reader, plan_for=lambda *pair: mutants(compile_plan(*pair))[which], **compared)
    assert wrong + miscounted > 0


# Coverage, seals, refusals


def test_contributing_and_gaps() -> None:
    writers = group(gqa, 4)
    assert contributing(writers, gqa(0, 2)) == (3, 5)
    assert contributing(writers, gqa(1, 2)) == (7, 9)
    gap = coverage_gap({3: writers[3], 7: writers[7]}, gqa())
    assert gap == "none of the writing ranks [3, 7] holds component 'k', layer 0, heads 1 to 1"
    assert "heads 3 to 3" in (coverage_gap({rank: writers[rank] for rank in (3, 5, 7)}, gqa()) or "")
    assert "layer 1" in (coverage_gap({0: gqa(layers=[0])}, gqa()) or "")
    assert "heads 0 to 3" in (coverage_gap({}, gqa()) or "")


def test_disjoint_layouts_owe_nothing() -> None:
    plan = compile_plan(0, {0: gqa(0, 2)}, gqa(1, 2))
    assert plan.parts == ()
    assert plan.layers == ()
    assert plan.nbytes(64) == 0
    assert owed_of(plan, 0, 64) == []
    assert contributing({0: gqa(0, 2)}, gqa(1, 2)) == ()


def test_a_rank_that_holds_only_state_contributes() -> None:
    def layout(rank: int, size: int, layers: range) -> KVLayout:
        return KVLayout(
            [Component("k", 2, 2, torch.uint8, layers=(0,))],
            num_layers=2,
            page_size=4,
            layers=layers,
            tp_rank=rank,
            tp_size=size,
            states=[State("ssm", (8, 3), torch.float32, shard_dim=0, layers=(1,))],
        )

    writers = {r: layout(r % 2, 2, range(r // 2, r // 2 + 1)) for r in range(4)}
    reader = layout(0, 2, range(2))
    assert contributing(writers, reader) == (0, 2)
    plan = compile_plan(2, writers, reader)
    assert plan.state is not None
    assert [segment.component for segment in plan.state.segments] == ["ssm"]
    assert not plan.segments
    assert plan.parts == (plan.state,)
    assert coverage_gap(writers, reader) is None
    assert "state 'ssm', layer 1, shard elements 4 to 7" in (
        coverage_gap({rank: writers[rank] for rank in range(3)}, layout(0, 1, range(2))) or ""
    )


@pytest.mark.parametrize("field", [{"page_size": 6}, {"num_layers": 3}, {"head_dim": 3}, {"dtype": torch.float32}])
def test_irreconcilable_layouts_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatch, match="rank 7"):
        compile_plan(7, {7: gqa()}, gqa(**field))


def test_held_layers_agree_with_the_reference() -> None:
    layout = KVLayout(
        [Component("k", 1, 1, torch.uint8, layers=(5, 1, 9))], num_layers=4, page_size=1, layers=(9, 1, 2)
    )
    assert list(layout.component_layers("k")) == held_layers(layout, "k") == [1, 9]


def test_instances_of_the_same_layouts_share_their_plans() -> None:
    """Of ranks only their order matters, so a cluster has as many plans as one pair of instances."""
    before = pair_plan._compile.cache_info().misses
    writers = [gqa(rank, 4, num_layers=7) for rank in range(4)]
    reader = gqa(1, 2, num_layers=7)
    plans = {
        id(compile_plan(base + rank, {base + n: layout for n, layout in enumerate(writers)}, reader))
        for base in range(0, 4000, 4)
        for rank in range(4)
    }
    assert len(plans) == 4
    assert pair_plan._compile.cache_info().misses == before + 4
