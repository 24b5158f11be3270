"""Moving the bytes of one verb to one peer, step by step. How, is up to the kinds of transfer.

* `copytransfer.CopyTransfer` stores into host memory that is mapped here.
* `kerneltransfer.KernelTransfer` lets the GPU store into the peer's pages.
* `puttransfer.PutTransfer` hands descriptors to the transport.
* `stagedtransfer.StagedTransfer` packs pages into the peer's staging ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from torchkv.errors import KVError, TransferCancelled
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route

__all__ = ["STEP_BYTES", "Report", "Transfer"]

# One step of a host copy: short enough (about two milliseconds) for the progress thread to stay responsive, and long
# beside the tenth of one that the rest of its round takes.
STEP_BYTES = 16 << 20

# (layers, bytes, path): these layers of the verb are visible at the receiver.
Report = Callable[[tuple[int, ...], int, str], None]


class Transfer(ABC):
    """One `SendOp` in execution. ``advance`` until ``finished``; then ``error`` and ``flushed`` say how it ended.

    flushed: nothing of it can land any more. ``report`` is called whenever whole layers have become visible at the
    receiver; layers are attested together once ``group_bytes`` have moved: small enough that a receiver can start
    early, large enough that a flush and a message cost nothing beside it.
    """

    group_bytes = 16 << 20
    posts = True  # whether it needs the transport's progress

    def __init__(self, op: SendOp, grant: BoundGrant, *, local: LocalPages, route: Route, report: Report) -> None:
        self.op = op
        self.route = route
        self.finished = False
        self.error: KVError | None = None
        self.flushed = True
        self.torn = False  # the receiver waits for what will never come: only the request's failure ends that
        self._grant = grant
        self._plan = grant.plan
        self._local = local
        self._report = report
        self._steps = self._run()

    def advance(self) -> int:
        """Does one bounded step. Returns the bytes it moved; 0 while it waits for something else."""
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
        """Stops: starts nothing more, and finishes once nothing of it can land any more."""
        if self.error is None and not self.finished:
            self.error = error
            self._steps = self._drain()

    def halt(self) -> None:
        self.fail(TransferCancelled(f"request {self.op.request!r}: stopped"))

    @property
    def grant(self) -> BoundGrant:
        return self._grant

    def admit(self) -> bool:
        """Whether it may begin. To be asked again, once another transfer has ended, until it is true."""
        return True

    @property
    def patience(self) -> float:
        """How many times ``Options.timeout`` it may go without progress."""
        return 1.0

    @property
    def gated(self) -> bool:
        """Whether it has not begun because the data are not ready, which is no lack of progress."""
        return False

    # ------------------------------------------------------------------ for the kinds

    @abstractmethod
    def _run(self) -> Iterator[int]:
        """The steps; each yields the bytes it moved, and the last may return them. May raise a `KVError`, which ends
        the transfer.
        """

    @abstractmethod
    def _drain(self) -> Iterator[int]:
        """The steps after a failure, until nothing started can land; sets ``flushed`` false if nobody can tell."""

    def _groups(self) -> Iterator[tuple[int, ...]]:
        """The op's layers that are owed, ascending, in groups of about ``group_bytes``."""
        if not self.op.num_pages:
            return
        layers = [layer for layer in self.op.layers if layer in self._plan.slabs_of]
        if len(layers) < 2:
            if layers:
                yield tuple(layers)
            return
        # As if the op were the whole grant, and so had all of every window: rather too much than too little.
        tokens = self.op.num_pages * self._plan.src_page_size
        per_layer = max(1, self._plan.nbytes(tokens, layers) // len(layers))
        size = max(1, self.group_bytes // per_layer)
        for first in range(0, len(layers), size):
            yield tuple(layers[first : first + size])

    def _named(self, error: KVError) -> KVError:
        """What a channel knows nothing of: which request, peer and layers its error is about."""
        layers = self.op.layers if len(self.op.layers) < 5 else (*self.op.layers[:4], "...")
        where = f"request {self.op.request!r} to rank {self.op.dst}, layers {', '.join(map(str, layers))}"
        return type(error)(f"{where}: {error}", retryable=error.retryable)
