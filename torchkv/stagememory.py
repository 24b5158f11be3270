"""The staging memory of one rank: a ring that others write to, and one that its own transfers pack into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchkv.errors import TransportUnavailable
from torchkv.staging import StagingRing

__all__ = ["SendStages", "StageMemory"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Registered memory, uint8 ``[nbytes]``. region: its index in the transport."""

    tensor: torch.Tensor
    region: int

    @property
    def ptr(self) -> int:
        return self.tensor.data_ptr()

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

    @property
    def taken(self) -> int:
        """Bytes of memory taken so far."""
        return 0 if self._memory is None else self._memory.nbytes

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
