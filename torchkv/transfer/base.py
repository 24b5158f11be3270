"""A transfer moves the bytes of one verb to one peer, step by step on the progress thread. There are four kinds:

* `torchkv.transfer.host_copy.HostCopyTransfer` (path ``direct``): the host stores into the peer's mapped pages.
* `torchkv.transfer.cuda_copy.CudaCopyTransfer` (``direct``): the GPU stores into the peer's mapped pages.
* `torchkv.transfer.put.PutTransfer` (``runs``, ``slices``): the transport puts one descriptor per contiguous run.
* `torchkv.staging.transfer.StagedTransfer` (``staged``): gather, one bulk put into the peer's ring, scatter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torchkv.arrays import Int64Array
from torchkv.cuda.page_ids import DevicePages
from torchkv.errors import KVError, TransferCancelled
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.transfer.offsets import PairOffsets
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

__all__ = ["Report", "Transfer", "TransferContext"]

# (layers, bytes, path): these layers of the verb are visible to the receiver; so many bytes of them were moved.
Report = Callable[[tuple[int, ...], int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """What a transfer moves, where to, and whom it reports to. It is the same for all kinds of transfer.

    pages: this rank's page ids of the verb. They may be in GPU memory only for transfers whose kernels read them.
    """

    op: SendOp
    grant: BoundGrant
    pages: Int64Array | DevicePages
    local: LocalPages
    connection: PeerConnection
    report: Report


class Transfer(ABC):
    """A `SendOp` in execution. Call ``advance`` until ``finished``; then ``error`` and ``flushed`` say how it ended.

    flushed: whether it is known that nothing of it can land any more.

    ``report`` is called when whole layers have become visible to the receiver. Layers are reported in groups of about
    ``group_bytes``: small enough that the receiver can use the first ones early, large enough that a flush and a
    message cost little beside their bytes. posts: whether the transfer needs the transport's progress.
    """

    group_bytes = 16 << 20
    posts = True

    def __init__(self, context: TransferContext) -> None:
        self.op = context.op
        self.connection = context.connection
        self.finished = False
        self.error: KVError | None = None
        self.flushed = True
        self._grant = context.grant
        self._plan = context.grant.plan
        self._pages = context.pages
        self._local = context.local
        self._report = context.report
        self._steps = self._run()

    def advance(self) -> int:
        """Does one bounded step. Returns the bytes moved; 0 while the transfer waits for something."""
        try:
            moved = next(self._steps)
        except StopIteration as end:
            self.finished = True
            moved = end.value or 0
        except KVError as error:
            self.fail(self._named(error))
            return 0
        if moved:
            self.op.moved = True
        return moved

    def fail(self, error: KVError) -> None:
        """Stops the transfer: it starts nothing more, and finishes once nothing of it can land any more."""
        if self.error is None and not self.finished:
            self.error = error
            self._steps = self._drain()

    def halt(self) -> None:
        self.fail(TransferCancelled(f"request {self.op.request!r}: stopped"))

    @property
    def grant(self) -> BoundGrant:
        return self._grant

    def admit(self) -> bool:
        """Whether the transfer may begin now. If not, ask again when another transfer has ended."""
        return True

    @property
    def patience(self) -> float:
        """How many times ``Options.timeout`` the transfer may go without progress."""
        return 1.0

    @property
    def gated(self) -> bool:
        """Whether it still waits for its data to be ready, which does not count as a lack of progress."""
        return False

    # ------------------------------------------------------------------ for the kinds

    @abstractmethod
    def _run(self) -> Iterator[int]:
        """The steps of the transfer. Each yields the bytes it moved; the last one may return them.

        A `KVError` that it raises ends the transfer.
        """

    @abstractmethod
    def _drain(self) -> Iterator[int]:
        """The steps after a failure, until nothing that was started can land. Clears ``flushed`` if that is unknown."""

    @cached_property
    def _offsets(self) -> PairOffsets:
        """Byte offsets of the verb's page pairs. Only for page ids in host memory."""
        assert not isinstance(self._pages, DevicePages)
        return PairOffsets(self.op, self._grant, self._pages, self._local, self.connection)

    def _groups(self) -> Iterator[tuple[int, ...]]:
        """The layers of the verb that the receiver is owed, ascending, in groups of about ``group_bytes``."""
        if not self.op.num_pages:
            return
        layers = [layer for layer in self.op.layers if layer in self._plan.segments_of]
        if len(layers) < 2:
            if layers:
                yield tuple(layers)
            return
        # An upper bound: as if the verb were the whole grant, and so had all of every window.
        tokens = self.op.num_pages * self._plan.src_page_size
        per_layer = max(1, self._plan.nbytes(tokens, layers) // len(layers))
        size = max(1, self.group_bytes // per_layer)
        for first in range(0, len(layers), size):
            yield tuple(layers[first : first + size])

    def _named(self, error: KVError) -> KVError:
        """The error with the request, peer and layers, which channels do not know."""
        layers = self.op.layers if len(self.op.layers) < 5 else (*self.op.layers[:4], "...")
        where = f"request {self.op.request!r} to {self.connection.name}, layers {', '.join(map(str, layers))}"
        return type(error)(f"{where}: {error}", retryable=error.retryable)
