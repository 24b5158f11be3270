"""A group's side streams on its GPU: which of them may wait, and for whom.

A GPU has a few hardware queues, 8 unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says otherwise. CUDA gives a stream a free one
when it has something to do; once all are taken by streams that wait, nothing else in the process runs, not even what
these wait for (docs/measurements, 2026-11-22). So only a few side streams wait, and leave queues to the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torchkv.cudadriver import num_queues

__all__ = ["Claim", "SideStreams", "StreamPool", "may_wait"]

S = TypeVar("S", bound=Hashable)

# High: blocks of a copy kernel start as soon as any block of the model's kernels has ended.
PRIORITY = -1
# Queues for two streams that wait for nothing, and for three of a model: it waits for transfers, too.
OTHERS = 5
MOST = 4  # side streams that may wait; half of them for peers


def may_wait() -> tuple[int, int]:
    """How many side streams may wait for signals of peers, and for events: (0, 0) with too few queues."""
    count = max(0, min(MOST, num_queues() - OTHERS))
    return count // 2, count - count // 2


@dataclass(frozen=True, eq=False, slots=True)
class Claim(Generic[S]):
    """What a tenant has of a `StreamPool`, until it gives it back. number: how many there were before."""

    stream: S
    number: int
    tenant: Hashable
    order: int


class StreamPool(Generic[S]):
    """Streams on which work may wait: what one tenant waits for should hold up no other.

    order: of what a tenant waits for, if it comes in one.
    """

    def __init__(self, streams: Iterable[S]) -> None:
        self._numbers = itertools.count()
        self._claims: dict[S, list[Claim[S]]] = {stream: [] for stream in streams}

    def claim(self, tenant: Hashable, order: int = 0) -> Claim[S] | None:
        """A stream that the tenant has already, or one that nobody has; None if there is none.

        No stream of which the tenant waits for something later in ``order``, which may come from behind this.
        """
        stream = self._own_or_free(tenant, order)
        return None if stream is None else self._given(stream, tenant, order)

    def share(self, tenant: Hashable) -> Claim[S]:
        """The same; if there is none, that whose first tenant has come last: no other is less likely to hang."""
        stream = self._own_or_free(tenant, 0)
        if stream is None:
            stream = max(self._claims, key=lambda one: self._claims[one][0].number)
        return self._given(stream, tenant, 0)

    def release(self, claim: Claim[S]) -> None:
        """Gives it back, once."""
        self._claims[claim.stream].remove(claim)

    def _own_or_free(self, tenant: Hashable, order: int) -> S | None:
        free = None
        for stream, claims in self._claims.items():
            own = [claim.order for claim in claims if claim.tenant == tenant]
            if own and order >= max(own):
                return stream
            if not claims and free is None:
                free = stream
        return free

    def _given(self, stream: S, tenant: Hashable, order: int) -> Claim[S]:
        claim = Claim(stream, next(self._numbers), tenant, order)
        self._claims[stream].append(claim)
        return claim


class SideStreams:
    """Unordered with the GPU's default stream. Belongs to the progress thread.

    outgoing, incoming: for work that waits for nothing here, and for peers but a while. waiting: for pieces that peers
    signal. gated: for transfers whose data are not ready yet. See `may_wait` for how many there are.
    """

    def __init__(self, device: torch.device) -> None:
        def streams(count: int) -> list[torch.cuda.Stream]:
            return [torch.cuda.Stream(device, priority=PRIORITY) for _ in range(count)]

        self.outgoing, self.incoming = streams(2)
        self.waiting, self.gated = (StreamPool(streams(count)) for count in may_wait())
