"""Executes what the protocol has started: waits for its data, chooses its path, advances it, reports its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from torchkv.copytransfer import CopyTransfer
from torchkv.cost import runs_between
from torchkv.devicepages import DevicePages
from torchkv.env import Options
from torchkv.errors import KVError, ProtocolError, RingExhausted, TransferTimeout
from torchkv.events import StreamEvent
from torchkv.packer import Staging
from torchkv.plan import PairPlan
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.sender import Sender
from torchkv.protocol.stageclient import StageClient
from torchkv.puttransfer import PutTransfer
from torchkv.route import LocalPages, Route
from torchkv.stagedtransfer import StagedTransfer
from torchkv.transfer import STEP_BYTES, Transfer
from torchkv.transport import Int64Array

if TYPE_CHECKING:
    from torchkv.device import Device
    from torchkv.jobs import JobTable

__all__ = ["Event", "Mover", "SendPayload"]

MAX_ACTIVE = 64
MAX_STEPS = 32  # pieces of one transfer in a row: a round of everything else costs as much as several small ones


class Event(Protocol):
    """Anything that says when data is ready; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...


@dataclass(slots=True)
class SendPayload:
    """What is needed to execute a `SendOp`: this rank's page ids, what gates them, the path to take."""

    pages: Int64Array | DevicePages
    event: Event | None
    path: str | None

    @property
    def gates(self) -> list[Event]:
        """Everything that must have happened before the pages may be read."""
        gates = [] if self.event is None else [self.event]
        return [*gates, self.pages.ready] if isinstance(self.pages, DevicePages) else gates


@dataclass(eq=False, slots=True)
class _Gated:
    """Started, and waiting for its data. path: taken over ``route``, once it is known. may_stage: whether it can be
    the staged one."""

    op: SendOp
    grant: BoundGrant
    may_stage: bool = True
    route: Route | None = None
    path: str | None = None


