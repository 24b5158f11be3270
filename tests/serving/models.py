"""Tiny models with random weights, which real engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

__all__ = ["PROMPTS", "save_gated_delta_net", "save_llama", "save_mamba2", "save_mla", "save_sliding"]

# Of several blocks and chunks, of whole blocks, of whole chunks, and of little more than one block.
PROMPTS = [
    [(7 * i) % 500 + 3 for i in range(300)],
    list(range(3, 120)),
    list(range(64)),
    [(11 * i) % 500 + 3 for i in range(33)],
]

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _save(folder: Path, config: str, model: str, **fields: Any) -> str:
    """Makes a model and saves it. config, model: names of classes of transformers. fields: beside those of `SHAPE`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SHAPE, **fields}))
    made.save_pretrained(folder)
    return str(folder)


def save_llama(folder: Path) -> str:
    """Grouped-query attention: 4 layers, 4 kv heads of 32."""
    return _save(folder, "LlamaConfig", "LlamaForCausalLM", num_key_value_heads=4, head_dim=32)


def save_mla(folder: Path) -> str:
    """Multi-head latent attention, with the only widths that vLLM's CPU kernels have: 512 + 64."""
    return _save(
        folder,
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
    )


def save_sliding(folder: Path) -> str:
    """Five layers with a window of two blocks, and one that attends to all tokens: six groups of one layer each."""
    return _save(
        folder,
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        query_pre_attn_scalar=32,
    )


def save_gated_delta_net(folder: Path) -> str:
    """Three layers with a state of a convolution and one of a gated delta net, and one that attends to all tokens."""
    return _save(
        folder,
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


def save_mamba2(folder: Path, groups: int = 1) -> str:
    """Three layers with a state of a convolution and one of Mamba 2, and one that attends to all tokens. groups: of
    heads, which have B and C in common.
    """
    return _save(
        folder,
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        num_key_value_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_local_experts=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=groups,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
    )
