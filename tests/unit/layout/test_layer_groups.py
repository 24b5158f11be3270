"""Layouts with layer groups: what is refused, the part of a group, how many pages may be absent; caches that share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.layer_groups import GROUPS, hybrid, shared_cache
from torchkv.cache import KVCache
from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.layout import codec
from torchkv.layout.group_map import GroupMap, RankInfo
from torchkv.layout.layer_groups import UNGROUPED, absent_allowed, group_of, part_name
from torchkv.layout.layout import Component, KVLayout, State, check_compatible
from torchkv.layout.page_ranges import PageRange, page_for_page, shared_pages


def test_a_layout_names_its_groups_and_travels_with_them() -> None:
    layout = hybrid(states=[State("ssm", (4,), torch.int8, layers=(0,), group="mamba")])
    assert layout.groups == (*GROUPS, "mamba")
    assert codec.decode(codec.encode(layout)) == layout
    assert hybrid(groups=None).groups == ()


def test_the_part_of_a_group_is_a_layout_without_groups() -> None:
    layout = hybrid(states=[State("ssm", (4,), torch.int8, layers=(0,), group="near")], tp_rank=1, tp_size=2)
    part = layout.of_group("near")
    assert part.groups == ()
    assert [component.name for component in part.components] == ["k.near", "v.near"]
    assert part.component_layers("k.near") == GROUPS["near"]
    assert (part.window(0), part.page_shape("k.near"), part.tp_rank) == (5, layout.page_shape("k.near"), 1)
    assert part.states[0].name == "ssm"
    assert layout.of_group("full").states == ()


def test_mla_by_group() -> None:
    common: dict[str, Any] = {"num_layers": 2, "latent_dim": 3, "rope_dim": 1, "page_size": 4, "dtype": torch.int8}
    layout = KVLayout.mla(groups={"a": [0], "b": [1]}, **common)
    assert [component.name for component in layout.components] == ["latent.a", "latent.b"]
    assert layout.component_layers("latent.b") == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"a": [0], "b": [0, 1]}}, "names layer 0 twice"),
        ({"groups": {"a": []}}, "names no layer"),
        ({"groups": {"a b": [0]}}, "'k.a b'"),
        ({"groups": {}}, "groups={}"),
        ({"groups": {"a": 3}}, "give a sequence of layer ids"),
        ({"states": [State("s", (1,), torch.int8)]}, "'s' names no layer group, others do: full, near, far"),
        ({"groups": None, "windows": {}, "states": [State("s", (1,), torch.int8, group="g")]}, "'k' names no layer"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        hybrid(**change)


def test_ranks_must_agree_on_groups() -> None:
    def layout(group: str | None) -> KVLayout:
        return KVLayout([Component("k", 1, 2, torch.int8, group=group)], num_layers=1, page_size=4)

    with pytest.raises(LayoutMismatch, match="component 'k': group is 'a' on rank 0 and 'b' on rank 1"):
        check_compatible(layout("a"), layout("b"), rank_a=0, rank_b=1)
    with pytest.raises(LayoutMismatch, match="group is None on rank 0 and 'b' on rank 1"):
        check_compatible(layout(None), layout("b"), rank_a=0, rank_b=1)


def members(*layouts: KVLayout | None) -> list[RankInfo]:
    pool = {"num_pages": 8, "num_slots": 0}
    return [
        RankInfo(rank=i, incarnation=i, instance="pd"[i > 0], layout=each, **pool) for i, each in enumerate(layouts)
    ]


def test_plans_of_a_part_hold_its_layers_only() -> None:
    group_map = GroupMap(0, members(hybrid(), hybrid()))
    whole = group_map.plan(0, (0,), 1)
    parts = {group: group_map.of(part_name("r", group)).plan(0, (0,), 1) for group in GROUPS}
    assert {group: plan.layers for group, plan in parts.items()} == {g: tuple(sorted(GROUPS[g])) for g in GROUPS}
    assert sum(plan.nbytes(24) for plan in parts.values()) == whole.nbytes(24)
    with pytest.raises(ProtocolError, match="names no layer group of rank 0, which has full, near, far"):
        group_map.of("r")
    ungrouped = GroupMap(0, members(hybrid(groups=None), hybrid(groups=None)))
    assert ungrouped.of(part_name("r", "full")) is ungrouped


def test_parts_follow_those_that_come_and_go() -> None:
    group_map = GroupMap(0, members(hybrid()))
    newcomer = members(None, hybrid())[1]
    group_map.add([newcomer])
    part = group_map.of(part_name("r", "near"))
    assert part.contributing((0,), 1) == (0,)
    group_map.remove(1)
    assert 1 not in part.info


@given(st.text(min_size=1), st.sampled_from(sorted(GROUPS)))
def test_a_parts_name_tells_its_group(request_name: str, group: str) -> None:
    assert group_of(part_name(request_name, group)) == group


@given(
    num_pages=st.integers(0, 12),
    page_size=st.integers(1, 5),
    windows=st.lists(st.none() | st.integers(1, 70), max_size=3),
)
def test_absent_pages_lie_before_all_that_any_layer_attends_to(
    num_pages: int, page_size: int, windows: list[int | None]
) -> None:
    following = num_pages * page_size  # the token after the longest prompt that the pages hold
    needed = {
        token // page_size
        for window in windows
        for token in range(following)
        if window is None or token > following - window
    }
    allowed = absent_allowed(num_pages, page_size, windows)
    assert allowed == min(needed, default=num_pages)


# ---------------------------------------------------------------------- caches


def test_groups_in_memory_of_their_own_have_pools_of_their_own() -> None:
    pools = KVCache.empty(hybrid(), 4, "cpu").pools
    assert len(set(pools.values())) == len(pools) == 6
    assert KVCache.empty(hybrid(groups=None), 4, "cpu").pools == UNGROUPED


def test_groups_over_one_block_of_memory_share_a_pool() -> None:
    cache = shared_cache(hybrid(), 4)
    assert {cache.pools[group, False] for group in GROUPS} == {0}
    assert len({cache.pools[group, True] for group in GROUPS} | {0}) == 4
    assert [len(ranges) for ranges in cache.pool_ranges().values()] == [12, 0, 0, 0]


def test_a_state_may_share_its_slots_with_pages() -> None:
    layout = KVLayout(
        [Component("k", 1, 4, torch.int16, layers=(0,), group="a")],
        num_layers=2,
        page_size=4,
        states=[State("s", (16,), torch.int16, layers=(1,), group="m")],
    )
    block = torch.zeros(8, 16, dtype=torch.int16)
    cache = KVCache(layout, {"k": [block.view(8, 4, 1, 4), None]}, states={"s": [None, block]})
    assert cache.pools["a", False] == cache.pools["m", True] == 0


@pytest.mark.parametrize("by", ["half a page", "a page", "another stride"])
def test_groups_that_share_memory_otherwise_are_refused(by: str) -> None:
    layout = KVLayout(
        [Component(f"k{i}", 1, 4, torch.int16, layers=(i,), group=f"g{i}") for i in range(2)],
        num_layers=2,
        page_size=4,
    )
    flat = torch.zeros(8 * 16 + 64, dtype=torch.int16)

    def tensor(at: int, stride: int) -> torch.Tensor:
        return flat.as_strided((4, 4, 1, 4), (stride, 4, 4, 1), at)

    other = {"half a page": tensor(8, 16), "a page": tensor(16, 16), "another stride": tensor(0, 32)}[by]
    with pytest.raises(LayoutMismatch, match=r"page \d of 'k\d' of layer \d and page \d of 'k\d' .* share bytes"):
        KVCache(layout, {"k0": [tensor(0, 16), None], "k1": [None, other]})
    apart = KVCache(layout, {"k0": [tensor(0, 32), None], "k1": [None, tensor(16, 32)]})  # within one block
    assert apart.pools["g0", False] != apart.pools["g1", False]


@given(st.data())
def test_page_for_page_means_that_no_other_pages_meet(data: st.DataObject) -> None:
    def some() -> PageRange:
        nbytes = data.draw(st.integers(1, 6))
        stride = data.draw(st.integers(nbytes, 12))
        return PageRange(data.draw(st.integers(0, 40)), stride, nbytes, data.draw(st.integers(1, 4)))

    one, other = some(), some()
    if not page_for_page(one, other):
        return
    assert one.num_pages == other.num_pages
    for i in range(one.num_pages):
        for j in range(other.num_pages):
            mine = set(range(one.start + i * one.stride, one.start + i * one.stride + one.nbytes))
            if i != j:
                start = other.start + j * other.stride
                assert mine.isdisjoint(range(start, start + other.nbytes))
    if shared_pages(one, other) is not None:
        assert shared_pages(one, other)[0] == shared_pages(one, other)[1]
