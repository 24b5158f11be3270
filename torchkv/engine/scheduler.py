"""Executes the sender's started operations (`SendOp`): waits for their events, chooses paths, advances transfers.

An op is *gated* until the events of its source pages are ready and its path is known. It then becomes a `Transfer`,
which is *queued* until it may begin, *active* while it is advanced, and at its end reported to the `Sender`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.cuda.events import StreamEvent
from torchkv.cuda.page_ids import DevicePages
from torchkv.engine.gpu_kernels import GpuKernels
from torchkv.engine.source_pages import SourcePages
from torchkv.errors import KVError, ProtocolError, RingExhausted, TransferTimeout
from torchkv.host.copy_loops import STEP_BYTES
from torchkv.layout.pair_plan import PairPlan
from torchkv.options import Options
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.sending.sender import Sender
from torchkv.protocol.sending.staging_requester import StagingRequester
from torchkv.staging.packer import Staging
from torchkv.staging.transfer import StagedTransfer
from torchkv.transfer.base import Transfer, TransferContext
from torchkv.transfer.host_copy import HostCopyTransfer
from torchkv.transfer.path_cost import choose, runs_between
from torchkv.transfer.peer_connection import LocalPages, PeerConnection
from torchkv.transfer.put import PutTransfer

if TYPE_CHECKING:
    from torchkv.kernels.gpu_context import GpuContext
    from torchkv.staging.cuda_packer import CudaPacker
    from torchkv.transfer.loop_kernels import Kernels

__all__ = ["LocalMemory", "TransferScheduler"]

trace = logging.getLogger("torchkv.request")  # see `KVProcessGroup`
_STARTED = "request %r to rank %d: transfer of layers %s started: %s"
_ATTESTED = "request %r to rank %d: layers %s attested, %d bytes"
_STAGED = "request %r to rank %d: %d bytes are in its staging ring"

MAX_ACTIVE = 64  # transfers that are advanced in turn
MAX_STEPS = 32  # steps of one transfer in a row: a turn of everything else costs as much as several small steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """A rank's own memory. pages: None without a cache. gpu: None for a cache in host memory. staging: as pages.

    kernels: in tests, a fake of what the resident loop needs of a GPU.
    """

    pages: LocalPages | None
    gpu: GpuContext | None
    staging: Staging | None
    kernels: Kernels | None = None


@dataclass(eq=False, slots=True)
class _Gated:
    """A started op that waits for its gates.

    path: the chosen path over ``connection``; None until it is known. may_stage: whether the staged path may be chosen.
    """

    op: SendOp
    grant: BoundGrant
    may_stage: bool = True
    connection: PeerConnection | None = None
    path: str | None = None


class TransferScheduler:
    """The transfers of one rank. Belongs to the driver's thread; ``lock`` guards ``sender``, which callers share.

    connection: gives the connection to a rank. on_broken: called with a connection whose channel broke under a
    transfer. send_stage_messages: sends what ``requester`` has queued for receivers.
    """

    def __init__(
        self,
        *,
        sender: Sender,
        lock: threading.Lock,
        options: Options,
        memory: LocalMemory,
        requester: StagingRequester,
        connection: Callable[[int], PeerConnection],
        on_broken: Callable[[PeerConnection], None],
        send_stage_messages: Callable[[], None],
    ) -> None:
        self._sender = sender
        self._lock = lock
        self._timeout = options.timeout
        self._forced = options.forced_path
        self._checksum = options.checksum
        self._local = memory.pages
        self.gpu = memory.gpu
        self.kernels: GpuKernels | None = None
        if memory.gpu is not None and memory.pages is not None:
            packer = None if memory.staging is None else memory.staging.packer
            self.kernels = GpuKernels(memory.gpu, memory.pages, cast("CudaPacker | None", packer))
        self._staging = memory.staging
        self._requester = requester
        self._connection = connection
        self._on_broken = on_broken
        self._send_stage_messages = send_stage_messages
        self._gated: list[_Gated] = []
        self._queue: deque[Transfer] = deque()  # transfers that have not begun
        self._admissible = False  # whether a queued transfer may be able to begin, since something has changed
        self._active: deque[Transfer] = deque()
        self._by_op: dict[SendOp, Transfer] = {}  # queued and active
        self._moved_at: dict[Transfer, float] = {}  # active -> when it last made progress
        self._posting = 0  # how many of these need the transport's progress
        self.restarts = 0  # transfers that were begun again on another path

    @property
    def moving(self) -> bool:
        """Whether there are any ops: gated, queued or active."""
        return bool(self._gated or self._by_op)

    @property
    def posting(self) -> bool:
        """Whether a transfer needs the transport's progress."""
        return self._posting > 0

    @property
    def pending(self) -> int:
        """How many ops are gated, queued or active."""
        return len(self._gated) + len(self._by_op)

    @property
    def gated(self) -> bool:
        """Whether there are gates that the host has to query again and again."""
        return bool(self._gated)

    def moves_to(self, rank: int) -> bool:
        """Whether a transfer to ``rank`` is queued or active, or something is under way that the loop had begun."""
        landing = any(each.op.dst == rank and each.op.landed is not None for each in self._gated)
        return landing or any(op.dst == rank for op in self._by_op)

    def will_stage(self, connection: PeerConnection) -> bool:
        """Whether transfers on this connection are likely to be staged."""
        if connection.channel is None or not self._ring(connection):
            return False
        return self._forced == "staged" or not connection.direct

    def _ring(self, connection: PeerConnection) -> int:
        """Bytes of staging memory that transfers on ``connection`` can use; 0 if nothing can be staged."""
        return 0 if self._staging is None else connection.ring(self._staging.sending.ring.capacity)

    def prepare(self, plan: PairPlan, connection: PeerConnection) -> None:
        """Loads what transfers of ``plan`` may need. Loading waits for all streams, so it is done before requests come.

        See `SyncWords.no_blocked_streams`.
        """
        if connection.channel is not None and self._ring(connection):
            assert self._staging is not None
            if self.will_stage(connection) and connection.staging_view is None:
                self._staging.sending.take()
            self._staging.packer.prepare(plan, sending=True, checksum=self._checksum, scales=connection.scales)
        if self.kernels is not None and connection.direct:
            self.kernels.load(plan, connection)

    def start(self, op: SendOp, grant: BoundGrant) -> None:
        """Takes on ``op``. Its end is reported to the sender exactly once, by ``op_finished``. Under the lock."""
        if op.landed is not None:  # the loop may still write to pages: no promise to use the ring only holds
            self._requester.go_direct(grant.dst, grant.generation)
        self._gated.append(_Gated(op, grant))

    def halt(self, op: SendOp) -> None:
        """Stops the transfer of ``op``, whose request has failed. A gated op ends in the next `open_gates`."""
        transfer = self._by_op.get(op)
        if transfer is not None:
            transfer.halt()
            self._admissible = True

    def open_gates(self, now: float) -> bool:
        """Turns gated ops into transfers once their gates have opened. True if any has."""
        if not self._gated:
            return False
        waiting: list[_Gated] = []
        candidates, self._gated = self._gated, []
        for gated in candidates:
            op = gated.op
            error: KVError | None = None
            try:
                if not self._has_landed(op):
                    waiting.append(gated)
                    continue
                if not self._sender.wants(op):
                    error = TransferTimeout(f"request {op.request!r} failed before its event was ready")
                elif (transfer := self._transfer(gated)) is None:
                    waiting.append(gated)
                    continue
                else:
                    self._by_op[op] = transfer
                    self._posting += transfer.posts
                    self._queue.append(transfer)
                    self._admissible = True
                    trace.debug(_STARTED, op.request, op.dst, op.layers, gated.path)
                    continue
            except KVError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - the caller's event object may raise anything
                error = ProtocolError(f"request {op.request!r}: event.query() raised {raised!r}")
            with self._lock:
                self._sender.op_finished(op, error, flushed=op.landed is None, now=now)
        self._gated.extend(waiting)
        return len(waiting) < len(candidates)

    def _has_landed(self, op: SendOp) -> bool:
        """Whether nothing is under way any more that the resident loop had begun for ``op``.

        Raises ``TransportUnavailable`` if the GPU has failed: then nobody knows.
        """
        if op.landed is not None and op.landed():
            op.landed = None
        if op.landed is not None and self.gpu is not None:
            self.gpu.check_alive()
        return op.landed is None

    def _transfer(self, gated: _Gated) -> Transfer | None:
        """The transfer of a gated op; None while its gates are shut, or something it needs is not ready.

        Raises `KVError` if the transfer cannot begin, and whatever ``event.query()`` raises.
        """
        assert self._local is not None
        op, grant = gated.op, gated.grant
        source_pages: SourcePages = op.source_pages
        connection = self._connection(op.dst)
        if gated.path is None or gated.connection is not connection:
            gated.connection, gated.path = connection, self._path(gated, connection)
        path = gated.path
        if path is None:
            return None
        if path != "staged" and connection.channel is not None and not self._may_write_pages(grant):
            return None
        if self.gpu is not None and path == "direct" and connection.channel is not None:
            return self._kernel_transfer(op, grant, source_pages, connection, source_pages.pages)
        for gate in source_pages.gates:
            if not gate.query():
                return None
        if path == "staged":
            return self._staged_transfer(op, grant, source_pages, connection)
        pages = (
            self._on_host(op, source_pages.pages) if isinstance(source_pages.pages, DevicePages) else source_pages.pages
        )
        if pages is None:
            return None
        if connection.channel is None and np.intersect1d(pages, grant.pages).size:
            raise ProtocolError(
                f"request {op.request!r}: a local copy from pages {pages[:4].tolist()}... into themselves; "
                f"give recv_pages other pages than those that are sent"
            )
        if path != "direct":
            return PutTransfer(self._context(op, grant, connection, pages), path=path)
        if self.gpu is not None:
            return self._kernel_transfer(op, grant, source_pages, connection, pages)
        return HostCopyTransfer(self._context(op, grant, connection, pages))

    def _context(
        self, op: SendOp, grant: BoundGrant, connection: PeerConnection, pages: Int64Array | DevicePages
    ) -> TransferContext:
        assert self._local is not None
        return TransferContext(
            op=op,
            grant=grant,
            pages=pages,
            local=self._local,
            connection=connection,
            report=partial(self._attest, op),
        )

    def _path(self, gated: _Gated, connection: PeerConnection) -> str | None:
        """The forced path, or the one that costs least; None while the connection's costs are still being measured."""
        assert self._local is not None
        op, grant = gated.op, gated.grant
        source_pages: SourcePages = op.source_pages
        plan = grant.plan
        path = connection.path(forced=source_pages.path, page_for_page=plan.page_for_page, converts=plan.converts)
        if source_pages.path is not None or path == "direct" or plan.converts:
            return path
        ring = self._ring(connection) if gated.may_stage else 0
        if not ring:
            return path
        if not connection.calibrated():
            return None
        pages = source_pages.pages
        return choose(
            grant.plan,
            op.layers,
            local=self._local,
            connection=connection,
            start=op.start,
            num_pages=op.num_pages,
            limit_tokens=grant.num_tokens,
            runs=None if isinstance(pages, DevicePages) else runs_between(pages, grant.pages, grant.plan, op.start),
            ring=ring,
        ).path

    def _may_write_pages(self, grant: BoundGrant) -> bool:
        """Whether this rank may write to the receiver's pages.

        A writer that promised to write to the receiver's staging ring only must withdraw the promise first.
        """
        with self._lock:
            return self._requester.go_direct(grant.dst, grant.generation)

    def _staged_transfer(
        self, op: SendOp, grant: BoundGrant, source_pages: SourcePages, connection: PeerConnection
    ) -> Transfer | None:
        """None if send staging memory must be allocated first but a stream is blocked: allocating may free memory."""
        assert self._local is not None
        assert self._staging is not None
        stages = self._staging.sending
        if self.gpu is not None and connection.staging_view is None and stages.ring.capacity and not stages.taken:
            with self.gpu.sync_words.no_blocked_streams() as quiet:
                if not quiet:
                    return None
                stages.take()
        return StagedTransfer(
            self._context(op, grant, connection, source_pages.pages),
            requester=self._requester,
            lock=self._lock,
            stages=stages,
            packer=self._staging.packer,
            checksum=self._checksum,
            send_stage_messages=self._send_stage_messages,
        )

    def _on_host(self, op: SendOp, pages: DevicePages) -> Int64Array | None:
        """This rank's page ids in host memory; None while they are being copied from the GPU."""
        assert self.gpu is not None
        assert self._local is not None
        operation = f"request {op.request!r} to {self._sender.named(op.dst)}"
        return pages.on_host(self.gpu.unblocked_stream, num_pages=self._local.num_pages, operation=operation)

    def _kernel_transfer(
        self,
        op: SendOp,
        grant: BoundGrant,
        source_pages: SourcePages,
        connection: PeerConnection,
        pages: Int64Array | DevicePages,
    ) -> Transfer | None:
        """A transfer by kernels, whose stream waits for the gates.

        None while a shut gate is no CUDA event, which only the host can query; while no stream is free to wait; and
        while the kernels cannot be loaded.
        """
        # Imported here because it imports Triton, as in `GpuKernels`.
        from torchkv.transfer.cuda_copy import CudaCopyTransfer

        assert self.gpu is not None
        assert self.kernels is not None
        table = self.kernels.loaded(grant.plan, connection)
        if table is None:
            return None
        waits: list[StreamEvent] = []
        for gate in source_pages.gates:
            if gate.query():
                continue
            if not isinstance(gate, StreamEvent):
                return None
            waits.append(gate)
        claim = self.gpu.claim(waits, op.request) if waits else None
        if waits and claim is None:
            return None
        return CudaCopyTransfer(
            self._context(op, grant, connection, pages),
            waits=waits,
            opened=lambda: self._on_gate_opened(op),
            claim=claim,
            table=table,
            device=self.gpu,
        )

    def _on_gate_opened(self, op: SendOp) -> None:
        with self._lock:
            self._sender.announce(op)

    def _attest(self, op: SendOp, layers: tuple[int, ...], nbytes: int, path: str) -> None:
        if layers:
            trace.debug(_ATTESTED, op.request, op.dst, layers, nbytes)
        else:  # the receiver knows by itself which layers it has unpacked
            trace.debug(_STAGED, op.request, op.dst, nbytes)
        with self._lock:
            self._sender.attest(op, layers, nbytes=nbytes, path=path if nbytes else "none")

    def advance(self, now: float) -> bool:
        """Advances active transfers in turn, by about ``STEP_BYTES`` in all. True if anything moved."""
        moved = False
        self._admit(now)
        budget = STEP_BYTES
        for _ in range(len(self._active)):
            if budget <= 0:
                break
            transfer = self._active.popleft()
            self._active.append(transfer)
            if nbytes := self._advance(transfer, budget):
                self._moved_at[transfer] = now
                budget -= nbytes
                moved = True
            elif now - self._moved_at[transfer] > self._timeout * transfer.patience and transfer.error is None:
                if transfer.gated:
                    self._moved_at[transfer] = now
                else:
                    transfer.fail(self._stuck(transfer.op))
            if transfer.finished:
                moved = True
                self._active.remove(transfer)
                self._finish(transfer, now)
        return moved

    def _admit(self, now: float) -> None:
        """Begins queued transfers in their order. One that cannot begin yet does not hold up those behind it."""
        if not self._admissible:
            return
        self._admissible = False
        kept: deque[Transfer] = deque()
        while self._queue and len(self._active) < MAX_ACTIVE:
            transfer = self._queue.popleft()
            if transfer.error is None and not transfer.admit():
                kept.append(transfer)
                continue
            self._moved_at[transfer] = now
            self._active.append(transfer)
        if kept:
            self._queue.extendleft(reversed(kept))

    def _advance(self, transfer: Transfer, budget: int) -> int:
        """Advances one transfer by about ``budget`` bytes, in at most ``MAX_STEPS`` steps. Returns the bytes moved."""
        total = 0
        for _ in range(MAX_STEPS):
            nbytes = transfer.advance()
            total += nbytes
            if not nbytes or total >= budget or transfer.finished:
                break
        return total

    def _finish(self, transfer: Transfer, now: float) -> None:
        del self._by_op[transfer.op]
        self._posting -= transfer.posts
        del self._moved_at[transfer]
        self._admissible = True
        if not transfer.flushed:
            self._on_broken(transfer.connection)
        # Pages that are converted have no other path.
        chose_path = transfer.op.source_pages.path is None and not transfer.grant.plan.converts
        if isinstance(transfer.error, RingExhausted) and chose_path and transfer.flushed:
            # The staged path was chosen, not forced: start again on another one. Pages that arrived are written again.
            self._gated.append(_Gated(transfer.op, transfer.grant, may_stage=False))
            self.restarts += 1
            return
        with self._lock:
            self._sender.op_finished(transfer.op, transfer.error, flushed=transfer.flushed, now=now)

    def _stuck(self, op: SendOp) -> TransferTimeout:
        return TransferTimeout(
            f"request {op.request!r} to {self._sender.named(op.dst)}: layers {list(op.layers)[:4]} made no progress "
            f"for {self._timeout:g} s (Options.timeout); cancel({op.request!r}) and retry, or raise the limit"
        )
