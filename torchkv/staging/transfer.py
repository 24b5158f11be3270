"""The staged path: gather into this rank's staging memory, put in bulk into a stage that the receiver granted.

A verb is cut into pieces, each of which takes one stage. Several are on their way at once: while one is put, the next
is gathered and the one before is scattered on the other side. Where the receiver's ring is mapped here, pieces are
gathered straight into their stage, which leaves out the put. If a GPU does that, the receiver hears of a piece as soon
as its gather is enqueued, and its own GPU waits for the signal behind that: so neither waits for the other's host.
Gathers wait for nothing of the other side, so however many ranks send to each other, some GPU can always go on.

Large verbs are hardly cut at all, but streamed through their stage: the receiver's GPU unpacks what is there already,
and the sender's writes where it has done so. Each waits for the other for a while only, and is then begun again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

from torchkv import cost
from torchkv.devicepages import DevicePages
from torchkv.errors import KVError, ProtocolError, RingExhausted, TransportUnavailable
from torchkv.packer import Early, Packer
from torchkv.pieces import ALIGNMENT, Cutter, Piece, PieceLayout, piece_layout
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.stageclient import Span, StageClient
from torchkv.route import LocalPages, Route, StageTarget
from torchkv.stagememory import Room, SendStages
from torchkv.staging import CHUNK_UNIT, SLOTS, Stage, Stream, signal_offset
from torchkv.transfer import Report, Transfer
from torchkv.transport import Batch, Completion, Int64Array

__all__ = ["StagedTransfer"]

_Packed = tuple[Piece, PieceLayout]

IN_FLIGHT = 4  # pieces: one being gathered, put and scattered each, and one that is asked for

# Bytes of a piece: small enough that the first is on its way soon and, on a host, that it is still in the cache when it
# is put; large enough that what a piece costs in messages and steps is little beside it.
LEAST_PIECE = {"cpu": 1 << 20, "cuda": 8 << 20}
LARGEST_PIECE = {"cpu": cost.LARGEST_PIECE, "cuda": 128 << 20}
# Of verbs that are streamed. Pieces: so that a receiver can begin with the first layers. At once: one begins while the
# one before ends. Shorter ones are not worth it.
LARGEST_STREAMED, STREAMS, LEAST_STREAMED = 512 << 20, 2, 8 << 20
LARGEST_CHUNK = 1 << 20

# Shares of a ring: of the sender's one piece is gathered while another is put, the receiver's holds one more.
SEND_SHARE, RECV_SHARE = 2, 3


class StagedTransfer(Transfer):
    """See `Transfer`. The receiver attests the layers itself, when it has unpacked them.

    client: asks for stages; guarded by ``lock``. stages: this rank's own. speak: sends what ``client`` has to say.
    """

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array | DevicePages,
        client: StageClient,
        lock: threading.Lock,
        stages: SendStages,
        packer: Packer,
        checksum: bool,
        local: LocalPages,
        route: Route,
        report: Report,
        speak: Callable[[], None],
    ) -> None:
        super().__init__(op, grant, local=local, route=route, report=report)
        assert route.staging is not None
        self._target: StageTarget = route.staging
        self._pages = pages
        self._client = client
        self._lock = lock
        self._speak = speak
        self._stages = stages
        self._view = route.staging_view
        self._packer = packer
        self._checksum = checksum
        self._cutter = Cutter(
            grant.plan, op.layers, op.start, op.num_pages, limit_tokens=grant.num_tokens, checksum=checksum
        )
        self._channels = self._num_channels()
        self._stage_nbytes = self._stage_size(local.device.type)
        self._piece_nbytes = LARGEST_STREAMED if self._channels else self._stage_nbytes
        self._asked = 0  # bytes that were asked for and not cut yet
        self._flights: list[Iterator[int]] = []
        self._waiting = 0  # flights that wait for their stage
        self._gathering = 0
        self._boarded = False

    @property
    def _signals(self) -> bool:
        """Whether this side can say that a stage is written by a signal, before it is."""
        # Ids on the GPU are checked there: until then nobody knows whether every byte of the stage will be written.
        if self._view is None or isinstance(self._pages, DevicePages):
            return False
        return self._packer.signals and self._packer.ready(self._plan, checksum=self._checksum)

    def _num_channels(self) -> int:
        """Of a stream, 0 if pieces of the size of a stage do better, or are all there is."""
        if not self._signals or self._checksum:
            return 0
        if self._cutter.nbytes < LEAST_STREAMED or self._cutter.layer_nbytes < CHUNK_UNIT:
            return 0
        return min(self._packer.channels, self._target.channels)

    def _stage_size(self, device: str) -> int:
        """So that several fit into either ring, and a verb makes `IN_FLIGHT` at least, unless that is not worth it."""
        rings = self._target.nbytes // RECV_SHARE
        if self._view is None:
            rings = min(rings, self._stages.ring.capacity // SEND_SHARE)
        if self._channels:
            return max(1, min(rings, Stream(LARGEST_CHUNK, self._channels).nbytes))
        wanted = max(-(-self._cutter.nbytes // IN_FLIGHT), LEAST_PIECE[device])
        return max(1, min(wanted, LARGEST_PIECE[device], rings))

    def admit(self) -> bool:
        self._boarded = self._stages.board(self.op.dst)
        return self._boarded

    @property
    def patience(self) -> float:
        """While only the receiver's ring is missing, it is the receiver that keeps the time, and says what is wrong."""
        return 2.0 if self._waiting and self._waiting == len(self._flights) else 1.0

    @property
    def _lane(self) -> str:
        return self.route.lane if self._view is None else "view"

    # ------------------------------------------------------------------ steps

    def _run(self) -> Iterator[int]:
        self._check_rings()
        while True:
            while self._ask():
                pass
            if not self._flights:
                break
            yield self._advance_flights()
        self._leave()
        self.route.count(self._lane, transfers=1)

    def _check_rings(self) -> None:
        """Raises ``RingExhausted`` if even one page is too large."""
        needed = [(self._target.nbytes, f"rank {self.op.dst}", "recv")]
        if self._view is None:
            needed.append((self._stages.ring.capacity, "this rank", "send"))
        for nbytes, whose, option in needed:
            if self._cutter.least > nbytes:
                raise RingExhausted(
                    f"one page of a layer takes {self._cutter.least} bytes of staging memory, {whose} has {nbytes}; "
                    f"raise Options.staging_{option} (TORCHKV_STAGING_{option.upper()}) there, or use another path",
                    retryable=False,
                )

    def _leave(self) -> None:
        if self._boarded:
            self._boarded = False
            self._stages.leave(self.op.dst)

    def _ask(self) -> bool:
        """Asks for the stages that pieces still to be cut will need, a few at a time. Whether it did."""
        left = self._cutter.nbytes - self._asked
        if left <= 0 or len(self._flights) >= (STREAMS if self._channels else IN_FLIGHT):
            return False
        least = self._cutter.least
        piece = max(min(self._piece_nbytes, left), least)
        stage = max(min(self._stage_nbytes, piece), least)
        with self._lock:
            serial = self._client.ask(self.op.dst, self._grant.generation, nbytes=stage, least=least)
        self._asked += piece
        self._flights.append(self._fly(serial, piece))
        return True

    def _advance_flights(self) -> int:
        moved = 0
        left = len(self._flights)
        for flight in list(self._flights):
            try:
                nbytes = next(flight)
            except StopIteration:
                self._flights.remove(flight)
                nbytes = 1  # something has happened, and the next piece can go
            except KVError:
                self._flights.remove(flight)
                raise
            moved += nbytes
            if not nbytes and self._waiting == left:
                break  # stages are granted in the order in which they were asked for
            left -= 1
        return moved

    def _fly(self, serial: int, nbytes: int) -> Iterator[int]:
        """One piece, from its ask to the word that it is there; ends early, and cleanly, once there is an error."""
        span = yield from self._granted(serial)
        if span is None:
            return
        early = self._early(span)
        if self._view is None:
            packed = yield from self._pack_and_put(span, nbytes)
        else:
            packed = yield from self._pack_there(serial, span, nbytes, early)
        if packed is None and self.error is None:
            self._give_back(serial)
        elif packed is not None and self.error is None and early is None:
            self._say(serial, *packed)

    def _early(self, span: Span) -> Early | None:
        """How the stage may be called written early; None if it may not."""
        if span.signal is None or not self._signals:
            return None
        assert self._view is not None
        address = self._view.ptr + signal_offset(self._target.nbytes, span.signal.word)
        return Early(address, span.signal.value, self._stream(span.nbytes))

    def _stream(self, room: int) -> Stream | None:
        """How pieces pass through a stage of ``room`` bytes; None if they have to fit into it."""
        if not self._channels:
            return None
        most = min(room // (SLOTS * self._channels), LARGEST_CHUNK) // CHUNK_UNIT
        if not most:
            return None
        # A layer's chunks should be alike: where large and small ones alternate, some channels have all the large ones.
        units = -(-self._cutter.layer_nbytes // CHUNK_UNIT)
        chunk = -(-units // -(-units // most)) * CHUNK_UNIT
        return Stream(chunk, self._channels)

    def _pack_and_put(self, span: Span, asked: int) -> Generator[int, None, _Packed | None]:
        """Through memory of its own. None if nothing is left to send, or once there is an error."""
        if self._cutter.done:  # the stages before were larger than they had to be
            return None
        stage = yield from self._own_stage(min(span.nbytes, max(self._cutter.nbytes, self._cutter.least)))
        if stage is None:
            return None
        try:
            packed = yield from self._pack(self._stages.take().room(stage), min(stage.nbytes, span.nbytes), asked)
            if packed is not None and self.error is None:
                yield from self._put(packed[1].nbytes, stage, span)
        finally:
            self._stages.ring.release(stage)
        return packed

    def _pack_there(
        self, serial: int, span: Span, asked: int, early: Early | None
    ) -> Generator[int, None, _Packed | None]:
        """The same, straight into the stage."""
        assert self._view is not None
        if span.offset % ALIGNMENT:
            raise ProtocolError(f"rank {self.op.dst} granted a stage at {span.offset}, no multiple of {ALIGNMENT}")
        try:
            room = Room(self._view.ptr + span.offset, span.nbytes)
            nbytes = span.nbytes if early is None or early.stream is None else max(asked, self._cutter.least)
            return (yield from self._pack(room, nbytes, asked, serial, early))
        except TransportUnavailable:
            self.flushed = False  # of the GPU: nobody can tell any more what lands
            raise

    def _pack(
        self, room: Room, nbytes: int, asked: int, serial: int = 0, early: Early | None = None
    ) -> Generator[int, None, _Packed | None]:
        """Cuts what fits into ``nbytes``, and gathers it. If it can be early, the stage is called written at once."""
        if self._cutter.done:
            return None
        self._asked -= asked
        piece = self._cutter.cut(nbytes)
        layout = piece_layout(self._plan, piece, limit_tokens=self._grant.num_tokens, checksum=self._checksum)
        self._gathering += 1
        steps = self._packer.gather(
            self.op,
            self._grant,
            self._pages,
            piece,
            layout,
            room,
            checksum=self._checksum,
            early=early,
            stopped=lambda: self.error is not None,
        )
        if early is not None:
            nbytes = next(steps)
            self._say(serial, piece, layout, early)
            yield nbytes
        yield from steps
        self._gathering -= 1
        self.torn |= early is not None and early.stream is not None and self.error is not None
        self._source_read()
        return piece, layout

    def _granted(self, serial: int) -> Generator[int, None, Span | None]:
        """The span to write to; None once there is an error, or if it was denied and is not needed any more."""
        span: Span | None = None
        self._waiting += 1
        try:
            while span is None and self.error is None:
                try:
                    with self._lock:
                        span = self._client.granted(self.op.dst, self._grant.generation, serial)
                except RingExhausted:
                    if self._cutter.done:
                        return None
                    raise
                if span is None:
                    yield 0
        finally:
            self._waiting -= 1
        if span is not None:
            yield 1  # progress, though what comes next may wait for memory, or for the GPU
        return span if self.error is None else None

    def _own_stage(self, nbytes: int) -> Generator[int, None, Stage | None]:
        """Memory to pack into; None once there is an error."""
        while self.error is None:
            stage = self._stages.ring.allocate(nbytes, self.op.request)
            if stage is not None:
                return stage
            yield 0
        return None

    def _put(self, nbytes: int, stage: Stage, span: Span) -> Iterator[int]:
        """Until it is visible in the receiver's ring, or after an error, until nothing of it is under way."""
        assert self.route.channel is not None
        local, target = self._stages.take(), self._target
        put = self.route.channel.put(
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
            flush = self.route.channel.flush()  # at once, so that it does not wait for the next piece too
        except KVError as error:
            failure = error
        while not put.done or (flush is not None and not flush.done):
            if self.error is not None:
                put.cancel()
            yield 0
        if flush is None or flush.error is not None:
            self.flushed = False  # nobody can tell any more what lands
        failure = failure or put.error or (None if flush is None else flush.error)
        if failure is not None and self.error is None:
            raise failure

    def _say(self, serial: int, piece: Piece, layout: PieceLayout, early: Early | None = None) -> None:
        with self._lock:
            self._client.staged(
                self.op.dst,
                self._grant.generation,
                serial,
                **piece._asdict(),
                checked=self._checksum,
                state=self.op.state,
                early=early is not None,
                stream=None if early is None else early.stream,
            )
        if self._packer.elsewhere:
            self._speak()
        self.route.count(self._lane, nbytes=layout.payload, spans=1)
        self._report((), layout.payload, "staged")

    def _give_back(self, serial: int) -> None:
        with self._lock:
            self._client.staged(
                self.op.dst, self._grant.generation, serial, layers=(), start=0, num_pages=0, checked=False
            )

    def _drain(self) -> Iterator[int]:
        """After a failure: what is being gathered or put comes to its end. Stages asked for go back by themselves."""
        while self._flights:
            try:
                self._advance_flights()
            except KVError:
                continue  # the first error is the one to report
            yield 0
        self._leave()

    def _source_read(self) -> None:
        """Tells the caller when the last page has been read."""
        if self._cutter.done and not self._gathering:
            self.op.ticket._release_source()
