"""KVCache: shapes, adoption without a copy, and placements."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchkv import Component, KVCache, KVError, KVLayout, LayoutMismatch, State, TransportUnavailable
from torchkv.host import shared_memory

PAGES = 5


def gqa(**changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": torch.bfloat16}
    return KVLayout.gqa(**{**settings, **changes})


def mixed() -> KVLayout:
    return KVLayout(
        [
            Component("k", 4, 8, torch.float16),
            Component("index", 1, 20, torch.uint8, sharded=False, layers=(1,)),
        ],
        num_layers=3,
        page_size=16,
        layers=(0, 1),
        states=[State("ssm", (4, 6), torch.float32, shard_dim=0), State("conv", (3,), torch.float16, layers=(1,))],
        tp_rank=1,
        tp_size=2,
    )


def tensors(layout: KVLayout) -> dict[str, list[torch.Tensor | None]]:
    return {
        c.name: [
            torch.zeros(PAGES, *layout.page_shape(c.name), dtype=c.dtype)
            if layer in layout.component_layers(c.name)
            else None
            for layer in layout.layers
        ]
        for c in layout.components
    }


def check_placements(cache: KVCache) -> None:
    """Reads every page and slot through its placement, as a peer does, and compares it with the tensor."""
    rng = np.random.default_rng()
    for storage in cache.storages:
        storage.copy_(torch.from_numpy(rng.integers(0, 256, storage.nbytes, dtype=np.uint8)))
    layout = cache.layout
    held = [(c.name, cache[c.name], layout.page_nbytes(c.name), cache.num_pages) for c in layout.components]
    if cache.num_slots:  # without slots, there are no tensors of states
        held += [(s.name, cache.state(s.name), layout.state_nbytes(s.name), cache.num_slots) for s in layout.states]
    seen = set()
    for name, tensors, nbytes, count in held:
        for layer, tensor in zip(layout.layers, tensors, strict=True):
            assert (tensor is None) == ((name, layer) not in cache.placements)
            if tensor is None:
                continue
            place = cache.placements[name, layer]
            assert place.num_pages == count
            base = cache.storages[place.storage].data_ptr()
            for page in range(count):
                expected = tensor[page].contiguous().view(torch.uint8).numpy().tobytes()
                found = ctypes.string_at(base + place.offset + page * place.page_stride, nbytes)
                assert found == expected
                assert ctypes.string_at(base + place.offset + page * place.page_stride, nbytes - 1) != expected
            seen.add((name, layer))
    assert seen
    assert seen == cache.placements.keys()


@pytest.mark.parametrize("layout", [gqa(), gqa(order="HND"), gqa(v_head_dim=3), gqa(layers=[2])])
def test_empty_has_the_shapes_of_the_layout(layout: KVLayout) -> None:
    cache = KVCache.empty(layout, PAGES, device="cpu")
    assert (cache.num_pages, cache.num_slots, cache.device.type) == (PAGES, 0, "cpu")
    for name, by_layer in (("k", cache.k), ("v", cache.v)):
        assert len(by_layer) == len(layout.layers)
        for tensor in by_layer:
            assert tensor is not None
            assert tuple(tensor.shape) == (PAGES, *layout.page_shape(name))
            assert tensor.dtype == torch.bfloat16
    assert len(cache.storages) == 1
    assert shared_memory.share(cache.storages[0]) is not None  # peers on this host can map it
    check_placements(cache)


def test_empty_with_components_in_some_layers_and_with_states() -> None:
    cache = KVCache.empty(mixed(), PAGES, device="cpu", num_slots=7)
    assert cache["index"][0] is None
    assert cache["index"][1] is not None
    assert cache.num_slots == 7
    ssm, conv = cache.state("ssm"), cache.state("conv")
    assert [None if s is None else tuple(s.shape) for s in ssm] == [(7, 2, 6), (7, 2, 6)]
    assert [None if s is None else tuple(s.shape) for s in conv] == [None, (7, 3)]
    check_placements(cache)


def test_tensors_of_a_cache_do_not_overlap() -> None:
    cache = KVCache.empty(mixed(), PAGES, device="cpu", num_slots=2)
    everything = [*cache["k"], *cache["index"], *cache.state("ssm"), *cache.state("conv")]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in everything if t is not None)
    assert len(spans) == 2 + 1 + 2 + 1
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start


def interleaved(layout: KVLayout) -> dict[str, list[torch.Tensor | None]]:
    """As in vLLM: K and V of a layer in one tensor [pages, 2, ...]."""
    both = [torch.zeros(PAGES, 2, *layout.page_shape("k"), dtype=torch.bfloat16) for _ in layout.layers]
    return {"k": [t[:, 0] for t in both], "v": [t[:, 1] for t in both]}


def one_storage(layout: KVLayout) -> dict[str, list[torch.Tensor | None]]:
    """All layers in one tensor [layers, 2, pages, ...]."""
    pool = torch.zeros(len(layout.layers), 2, PAGES, *layout.page_shape("k"), dtype=torch.bfloat16)
    return {"k": [layer[0] for layer in pool], "v": [layer[1] for layer in pool]}


def layers_within_pages(layout: KVLayout) -> dict[str, list[torch.Tensor | None]]:
    pool = torch.zeros(PAGES, len(layout.layers), 2, *layout.page_shape("k"), dtype=torch.bfloat16)
    return {"k": [pool[:, i, 0] for i in range(3)], "v": [pool[:, i, 1] for i in range(3)]}


@pytest.mark.parametrize(
    ("make", "storages"), [(tensors, 6), (interleaved, 3), (one_storage, 1), (layers_within_pages, 1)]
)
def test_adoption_copies_nothing(make: Callable[[KVLayout], Any], storages: int) -> None:
    layout = gqa()
    given = make(layout)
    cache = KVCache(layout, given)
    assert cache.num_pages == PAGES
    assert len(cache.storages) == storages
    for name in ("k", "v"):
        for ours, theirs in zip(cache[name], given[name], strict=True):
            assert ours is not None
            assert ours.data_ptr() == theirs.data_ptr()
    check_placements(cache)


def addresses(rows: list[Any]) -> list[int | None]:
    return [None if row is None else row.data_ptr() for row in rows]


@pytest.mark.parametrize("make", [tensors, one_storage, layers_within_pages])
def test_pointers_stand_for_tensors(make: Callable[[KVLayout], Any]) -> None:
    layout = gqa()
    given = make(layout)
    pointers = {name: addresses(rows) for name, rows in given.items()}
    strides = {name: rows[0].stride(0) * rows[0].element_size() for name, rows in given.items()}
    cache = KVCache.from_pointers(layout, pointers, PAGES, "cpu", strides=strides)
    for name in ("k", "v"):
        for ours, theirs in zip(cache[name], given[name], strict=True):
            assert ours is not None
            assert (ours.data_ptr(), ours.shape, ours.stride()) == (theirs.data_ptr(), theirs.shape, theirs.stride())
            ours.view(torch.int16).random_(-(2**15), 2**15 - 1)
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    check_placements(cache)


def test_pointers_of_some_layers_and_of_states() -> None:
    layout = mixed()
    ssm, conv = torch.rand(7, 2, 6), torch.rand(7, 3).half()
    given = tensors(layout)
    pointers = {name: addresses(rows) for name, rows in given.items()}
    pointers |= {"ssm": [ssm.data_ptr(), ssm.data_ptr()], "conv": [None, conv.data_ptr()]}
    cache = KVCache.from_pointers(layout, pointers, PAGES, "cpu", num_slots=7)
    assert cache.num_slots == 7
    assert cache["index"][0] is None
    found = cache.state("conv")[1]
    assert found is not None
    assert torch.equal(found, conv)
    check_placements(cache)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pointers": {"k": [4096] * 3}}, "missing"),
        ({"pointers": {"k": [4096] * 3, "v": [1 << 20] * 2}}, "2 tensors for 3 layers"),
        ({"pointers": {"k": [4096] * 3, "v": [1 << 20] * 3, "w": []}}, "unknown"),
        ({"pointers": {"k": [0] * 3, "v": [1 << 20] * 3}}, "pointers"),
        ({"pointers": {"k": [4097] * 3, "v": [1 << 20] * 3}}, "multiples of 2"),
        ({"strides": {"k": 100}}, "strides"),
        ({"strides": {"x": 4096}}, "unknown"),
        ({"num_pages": 0}, "num_pages"),
    ],
)
def test_pointers_that_contradict_the_layout_are_refused(changes: dict[str, Any], words: str) -> None:
    good = {"pointers": {"k": [4096, 8192, 16384], "v": [1 << 20] * 3}, "num_pages": 1, "device": "cpu"}
    with pytest.raises(LayoutMismatch, match=words):
        KVCache.from_pointers(gqa(), **{**good, **changes})


def test_adopted_states() -> None:
    layout = mixed()
    states = {
        "ssm": [torch.zeros(7, 2, 6), torch.zeros(7, 2, 6)],
        "conv": [None, torch.zeros(7, 3, dtype=torch.float16)],
    }
    cache = KVCache(layout, tensors(layout), states=states)
    assert cache.num_slots == 7
    assert cache.state("conv")[1] is states["conv"][1]
    check_placements(cache)
    with pytest.raises(LayoutMismatch, match=r"'ssm'.*layer 0"):
        KVCache(layout, tensors(layout), states={**states, "ssm": [torch.zeros(7, 4, 6), torch.zeros(7, 2, 6)]})


def recurrent() -> KVLayout:
    """A layout without keys and values."""
    states = [State("ssm", (4, 6), torch.float32, shard_dim=0), State("conv", (3,), torch.float16, layers=(1,))]
    return KVLayout([], num_layers=2, page_size=16, states=states)


def test_a_cache_of_state_alone() -> None:
    cache = KVCache.empty(recurrent(), 1, device="cpu", num_slots=7)
    assert (cache.num_pages, cache.num_slots) == (1, 7)
    assert len(cache.storages) == 1
    check_placements(cache)


def test_adopted_state_alone_is_told_how_many_pages_the_engine_has() -> None:
    """Like every rank of its instance it takes part in grants of pages, but none of its tensors has pages."""
    states = {"ssm": [torch.zeros(5, 4, 6)] * 2, "conv": [None, torch.zeros(5, 3).half()]}
    assert KVCache(recurrent(), {}, states=states).num_pages == 0
    assert KVCache(recurrent(), {}, states=states, num_pages=9).num_pages == 9
    with pytest.raises(LayoutMismatch, match="num_pages=0"):
        KVCache(recurrent(), {}, states=states, num_pages=0)
    with pytest.raises(LayoutMismatch, match=r"agree on num_pages.*'5', '9'"):
        KVCache(gqa(), tensors(gqa()), num_pages=9)
    assert KVCache(gqa(), tensors(gqa()), num_pages=PAGES).num_pages == PAGES


def test_adopted_states_may_have_gaps_between_slots_and_share_a_storage() -> None:
    """As engines lay them out: one record per slot with all states of a layer, followed by padding."""
    layout = recurrent()
    records = torch.zeros(2, 5, 4 * 6 * 4 + 3 * 2 + 10, dtype=torch.uint8)  # [layers, slots, bytes]: float32 aligned
    ssm = [record[:, : 4 * 6 * 4].view(torch.float32).view(5, 4, 6) for record in records]
    conv = records[1, :, 96:102].view(torch.float16)
    cache = KVCache(layout, {}, states={"ssm": ssm, "conv": [None, conv]})
    assert (cache.num_slots, len(cache.storages)) == (5, 1)
    assert {place.page_stride for place in cache.placements.values()} == {records.stride(1)}
    check_placements(cache)


def test_states_must_agree_on_the_number_of_slots() -> None:
    states = {"ssm": [torch.zeros(5, 4, 6), torch.zeros(6, 4, 6)], "conv": [None, torch.zeros(5, 3).half()]}
    with pytest.raises(LayoutMismatch, match=r"agree on num_slots.*'5', '6'"):
        KVCache(recurrent(), {}, states=states)
    states["ssm"][1] = torch.zeros(5, 4, 12)[..., ::2]
    with pytest.raises(LayoutMismatch, match=r"state 'ssm' of layer 1.*must be contiguous"):
        KVCache(recurrent(), {}, states=states)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVCache.empty(recurrent(), PAGES, device="cpu"),
        lambda: KVCache(recurrent(), {}),
        lambda: KVCache.empty(
            KVLayout([], num_layers=2, page_size=4, layers=[0], states=recurrent().states[1:]),
            PAGES,
            device="cpu",
            num_slots=3,
        ),
    ],
)
def test_a_cache_of_nothing_is_refused(make: Callable[[], KVCache]) -> None:
    with pytest.raises(LayoutMismatch, match=r"nothing to hold.*num_slots"):
        make()


def test_ids_are_good_where_no_held_layer_has_pages_or_state() -> None:
    """All pipeline stages are given the same page ids and slot, whatever their layers have."""
    layout = gqa(states=[State("ssm", (4,), torch.float32, layers=(2,))], layers=[0, 1])
    cache = KVCache.empty(layout, PAGES, device="cpu", num_slots=7)
    assert (cache.num_pages, cache.num_slots) == (PAGES, 7)
    assert cache.state("ssm") == [None, None]
    assert {name for name, _ in cache.placements} == {"k", "v"}
    check_placements(cache)


def change(**replacements: Any) -> dict[str, Any]:
    made: dict[str, Any] = tensors(gqa())
    made.update(replacements)
    return made


def k_with(tensor: torch.Tensor | None) -> dict[str, Any]:
    made = tensors(gqa())
    made["k"][1] = tensor
    return made


BF16 = torch.bfloat16
BAD = [
    ({"k": tensors(gqa())["k"]}, r"missing \['v'\]"),
    (change(w=[None] * 3), r"unknown \['w'\]"),
    (change(k=tensors(gqa())["k"][:2]), "'k': 2 tensors for 3 layers"),
    (k_with(None), "'k' of layer 1.*exists"),
    (change(k=np.zeros((3, PAGES, 16, 4, 8), np.float16)), "'k' of layer 0: this is a ndarray; give a torch.Tensor"),
    (k_with(torch.zeros(PAGES, 16, 4, 8)), "'k' of layer 1: dtype torch.float32.*torch.bfloat16"),
    (k_with(torch.zeros(PAGES, 4, 16, 8, dtype=BF16)), r"'k' of layer 1: shape \(5, 4, 16, 8\).*16, 4, 8"),
    (k_with(torch.zeros(PAGES, 16, 32, dtype=BF16)), r"'k' of layer 1: shape \(5, 16, 32\)"),
    (k_with(torch.zeros(0, 16, 4, 8, dtype=BF16)), "'k' of layer 1: shape"),
    (k_with(torch.zeros(4, 16, 4, 8, dtype=BF16)), "agree on num_pages.*'4', '5'"),
    (k_with(torch.zeros(PAGES, 4, 16, 8, dtype=BF16).transpose(1, 2)), "'k' of layer 1.*must be contiguous"),
    (k_with(torch.zeros(PAGES, 16, 4, 16, dtype=BF16)[..., :8]), "'k' of layer 1.*must be contiguous"),
    (k_with(torch.zeros(1, 16, 4, 8, dtype=BF16).expand(PAGES, -1, -1, -1)), "'k' of layer 1: page stride 0"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_tensors_that_contradict_the_layout_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        KVCache(gqa(), given)
    KVCache(gqa(), tensors(gqa()))  # control: the unchanged tensors are fine


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"num_pages": 0, "device": "cpu"}, LayoutMismatch, "num_pages=0"),
        ({"num_pages": -3, "device": "cpu"}, LayoutMismatch, "num_pages=-3"),
        ({"num_pages": 4, "device": "cpu", "num_slots": -1}, LayoutMismatch, "num_slots=-1"),
        ({"num_pages": 1 << 50, "device": "cpu"}, KVError, "num_pages="),
        ({"num_pages": 4}, TransportUnavailable, "device='cpu'"),  # the default is "cuda"
        ({"num_pages": 4, "device": "meta"}, TransportUnavailable, "device='cpu'"),
    ],
)
def test_pools_that_cannot_be_made(arguments: dict[str, Any], kind: type[KVError], words: str) -> None:
    with pytest.raises(kind, match=words):
        KVCache.empty(gqa(), **arguments)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    cache = KVCache.empty(gqa(), PAGES, device="cpu")
    with pytest.raises(LayoutMismatch, match="'latent'; it has k, v"):
        cache["latent"]
    with pytest.raises(LayoutMismatch, match="'ssm'; it has none"):
        cache.state("ssm")
    mla = KVLayout.mla(num_layers=1, latent_dim=8, rope_dim=4, page_size=16, dtype=BF16)
    with pytest.raises(LayoutMismatch, match="'k'; it has latent"):
        _ = KVCache.empty(mla, PAGES, device="cpu").k


# ---------------------------------------------------------------------- layers that share memory


def layers_of(block: torch.Tensor, starts: list[int], num_pages: int = PAGES) -> dict[str, list[torch.Tensor | None]]:
    """Keys and values alike: of each layer, the pages of ``block`` from its start on."""
    return {
        "k": [block[start : start + num_pages] for start in starts],
        "v": [torch.empty_like(block[:num_pages]) for _ in starts],
    }


def test_layers_that_share_some_pages_are_refused() -> None:
    layout = gqa()
    block = torch.empty((40, *layout.page_shape("k")), dtype=torch.bfloat16)
    KVCache(layout, layers_of(block, [0, PAGES, 2 * PAGES]))
    with pytest.raises(LayoutMismatch, match="page 1 of 'k' of layer 2 and page 0 of 'k' of layer 1 share bytes"):
        KVCache(layout, layers_of(block, [0, 2 * PAGES, 2 * PAGES - 1]))
    with pytest.raises(LayoutMismatch, match="share bytes; give each layer memory of its own"):
        KVCache(layout, layers_of(block, [0, 20, 4]))


def test_layers_may_share_all_their_pages() -> None:
    layout = gqa()
    block = torch.empty((2 * PAGES, *layout.page_shape("k")), dtype=torch.bfloat16)
    cache = KVCache(layout, layers_of(block, [0, PAGES, 0]))
    assert cache.placements["k", 0] == cache.placements["k", 2]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same pages, each a row further on."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - tensor.stride(1))


@pytest.mark.parametrize("axis", [1, 2])
def test_pages_of_layers_may_take_turns(axis: int) -> None:
    """Engines keep all layers of a page together, or keys and values, or both."""
    layout = gqa()
    shape = [PAGES, 3, 2, *layout.page_shape("k")]
    shape[1], shape[2] = (3, 2) if axis == 1 else (2, 3)
    block = torch.empty(shape, dtype=torch.bfloat16)
    pick = (lambda kv, i: block[:, i, kv]) if axis == 1 else (lambda kv, i: block[:, kv, i])
    KVCache(layout, {name: [pick(kv, i) for i in range(3)] for kv, name in enumerate(("k", "v"))})
    with pytest.raises(LayoutMismatch, match="share bytes"):
        KVCache(layout, {"k": [pick(0, i) for i in range(3)], "v": [pick(1, 0), pick(1, 1), shifted(pick(0, 2))]})


@pytest.mark.parametrize("wrong", [None, [], 3])
def test_tensors_that_are_no_mapping_are_refused(wrong: Any) -> None:
    with pytest.raises(LayoutMismatch, match="give a mapping"):
        KVCache(gqa(), wrong)
