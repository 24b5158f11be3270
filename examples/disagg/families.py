"""Small models of every family that keeps more than plain K and V pages, and what torchkv moves for each.

The classes are Hugging Face's own, the weights are drawn by `models.build`; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

import torchkv
from disagg.family_cache import CONVOLUTION, INDEXER, RECURRENT
from disagg.models import BOS, VOCAB_SIZE

DTYPE = torch.float32
KERNEL = 4  # tokens that a causal convolution sees
WINDOW = 32  # tokens that a sliding layer sees
LAYERS = 4


@dataclass(frozen=True)
class Family:
    """A model and what it caches.

    ``sending``: how its prefill sends: "hooks" (a forward hook on each decoder layer calls send_pages and send_state),
    "pipeline" (`torchkv.pipeline` does), or "finish" (hooks send the pages, ``finish`` all state at the end).
    ``windows``: {layer: tokens} of its sliding layers.
    """

    config: PreTrainedConfig
    operation: str
    sending: str
    components: tuple[torchkv.Component, ...]
    states: tuple[torchkv.State, ...] = ()
    windows: dict[int, int] = field(default_factory=dict)

    def layout(self, page_size: int) -> torchkv.KVLayout:
        return torchkv.KVLayout(
            self.components, num_layers=LAYERS, page_size=page_size, states=self.states, windows=self.windows
        )


def make(name: str) -> Family:
    """The family called ``name``, one of `FAMILIES`."""
    return FAMILIES[name]()


def _common(**more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1 << 12,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return {**sizes, **more}


def _keys_and_values(config: PreTrainedConfig, layers: tuple[int, ...] | None = None) -> tuple[torchkv.Component, ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    return tuple(torchkv.Component(name, heads, head_dim, DTYPE, layers=layers) for name in ("k", "v"))


def _falcon_h1() -> Family:
    heads, head_dim, groups, state_size = 8, 8, 1, 16
    config = transformers.FalconH1Config(
        **_common(),
        mamba_d_ssm=heads * head_dim,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=groups,
        mamba_d_state=state_size,
        mamba_d_conv=KERNEL,
        mamba_chunk_size=16,
    )
    parts = (heads * head_dim, groups * state_size, groups * state_size)  # x, B, C
    states = (
        torchkv.State(RECURRENT, (heads, head_dim, state_size), DTYPE, shard_dim=0),
        torchkv.State(CONVOLUTION, (sum(parts), KERNEL), DTYPE, shard_dim=0, shard_groups=parts),
    )
    operation = "attention and Mamba-2 side by side in every layer"
    return Family(config, operation, "hooks", _keys_and_values(config), states)


def _jamba() -> Family:
    attention, mamba = (1, 3), (0, 2)
    state_size, expand = 16, 2
    config = transformers.JambaConfig(
        **_common(),
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        experts_implementation="eager",
        mamba_d_state=state_size,
        mamba_d_conv=KERNEL,
        mamba_expand=expand,
        mamba_dt_rank=8,
    )
    channels = expand * config.hidden_size
    states = (
        torchkv.State(RECURRENT, (channels, state_size), DTYPE, shard_dim=0, layers=mamba),
        torchkv.State(CONVOLUTION, (channels, KERNEL), DTYPE, shard_dim=0, layers=mamba),
    )
    return Family(config, "Mamba and attention in turn", "finish", _keys_and_values(config, attention), states)


def _qwen3_next() -> Family:
    attention, linear = (3,), (0, 1, 2)
    k_heads, v_heads, k_dim, v_dim = 2, 4, 16, 16
    config = transformers.Qwen3NextConfig(
        **_common(head_dim=16),
        layer_types=["full_attention" if layer in attention else "linear_attention" for layer in range(LAYERS)],
        linear_num_key_heads=k_heads,
        linear_num_value_heads=v_heads,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=v_dim,
        linear_conv_kernel_dim=KERNEL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        experts_implementation="eager",
    )
    parts = (k_heads * k_dim, k_heads * k_dim, v_heads * v_dim)  # q, k, v
    states = (
        torchkv.State(RECURRENT, (v_heads, k_dim, v_dim), DTYPE, shard_dim=0, layers=linear),
        torchkv.State(CONVOLUTION, (sum(parts), KERNEL), DTYPE, shard_dim=0, shard_groups=parts, layers=linear),
    )
    operation = "three gated delta nets and one attention layer"
    return Family(config, operation, "pipeline", _keys_and_values(config, attention), states)


def _gpt_oss() -> Family:
    config = transformers.GptOssConfig(
        **_common(head_dim=16),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    windows = {layer: WINDOW for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention"}
    operation = f"a sliding window of {WINDOW} tokens in layers {', '.join(map(str, windows))}"
    return Family(config, operation, "pipeline", _keys_and_values(config), windows=windows)


def _deepseek_v32() -> Family:
    index_dim = 32
    config = transformers.DeepseekV32Config(
        **_common(num_key_value_heads=8),
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,  # as wide as keys, else torch has no fast attention on the CPU
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        experts_implementation="eager",
        n_group=2,
        topk_group=1,
        index_n_heads=4,
        index_head_dim=index_dim,
        index_topk=48,
    )
    components = (
        torchkv.Component("latent", 1, config.kv_lora_rank + config.qk_rope_head_dim, DTYPE, sharded=False),
        torchkv.Component(INDEXER, 1, index_dim, DTYPE, sharded=False),
    )
    return Family(config, f"a latent, and an indexer that picks {config.index_topk} tokens", "hooks", components)


FAMILIES: dict[str, Callable[[], Family]] = {
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "deepseek_v32": _deepseek_v32,
}
