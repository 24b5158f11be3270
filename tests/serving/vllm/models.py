"""Tiny models with random weights, which real engines load."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["PROMPTS", "save_llama", "save_mla"]

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


def save_llama(folder: Path) -> str:
    """Grouped-query attention: 4 layers, 4 kv heads of 32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=4, head_dim=32)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_mla(folder: Path) -> str:
    """Multi-head latent attention, with the only widths that vLLM's CPU kernels have: 512 + 64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **SHAPE,
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
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return str(folder)
