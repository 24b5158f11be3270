"""A decoder-only transformer with random weights, in plain PyTorch: what a real prefill costs, and a first decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from torchkv.layout import KVLayout

__all__ = ["Decoder", "Memory", "ModelSize"]

VOCABULARY = 4096
ROPE_BASE = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """hidden, ffn: widths of the model and of its feed-forward part. heads: of queries; kv_heads divides it."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def layout(self, page_size: int) -> KVLayout:
        return KVLayout.gqa(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=self.dtype,
        )


class Memory(Protocol):
    """Keys and values of one sequence. num_tokens: how many tokens it holds already."""

    num_tokens: int

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes those of n new tokens, [n, kv_heads, head_dim]; returns those of all tokens to attend to."""


class _Layer(nn.Module):
    def __init__(self, size: ModelSize, number: int) -> None:
        super().__init__()
        self._size, self._number = size, number
        wide = size.heads * size.head_dim
        self.qkv = _weight(wide + 2 * size.kv_heads * size.head_dim, size.hidden, size.dtype)
        self.out = _weight(size.hidden, wide, size.dtype)
        self.gate_up = _weight(2 * size.ffn, size.hidden, size.dtype)
        self.down = _weight(size.hidden, size.ffn, size.dtype)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], memory: Memory) -> torch.Tensor:
        size, n = self._size, len(x)
        qkv = F.linear(_norm(x), self.qkv).view(n, -1, size.head_dim)
        q, k, v = torch.split(qkv, [size.heads, size.kv_heads, size.kv_heads], dim=1)
        k, v = memory.extend(self._number, _rotate(k, rotation), v)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (_rotate(q, rotation), k, v))
        # New tokens come all at once, behind nothing, or one by one, behind everything.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=size.heads != size.kv_heads)
        x = x + F.linear(y.squeeze(0).transpose(0, 1).reshape(n, -1), self.out)
        gate, up = F.linear(_norm(x), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """The same weights for the same seed, in every process on one kind of device."""

    def __init__(self, size: ModelSize, *, device: torch.device, seed: int) -> None:
        super().__init__()
        with device:
            self.layers = nn.ModuleList(_Layer(size, number) for number in range(size.layers))
            self.embedding = _weight(VOCABULARY, size.hidden, size.dtype)
        self._head_dim = size.head_dim
        generator = torch.Generator(device).manual_seed(seed)
        for weight in self.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)

    def forward(self, tokens: torch.Tensor, memory: Memory) -> torch.Tensor:
        """tokens: int64 [n], of which memory holds none yet, or one behind those it holds. The last one's logits."""
        x = F.embedding(tokens, self.embedding)
        positions = memory.num_tokens + torch.arange(len(tokens), device=tokens.device, dtype=torch.float32)
        steps = torch.arange(0, self._head_dim, 2, device=tokens.device, dtype=torch.float32) / self._head_dim
        angles = torch.outer(positions, ROPE_BASE**-steps).unsqueeze(1)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, memory)
        return F.linear(_norm(x[-1]), self.embedding)


def _weight(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
