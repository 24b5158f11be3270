"""What can be under way on a channel: puts, flushes and signals, each a `Completion` that the channel steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchkv import spans
from torchkv.errors import KVError, PeerLost, TransferCancelled
from torchkv.transport import Int64Array
from torchkv_ucx import pump
from torchkv_ucx.libucp import HOST, request_params
from torchkv_ucx.mailbox import SIGNAL_NBYTES, Mailbox
from torchkv_ucx.process import LocalProcess

__all__ = ["FlushOperation", "Link", "Operation", "PutOperation", "SignalOperation", "Spans", "VectoredPut"]


@dataclass(frozen=True, slots=True)
class Link:
    """What compiled code needs to reach one peer: function addresses, raw handles, and how errors are named."""

    functions: Int64Array
    worker: int
    endpoint: int
    describe: Callable[[int, str], KVError]  # (ucs status, operation) -> typed error


@dataclass(frozen=True, slots=True)
class Spans(spans.Spans):
    """Checked puts with the handles of their regions."""

    memhs: Int64Array  # by local region
    rkeys: Int64Array  # by remote region
    memory_type: int = HOST  # ucs_memory_type_t of all sources, and of all targets


class Operation(ABC):
    """Base of all operations. ``step`` advances it; ``posted`` lets the channel's next operation begin."""

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
        """Ended in an error, other than by its caller's cancel."""
        return self._error is not None and not isinstance(self._error, TransferCancelled)

    @property
    @abstractmethod
    def posted(self) -> bool:
        """Whether nothing more of it will be posted."""

    @property
    def outstanding(self) -> int:
        """Requests that UCX still holds."""
        return int(self._state[pump.COUNT])

    def cancel(self) -> None:
        if not self.posted:
            self.stop(TransferCancelled(f"{self._name} was cancelled before all of it was posted"))

    def stop(self, reason: KVError) -> None:
        """Posts nothing more; ends with ``reason`` once UCX has let go of what was posted."""
        if self._done or self._stopped_by is not None:
            return
        self._stopped_by = reason
        self._state[pump.STOPPED] = 1

    def step(self, budget_ns: int) -> bool:
        """Posts and reaps for at most ``budget_ns``. True if anything moved."""
        moved = False if self._done else self._step(budget_ns)
        if not self._done and self.posted and self.outstanding == 0:
            status = int(self._state[pump.STATUS])
            # Who stopped it knows better than the status in which UCX then gave the rest back.
            self._error = self._stopped_by or (self._link.describe(status, self._name) if status else None)
            self._done = moved = True
            self._release()
        return moved

    @abstractmethod
    def _step(self, budget_ns: int) -> bool:
        """Posts and reaps for at most ``budget_ns``. True if anything moved."""

    def _release(self) -> None:  # noqa: B027 - most operations hold nothing to drop
        """Drops what only a running operation needs."""


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
    """Small spans over the cma lane. UCX makes one system call a span; this makes one for hundreds.

    What it does is what UCX does there, ``process_vm_writev`` by the initiator: complete, and visible, on return.
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


class SignalOperation(Operation):
    """A flush, so that earlier puts are visible, then one small put into the peer's mailbox.

    target: address of the peer's slot; memh, rkeys: handles of the two mailboxes.
    """

    def __init__(
        self, link: Link, name: str, mailbox: Mailbox, value: int, target: int, memh: int, rkeys: Int64Array
    ) -> None:
        super().__init__(link, name, 1)
        self._flush = FlushOperation(link, name)
        self._mailbox = mailbox
        self._value = value
        self._target = target
        self._memhs = np.array([memh], dtype=np.int64)
        self._rkeys = rkeys
        self._place: int | None = None
        self._put: PutOperation | None = None

    @property
    def posted(self) -> bool:
        if self._put is not None:
            return self._put.posted
        return self._stopped_by is not None

    @property
    def outstanding(self) -> int:
        return self._flush.outstanding + (0 if self._put is None else self._put.outstanding)

    def _step(self, budget_ns: int) -> bool:
        if not self._flush.done:
            if self._stopped_by is not None:
                self._flush.stop(self._stopped_by)
            return self._flush.step(budget_ns)
        if self._flush.error is not None:
            self.stop(self._flush.error)
        if self._put is None:
            if self._stopped_by is not None:
                return False
            self._place = self._mailbox.acquire(self._value)
            if self._place is None:
                return False
            self._put = PutOperation(self._link, self._name, self._spans(self._place))
        moved = self._put.step(budget_ns)
        if self._put.done and self._put.error is not None:
            self.stop(self._put.error)
        return moved

    def _spans(self, place: int) -> Spans:
        first = np.zeros(1, dtype=np.int64)
        return Spans(
            source=np.array([self._mailbox.address(place)], dtype=np.int64),
            target=np.array([self._target], dtype=np.int64),
            length=np.array([SIGNAL_NBYTES], dtype=np.int64),
            local_region=first,
            remote_region=first,
            memhs=self._memhs,
            rkeys=self._rkeys,
        )

    def _release(self) -> None:
        if self._place is not None:
            self._mailbox.release(self._place)
