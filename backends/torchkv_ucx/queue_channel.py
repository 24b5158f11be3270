"""`QueueChannel`: what all channels of this transport share: views, checked batches, and a queue of operations."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchkv.errors import KVError, PeerLost, ProtocolError
from torchkv.transport import Channel, RemoteView
from torchkv_ucx.libucp import MEMORY_TYPES
from torchkv_ucx.operation import Operation, PutOperation
from torchkv_ucx.spans import LocalRegions, RemoteRegions
from torchkv_ucx.views import PeerViews
from torchkv_ucx.wire import RegionBlob

__all__ = ["QueueChannel"]


class QueueChannel(Channel):
    """Operations begin in the order in which they were queued, each once the one before is posted.

    peer: names it in messages. device: see `PeerViews`. working: the transport's channels that have something to do;
    this one adds itself.
    """

    def __init__(
        self,
        peer: str,
        regions: Sequence[RegionBlob],
        local: LocalRegions,
        device: Callable[[], torch.device],
    ) -> None:
        self._peer = peer
        self.working: dict[QueueChannel, None] = {}
        self._local = local
        self._views = PeerViews(regions, device, peer)
        self._failure: KVError | None = None
        self._closed = False
        self._unstepped = False  # whether an operation was queued after the last step
        self._queue: deque[Operation] = deque()
        self._posted: list[Operation] = []
        self._remote = RemoteRegions(
            np.array([blob.base for blob in regions], dtype=np.int64),
            np.array([blob.nbytes for blob in regions], dtype=np.int64),
            np.zeros(len(regions), dtype=np.int64),
            np.array([MEMORY_TYPES[blob.device] for blob in regions], dtype=np.int64),
        )

    @property
    @abstractmethod
    def _alive(self) -> bool:
        """Whether the peer has not been seen to have ended."""

    @property
    @abstractmethod
    def wants_progress(self) -> bool:
        """Whether progress has work that no event announces."""

    @abstractmethod
    def note_round(self) -> None:
        """Called once per round of progress, after all channels have been stepped."""

    def view(self, region: int) -> RemoteView | None:
        if self._closed:
            raise ProtocolError(f"view of region {region}: the channel to {self._peer} is closed")
        return self._views.view(region)

    def why_no_view(self, region: int) -> str:
        return self._views.why_not(region) or super().why_no_view(region)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def idle(self) -> bool:
        """No operation is under way."""
        return not self._queue and not self._posted

    @property
    def over(self) -> bool:
        """Whether it is closed, and nothing of it is under way."""
        return self._closed and self.idle

    def uses_local(self, region: int) -> bool:
        """Whether an unfinished put reads from local region ``region``."""
        return any(
            isinstance(operation, PutOperation) and operation.uses_local(region)
            for operation in (*self._posted, *self._queue)
        )

    def step(self, budget_ns: int) -> bool:
        """Advances the operations for about ``budget_ns``. True if anything moved."""
        self._unstepped = False
        if self._failure is None and not self._alive:
            self._fail(PeerLost(f"{self._peer} is lost: its process has ended or the network to it is down"))
        moved = False
        for operation in self._posted:
            moved = operation.step(budget_ns) or moved
        while self._queue:
            operation = self._queue[0]
            moved = operation.step(budget_ns) or moved
            if not operation.posted:
                break
            self._queue.popleft()
            self._posted.append(operation)
            self._settle(operation)
        for operation in self._posted:
            self._settle(operation)
        self._posted = [operation for operation in self._posted if not operation.done]
        return moved

    @property
    def works(self) -> bool:
        """Whether rounds of progress have something to do for it."""
        return not self.idle or self._draining

    @property
    def _draining(self) -> bool:
        """Whether it has failed, and what its peer has sent may still land."""
        return self._failure is not None and not self._closed and not self.drained

    def _enqueue(self, operation: Operation) -> None:
        self._queue.append(operation)
        self._unstepped = True
        self.working[self] = None

    def _settle(self, operation: Operation) -> None:
        """Fails the channel if ``operation`` has failed: a later flush could not tell what has arrived."""
        if operation.done and operation.failed and self._failure is None:
            assert operation.error is not None
            self._fail(operation.error)

    def _fail(self, failure: KVError) -> None:
        self._failure = failure
        self.working[self] = None
        for operation in (*self._posted, *self._queue):
            operation.stop(failure)

    def _require_usable(self) -> None:
        if self._closed:
            raise ProtocolError(f"the channel to {self._peer} is closed")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
