"""The staged path on the sender: gather scattered pages into a stage, put the stage in bulk, have it scattered.

        sender (this module)                                receiver (`torchkv.staging.unpacker`)

        pages --gather--> stage ----- put and flush -----> stage --scatter--> pages
                          of the send ring                 of the receive ring

        1. StageAsk   --------------------------------->
                      <---------------------------------   2. StageGrant, as soon as the ring has space: the credit
        3. gather, put, flush
        4. Staged     --------------------------------->   5. scatters the stage, attests its layers, frees it

A verb is cut into pieces (`torchkv.layout.pieces.Cutter`). Each piece takes one stage, a contiguous span of the
receiver's ring. Several pieces are under way at once: while one is put, the next is gathered here and the one before is
scattered there.

Where the receiver's ring is mapped here (shared memory, NVLink), pieces are gathered straight into their stage: no send
ring, no put.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

from torchkv.errors import KVError, ProtocolError, RingExhausted, TransportUnavailable
from torchkv.layout.pieces import Cutter, Piece, PieceLayout, piece_layout
from torchkv.layout.stage_format import ALIGNMENT, MemorySpan
from torchkv.protocol.receiving.stage_allocator import Stage
from torchkv.protocol.sending.staging_requester import Span, StagingRequester
from torchkv.staging.memory import SendStages
from torchkv.staging.packer import GatherJob, Packer
from torchkv.transfer import path_cost
from torchkv.transfer.base import Transfer, TransferContext
from torchkv.transfer.peer_connection import StageTarget
from torchkv.transport.interface import Batch, Completion

__all__ = ["StagedTransfer"]

_Packed = tuple[Piece, PieceLayout]

IN_FLIGHT = 4  # pieces of a verb under way: one each is gathered, put and scattered, and one waits for its stage

# Bytes of a piece, by device type. Small enough that the first piece leaves soon and, on a host, is still in the cache
# when it is put; large enough that its messages and steps cost little beside its bytes.
LEAST_PIECE = {"cpu": 1 << 20, "cuda": 8 << 20}
LARGEST_PIECE = {"cpu": path_cost.LARGEST_PIECE, "cuda": 128 << 20}

# How many stages must fit into a ring: in the send ring one piece is gathered while another is put, the receive ring
# holds one more.
SEND_SHARE, RECV_SHARE = 2, 3


class StagedTransfer(Transfer):
    """A `Transfer` through the receiver's staging ring.

    It reports bytes without layers: the receiver attests layers when it has scattered them. requester: asks the
    receiver for stages; guarded by ``lock``. stages: this rank's send ring. send_stage_messages: sends the messages
    that ``requester`` has queued.
    """

    def __init__(
        self,
        context: TransferContext,
        *,
        requester: StagingRequester,
        lock: threading.Lock,
        stages: SendStages,
        packer: Packer,
        checksum: bool,
        send_stage_messages: Callable[[], None],
    ) -> None:
        super().__init__(context)
        op, grant, connection = context.op, context.grant, context.connection
        assert connection.staging is not None
        self._target: StageTarget = connection.staging
        self._requester = requester
        self._lock = lock
        self._send_stage_messages = send_stage_messages
        self._stages = stages
        self._view = connection.staging_view
        self._packer = packer
        self._checksum = checksum
        self._cutter = Cutter(
            grant.plan, op.layers, op.start, op.num_pages, limit_tokens=grant.num_tokens, checksum=checksum
        )
        self._stage_nbytes = self._stage_size(context.local.device.type)
        self._requested_nbytes = 0  # bytes of pieces that have asked for a stage and are not cut yet
        self._pieces: list[Iterator[int]] = []
        self._num_waiting = 0  # pieces that wait for their stage to be granted
        self._gathers: list[GatherJob] = []  # gathers that may still read pages
        self._holds_turn = False

    def _stage_size(self, device: str) -> int:
        """Bytes of stages to ask for: several fit into either ring, and a verb makes `IN_FLIGHT` pieces or more.

        Fewer pieces if they would be shorter than `LEAST_PIECE`.
        """
        rings = self._target.nbytes // RECV_SHARE
        if self._view is None:
            rings = min(rings, self._stages.ring.largest_possible // SEND_SHARE)
        wanted = max(-(-self._cutter.nbytes // IN_FLIGHT), LEAST_PIECE[device])
        return max(1, min(wanted, LARGEST_PIECE[device], rings))

    def admit(self) -> bool:
        self._holds_turn = self._stages.acquire_turn(self.op.dst)
        return self._holds_turn

    @property
    def patience(self) -> float:
        """Twice the timeout while every piece waits for the receiver's ring.

        Then the receiver's timeout comes first, whose error says what fills the ring.
        """
        return 2.0 if self._num_waiting and self._num_waiting == len(self._pieces) else 1.0

    def fail(self, error: KVError) -> None:
        super().fail(error)
        for job in self._gathers:
            job.stopped = True

    @property
    def _lane(self) -> str:
        return self.connection.lane if self._view is None else "view"

    # ------------------------------------------------------------------ steps

    def _run(self) -> Iterator[int]:
        self._check_rings()
        while True:
            while self._request_stage():
                pass
            if not self._pieces:
                break
            yield self._advance_pieces()
        self._release_turn()
        self.connection.count(self._lane, transfers=1)

    def _check_rings(self) -> None:
        """Raises ``RingExhausted`` if one page of a layer is larger than a ring."""
        needed = [(self._target.nbytes, self.connection.name, "recv")]
        if self._view is None:
            needed.append((self._stages.ring.largest_possible, "this rank", "send"))
        for nbytes, whose, option in needed:
            if self._cutter.least > nbytes:
                raise RingExhausted(
                    f"one page of a layer takes {self._cutter.least} bytes of staging memory, {whose} has {nbytes}; "
                    f"raise Options.staging_{option} (TORCHKV_STAGING_{option.upper()}) there, or use another path",
                    retryable=False,
                )

    def _release_turn(self) -> None:
        if self._holds_turn:
            self._holds_turn = False
            self._stages.release_turn(self.op.dst)

    def _request_stage(self) -> bool:
        """Asks for a stage for the next piece. False if nothing is left to send, or enough pieces are under way."""
        left = self._cutter.nbytes - self._requested_nbytes
        if left <= 0 or len(self._pieces) >= IN_FLIGHT:
            return False
        least = self._cutter.least
        nbytes = max(min(self._stage_nbytes, left), least)
        with self._lock:
            serial = self._requester.ask(self.op.dst, self._grant.generation, nbytes=nbytes, least=least)
        self._requested_nbytes += nbytes
        self._pieces.append(self._send_piece(serial, nbytes))
        return True

    def _advance_pieces(self) -> int:
        """Advances each piece by one step. Returns the bytes moved; more than 0 if a piece has ended."""
        moved = 0
        left = len(self._pieces)
        for piece in list(self._pieces):
            try:
                nbytes = next(piece)
            except StopIteration:
                self._pieces.remove(piece)
                nbytes = 1  # progress: the next piece can begin
            except KVError:
                self._pieces.remove(piece)
                raise
            moved += nbytes
            if not nbytes and self._num_waiting == left:
                break  # stages are granted in the order of the asks, so the pieces behind this one wait as well
            left -= 1
        return moved

    def _send_piece(self, serial: int, nbytes: int) -> Iterator[int]:
        """The steps of one piece, which has asked for stage ``serial``, until the receiver is told of it.

        Once the transfer has failed, they end as soon as nothing of the piece is under way.
        """
        span = yield from self._await_grant(serial)
        if span is None:
            return
        if self._view is None:
            packed = yield from self._pack_and_put(span, nbytes)
        else:
            packed = yield from self._pack_into_ring(span, nbytes)
        if packed is None and self.error is None:
            self._return_stage(serial)
        elif packed is not None and self.error is None:
            self._announce(serial, *packed)

    def _pack_and_put(self, span: Span, asked: int) -> Generator[int, None, _Packed | None]:
        """Gathers a piece into the send ring and puts it. None if nothing is left to send, or after an error."""
        if self._cutter.done:  # earlier pieces were larger than expected
            return None
        stage = yield from self._own_stage(min(span.nbytes, max(self._cutter.nbytes, self._cutter.least)))
        if stage is None:
            return None
        try:
            packed = yield from self._pack(self._stages.take().span(stage), min(stage.nbytes, span.nbytes), asked)
            if packed is not None and self.error is None:
                yield from self._put(packed[1].nbytes, stage, span)
        finally:
            self._stages.ring.release(stage)
        return packed

    def _pack_into_ring(self, span: Span, asked: int) -> Generator[int, None, _Packed | None]:
        """Gathers a piece straight into the receiver's mapped ring. Returns what `_pack_and_put` returns."""
        assert self._view is not None
        if span.offset % ALIGNMENT:
            raise ProtocolError(f"{self.connection.name} granted a stage at {span.offset}, no multiple of {ALIGNMENT}")
        try:
            memory = MemorySpan(self._view.ptr + span.offset, span.nbytes)
            return (yield from self._pack(memory, span.nbytes, asked))
        except TransportUnavailable:
            self.flushed = False  # the GPU has failed, and may still write to the stage
            raise

    def _pack(self, memory: MemorySpan, nbytes: int, asked: int) -> Generator[int, None, _Packed | None]:
        """Cuts the piece that fits into ``nbytes`` and gathers it."""
        if self._cutter.done:
            return None
        self._requested_nbytes -= asked
        piece = self._cutter.cut(nbytes)
        layout = piece_layout(self._plan, piece, limit_tokens=self._grant.num_tokens, checksum=self._checksum)
        job = GatherJob(
            dst=self.op.dst,
            generation=self._grant.generation,
            stage=memory,
            piece=piece,
            layout=layout,
            plan=self._plan,
            pages=self._pages,
            start=self.op.start,
            num_tokens=self._grant.num_tokens,
            checked=self._checksum,
            scales=self.connection.scales,
        )
        self._gathers.append(job)
        yield from self._packer.gather(job)
        self._gathers.remove(job)
        self._source_read()
        return piece, layout

    def _await_grant(self, serial: int) -> Generator[int, None, Span | None]:
        """The granted stage; None once the transfer has failed, or if a denied stage is not needed any more."""
        span: Span | None = None
        self._num_waiting += 1
        try:
            while span is None and self.error is None:
                try:
                    with self._lock:
                        span = self._requester.granted(self.op.dst, self._grant.generation, serial)
                except RingExhausted:
                    if self._cutter.done:
                        return None
                    raise
                if span is None:
                    yield 0
        finally:
            self._num_waiting -= 1
        if span is not None:
            yield 1  # progress, though the next step may have to wait for memory or for the GPU
        return span if self.error is None else None

    def _own_stage(self, nbytes: int) -> Generator[int, None, Stage | None]:
        """A stage of the send ring, as soon as there is space; None once the transfer has failed."""
        while self.error is None:
            stage = self._stages.ring.allocate(nbytes, self.op.request)
            if stage is not None:
                return stage
            yield 0
        return None

    def _put(self, nbytes: int, stage: Stage, span: Span) -> Iterator[int]:
        """Puts a packed stage, until the receiver can see it or, after an error, until nothing is under way."""
        assert self.connection.channel is not None
        local, target = self._stages.take(), self._target
        put = self.connection.channel.put(
            Batch.one(
                local_region=local.region,
                local_offset=stage.offset,
                remote_region=target.region,
                remote_offset=span.offset,
                length=nbytes,
            )
        )
        flush: Completion | None = None
        failure: KVError | None = None
        try:
            flush = self.connection.channel.flush()  # now: a later flush would wait for the puts of other pieces too
        except KVError as error:
            failure = error
        while not put.done or (flush is not None and not flush.done):
            if self.error is not None:
                put.cancel()
            yield 0
        if flush is None or flush.error is not None:
            self.flushed = False  # it is unknown whether the put still lands
        failure = failure or put.error or (None if flush is None else flush.error)
        if failure is not None and self.error is None:
            raise failure

    def _announce(self, serial: int, piece: Piece, layout: PieceLayout) -> None:
        """Tells the receiver that the stage is written."""
        with self._lock:
            self._requester.staged(
                self.op.dst,
                self._grant.generation,
                serial,
                **piece._asdict(),
                checked=self._checksum,
                state=self.op.state,
            )
        if self._packer.asynchronous:
            self._send_stage_messages()
        self.connection.count(self._lane, nbytes=layout.packed, spans=1)
        self._report((), layout.payload, "staged")

    def _return_stage(self, serial: int) -> None:
        """Gives a stage back to the receiver unused."""
        with self._lock:
            self._requester.staged(
                self.op.dst, self._grant.generation, serial, layers=(), start=0, num_pages=0, checked=False
            )

    def _drain(self) -> Iterator[int]:
        """Lets gathers and puts end. The receiver takes its stages back when it hears that this writer is quiescent."""
        while self._pieces:
            try:
                self._advance_pieces()
            except KVError:
                continue  # the first error is the one to report
            yield 0
        self._release_turn()

    def _source_read(self) -> None:
        """Tells the caller that the source may be overwritten, once the last page has been gathered."""
        if self._cutter.done and not self._gathers:
            self.op.work._release_source()
