"""A GPU's side streams: which of them may wait, and for whom.

A GPU has a few hardware queues, 8 unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says otherwise. CUDA gives a stream a free one
when it has something to do; once all are taken by streams that wait, nothing else in the process runs, not even what
these wait for (docs/measurements, 2026-11-22). So all groups of a process share a few side streams, and leave some
queues to the model.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torchkv.cudadriver import num_queues

__all__ = ["Claim", "SideStreams", "StreamPool", "may_wait", "side_streams"]

S = TypeVar("S", bound=Hashable)

# High: blocks of a copy kernel start as soon as any block of the model's kernels has ended.
PRIORITY = -1
# Queues for two streams that wait for nothing, and for three of a model: it waits for transfers, too.
OTHERS = 5
MOST = 6  # side streams that may wait; a third of them for peers


def may_wait() -> tuple[int, int]:
    """How many side streams may wait for signals of peers, and for events: (0, 0) with too few queues."""
    count = max(0, min(MOST, num_queues() - OTHERS))
    return count // 3, count - count // 3


@dataclass(frozen=True, eq=False, slots=True)
class Claim(Generic[S]):
    """What a tenant has of a `StreamPool`, until it gives it back. number: how many there were before."""

    stream: S
    number: int
    owner: object
    tenant: Hashable
    order: int


class StreamPool(Generic[S]):
    """Streams on which work may wait: what one tenant waits for should hold up no other. Thread-safe.

    owner: who goes at once, with all tenants of its own. order: of what a tenant waits for, if it comes in one.
    """

    def __init__(self, streams: Iterable[S]) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._claims: dict[S, list[Claim[S]]] = {stream: [] for stream in streams}

    def claim(self, owner: object, tenant: Hashable, order: int = 0) -> Claim[S] | None:
        """A stream that the tenant has already, or one that nobody has; None if there is none.

        No stream of which the tenant waits for something later in ``order``, which may come from behind this.
        """
        with self._lock:
            stream = self._own_or_free(owner, tenant, order)
            return None if stream is None else self._given(stream, owner, tenant, order)

    def share(self, owner: object, tenant: Hashable) -> Claim[S]:
        """The same; if there is none, that whose first tenant has come last: no other is less likely to hang."""
        with self._lock:
            stream = self._own_or_free(owner, tenant, 0)
            if stream is None:
                stream = max(self._claims, key=lambda one: self._claims[one][0].number)
            return self._given(stream, owner, tenant, 0)

    def release(self, claim: Claim[S]) -> None:
        """Gives it back; nothing, if its owner has left."""
        with self._lock, suppress(ValueError):
            self._claims[claim.stream].remove(claim)

    def leave(self, owner: object) -> None:
        """Gives back all that the owner's tenants have."""
        with self._lock:
            for claims in self._claims.values():
                claims[:] = [claim for claim in claims if claim.owner is not owner]

    def _own_or_free(self, owner: object, tenant: Hashable, order: int) -> S | None:
        free = None
        for stream, claims in self._claims.items():
            own = [claim.order for claim in claims if claim.owner is owner and claim.tenant == tenant]
            if own and order >= max(own):
                return stream
            if not claims and free is None:
                free = stream
        return free

    def _given(self, stream: S, owner: object, tenant: Hashable, order: int) -> Claim[S]:
        claim = Claim(stream, next(self._numbers), owner, tenant, order)
        self._claims[stream].append(claim)
        return claim


class SideStreams:
    """Of one GPU, unordered with its default stream, for all groups of this process.

    outgoing, incoming: for work that waits for nothing here, and for peers but a while. waiting: for pieces that peers
    signal. gated: for transfers whose data are not ready yet. See `may_wait` for how many there are.
    """

    def __init__(self, device: torch.device) -> None:
        def streams(count: int) -> list[torch.cuda.Stream]:
            return [torch.cuda.Stream(device, priority=PRIORITY) for _ in range(count)]

        self.outgoing, self.incoming = streams(2)
        self.waiting, self.gated = (StreamPool(streams(count)) for count in may_wait())


@functools.cache
def side_streams(index: int) -> SideStreams:
    """Those of ``cuda:index``."""
    return SideStreams(torch.device("cuda", index))
