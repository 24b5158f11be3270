"""The format of the staging ring: alignment, and spans of memory.

A stage is a span of the receiver's staging ring that is granted to one writer. The writer packs a piece of a request
into it (see `torchkv.layout.pieces`), and the receiver unpacks the piece into its pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchkv.errors import ProtocolError

__all__ = ["ALIGNMENT", "MemorySpan"]

ALIGNMENT = 256  # bytes; of stages and of groups in them: whole cache lines, and the widest words of a GPU


class MemorySpan(NamedTuple):
    """``nbytes`` bytes at address ``ptr``: memory of this rank, or memory of a peer that is mapped here."""

    ptr: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemorySpan:
        """The memory of a contiguous uint8 tensor. Raises ``ProtocolError`` for any other tensor."""
        if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
            raise ProtocolError(f"a stage must be a contiguous uint8 tensor, not {tensor.dtype} {tuple(tensor.shape)}")
        return cls(tensor.data_ptr(), tensor.numel())

    def part(self, offset: int, nbytes: int) -> MemorySpan:
        """The ``nbytes`` bytes at ``offset``."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, f"[{offset}, {offset + nbytes}) of {self.nbytes}"
        return MemorySpan(self.ptr + offset, nbytes)
