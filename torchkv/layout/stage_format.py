"""The format of the staging ring: alignment, signal words behind the ring, and FIFOs through a stage.

A stage is a span of the receiver's staging ring that is granted to one writer. The writer packs a piece of a request
into it (see `torchkv.layout.pieces`), and the receiver unpacks the piece into its pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchkv.errors import ProtocolError

__all__ = [
    "ALIGNMENT",
    "CHUNK_UNIT",
    "MAX_CHANNELS",
    "SIGNALS",
    "SIGNAL_STEP",
    "SLOTS",
    "MemorySpan",
    "Signal",
    "ChunkFifo",
    "signal_offset",
]

ALIGNMENT = 256  # bytes; of stages and of groups in them: whole cache lines, and the widest words of a GPU

SIGNALS = 64  # signals behind a ring: the most stages that can be FIFOs at once
SIGNAL_STEP = 1 << 20  # between the values of consecutive uses of signals; more than the chunks of a piece
MAX_CHANNELS = 256  # of a FIFO
SLOTS = 4  # FIFO slots of each channel: chunks of it that may be in the stage at once
CHUNK_UNIT = 32 << 10  # bytes; chunks are multiples of it, and it is a multiple of the tiles of all kernels


class Signal(NamedTuple):
    """How the GPUs on both sides of a FIFO tell each other how far they are: int64 words behind the ring.

    word: index of the signal, of ``2 * MAX_CHANNELS`` words. Words only ever increase. value: larger than all values
    that these words have held.

    Word c becomes ``value`` plus the number of chunks that channel c has written, and word ``MAX_CHANNELS + c`` becomes
    ``value`` plus the number of these chunks that the receiver has read.
    """

    word: int
    value: int


class ChunkFifo(NamedTuple):
    """How a piece of any size passes through a stage of fixed size: as a FIFO of chunks, for each of some channels.

    chunk: bytes of a chunk, a multiple of `CHUNK_UNIT`. channels: of the FIFO; each moves every ``channels``-th chunk
    of the piece through `SLOTS` slots of its own.
    """

    chunk: int
    channels: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stage that the FIFO takes."""
        return self.chunk * self.channels * SLOTS

    def chunks(self, job_nbytes: int) -> int:
        """Chunks of one job (one segment in one layer) of ``job_nbytes`` bytes; the last one may be partly filled."""
        return -(-job_nbytes // self.chunk)


def signal_offset(ring_nbytes: int, word: int) -> int:
    """Offset, from the start of a ring of ``ring_nbytes`` bytes, of signal number ``word``."""
    return -(-ring_nbytes // 8) * 8 + 8 * 2 * MAX_CHANNELS * word


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
