"""Tensor parallelism in its textbook form: split the matrices, add up the partial results.

Matrices that produce heads or hidden units are split by output (column parallel), those that consume them by
input (row parallel); after a row-parallel matrix each rank holds a partial sum, which one all-reduce completes.
So a rank computes, and caches, only its own heads. What is not split is computed by every rank: embeddings,
norms, routed experts, the low-rank projections of MLA (hence its latent is the same on every rank).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

COLUMN_PARALLEL = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
KV_PARALLEL = ("k_proj", "v_proj")  # column parallel too, but by kv head
ROW_PARALLEL = ("o_proj", "down_proj")


def shard(
    model: nn.Module,
    config: PreTrainedConfig,
    kv_heads: range,
    *,
    rank: int,
    size: int,
    group: dist.ProcessGroup,
) -> None:
    """Keep this rank's part of ``model``, in place, and add up over ``group`` where sums are partial.

    ``kv_heads``: the global kv heads of this rank; ranks share a head where there are more ranks than heads.
    """
    if size == 1:
        return

    def add_up(module: nn.Module, inputs: tuple[torch.Tensor, ...], partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=group)
        return partial

    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in COLUMN_PARALLEL:
            _keep(module, 0, rank, rank + 1, size)
        elif leaf in KV_PARALLEL:
            _keep(module, 0, kv_heads.start, kv_heads.stop, config.num_key_value_heads)
        elif leaf in ROW_PARALLEL:
            _keep(module, 1, rank, rank + 1, size)
            module.register_forward_hook(add_up)
        elif leaf == "self_attn" and config.model_type != "deepseek_v3":
            # A kv head that several ranks share serves only some of its query heads on each of them.
            module.num_key_value_groups = config.num_attention_heads // size // len(kv_heads)


def _keep(linear: nn.Linear, dim: int, first: int, last: int, parts: int) -> None:
    """Cut the weight along ``dim`` into equal ``parts`` and keep parts first..last-1."""
    if linear.bias is not None:
        raise NotImplementedError("biases are not sharded here; none of the demo's models has one")
    width = linear.weight.shape[dim] // parts
    linear.weight = nn.Parameter(
        linear.weight.detach().narrow(dim, first * width, (last - first) * width).contiguous(),
        requires_grad=False,
    )
