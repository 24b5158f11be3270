"""The staging memory of one rank: the receive ring, which peers write to, and the send ring, which it packs into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchkv.errors import TransportUnavailable
from torchkv.layout.stage_format import MemorySpan
from torchkv.protocol.receiving.stage_allocator import Stage, StagingRing

__all__ = ["SendStages", "StageMemory"]


MAX_TURNS = 2  # staged transfers to one receiver at once: the next begins while the last pieces of one are under way


@dataclass(slots=True)
class StageMemory:
    """Registered memory of a ring: tensor, uint8 ``[nbytes]``; region, its index in the transport."""

    tensor: torch.Tensor
    region: int

    def release(self) -> None:
        """Drops the memory after the last transfer, since works and groups may be kept alive for longer."""
        self.tensor = self.tensor.new_empty(0)

    def span(self, stage: Stage) -> MemorySpan:
        return MemorySpan.of(self.tensor).part(stage.offset, stage.nbytes)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()


class SendStages:
    """The send ring, and the turns of staged transfers. Used by the progress thread only.

    The memory is allocated when the first transfer needs it: ranks that reach each other's pages or rings never do.
    """

    def __init__(self, nbytes: int, make: Callable[[int], StageMemory]) -> None:
        """make: allocates and registers ``nbytes`` bytes; may raise ``TransportUnavailable``."""
        self.ring = StagingRing(nbytes)
        self._make = make
        self._memory: StageMemory | None = None
        self._turns: Counter[int] = Counter()

    def release(self) -> None:
        """See `StageMemory.release`."""
        if self._memory is not None:
            self._memory.release()

    @property
    def taken(self) -> int:
        """Bytes of memory allocated so far."""
        return 0 if self._memory is None else self._memory.nbytes

    def acquire_turn(self, dst: int) -> bool:
        """Whether one more transfer to rank ``dst`` may begin now. If so, call `release_turn` when it has ended.

        A few transfers keep the link busy. More would only divide the ring, and the progress thread's time, among them.
        """
        if self._turns[dst] == MAX_TURNS:
            return False
        self._turns[dst] += 1
        return True

    def release_turn(self, dst: int) -> None:
        self._turns[dst] -= 1

    def take(self) -> StageMemory:
        """The memory, allocated at the first call. Raises ``TransportUnavailable``."""
        if self._memory is None:
            if not self.ring.capacity:
                raise TransportUnavailable(
                    "this rank has no staging memory to send from: Options.staging_send is 0; raise it, or use "
                    "another path"
                )
            self._memory = self._make(self.ring.capacity)
        return self._memory
