"""A decoder-only transformer with random weights, in plain PyTorch: it makes a prefill cost what a real one costs.

Heads and feed-forward columns may be split into shards, whose results are summed as in tensor parallelism. A rank
computes each of its shards separately, so that the results are the same bits on however many ranks the shards are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from torchkv.layout.layout import KVLayout

__all__ = ["Decoder", "Memory", "ModelSize"]

VOCABULARY = 4096
ROPE_BASE = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """hidden, ffn: widths of the model and of its feed-forward part. heads: query heads, a multiple of kv_heads."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def layout(self, page_size: int, *, tp_rank: int = 0, tp_size: int = 1) -> KVLayout:
        return KVLayout.gqa(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )


class Memory(Protocol):
    """Holds the keys and values of one sequence for the shards of one rank. num_tokens: tokens it holds already."""

    num_tokens: int

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values of n new tokens, [n, kv heads, head_dim]; returns those of all tokens to attend to.

        shard: index among the rank's shards, which all have as many kv heads.
        """


Rotation = tuple[torch.Tensor, torch.Tensor]
Reduce = Callable[[torch.Tensor], object]


class _Shard(nn.Module):
    """One shard of one layer: a part of the heads and of the feed-forward columns. Its results are partial sums."""

    def __init__(self, size: ModelSize, num_shards: int, generator: torch.Generator) -> None:
        super().__init__()
        self._head_dim = size.head_dim
        self._heads = [size.heads // num_shards, size.kv_heads // num_shards, size.kv_heads // num_shards]
        wide, ffn = size.heads * size.head_dim, size.ffn // num_shards
        self.qkv = _weight(sum(self._heads) * size.head_dim, size.hidden, size, generator)
        self.out = _weight(size.hidden, wide // num_shards, size, generator, inputs=wide)
        self.gate_up = _weight(2 * ffn, size.hidden, size, generator)
        self.down = _weight(size.hidden, ffn, size, generator, inputs=size.ffn)

    def attend(self, x: torch.Tensor, rotation: Rotation, memory: Memory, layer: int, number: int) -> torch.Tensor:
        n = len(x)
        qkv = F.linear(x, self.qkv).view(n, -1, self._head_dim)
        q, k, v = torch.split(qkv, self._heads, dim=1)
        k, v = memory.extend(layer, number, _rotate(k, rotation), v)
        q, k, v = (t.transpose(0, 1) for t in (_rotate(q, rotation), k, v))
        # New tokens are a whole prompt, the rest of one behind its prefix, or one token after all others.
        y = _attend_causally(q, k, v) if n > 1 else _attend_to_all(q, k, v)
        return F.linear(y.transpose(0, 1).reshape(n, -1), self.out)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class _Layer(nn.Module):
    def __init__(self, number: int, shards: Sequence[_Shard], reduce: Reduce | None) -> None:
        super().__init__()
        self._number, self._reduce = number, reduce
        self._shards = tuple(shards)
        self.shards = nn.ModuleList(shards)  # registers their weights with the model

    def forward(self, x: torch.Tensor, rotation: Rotation, memory: Memory) -> torch.Tensor:
        y = _norm(x)
        x = x + self._sum([s.attend(y, rotation, memory, self._number, i) for i, s in enumerate(self._shards)])
        y = _norm(x)
        return x + self._sum([s.feed_forward(y) for s in self._shards])

    def _sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if self._reduce is not None:
            self._reduce(total)
        return total


class Decoder(nn.Module):
    """The model. Its weights follow from seed and num_shards alone, in every process on one kind of device.

    held: the shards, of num_shards, that this rank computes; by default all. reduce: sums a tensor, in place, over this
    rank and the ranks that compute the other shards.
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        device: torch.device,
        seed: int,
        num_shards: int = 1,
        held: range | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        super().__init__()
        self._head_dim = size.head_dim
        generator = torch.Generator(device).manual_seed(seed)
        self.embedding = _weight(VOCABULARY, size.hidden, size, generator)
        self.layers = nn.ModuleList()
        held = range(num_shards) if held is None else held
        for number in range(size.layers):
            # Other ranks' shards are drawn too, because the generator's next numbers depend on it.
            shards = [_Shard(size, num_shards, generator) for _ in range(num_shards)]
            self.layers.append(_Layer(number, [shards[shard] for shard in held], reduce))

    def forward(self, tokens: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Logits of the last token. tokens: int64 [n], those behind what ``memory`` holds."""
        x = F.embedding(tokens, self.embedding)
        positions = memory.num_tokens + torch.arange(len(tokens), device=tokens.device, dtype=torch.float32)
        steps = torch.arange(0, self._head_dim, 2, device=tokens.device, dtype=torch.float32) / self._head_dim
        angles = torch.outer(positions, ROPE_BASE**-steps).unsqueeze(1)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, memory)
        return F.linear(_norm(x[-1]), self.embedding)


def _attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [heads, n, head_dim]; k, v: [kv heads, tokens, head_dim], of which the last n belong to the queries."""
    queries, tokens, grouped = q.shape[1], k.shape[1], len(q) != len(k)
    mask = None
    if queries < tokens:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).tril(tokens - queries)
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return attended.squeeze(0)


def _attend_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [heads, 1, head_dim]; k, v: [kv heads, tokens, head_dim].

    In plain products: with PyTorch's own attention, two such steps of one process on a GPU did not always give the same
    logits.
    """
    together = q.reshape(len(k), -1, q.shape[-1])  # query heads that share a kv head, in one matrix
    scores = (together @ k.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    weighted: torch.Tensor = scores.softmax(-1).to(v.dtype) @ v
    return weighted.view_as(q)


def _weight(
    rows: int, columns: int, size: ModelSize, generator: torch.Generator, *, inputs: int | None = None
) -> nn.Parameter:
    """A random matrix. inputs: columns of the whole matrix, if this is a shard of it; they scale the values."""
    weight = torch.empty(rows, columns, dtype=size.dtype, device=generator.device)
    weight.normal_(std=(inputs or columns) ** -0.5, generator=generator)
    return nn.Parameter(weight, requires_grad=False)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