class Mover:
    """The transfers of one rank. Belongs to the driver's thread; ``lock`` guards ``sender``, which callers share.

    route: gives the way to a rank. broke: told of a route whose channel broke under a transfer. speak: sends what
    ``client`` has to say.
    """

    def __init__(
        self,
        *,
        sender: Sender,
        lock: threading.Lock,
        options: Options,
        local: LocalPages | None,
        device: Device | None,
        staging: Staging | None,
        client: StageClient,
        route: Callable[[int], Route],
        broke: Callable[[Route], None],
        speak: Callable[[], None],
    ) -> None:
        self.device = device
        self._sender = sender
        self._lock = lock
        self._timeout = options.timeout
        self._forced = options.forced_path
        self._checksum = options.checksum
        self._local = local
        self._staging = staging
        self._client = client
        self._route = route
        self._broke = broke
        self._speak = speak
        self._gated: list[_Gated] = []
        self._queue: deque[Transfer] = deque()  # those that have not begun
        self._admissible = False  # whether some of them may be able to by now
        self._active: deque[Transfer] = deque()
        self._moved_at: dict[Transfer, float] = {}
        self._by_op: dict[SendOp, Transfer] = {}
        self._posting = 0  # how many of these post to the transport

    @property
    def moving(self) -> bool:
        """Whether transfers are under way, or waiting for their gates."""
        return bool(self._gated or self._by_op)

    @property
    def posting(self) -> bool:
        """Whether transfers are under way that wait for the transport's progress."""
        return self._posting > 0

    @property
    def pending(self) -> int:
        """How many verbs are not over yet."""
        return len(self._gated) + len(self._by_op)

    @property
    def gated(self) -> bool:
        """Whether a gate has to be looked at again and again."""
        return bool(self._gated)

    def moves_to(self, rank: int) -> bool:
        """Whether a transfer to ``rank`` is under way."""
        return any(op.dst == rank for op in self._by_op)

    def will_stage(self, route: Route) -> bool:
        """Whether transfers on this route are likely to be staged."""
        if route.channel is None or not self._ring(route):
            return False
        return self._forced == "staged" or not route.direct

    def _ring(self, route: Route) -> int:
        """Bytes of the smaller of the two rings at the ends of ``route``; 0 if nothing can be staged."""
        return 0 if self._staging is None else route.ring(self._staging.sending.ring.capacity)

    def prepare(self, plan: PairPlan, route: Route) -> None:
        """Loads what transfers of ``plan`` may need: later it might have to wait; see `Device.quiet`."""
        if route.channel is not None and self._ring(route):
            assert self._staging is not None
            if self.will_stage(route) and route.staging_view is None:
                self._staging.sending.take()
            self._staging.packer.prepare(plan, sending=True, checksum=self._checksum)
        if self.device is not None and route.direct:
            self._load(self._table(plan, route))

    def _jobs(self, plan: PairPlan, route: Route) -> JobTable | None:
        """What kernels copy by; None if these are not loaded yet, and it is not `Device.quiet`."""
        assert self.device is not None
        table = self._table(plan, route)
        if not table.is_loaded:
            with self.device.quiet() as quiet:
                if not quiet:
                    return None
                self._load(table)
        return table

    def _table(self, plan: PairPlan, route: Route) -> JobTable:
        if (table := route.job_table(plan)) is not None:
            return table
        # Here, because it brings Triton with it, which a rank without a GPU need not have.
        from torchkv.jobs import JobTable

        assert self.device is not None
        assert self._local is not None
        with self.device.beside_the_model("make tables"):
            return JobTable.of(plan, self._local, route)

    def _load(self, table: JobTable) -> None:
        assert self.device is not None
        with self.device.beside_the_model("load kernels"):
            table.load()

    def start(self, op: SendOp, grant: BoundGrant) -> None:
        self._gated.append(_Gated(op, grant))

    def halt(self, op: SendOp) -> None:
        transfer = self._by_op.get(op)
        if transfer is not None:
            transfer.halt()
            self._admissible = True

    def open_gates(self, now: float) -> bool:
        """Turns started ops into transfers as soon as their data are ready."""
        if not self._gated:
            return False
        waiting: list[_Gated] = []
        gated, self._gated = self._gated, []
        for one in gated:
            op = one.op
            error: KVError | None = None
            try:
                if not self._sender.wants(op):
                    error = TransferTimeout(f"request {op.request!r} failed before its event was ready")
                elif (transfer := self._transfer(one)) is None:
                    waiting.append(one)
                    continue
                else:
                    self._by_op[op] = transfer
                    self._posting += transfer.posts
                    self._queue.append(transfer)
                    self._admissible = True
                    continue
            except KVError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - the caller's event object may raise anything
                error = ProtocolError(f"request {op.request!r}: event.query() raised {raised!r}")
            with self._lock:
                self._sender.op_finished(op, error, flushed=True, now=now)
        self._gated.extend(waiting)
        return len(waiting) < len(gated)

    def _transfer(self, gated: _Gated) -> Transfer | None:
        """The transfer that executes its op, or None while its gate is shut."""
        assert self._local is not None
        op, grant = gated.op, gated.grant
        payload: SendPayload = op.payload
        route = self._route(op.dst)
        if gated.path is None or gated.route is not route:
            gated.route, gated.path = route, self._path(gated, route)
        path = gated.path
        if path is None:
            return None
        if path != "staged" and route.channel is not None and not self._may_write_pages(grant):
            return None
        if self.device is not None and path == "direct" and route.channel is not None:
            return self._kernel_transfer(op, grant, payload, route, payload.pages)
        for gate in payload.gates:
            if not gate.query():
                return None
        if path == "staged":
            return self._staged_transfer(op, grant, payload, route)
        pages = self._on_host(op, payload.pages) if isinstance(payload.pages, DevicePages) else payload.pages
        if pages is None:
            return None
        if route.channel is None and np.intersect1d(pages, grant.pages).size:
            raise ProtocolError(
                f"request {op.request!r}: a local copy from pages {pages[:4].tolist()}... into themselves; "
                f"give recv_pages other pages than those that are sent"
            )
        if path != "direct":
            return PutTransfer(
                op, grant, pages=pages, path=path, local=self._local, route=route, report=partial(self._attest, op)
            )
        if self.device is not None:
            return self._kernel_transfer(op, grant, payload, route, pages)
        return CopyTransfer(op, grant, pages=pages, local=self._local, route=route, report=partial(self._attest, op))

    def _path(self, gated: _Gated, route: Route) -> str | None:
        """The path that is forced, or costs least; None while nobody knows yet what the route costs."""
        assert self._local is not None
        op, grant = gated.op, gated.grant
        payload: SendPayload = op.payload
        path = route.path(forced=payload.path, page_for_page=grant.plan.page_for_page)
        if payload.path is not None or path == "direct":
            return path
        ring = self._ring(route) if gated.may_stage else 0
        if not ring:
            return path
        if not route.calibrated():
            return None
        pages = payload.pages
        return route.choose(
            grant.plan,
            self._local,
            op.layers,
            start=op.start,
            num_pages=op.num_pages,
            limit_tokens=grant.num_tokens,
            runs=None if isinstance(pages, DevicePages) else runs_between(pages, grant.pages, grant.plan, op.start),
            ring=ring,
        ).path

    def _may_write_pages(self, grant: BoundGrant) -> bool:
        """Whether the receiver does not rely (any more) on this rank's word to write to its staging ring only."""
        with self._lock:
            return self._client.go_direct(grant.dst, grant.generation)

    def _staged_transfer(self, op: SendOp, grant: BoundGrant, payload: SendPayload, route: Route) -> Transfer | None:
        """None if memory must be taken first, which may free other memory, and it is not `Device.quiet`."""
        assert self._local is not None
        assert self._staging is not None
        stages = self._staging.sending
        if self.device is not None and route.staging_view is None and stages.ring.capacity and not stages.taken:
            with self.device.quiet() as quiet:
                if not quiet:
                    return None
                stages.take()
        return StagedTransfer(
            op,
            grant,
            pages=payload.pages,
            client=self._client,
            lock=self._lock,
            stages=stages,
            packer=self._staging.packer,
            checksum=self._checksum,
            local=self._local,
            route=route,
            report=partial(self._attest, op),
            speak=self._speak,
        )

    def _on_host(self, op: SendOp, pages: DevicePages) -> Int64Array | None:
        """This rank's page ids; None while they are on their way from the GPU."""
        assert self.device is not None
        assert self._local is not None
        num_pages = self._local.num_pages
        stream = self.device.open_stream
        return pages.on_host(stream, num_pages=num_pages, what=f"request {op.request!r} to rank {op.dst}")

    def _kernel_transfer(
        self, op: SendOp, grant: BoundGrant, payload: SendPayload, route: Route, pages: Int64Array | DevicePages
    ) -> Transfer | None:
        """A transfer whose stream waits for the gate; None if the gate can only be watched from here, and is shut.

        Also as long as nothing can be loaded that it needs.
        """
        # Here for the reason that `_table` has.
        from torchkv.kerneltransfer import KernelTransfer

        assert self.device is not None
        assert self._local is not None
        jobs = self._jobs(grant.plan, route)
        if jobs is None:
            return None
        waits: list[StreamEvent] = []
        for gate in payload.gates:
            if gate.query():
                continue
            if not isinstance(gate, StreamEvent):
                return None
            waits.append(gate)
        claim = self.device.claim(waits, op.request) if waits else None
        if waits and claim is None:
            return None
        return KernelTransfer(
            op,
            grant,
            pages=pages,
            waits=waits,
            opened=lambda: self._on_gate_opened(op),
            claim=claim,
            jobs=jobs,
            device=self.device,
            local=self._local,
            route=route,
            report=partial(self._attest, op),
        )

    def _on_gate_opened(self, op: SendOp) -> None:
        with self._lock:
            self._sender.announce(op)

    def _attest(self, op: SendOp, layers: tuple[int, ...], nbytes: int, path: str) -> None:
        with self._lock:
            self._sender.attest(op, layers, nbytes=nbytes, path=path if nbytes else "none")

    def advance(self, now: float) -> bool:
        """A bounded step of active transfers, in turn. True if anything moved."""
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
        """Lets transfers begin, in their order. One that waits for others to end is in nobody's way, at no cost."""
        if not self._admissible:
            return
        self._admissible = False
        behind: deque[Transfer] = deque()
        while self._queue and len(self._active) < MAX_ACTIVE:
            transfer = self._queue.popleft()
            if transfer.error is None and not transfer.admit():
                behind.append(transfer)
                continue
            self._moved_at[transfer] = now
            self._active.append(transfer)
        if behind:
            self._queue.extendleft(reversed(behind))

    def _advance(self, transfer: Transfer, budget: int) -> int:
        """Some steps of one transfer: about ``budget`` bytes, in not too many pieces. Returns the bytes moved."""
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
            self._broke(transfer.route)
        elsewhere = transfer.flushed and not transfer.torn and transfer.op.payload.path is None
        if isinstance(transfer.error, RingExhausted) and elsewhere:
            # It need not have been this path: again, as a whole, on another. What is there already changes nothing.
            self._gated.append(_Gated(transfer.op, transfer.grant, may_stage=False))
            return
        with self._lock:
            self._sender.op_finished(transfer.op, transfer.error, flushed=transfer.flushed, now=now)

    def _stuck(self, op: SendOp) -> TransferTimeout:
        return TransferTimeout(
            f"request {op.request!r} to rank {op.dst}: layers {list(op.layers)[:4]} made no progress for "
            f"{self._timeout:g} s (Options.timeout); cancel({op.request!r}) and retry, or raise the limit"
        )
