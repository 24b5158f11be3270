"""The CUDA streams that a group uses beside the model's: which of them may be blocked, and by which work.

A stream is *blocked* while its next operation waits for an event, or for a word in memory, that is not there yet. A
GPU has few hardware queues per process, 8 unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says otherwise. CUDA gives a stream a
free queue when it has something to do, and a blocked stream keeps its queue. Once blocked streams hold all queues,
nothing else of the process runs on that GPU, not even the operations that they wait for (docs/measurements,
2026-11-22). So only a few side streams may be blocked, and they leave queues to the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torchkv.cuda.driver import num_queues

__all__ = ["StreamClaim", "SideStreams", "StreamPool", "enough_queues", "num_waiting_streams"]

S = TypeVar("S", bound=Hashable)

# High priority: blocks of a copy kernel start as soon as any block of the model's kernels has ended.
PRIORITY = -1
# Queues for the two side streams that are never blocked, and for three streams of a model, which may be blocked too:
# they wait for transfers.
RESERVED_QUEUES = 5
MAX_WAITING_STREAMS = 4  # side streams that may be blocked
# With fewer queues fewer than two side streams may be blocked, so that what one request waits for holds up the others.
ENOUGH_QUEUES = 7


def num_waiting_streams() -> int:
    """How many side streams may be blocked; 0 with too few queues."""
    return max(0, min(MAX_WAITING_STREAMS, num_queues() - RESERVED_QUEUES))


def enough_queues() -> bool:
    """Whether streams that wait leave queues to the others."""
    return num_queues() >= ENOUGH_QUEUES


@dataclass(frozen=True, eq=False, slots=True)
class StreamClaim(Generic[S]):
    """The use of one stream of a `StreamPool` by one owner, until `StreamPool.release`. order: see `StreamPool`."""

    stream: S
    owner: Hashable
    order: int


class StreamPool(Generic[S]):
    """Hands out streams for work that waits, so that what one owner waits for holds up no other owner's work.

    An owner is whatever the work waits for: a request, a stream of the model. Claims of one owner share a stream.
    order: if what an owner waits for comes in an order, a number that grows in it.
    """

    def __init__(self, streams: Iterable[S]) -> None:
        self._claims: dict[S, list[StreamClaim[S]]] = {stream: [] for stream in streams}

    def claim(self, owner: Hashable, order: int = 0) -> StreamClaim[S] | None:
        """A stream that ``owner`` has claimed already, or else a free one; None if there is neither.

        Never a stream on which the owner already waits for something of a higher ``order``: that may come only after
        this claim's work is done (a stream of the model may wait for it), and this work would be stuck behind the wait.
        """
        free = None
        for stream, claims in self._claims.items():
            own = [claim.order for claim in claims if claim.owner == owner]
            if own and order >= max(own):
                return self._given(stream, owner, order)
            if not claims and free is None:
                free = stream
        return None if free is None else self._given(free, owner, order)

    def release(self, claim: StreamClaim[S]) -> None:
        """Ends a claim; to be called once."""
        self._claims[claim.stream].remove(claim)

    def _given(self, stream: S, owner: Hashable, order: int) -> StreamClaim[S]:
        claim = StreamClaim(stream, owner, order)
        self._claims[stream].append(claim)
        return claim


class SideStreams:
    """The side streams of one group on one GPU, not ordered with the default stream. Belongs to the progress thread.

    outgoing, incoming: for work that waits for nothing. gated: `num_waiting_streams` streams for transfers whose pages
    are not ready yet. every: all of these.
    """

    def __init__(self, device: torch.device) -> None:
        def streams(count: int) -> list[torch.cuda.Stream]:
            return [torch.cuda.Stream(device, priority=PRIORITY) for _ in range(count)]

        self.outgoing, self.incoming = streams(2)
        waiting = streams(num_waiting_streams())
        self.gated = StreamPool(waiting)
        self.every = self.outgoing, self.incoming, *waiting
