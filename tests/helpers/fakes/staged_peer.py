"""A `StagedTransfer` with a fake transport and receiver, each step of which the test triggers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.helpers.packing import Pages
from tests.helpers.protocol import pages as page_ids
from tests.helpers.protocol import pair
from tests.helpers.references.page_transfer import GAP, Bytes, Pool, gqa
from torchkv.errors import KVError
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.messages import StageAsk, Staged, StageDenied, StageGrant
from torchkv.protocol.sending.staging_requester import StagingRequester
from torchkv.staging.host_packer import HostPacker
from torchkv.staging.memory import SendStages, StageMemory
from torchkv.staging.packer import GatherJob, Packer
from torchkv.staging.transfer import StagedTransfer
from torchkv.transfer.base import TransferContext
from torchkv.transfer.peer_connection import LocalPages, PeerConnection, StageTarget
from torchkv.transport import Batch, Channel, RemoteView

REGION, RING_REGION = 5, 9
GENERATION = 3
SRC, DST = [4, 1, 7, 2], [0, 5, 3, 6]
RING = 1 << 16
# One layer is 4 pages of (K, V) x 4 tokens x 4 heads x 2 x 2 bytes.
LAYER = 4 * 2 * 4 * 4 * 2 * 2
LEAST = 64 + 64  # one page of a layer


class Op:
    """A put or flush that ends when the test calls `end`."""

    def __init__(self) -> None:
        self.done = False
        self.error: KVError | None = None
        self.cancelled = False
        self.batch: Batch | None = None

    def cancel(self) -> None:
        self.cancelled = True

    def end(self, error: KVError | None = None) -> None:
        self.error, self.done = error, True


class Wire:
    """A channel that reads the source of a put only when the test lets it, as a network card may."""

    link = "test"

    def __init__(self, memory: Callable[[], StageMemory]) -> None:
        self.puts: list[Op] = []
        self.flushes: list[Op] = []
        self.ring: Bytes = np.random.default_rng().integers(0, 256, RING, dtype=np.uint8)
        self._memory = memory

    def put(self, batch: Batch) -> Op:
        assert (batch.local_region.tolist(), batch.remote_region.tolist()) == ([REGION], [RING_REGION])
        put = Op()
        put.batch = batch
        self.puts.append(put)
        return put

    def flush(self) -> Op:
        self.flushes.append(Op())
        return self.flushes[-1]

    def read(self, put: Op) -> None:
        """The source of ``put`` is read now, and lands."""
        assert put.batch is not None
        src, dst, length = (int(c[0]) for c in (put.batch.local_offset, put.batch.remote_offset, put.batch.length))
        self.ring[dst : dst + length] = self._memory().tensor.numpy()[src : src + length]
        put.end()


class Gather:
    """A gather that writes, and ends, when the test calls `end`. A gather that fails has written everything."""

    def __init__(self, job: GatherJob) -> None:
        self.job = job
        self.over = False
        self.error: KVError | None = None

    def end(self, error: KVError | None = None) -> None:
        self.error, self.over = error, True


class SlowPacker(HostPacker):
    """A packer whose gathers take time, as on a GPU."""

    def __init__(self, local: LocalPages, receiving: StageMemory | None) -> None:
        super().__init__(local, receiving)
        self.gathers: list[Gather] = []

    def gather(self, job: GatherJob) -> Iterator[int]:
        gather = Gather(job)
        self.gathers.append(gather)
        while not gather.over:
            yield 0
        for _ in super().gather(job):
            pass
        if gather.error is not None:
            raise gather.error
        yield 1


class Source:
    """The part of a `KVWork` that a transfer uses."""

    def __init__(self) -> None:
        self.released = 0

    def _release_source(self) -> None:
        self.released += 1


class Case:
    """own, ring: bytes of the two rings. mapped: whether the receiver's is mapped here, the whole of `Wire.ring`.

    packer: made for this rank's pages; `HostPacker` by default. state: whether the verb says that it moves state.
    """

    def __init__(
        self,
        *,
        own: int = RING,
        ring: int = RING,
        layers: tuple[int, ...] = (0, 1),
        mapped: bool = False,
        checksum: bool = False,
        packer: Callable[[LocalPages, None], Packer] = HostPacker,
        state: bool = False,
    ) -> None:
        plan = pair(0).plan(0, (0,), 1)
        self.pool = Pool.random(gqa(), 8, np.random.default_rng())
        self.local = Pages(self.pool, torch.device("cpu")).local
        self.taken: list[int] = []
        self.stages = SendStages(own, self._make)
        self.requester = StagingRequester()
        self.lock = threading.Lock()
        self.wire = Wire(self.stages.take)
        self.before = self.wire.ring.copy()
        views: list[RemoteView | None] = [None] * (RING_REGION + 1)
        if mapped:
            views[RING_REGION] = RemoteView(self.wire.ring.ctypes.data, RING, torch.device("cpu"))
        self.connection = PeerConnection(
            rank=1,
            layout=gqa(),
            placements={},
            channel=cast(Channel, self.wire),
            views=views,
            staging=StageTarget(RING_REGION, ring),
        )
        self.grant = BoundGrant(
            dst=1, generation=GENERATION, request="r", prefix_tokens=0, pages=page_ids(*DST), plan=plan
        )
        self.source = Source()
        self.reported = 0
        self.sent_at_once: list[int] = []  # queued messages at each call of send_stage_messages
        self.packer = packer(self.local, None)
        self.state = state
        self.transfer = self.make(layers, checksum=checksum)

    def _make(self, nbytes: int) -> StageMemory:
        self.taken.append(nbytes)
        return StageMemory(torch.zeros(nbytes, dtype=torch.uint8), REGION)

    def make(self, layers: tuple[int, ...], *, checksum: bool = False) -> StagedTransfer:
        return StagedTransfer(
            TransferContext(
                op=SendOp("r", 1, {}, layers, 0, len(SRC), self.source, state=self.state),
                grant=self.grant,
                pages=page_ids(*SRC),
                local=self.local,
                connection=self.connection,
                report=self._report,
            ),
            requester=self.requester,
            lock=self.lock,
            stages=self.stages,
            packer=self.packer,
            checksum=checksum,
            send_stage_messages=self._send_stage_messages,
        )

    def _send_stage_messages(self) -> None:
        assert not self.lock.locked()
        self.sent_at_once.append(len(self.requester.outbox))

    def _report(self, layers: tuple[int, ...], nbytes: int, path: str) -> None:
        assert (layers, path) == ((), "staged"), "the receiver attests what it has unpacked"
        self.reported += nbytes

    def step(self, times: int = 50) -> None:
        for _ in range(times):
            if not self.transfer.finished:
                self.transfer.advance()

    def take_messages(self) -> list[Any]:
        outbox, self.requester.outbox = self.requester.outbox, []
        assert {to for to, _ in outbox} <= {1}
        return [message for _, message in outbox]

    def give(self, ask: StageAsk, offset: int) -> None:
        self.requester.on_grant(1, StageGrant(GENERATION, ask.serial, offset, ask.nbytes), 1 << 16)

    def deny(self, ask: StageAsk) -> None:
        self.requester.on_denied(1, StageDenied(GENERATION, ask.serial, "full of others"), 1 << 16)

    def packed(self, staged: Staged, offset: int) -> bool:
        """Whether the ring holds the pages of ``staged``."""
        want = self._bytes(staged)
        return np.array_equal(self.wire.ring[offset : offset + len(want)], want)

    def expected(self, staged: Sequence[tuple[Staged, int]]) -> Bytes:
        """The ring with these pieces at these offsets, and all other bytes as before."""
        ring = self.before.copy()
        for message, offset in staged:
            want = self._bytes(message)
            ring[offset : offset + len(want)] = want
        return ring

    def _bytes(self, staged: Staged) -> Bytes:
        """The packed bytes of a piece: layer by layer, all of K, then all of V."""
        return np.concatenate(
            [
                self.pool.tensors[name, layer][page, :-GAP]
                for layer in staged.layers
                for name in ("k", "v")
                for page in SRC[staged.start : staged.start + staged.num_pages]
            ]
        )


def offsets(start: int = 0) -> Iterator[int]:
    """The offsets at which the receiver grants one stage after the other."""
    return iter(range(start, 1 << 16, 4096))


def pages_sent(staged: list[tuple[Staged, int]]) -> list[tuple[int, int]]:
    """(layer, page) of everything in the messages that `run_to_end` returned, sorted."""
    return sorted(
        (layer, page)
        for message, _ in staged
        for layer in message.layers
        for page in range(message.start, message.start + message.num_pages)
    )


def run_to_end(case: Case, at: dict[int, int] | None = None) -> list[tuple[Staged, int]]:
    """Runs the transfer. Returns the `Staged` messages with their offsets. at: stages granted before, by serial."""
    places, at, staged = offsets(32768), dict(at or {}), []
    for _ in range(200):
        case.step(1)
        for message in case.take_messages():
            if isinstance(message, StageAsk):
                at[message.serial] = next(places)
                case.give(message, at[message.serial])
            else:
                assert isinstance(message, Staged)
                staged.append((message, at[message.serial]))
        for put in case.wire.puts:
            if not put.done:
                case.wire.read(put)
        for flush in case.wire.flushes:
            flush.end()
        if case.transfer.finished:
            return staged
    pytest.fail("never finished")
