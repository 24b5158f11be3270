"""One plain copy of as many contiguous bytes in one process: the limit that no way of moving pages is asked to beat."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from torchkv.bench import gpu
from torchkv.bench.rivals.cases import Case
from torchkv.bench.rivals.side import POISON, Rival, Side

__all__ = ["MEMCPY", "PEER_COPY"]


class _Memcpy(Side):
    """C's memcpy by one thread, between private buffers."""

    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        self._source = np.empty(case.payload(nbytes), dtype=np.uint8)
        self._target = np.empty_like(self._source)

    def prepare(self, number: int) -> None:
        words = np.random.default_rng(number).integers(0, 1 << 64, len(self._source) // 8, dtype=np.uint64)
        self._source.view(np.uint64)[:] = words
        self._target[:] = POISON

    def move(self) -> None:
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, len(self._source))

    def wrong(self) -> int:
        return int(np.count_nonzero(self._source != self._target))


class _PeerCopy(Side):
    """A copy from GPU to GPU, or on one GPU where there is only one, by the driver's copy engine."""

    def __init__(self, case: Case, nbytes: int, rank: int) -> None:
        here, there = gpu.devices(rank)
        self._source = torch.empty(case.payload(nbytes), dtype=torch.uint8, device=here)
        self._target = torch.empty(case.payload(nbytes), dtype=torch.uint8, device=there)

    def prepare(self, number: int) -> None:
        self._source.random_(0, 256, generator=torch.Generator(self._source.device).manual_seed(number))
        self._target.fill_(POISON)
        self._synchronize()

    def move(self) -> None:
        self._target.copy_(self._source, non_blocking=True)
        self._synchronize()

    def wrong(self) -> int:
        return int((self._source != self._target.to(self._source.device)).sum())

    def _synchronize(self) -> None:
        for tensor in (self._source, self._target):
            torch.cuda.synchronize(tensor.device)


MEMCPY = Rival(
    name="memcpy", ranks=1, make=_Memcpy, why_not=lambda device: None if device == "cpu" else "copies host memory only"
)
PEER_COPY = Rival(
    name="peer-copy",
    ranks=1,
    make=_PeerCopy,
    why_not=lambda device: None if device == "cuda" else "copies memory of GPUs only",
)
