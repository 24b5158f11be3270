"""Small language models with seeded random weights, and the KV layout each of them needs.

Nothing is downloaded: the classes are Hugging Face's own, the weights are drawn here. A token is a byte of the
prompt, so no tokenizer is needed either.
"""

from __future__ import annotations

import math

import torch
import transformers
from torch import nn

import torchkv

MODELS = ("llama", "qwen3", "deepseek_v3")
BOS = 256  # the first id after the 256 byte values
VOCAB_SIZE = 258
WEIGHT_GAIN = 2.0


def make_config(name: str, *, layers: int, hidden: int) -> transformers.PreTrainedConfig:
    """The configuration of a small model: 8 query heads, and 4 kv heads (GQA) or one latent (MLA)."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 1 << 16,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if name == "llama":
        return transformers.LlamaConfig(**common, num_key_value_heads=4)
    if name == "qwen3":
        return transformers.Qwen3Config(**common, num_key_value_heads=4, head_dim=hidden // 8)
    if name == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **common,
            num_key_value_heads=8,
            q_lora_rank=hidden // 2,
            kv_lora_rank=hidden // 4,
            qk_nope_head_dim=hidden // 8,
            qk_rope_head_dim=16,
            v_head_dim=hidden // 8 + 16,  # as wide as keys, else torch has no fast attention on the CPU
            first_k_dense_replace=1,  # layer 0 is dense, the others are mixtures of experts
            moe_intermediate_size=hidden // 2,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            experts_implementation="eager",  # a loop over the experts: the same sums on every device
            n_group=2,
            topk_group=1,
        )
    raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")


def build(config: transformers.PreTrainedConfig, *, seed: int, device: torch.device) -> nn.Module:
    """The whole model in float32, the same on every rank for one seed."""
    torch.manual_seed(seed)  # what is no matrix (A_log, attention sinks) stays as transformers draws it
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    return model.eval().to(device)


@torch.no_grad()
def _draw_weights(model: nn.Module, seed: int) -> None:
    """Redraw every matrix with a variance that keeps activations near 1.

    The usual initialisation (a standard deviation of 0.02) leaves a small model with nearly constant logits: the
    cache would hardly matter, and comparing tokens would prove little.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() >= 2:
            fan_in = 1 if weight is embedding else weight.shape[-1]
            weight.normal_(std=WEIGHT_GAIN / math.sqrt(fan_in), generator=generator)


def kv_layout(
    config: transformers.PreTrainedConfig, *, page_size: int, order: str, tp_rank: int, tp_size: int
) -> torchkv.KVLayout:
    """What one rank of ``tp_size`` caches: its kv heads, or (MLA) the latent that every rank holds whole."""
    shared = {
        "num_layers": config.num_hidden_layers,
        "page_size": page_size,
        "dtype": torch.float32,
        "order": order,
        "tp_rank": tp_rank,
        "tp_size": tp_size,
    }
    if config.model_type == "deepseek_v3":
        return torchkv.KVLayout.mla(latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, **shared)
    return torchkv.KVLayout.gqa(num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, **shared)


def encode(text: bytes, *, device: torch.device) -> torch.Tensor:
    """Token ids [1, len(text) + 1], int64: BOS and the bytes."""
    return torch.tensor([[BOS, *text]], dtype=torch.int64, device=device)


def render(tokens: list[int]) -> str:
    """Tokens as one printable line: printable ASCII as it is, other bytes as \\xNN, special ids as <N>."""
    shown = []
    for token in tokens:
        if token >= BOS:
            shown.append(f"<{token}>")
        else:
            shown.append(chr(token) if 32 <= token < 127 else f"\\x{token:02x}")
    return "".join(shown)
