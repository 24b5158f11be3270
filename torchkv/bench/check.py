"""Every run is byte-checked."""

from __future__ import annotations

import torch

from torchkv.cache import KVCache

__all__ = ["count_wrong"]


def count_wrong(source: KVCache, got: KVCache, src: torch.Tensor, dst: torch.Tensor) -> int:
    """Bytes in pages ``dst`` of ``got``, in all layers, that differ from those heads in pages ``src`` of ``source``."""
    heads = got.layout.heads
    wrong = 0
    for name in ("k", "v"):
        for want, have in zip(source[name], got[name], strict=True):
            assert want is not None
            assert have is not None
            expected = want.view(torch.int16)[src][:, :, heads.start : heads.stop]
            wrong += int((expected != have.view(torch.int16)[dst]).sum()) * 2
    return wrong
