"""The comparison of received pages with the sender's, byte by byte."""

from __future__ import annotations

import torch

from torchkv.cache import KVCache

__all__ = ["count_wrong", "differing"]


def count_wrong(source: KVCache, got: KVCache, src: torch.Tensor, dst: torch.Tensor) -> int:
    """How many bytes of pages ``dst`` of ``got`` differ from pages ``src`` of ``source``, over K and V of all layers.

    src, dst: int64 [pages], on the caches' device. ``got`` may hold a part of ``source``'s kv heads. Elements of both
    caches are 2 bytes wide.
    """
    heads = got.layout.heads
    wrong = 0
    for name in ("k", "v"):
        for want, have in zip(source[name], got[name], strict=True):
            assert want is not None
            assert have is not None
            expected = want.view(torch.int16)[src][:, :, heads.start : heads.stop]
            wrong += int((expected != have.view(torch.int16)[dst]).sum()) * 2
    return wrong


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors of one size differ."""
    return int((one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum())
