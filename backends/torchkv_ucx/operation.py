"""The operations of a channel, puts and flushes: each is a `Completion` that the channel advances step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PeerLost, TransferCancelled
from torchkv.transport import batch_check
from torchkv_ucx import pump
from torchkv_ucx.libucp import HOST, request_params
from torchkv_ucx.process import LocalProcess

__all__ = ["FlushOperation", "Link", "Operation", "PutOperation", "Spans", "VectoredPut"]


@dataclass(frozen=True, slots=True)
class Link:
    """What compiled code needs to reach one peer: function addresses and raw handles; and how errors are made."""

    functions: Int64Array
    worker: int
    endpoint: int
    describe: Callable[[int, str], KVError]  # (ucs status, operation) -> typed error


@dataclass(frozen=True, slots=True)
class Spans(batch_check.Spans):
    """Checked spans with UCX's handles of their regions."""

    memhs: Int64Array  # memory handles by local region
    rkeys: Int64Array  # remote keys by remote region
    memory_type: int = HOST  # ucs_memory_type_t of all sources, and of all targets


class Operation(ABC):
    """Base of all operations. `step` advances it. Once it is `posted`, the channel's next operation begins.

    window: how many requests it may have outstanding.
    """

    def __init__(self, link: Link, name: str, window: int) -> None:
        self._link = link
        self._name = name
        self._ring = np.zeros((window, pump.RING_COLUMNS), dtype=np.int64)
        self._state = np.zeros(pump.STATE_WORDS, dtype=np.int64)
        self._stopped_by: KVError | None = None
        self._error: KVError | None = None
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    @property
    def error(self) -> KVError | None:
        return self._error

    @property
    def failed(self) -> bool:
        """Whether it ended with an error other than its caller's cancel."""
        return self._error is not None and not isinstance(self._error, TransferCancelled)

    @property
    @abstractmethod
    def posted(self) -> bool:
        """Whether nothing more of it will be posted: all of it was, or it was stopped or has failed."""

    @property
    def outstanding(self) -> int:
        """Number of requests that UCX has not completed."""
        return int(self._state[pump.COUNT])

    def cancel(self) -> None:
        if not self.posted:
            self.stop(TransferCancelled(f"{self._name} was cancelled before all of it was posted"))

    def stop(self, reason: KVError) -> None:
        """Posts nothing more; ends with ``reason`` once UCX has completed what was posted."""
        if self._done or self._stopped_by is not None:
            return
        self._stopped_by = reason
        self._state[pump.STOPPED] = 1

    def step(self, budget_ns: int) -> bool:
        """Posts and reaps for at most ``budget_ns``. True if anything moved."""
        moved = False if self._done else self._step(budget_ns)
        if not self._done and self.posted and self.outstanding == 0:
            status = int(self._state[pump.STATUS])
            # After a stop the reason for it comes first: UCX completes the rest with a status that says less.
            self._error = self._stopped_by or (self._link.describe(status, self._name) if status else None)
            self._done = moved = True
            self._release()
        return moved

    @abstractmethod
    def _step(self, budget_ns: int) -> bool:
        """Posts and reaps for at most ``budget_ns``. True if anything moved."""

    def _release(self) -> None:  # noqa: B027 - a flush holds nothing
        """Drops what only a pending operation needs."""


class PutOperation(Operation):
    def __init__(self, link: Link, name: str, spans: Spans) -> None:
        super().__init__(link, name, max(1, min(pump.WINDOW, len(spans.length))))
        self._spans: Spans | None = spans
        self._params = request_params(spans.memory_type)

    @property
    def posted(self) -> bool:
        if self._spans is None or self._state[pump.STOPPED] or self._state[pump.STATUS]:
            return True
        return bool(self._state[pump.CURSOR] == len(self._spans.length))

    def uses_local(self, region: int) -> bool:
        """Whether this unfinished put reads from local region ``region``."""
        return self._spans is not None and bool(np.any(self._spans.local_region == region))

    def _step(self, budget_ns: int) -> bool:
        spans, link = self._spans, self._link
        assert spans is not None
        return bool(
            pump.pump(
                link.functions, link.worker, link.endpoint, self._params, spans.source, spans.target, spans.length,
                spans.local_region, spans.remote_region, spans.memhs, spans.rkeys, self._ring, self._state, budget_ns,
            )
        )  # fmt: skip

    def _release(self) -> None:
        self._spans = None


class VectoredPut(PutOperation):
    """A put of small spans over the cma lane, with one system call for `pump.VECTOR` spans; UCX makes one for each.

    The call is UCX's own on that lane: ``process_vm_writev`` by the writer. Its bytes are visible when it returns.
    """

    def __init__(self, link: Link, name: str, spans: Spans, peer: LocalProcess) -> None:
        super().__init__(link, name, spans)
        self._peer = peer
        self._vectors = np.zeros((2, pump.VECTOR, 2), dtype=np.int64)

    def _step(self, budget_ns: int) -> bool:
        spans = self._spans
        assert spans is not None
        if self._state[pump.STOPPED]:
            return False
        if self._peer.ended:
            self.stop(PeerLost(f"{self._name}: process {self._peer.pid} has ended"))
            return True
        arrays = (spans.source, spans.target, spans.length)
        if not pump.write_vectors(self._link.functions, self._peer.pid, *arrays, self._vectors, self._state, budget_ns):
            self.stop(self._peer.why_not_written(self._name, *(a[self._state[pump.CURSOR] :] for a in arrays)))
        return True


class FlushOperation(Operation):
    def __init__(self, link: Link, name: str) -> None:
        super().__init__(link, name, 1)
        self._params = request_params()
        self._begun = False

    @property
    def posted(self) -> bool:
        return self._begun or bool(self._state[pump.STOPPED])

    def _step(self, budget_ns: int) -> bool:
        link = self._link
        if not self.posted:
            self._begun = True
            pump.post_flush(link.functions, link.endpoint, self._params, self._ring, self._state)
            return True
        return bool(pump.reap(link.functions, self._ring, self._state) > 0)
