"""How ranks share the states that vLLM tells of, as it lays them out: `MambaStateShapeCalculator`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.errors import LayoutMismatch
from torchkv.integrations.layer_groups import PackedState
from torchkv.integrations.vllm_specs import groups_of

HEADS, WIDTH, SIZE, TOKENS = 8, 4, 16, 3  # of the whole model; a convolution remembers three tokens
INNER = HEADS * WIDTH
BF16, FP32 = torch.bfloat16, torch.float32


def mamba2(groups: int, tp_size: int, *, channels_first: bool = False) -> list[tuple[int, ...]]:
    """Shapes on one of the ranks. Groups that the ranks cannot share are the same on each of them."""
    extended = groups if groups % tp_size == 0 else tp_size
    channels = (INNER + 2 * extended * SIZE) // tp_size
    convolution = (channels, TOKENS) if channels_first else (TOKENS, channels)
    return [convolution, (HEADS // tp_size, WIDTH, SIZE)]


def states(shapes: list[tuple[int, ...]], kind: Any, tp_size: int, whole: Any = None, **fields: Any) -> Any:
    class FullAttentionSpec:
        block_size = 16

    class MambaSpec:
        dtypes = (BF16, FP32)

    spec = MambaSpec()
    vars(spec).update(shapes=tuple(shapes), mamba_type=kind, block_size=16, **fields)
    groups = [
        SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["0"]),
        SimpleNamespace(kv_cache_spec=spec, layer_names=["1", "2"]),
    ]
    found = groups_of(groups, int, tp_size=tp_size, whole=lambda: whole)
    assert [group.layers for group in found.all] == [(0,), (1, 2)]
    return list(found.all[1].states)


MAMBA2 = SimpleNamespace(name="MAMBA2")  # as newer vLLM has it; older ones have strings


@pytest.mark.parametrize("kind", [MAMBA2, "mamba2"])
@pytest.mark.parametrize("channels_first", [False, True])
def test_all_ranks_hold_the_only_group_of_mamba_2(kind: Any, channels_first: bool) -> None:
    dim = 0 if channels_first else 1
    for tp_size in (1, 2):
        shapes = mamba2(1, tp_size, channels_first=channels_first)
        found = states(shapes, kind, tp_size, mamba2(1, 1, channels_first=channels_first))
        parts = ((INNER // tp_size, True), (2 * SIZE, False))
        assert found == [
            PackedState(shapes[0], BF16, dim, parts),
            PackedState(shapes[1], FP32, 0, ((HEADS // tp_size, True),)),
        ]


def test_ranks_share_several_groups_of_mamba_2() -> None:
    for tp_size in (1, 2, 4):
        shapes = mamba2(4, tp_size)
        first, second = states(shapes, MAMBA2, tp_size, mamba2(4, 1))
        width = 4 * SIZE // tp_size
        assert first == PackedState(shapes[0], BF16, 1, ((INNER // tp_size, True), (width, True), (width, True)))
        assert second == PackedState(shapes[1], FP32, 0, ((HEADS // tp_size, True),))


@pytest.mark.parametrize("kind", [SimpleNamespace(name="GDN_ATTN"), "gdn_attention"])
def test_ranks_share_q_k_and_v_of_a_gated_delta_net(kind: Any) -> None:
    shapes = [(TOKENS, 2 * 24 + 2 * WIDTH), (2, WIDTH, SIZE)]
    first, second = states(shapes, kind, 4)
    assert first == PackedState(shapes[0], BF16, 1, ((24, True), (24, True), (2 * WIDTH, True)))
    assert second == PackedState(shapes[1], FP32, 0, ((2, True),))


def test_what_all_ranks_hold_is_not_shared() -> None:
    shapes = [(3, 4), (5, 6)]
    assert states(shapes, "other", 2, tp_replicated=True) == [PackedState((3, 4), BF16), PackedState((5, 6), FP32)]


def test_states_of_other_kinds_need_one_rank() -> None:
    assert states([(3, 4), (5, 6)], "mamba1", 1) == [PackedState((3, 4), BF16), PackedState((5, 6), FP32)]
    with pytest.raises(LayoutMismatch, match="'mamba1'; use tensor_parallel_size=1, not 2"):
        states([(3, 4), (5, 6)], "mamba1", 2)
