"""SGLang's memory, told by addresses, as pages of torchkv. Real engines: tests/serving/sglang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.errors import LayoutMismatch, ProtocolError
from torchkv.integrations.sglang_memory import AuxRows, cache_of, dtype_of

LAYERS, PAGES, PAGE, HEADS, DIM = 3, 5, 4, 2, 6


def kv_args(tensors: list[torch.Tensor], **other: Any) -> Any:
    """SGLang's KVArgs of tensors ``[pages * tokens, heads, dim]``."""
    args = {
        "kv_data_ptrs": [tensor.data_ptr() for tensor in tensors],
        "kv_data_lens": [tensor.nbytes for tensor in tensors],
        "kv_item_lens": [tensor[0].nbytes * PAGE for tensor in tensors],
        "kv_layer_ids": [],
        "kv_layout": None,
        "page_size": PAGE,
        "state_types": [],
        "num_draft_entries": 0,
    }
    return SimpleNamespace(**{**args, **other})


def buffers(count: int, dim: int = DIM, heads: int = HEADS) -> list[torch.Tensor]:
    made = torch.arange(count * PAGES * PAGE * heads * dim, dtype=torch.int32).view(count, PAGES * PAGE, heads, dim)
    return list(made.view(torch.float32))


def adopt(args: Any, **other: Any) -> Any:
    how = {"dtype": torch.float32, "total_heads": 4, "tp_rank": 1, "tp_size": 2, "device": "cpu"}
    return cache_of(args, **{**how, **other})


def test_keys_and_values_are_adopted_where_they_lie() -> None:
    keys, values = buffers(LAYERS), buffers(LAYERS, dim=DIM + 2)
    cache = adopt(kv_args(keys + values))
    assert (cache.num_pages, cache.layout.tp_rank, cache.layout.tp_size) == (PAGES, 1, 2)
    assert [(c.name, c.heads, c.dim, c.sharded) for c in cache.layout.components] == [
        ("k", 4, DIM, True),
        ("v", 4, DIM + 2, True),
    ]
    for layer in range(LAYERS):
        for name, own in (("k", keys[layer]), ("v", values[layer])):
            assert cache[name][layer].data_ptr() == own.data_ptr()
            assert torch.equal(cache[name][layer].view(torch.int32).flatten(), own.view(torch.int32).flatten())


def test_a_latent_is_whole_on_every_rank() -> None:
    latents = buffers(LAYERS, heads=1)
    cache = adopt(kv_args(latents), total_heads=None)
    assert [(c.name, c.heads, c.dim, c.sharded) for c in cache.layout.components] == [("latent", 1, DIM, False)]
    assert len(cache["latent"]) == LAYERS


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"state_types": [SimpleNamespace(value="mamba")]}, "mamba"),
        ({"num_draft_entries": 2}, "draft"),
        ({"kv_layout": "packed"}, "packed"),
        ({"kv_layer_ids": [1, 2, 3, 1, 2, 3]}, "layers"),
        ({"kv_data_ptrs": [1, 2, 3]}, "multiple"),
        ({"kv_item_lens": [PAGE * HEADS * DIM * 4] * 5 + [PAGE * HEADS * DIM * 8]}, "same in all"),
        ({"kv_item_lens": [PAGE * HEADS * DIM * 4 + 1] * 6}, "tokens of"),
        ({"kv_data_lens": [PAGES * PAGE * HEADS * DIM * 4] * 5 + [PAGE * HEADS * DIM * 4]}, "unlike numbers"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(changed: dict[str, Any], reason: str) -> None:
    own = buffers(2 * LAYERS)
    assert adopt(kv_args(own, kv_layer_ids=[0, 1, 2, 0, 1, 2])).num_pages == PAGES
    with pytest.raises(LayoutMismatch, match=reason):
        adopt(kv_args(own, **changed))


@pytest.mark.parametrize("total", [3, 1])
def test_heads_that_the_ranks_cannot_share_are_refused(total: int) -> None:
    with pytest.raises(LayoutMismatch, match="kv heads on 2 ranks"):
        adopt(kv_args(buffers(2 * LAYERS)), total_heads=total)


def test_dtypes() -> None:
    assert dtype_of("auto", torch.float32) is torch.float32
    assert dtype_of("fp8_e4m3", torch.float32) is torch.float8_e4m3fn
    with pytest.raises(LayoutMismatch, match="fp4"):
        dtype_of("fp4_e2m1", torch.float32)


def test_a_row_of_metadata_goes_from_one_engine_to_the_other() -> None:
    rows, other = (
        [torch.full((4, 16), fill, dtype=torch.int32), torch.full((4, 2), fill, dtype=torch.uint8)] for fill in (0, 7)
    )
    rows[0][2], rows[1][2] = torch.arange(16), torch.tensor([3, 4])

    def of(tensors: list[torch.Tensor]) -> AuxRows:
        return AuxRows([t.data_ptr() for t in tensors], [t.nbytes for t in tensors], [t[0].nbytes for t in tensors])

    of(other).put(1, of(rows).row(2))
    assert torch.equal(other[0][1], rows[0][2])
    assert torch.equal(other[1][1], rows[1][2])
    assert (other[0][[0, 2, 3]] == 7).all()
    assert (other[1][[0, 2, 3]] == 7).all()
    for wrong in (b"", of(rows).row(2)[:-1], of(rows).row(2) + b"x"):
        with pytest.raises(ProtocolError, match="same version"):
            of(other).put(1, wrong)
