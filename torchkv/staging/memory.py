"""The staging memory of one rank: a ring that others write to, and one that its own transfers pack into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.staging import MAX_CHANNELS, Signal, Stage, StagingRing

__all__ = ["Room", "SendStages", "StageMemory"]


class Room(NamedTuple):
    """``nbytes`` bytes at address ``ptr``, to pack into or to unpack from: this rank's, or a peer's, mapped here."""

    ptr: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Room:
        """A contiguous uint8 tensor's. Raises ``ProtocolError`` for any other."""
        if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
            raise ProtocolError(f"a stage must be a contiguous uint8 tensor, not {tensor.dtype} {tuple(tensor.shape)}")
        return cls(tensor.data_ptr(), tensor.numel())

    def part(self, offset: int, nbytes: int) -> Room:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, f"[{offset}, {offset + nbytes}) of {self.nbytes}"
        return Room(self.ptr + offset, nbytes)


MAX_BOARDED = 2  # transfers to one receiver at once: while one ends, the next begins


@dataclass(slots=True)
class StageMemory:
    """Registered memory, uint8 ``[nbytes]``. region: its index in the transport.

    signals: int64 ``[n, 2 * MAX_CHANNELS]``, at `signal_offset`.
    """

    tensor: torch.Tensor
    region: int
    signals: torch.Tensor = field(default_factory=lambda: torch.empty((0, 2 * MAX_CHANNELS), dtype=torch.int64))

    def release(self) -> None:
        """Lets go of the memory, after the last transfer: works and groups may be kept for longer than that."""
        self.tensor, self.signals = self.tensor.new_empty(0), self.signals.new_empty(0)

    def signal_ptr(self, signal: Signal) -> int:
        """Address of the signal's first word."""
        return self.signals[signal.word].data_ptr()

    def room(self, stage: Stage) -> Room:
        return Room.of(self.tensor).part(stage.offset, stage.nbytes)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()


class SendStages:
    """Memory that this rank's transfers pack into, and who has which part of it. Belongs to the progress thread.

    It is taken when the first transfer needs it: ranks that reach each other's pages directly never do.
    """

    def __init__(self, nbytes: int, make: Callable[[int], StageMemory]) -> None:
        """make: allocates and registers so many bytes; may raise ``TransportUnavailable``."""
        self.ring = StagingRing(nbytes)
        self._make = make
        self._memory: StageMemory | None = None
        self._boarded: Counter[int] = Counter()

    def release(self) -> None:
        """See `StageMemory.release`."""
        if self._memory is not None:
            self._memory.release()

    @property
    def taken(self) -> int:
        """Bytes of memory taken so far."""
        return 0 if self._memory is None else self._memory.nbytes

    def board(self, dst: int) -> bool:
        """Whether one more transfer to rank ``dst`` may begin now; then `leave` when it has ended.

        A few keep the link busy. More would only share the memory out among them, and each step of the progress
        thread with it.
        """
        if self._boarded[dst] == MAX_BOARDED:
            return False
        self._boarded[dst] += 1
        return True

    def leave(self, dst: int) -> None:
        self._boarded[dst] -= 1

    def take(self) -> StageMemory:
        """The memory. Raises ``TransportUnavailable``."""
        if self._memory is None:
            if not self.ring.capacity:
                raise TransportUnavailable(
                    "this rank has no staging memory to send from: Options.staging_send is 0; raise it, or use "
                    "another path"
                )
            self._memory = self._make(self.ring.capacity)
        return self._memory
