"""Layouts: what a rank holds, which layouts are refused, and encoding."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.references.page_transfer import held_heads
from torchkv.errors import KVError, LayoutMismatch, ProtocolError
from torchkv.layout import codec
from torchkv.layout.layout import Component, KVLayout, State, check_compatible, shard_heads

BASE = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
MLA = {"num_layers": 61, "latent_dim": 512, "rope_dim": 64, "page_size": 64, "dtype": torch.bfloat16}
CONV = State("conv", (12, 4), torch.float32, shard_dim=0, shard_groups=(4, 8))


def gqa(**given: object) -> KVLayout:
    return KVLayout.gqa(**{**BASE, **given})


# What a rank holds


def test_gqa_shapes() -> None:
    layout = gqa(tp_rank=1, tp_size=4, v_head_dim=64)
    assert layout.heads == range(2, 4)
    assert layout.layers == (0, 1, 2, 3)
    assert layout.page_shape("k") == (16, 2, 128)
    assert layout.page_shape("v") == (16, 2, 64)
    assert layout.page_nbytes("k") == 16 * 2 * 128 * 2
    assert layout.page_nbytes("v") == 16 * 2 * 64 * 2
    assert gqa(order="HND", tp_rank=1, tp_size=4).page_shape("k") == (2, 16, 128)


def test_mla_is_one_replicated_component() -> None:
    for rank in range(8):
        layout = KVLayout.mla(**MLA, tp_rank=rank, tp_size=8)
        assert [component.name for component in layout.components] == ["latent"]
        assert layout.page_shape("latent") == (64, 1, 576)
        assert layout.heads == range(1)
    assert KVLayout.mla(**{**MLA, "rope_dim": 0}).page_shape("latent") == (64, 1, 512)


def test_heads_are_those_of_the_first_sharded_component() -> None:
    latent, keys = Component("latent", 1, 8, torch.uint8, sharded=False), Component("k", 8, 8, torch.uint8)
    both = KVLayout([latent, keys], num_layers=1, page_size=1, tp_rank=1, tp_size=2)
    assert both.heads == range(4, 8)
    assert both.component_heads("latent") == range(1)


@given(st.integers(1, 32), st.integers(1, 64))
def test_head_mapping_is_the_definition_or_refused(heads: int, size: int) -> None:
    if max(heads, size) % min(heads, size):
        with pytest.raises(LayoutMismatch, match=f"tp_size={size} cannot share heads={heads}"):
            shard_heads(heads, tp_rank=0, tp_size=size)
        return
    layouts = [gqa(num_kv_heads=heads, tp_rank=rank, tp_size=size) for rank in range(size)]
    assert [list(layout.heads) for layout in layouts] == [held_heads(layout, "k") for layout in layouts]
    assert {head for layout in layouts for head in layout.heads} == set(range(heads))


def test_layers_of_stages_drafts_and_sparse_components() -> None:
    components = [
        Component("k", 2, 2, torch.uint8),
        Component("index", 1, 2, torch.uint8, sharded=False, layers=[6, 2]),
    ]
    layout = KVLayout(components, num_layers=6, page_size=1, layers=[6, 3, 2])
    assert layout.layers == (2, 3, 6)
    assert layout.component_layers("k") == (2, 3, 6)
    assert layout.component_layers("index") == (2, 6)
    assert KVLayout(components, num_layers=6, page_size=1, layers=[0]).component_layers("index") == ()


def test_state_shapes() -> None:
    states = [CONV, State("ssm", (3, 8), torch.float32, shard_dim=1, layers=(1,)), State("all", (5,), torch.int8)]
    layout = gqa(states=states, tp_rank=1, tp_size=4)
    assert layout.state_shape("conv") == (3, 4)
    assert layout.state_shape("ssm") == (3, 2)
    assert layout.state_shape("all") == (5,)
    assert layout.state_layers("ssm") == (1,)
    assert CONV.groups == (4, 8)
    assert states[1].groups == (8,)
    assert states[2].groups == ()


def test_layouts_are_values() -> None:
    assert gqa() == gqa()
    assert hash(gqa()) == hash(gqa())
    assert gqa() != gqa(page_size=32)
    assert len({gqa(), gqa(layers=range(4)), gqa(layers=[0])}) == 2
    with pytest.raises(FrozenInstanceError):
        gqa().page_size = 8


def test_numpy_integers_are_integers() -> None:
    layout = gqa(page_size=np.int64(16), layers=np.arange(4), tp_rank=np.int32(0))
    assert layout == gqa()
    assert all(type(layer) is int for layer in layout.layers)


def test_windows_are_kept_in_order_and_are_part_of_the_value() -> None:
    layout = gqa(windows={np.int64(3): np.int32(128), 1: 64})
    assert layout.windows == ((1, 64), (3, 128))
    assert all(type(number) is int for pair in layout.windows for number in pair)
    assert layout == gqa(windows={1: 64, 3: 128})
    assert hash(layout) == hash(gqa(windows={1: 64, 3: 128}))
    assert layout != gqa(windows={1: 64})
    assert gqa() == gqa(windows={}) == gqa(windows=None)
    assert [layout.window(layer) for layer in range(5)] == [None, 64, None, 128, None]
    assert KVLayout.mla(**MLA, windows={60: 2}).window(60) == 2
    assert KVLayout([Component("k", 1, 1, torch.uint8)], num_layers=1, page_size=1, windows={0: 5}).window(0) == 5


# Layouts that are refused


REFUSED = [
    ({"page_size": 0}, "page_size=0"),
    ({"page_size": 65537}, "from 1 to 65536"),
    ({"page_size": True}, "page_size=True"),
    ({"page_size": 16.0}, "page_size=16.0"),
    ({"num_layers": 0}, "num_layers=0"),
    ({"num_layers": 1 << 20}, "num_layers=1048576"),
    ({"num_kv_heads": 0}, "component 'k': heads=0"),
    ({"num_kv_heads": (1 << 20) + 1}, "heads=1048577"),
    ({"head_dim": -1}, "component 'k': dim=-1"),
    ({"v_head_dim": 0}, "component 'v': dim=0"),
    ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
    ({"dtype": torch.quint8}, "dtype=torch.quint8"),
    ({"dtype": []}, r"dtype=\[\]"),
    ({"order": "nhd"}, "order='nhd'"),
    ({"order": []}, r"order=\[\]"),
    ({"tp_size": 0}, "tp_size=0"),
    ({"tp_size": 3}, "tp_size=3 cannot share heads=8"),
    ({"tp_size": 12}, "tp_size=12 cannot share heads=8"),
    ({"tp_size": 2, "tp_rank": 2}, "tp_rank=2"),
    ({"tp_rank": -1}, "tp_rank=-1"),
    ({"layers": []}, "layers names no layer"),
    ({"layers": [1, 1]}, "layer 1 twice"),
    ({"layers": [-1]}, r"layers\[0\]=-1"),
    ({"layers": [1 << 20]}, "from 0 to 1048575"),
    ({"layers": 3}, "layers=3"),
    ({"layers": range(5000)}, "more than 4096"),
    ({"page_size": 65536, "num_kv_heads": 1 << 20, "head_dim": 1 << 20}, "a page of component 'k' takes"),
    ({"states": [CONV, CONV]}, "'conv' twice"),
    ({"states": ["conv"]}, "give torchkv.State objects"),
    ({"windows": {0: 0}}, "windows, layer 0: tokens=0"),
    ({"windows": {0: 1 << 31}}, "from 1 to 2147483647"),
    ({"windows": {0: True}}, "tokens=True"),
    ({"windows": {0: 1.5}}, "tokens=1.5"),
    ({"windows": {0: None}}, "tokens=None"),
    ({"windows": {-1: 8}}, r"windows, the layer ids\[0\]=-1"),
    ({"windows": {1 << 20: 8}}, "from 0 to 1048575"),
    ({"windows": {"0": 8}}, r"windows, the layer ids\[0\]='0'"),
    ({"windows": [(0, 8)]}, r"windows=\[\(0, 8\)\] is not allowed: give a mapping"),
    ({"windows": dict.fromkeys(range(5000), 8)}, "more than 4096"),
    ({"states": [CONV], "tp_size": 8}, "does not divide the sharded size 4"),
]


@pytest.mark.parametrize(("field", "message"), REFUSED)
def test_bad_layouts_are_refused_with_field_value_and_limit(field: dict[str, Any], message: str) -> None:
    gqa()
    with pytest.raises(LayoutMismatch, match=message) as caught:
        gqa(**field)
    assert isinstance(caught.value, ValueError | KVError)
    assert caught.value.pages_safe


@pytest.mark.parametrize("name", ["", "a b", "1k", "k" * 65, "k\n", "\xe9", b"k", None])
def test_names_are_identifiers(name: object) -> None:
    assert Component("k" * 64, 1, 1, torch.uint8).name == "k" * 64
    with pytest.raises(LayoutMismatch, match=r"Component\.name="):
        Component(name, 1, 1, torch.uint8)
    with pytest.raises(LayoutMismatch, match=r"State\.name="):
        State(name, (1,), torch.uint8)


def test_components_are_bounded_and_distinct() -> None:
    def layout(names: list[str]) -> KVLayout:
        return KVLayout([Component(name, 1, 1, torch.uint8) for name in names], num_layers=1, page_size=1)

    assert len(layout([f"c{i}" for i in range(64)]).components) == 64
    with pytest.raises(LayoutMismatch, match="at most 64"):
        layout([f"c{i}" for i in range(65)])
    with pytest.raises(LayoutMismatch, match="'k' twice"):
        layout(["k", "k"])
    with pytest.raises(LayoutMismatch, match="at least one"):
        layout([])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"shape": ()}, "1 to 8 dimensions"),
        ({"shape": (1,) * 9}, "1 to 8 dimensions"),
        ({"shape": (0, 4)}, r"shape\[0\]=0"),
        ({"shape": 4}, "shape=4"),
        ({"shape": (1 << 30, 1 << 30)}, "one slot takes"),
        ({"shard_dim": 2}, "shard_dim=2"),
        ({"shard_dim": -1}, "shard_dim=-1"),
        ({"shard_groups": (4, 4)}, "sum to 8: they must sum to shape"),
        ({"shard_dim": None}, "must sum to"),
        ({"layers": (1, 1)}, "twice"),
        ({"dtype": None}, "dtype=None"),
    ],
)
def test_bad_states_are_refused(field: dict[str, Any], message: str) -> None:
    good = {"name": "s", "shape": (12, 4), "dtype": torch.int8, "shard_dim": 0, "shard_groups": (4, 8)}
    State(**good)
    with pytest.raises(LayoutMismatch, match=message):
        State(**{**good, **field})


@pytest.mark.parametrize("ask", [KVLayout.component, KVLayout.page_shape, KVLayout.component_layers])
def test_unknown_names_are_refused(ask: object) -> None:
    with pytest.raises(LayoutMismatch, match=r"no component 'q' \(it has: k, v\)"):
        ask(gqa(), "q")
    with pytest.raises(LayoutMismatch, match=r"no state 'q' \(it has: none\)"):
        gqa().state_shape("q")


# Compatibility of two layouts


def test_what_may_differ_between_instances() -> None:
    a = gqa(states=[CONV])
    for other in (
        gqa(states=[CONV], tp_rank=1, tp_size=4, layers=[0, 3, 4], order="HND", page_size=64),
        gqa(states=[CONV], page_size=1),
        KVLayout(reversed(a.components), num_layers=4, page_size=16, states=[CONV]),
        KVLayout(
            [Component("k", 8, 128, torch.bfloat16, layers=(0,)), a.component("v")],
            num_layers=4,
            page_size=16,
            states=[CONV],
        ),
    ):
        check_compatible(a, other, rank_a=0, rank_b=1)
        check_compatible(other, a, rank_a=1, rank_b=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 5}, "num_layers is 4 on rank 2 and 5 on rank 9"),
        ({"page_size": 24}, "page_size .* is 16 on rank 2 and 24 on rank 9"),
        ({"num_kv_heads": 4}, "component 'k': heads is 8 on rank 2 and 4 on rank 9"),
        ({"head_dim": 64, "v_head_dim": 128}, "component 'k': dim is 128 on rank 2 and 64 on rank 9"),
        ({"v_head_dim": 64}, "component 'v': dim is 128 on rank 2 and 64 on rank 9"),
        ({"dtype": torch.float16}, "dtype is torch.bfloat16 on rank 2 and torch.float16 on rank 9"),
        ({"states": []}, r"state names is \['conv'\] on rank 2 and \[\] on rank 9"),
        ({"states": [State("conv", (12, 8), torch.float32, 0, (4, 8))]}, r"state 'conv': shape is \(12, 4\)"),
        ({"states": [State("conv", (12, 4), torch.float64, 0, (4, 8))]}, "state 'conv': dtype"),
        ({"states": [State("conv", (12, 4), torch.float32, 1)]}, "state 'conv': shard_dim is 0"),
        ({"states": [State("conv", (12, 4), torch.float32, 0)]}, r"state 'conv': groups is \(4, 8\)"),
    ],
)
def test_incompatible_layouts_name_ranks_field_and_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        check_compatible(gqa(states=[CONV]), gqa(**{"states": [CONV], **change}), rank_a=2, rank_b=9)


def test_windows_must_agree_of_layers_that_both_hold() -> None:
    def check(a: KVLayout, b: KVLayout) -> None:
        check_compatible(a, b, rank_a=2, rank_b=9)

    windowed = gqa(windows={1: 64, 3: 64})
    check(windowed, gqa(windows={1: 64, 3: 64}, page_size=32, tp_size=2))
    check(windowed, gqa(windows={1: 64, 3: 9}, layers=[0, 1, 2]))
    check(gqa(layers=[0, 2]), windowed)
    with pytest.raises(LayoutMismatch, match="window of layer 3 is 64 on rank 2 and 9 on rank 9"):
        check(windowed, gqa(windows={1: 64, 3: 9}))
    with pytest.raises(LayoutMismatch, match="window of layer 1 is 64 on rank 2 and None on rank 9"):
        check(windowed, gqa(layers=[1]))
    with pytest.raises(LayoutMismatch, match="window of layer 2 is None on rank 2 and 64 on rank 9"):
        check(windowed, gqa(windows={1: 64, 2: 64, 3: 64}))


def test_sharding_and_names_must_agree() -> None:
    def layout(**given: object) -> KVLayout:
        fields = {"name": "k", "heads": 2, "dim": 2, "dtype": torch.uint8, **given}
        return KVLayout([Component(**fields)], num_layers=1, page_size=1)

    with pytest.raises(LayoutMismatch, match="sharded is True on rank 0 and False on rank 1"):
        check_compatible(layout(), layout(sharded=False), rank_a=0, rank_b=1)
    with pytest.raises(LayoutMismatch, match=r"component names is \['k'\] on rank 0 and \['q'\] on rank 1"):
        check_compatible(layout(), layout(name="q"), rank_a=0, rank_b=1)


# Encoding


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,9}", fullmatch=True)
dtypes = st.sampled_from([torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float64, torch.bool])
some_layers = st.lists(st.integers(0, (1 << 20) - 1), min_size=1, max_size=9, unique=True)
some_windows = st.dictionaries(st.integers(0, (1 << 20) - 1), st.integers(1, (1 << 31) - 1), max_size=9)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    known = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(1, min(len(known), 4)))
    components = [
        Component(
            name,
            draw(st.sampled_from([1, 2, 8, 64])),
            draw(st.integers(1, 4096)),
            draw(dtypes),
            draw(st.booleans()),
            draw(st.none() | some_layers),
        )
        for name in known[:cut]
    ]
    states = [
        State(name, (8, draw(st.integers(1, 99))), draw(dtypes), draw(st.sampled_from([None, 0])))
        for name in known[cut:]
    ]
    return KVLayout(
        components,
        num_layers=draw(st.integers(1, 200)),
        page_size=draw(st.integers(1, 256)),
        order=draw(st.sampled_from(["NHD", "HND"])),
        tp_rank=draw(st.integers(0, size - 1)),
        tp_size=size,
        layers=draw(st.none() | some_layers),
        states=states,
        windows=draw(st.none() | some_windows),
    )


@settings(deadline=None)
@given(layouts())
def test_round_trip(layout: KVLayout) -> None:
    data = codec.encode(layout)
    assert codec.decode(data) == layout
    assert hash(codec.decode(data)) == hash(layout)
    assert codec.encode(codec.decode(data)) == data


def test_every_dtype_and_draft_layer_crosses_the_wire() -> None:
    for dtype in (torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int64, torch.complex64):
        layout = gqa(dtype=dtype, layers=[0, 1, 7], states=[CONV], tp_rank=3, tp_size=4)
        assert codec.decode(codec.encode(layout)) == layout
    assert len(codec.encode(gqa(num_layers=4096))) < 100, "contiguous layers cost nothing"


def test_the_most_windows_fit_onto_the_wire() -> None:
    layers = range((1 << 20) - 4096, 1 << 20)
    layout = gqa(layers=layers, windows=dict.fromkeys(layers, (1 << 31) - 1))
    assert codec.decode(codec.encode(layout)) == layout


def test_a_layout_too_large_for_the_wire_is_refused() -> None:
    layers = range(0, 8192, 2)
    components = [Component(f"c{i}", 1, 1, torch.uint8, layers=layers) for i in range(8)]
    with pytest.raises(LayoutMismatch, match="more than the 65536 allowed"):
        codec.encode(KVLayout(components, num_layers=1, page_size=1, layers=layers))


def decodes_or_refuses(data: bytes) -> None:
    try:
        layout = codec.decode(data)
    except ProtocolError:
        return
    assert codec.decode(codec.encode(layout)) == layout


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(data)


@settings(max_examples=examples(150), deadline=None)
@given(layouts(), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes_decode_to_a_valid_layout_or_are_refused(
    layout: KVLayout, mutations: list[tuple[int, int]]
) -> None:
    data = bytearray(codec.encode(layout))
    for position, value in mutations:
        data[position % len(data)] = value
    decodes_or_refuses(bytes(data))
    with pytest.raises(ProtocolError):
        codec.decode(bytes(codec.encode(layout)[:-1]))
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(layout) + b"\0")


def forged(**change: object) -> bytes:
    scalars = ("num_layers", "page_size", "order", "tp_rank", "tp_size")
    order = ("version", "components", *scalars, "layers", "states", "windows")
    fields = dict(zip(order, msgspec.msgpack.decode(codec.encode(gqa(states=[CONV]))), strict=True))
    return msgspec.msgpack.encode(list({**fields, **change}.values()))


HUGE = [[0, 1 << 20]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1"),
        ({"page_size": 1 << 40}, "page_size=1099511627776"),
        ({"page_size": (1 << 64) - 1}, "page_size=18446744073709551615"),
        ({"page_size": -16}, "page_size=-16"),
        ({"page_size": "16"}, "Expected `int`"),
        ({"order": "DNH"}, "DNH"),
        ({"tp_rank": 9, "tp_size": 8}, "tp_rank=9"),
        ({"tp_size": 3}, "tp_size=3"),
        ({"layers": HUGE}, r"layers \[0, 1048576\)"),
        ({"layers": [[0, 4096], [5000, 5001]]}, r"layers \[5000, 5001\)"),
        ({"layers": [[3, 3]]}, r"layers \[3, 3\)"),
        ({"layers": [[0, 2], [1, 3]]}, "layer 1 twice"),
        ({"layers": []}, "no layer"),
        ({"components": [], "states": []}, "at least one"),
        ({"components": [["k", 8, 128, "os.system", True, None, None]]}, "dtype 'os.system'"),
        ({"components": [["k", 8, 128, "quint8", True, None, None]]}, "dtype 'quint8'"),
        ({"components": [["k", 8, 128, "uint8", True, HUGE, None]]}, r"layers \[0, 1048576\)"),
        ({"components": [["k", 8, 128, "uint8", True, None, None, [], 1]]}, "length"),
        ({"components": [["k", 8, 128, "uint8", True, None, None, 1]]}, "Expected `array`"),
        ({"components": [["k", 8, 128, "uint8", True, None, None, ["os.system"]]]}, "dtype 'os.system'"),
        ({"components": [["k", 8, 128, "uint8", True, None, None, ["bfloat16"]]]}, "no conversion to torch.uint8"),
        ({"components": [["k", 8, 128, "uint8", True, None, None, ["uint8"] * 17]]}, "length <= 16"),
        ({"components": [["k", 8, 128, "uint8", 1, None, None]]}, "bool"),
        ({"components": [["k" * 5000, 8, 128, "uint8", True, None, None]]}, "Component.name="),
        ({"components": [[f"k{i}", 8, 1, "uint8", True, None, None] for i in range(65)]}, "at most 64"),
        ({"states": [["s", [1 << 60], "uint8", None, None, None, None]]}, r"shape\[0\]="),
        ({"states": [["s", [1 << 40] * 8, "uint8", None, None, None, None]]}, "one slot takes"),
        ({"components": [["k", 8, 128, "uint8", True, None, "a b"]]}, "group='a b'"),
        ({"components": [["k", 8, 128, "uint8", True, None, "g"]]}, "'s.*' names no layer group, others do: g"),
        ({"windows": [[0, 0]]}, "windows, layer 0: tokens=0"),
        ({"windows": [[3, 1 << 31]]}, "windows, layer 3: tokens=2147483648 .* from 1 to 2147483647"),
        ({"windows": [[-1, 8]]}, r"the layer ids\[0\]=-1"),
        ({"windows": [[1 << 20, 8]]}, "from 0 to 1048575"),
        ({"windows": [[(1 << 64) - 1, 8]]}, "from 0 to 1048575"),
        ({"windows": [[2, 8], [2, 9]]}, "layer twice"),
        ({"windows": [[layer, 8] for layer in range(4097)]}, "more than 4096"),
        ({"windows": [[2, 8, 1]]}, "length"),
        ({"windows": [[2, "8"]]}, "Expected `int`"),
        ({"windows": {"2": 8}}, "Expected `array`"),
    ],
)
def test_hostile_fields_are_refused(change: dict[str, Any], message: str) -> None:
    assert codec.decode(forged()) == gqa(states=[CONV])
    with pytest.raises(ProtocolError, match=message) as caught:
        codec.decode(forged(**change))
    assert len(str(caught.value)) < 1000


def test_oversized_bytes_are_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="65537 bytes, more than the 65536"):
        codec.decode(b"\0" * 65537)
