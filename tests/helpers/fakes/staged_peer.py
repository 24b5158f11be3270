"""A `StagedTransfer` with a transport and a receiver that do exactly what the test says, when it says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from oracle import GAP, Bytes, Pool, gqa
from pack_kit import Pages
from protocol_kit import pages as page_ids
from protocol_kit import pair

from torchkv.errors import KVError
from torchkv.packer import Early, HostPacker, Packer
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.protocol.stageclient import StageClient
from torchkv.route import LocalPages, Route, StageTarget
from torchkv.stagedtransfer import StagedTransfer
from torchkv.stagememory import SendStages, StageMemory
from torchkv.transport import Batch, Channel, RemoteView
from torchkv.wire import StageAsk, Staged, StageDenied, StageGrant

REGION, RING_REGION = 5, 9
GENERATION = 3
SRC, DST = [4, 1, 7, 2], [0, 5, 3, 6]
RING = 1 << 16
# One layer is 4 pages of (K, V) x 4 tokens x 4 heads x 2 x 2 bytes.
LAYER = 4 * 2 * 4 * 4 * 2 * 2
LEAST = 64 + 64  # one page of a layer


class Op:
    """A put or flush, over when the test says so."""

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
    """One that has begun: it writes, and is over, when the test says so. One that fails has written all."""

    def __init__(self, early: Early | None, stopped: Callable[[], bool]) -> None:
        self.early = early
        self.stopped = stopped
        self.over = False
        self.error: KVError | None = None

    def end(self, error: KVError | None = None) -> None:
        self.error, self.over = error, True


class SlowPacker(HostPacker):
    """Others do the work, as on a GPU."""

    def __init__(self, local: LocalPages, receiving: StageMemory | None) -> None:
        super().__init__(local, receiving)
        self.gathers: list[Gather] = []

    signals = True

    def gather(self, *args: Any, early: Early | None = None, stopped: Any, **settings: Any) -> Iterator[int]:
        gather = Gather(early, stopped)
        self.gathers.append(gather)
        while not gather.over:
            yield 0
        for _ in super().gather(*args, **settings):
            pass
        if gather.error is not None:
            raise gather.error
        yield 1


class Source:
    """What `KVWork` is to a transfer."""

    def __init__(self) -> None:
        self.released = 0

    def _release_source(self) -> None:
        self.released += 1


class Case:
    """own, ring: bytes of the two rings. mapped: whether the receiver's is mapped here, the whole of `Wire.ring`.

    packer: made for this rank's pages; `HostPacker` by default.
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
        channels: int = 0,
    ) -> None:
        plan = pair(0).plan(0, (0,), 1)
        self.pool = Pool.random(gqa(), 8, np.random.default_rng())
        self.local = Pages(self.pool, torch.device("cpu")).local
        self.taken: list[int] = []
        self.stages = SendStages(own, self._make)
        self.client = StageClient()
        self.lock = threading.Lock()
        self.wire = Wire(self.stages.take)
        self.before = self.wire.ring.copy()
        views: list[RemoteView | None] = [None] * (RING_REGION + 1)
        if mapped:
            views[RING_REGION] = RemoteView(self.wire.ring.ctypes.data, RING, torch.device("cpu"))
        self.route = Route(
            rank=1,
            layout=gqa(),
            placements={},
            channel=cast(Channel, self.wire),
            views=views,
            staging=StageTarget(RING_REGION, ring, channels),
        )
        self.grant = BoundGrant(
            dst=1, generation=GENERATION, request="r", prefix_tokens=0, pages=page_ids(*DST), plan=plan
        )
        self.source = Source()
        self.reported = 0
        self.spoken: list[int] = []  # messages that were sent at once
        self.packer = packer(self.local, None)
        self.transfer = self.make(layers, checksum=checksum)

    def _make(self, nbytes: int) -> StageMemory:
        self.taken.append(nbytes)
        return StageMemory(torch.zeros(nbytes, dtype=torch.uint8), REGION)

    def make(self, layers: tuple[int, ...], *, checksum: bool = False) -> StagedTransfer:
        return StagedTransfer(
            SendOp("r", 1, {}, layers, 0, len(SRC), self.source),
            self.grant,
            pages=page_ids(*SRC),
            client=self.client,
            lock=self.lock,
            stages=self.stages,
            packer=self.packer,
            checksum=checksum,
            local=self.local,
            route=self.route,
            report=self._report,
            speak=self._speak,
        )

    def _speak(self) -> None:
        assert not self.lock.locked()
        self.spoken.append(len(self.client.outbox))

    def _report(self, layers: tuple[int, ...], nbytes: int, path: str) -> None:
        assert (layers, path) == ((), "staged"), "the receiver attests what it has unpacked"
        self.reported += nbytes

    def step(self, times: int = 50) -> None:
        for _ in range(times):
            if not self.transfer.finished:
                self.transfer.advance()

    def said(self) -> list[Any]:
        outbox, self.client.outbox = self.client.outbox, []
        assert {to for to, _ in outbox} <= {1}
        return [message for _, message in outbox]

    def give(self, ask: StageAsk, offset: int, *signal: int) -> None:
        self.client.on_grant(1, StageGrant(GENERATION, ask.serial, offset, ask.nbytes, *signal), 1 << 16, 8)

    def deny(self, ask: StageAsk) -> None:
        self.client.on_denied(1, StageDenied(GENERATION, ask.serial, "full of others"), 1 << 16)

    def packed(self, staged: Staged, offset: int) -> bool:
        """Whether the ring holds the pages of ``staged``."""
        want = self._bytes(staged)
        return np.array_equal(self.wire.ring[offset : offset + len(want)], want)

    def expected(self, staged: Sequence[tuple[Staged, int]]) -> Bytes:
        """The ring with these pieces at these offsets, every other byte as before."""
        ring = self.before.copy()
        for message, offset in staged:
            want = self._bytes(message)
            ring[offset : offset + len(want)] = want
        return ring

    def _bytes(self, staged: Staged) -> Bytes:
        """Layer by layer, all of K, then all of V."""
        return np.concatenate(
            [
                self.pool.tensors[name, layer][page, :-GAP]
                for layer in staged.layers
                for name in ("k", "v")
                for page in SRC[staged.start : staged.start + staged.num_pages]
            ]
        )


def offsets(start: int = 0) -> Iterator[int]:
    """Where the receiver puts one stage after the other."""
    return iter(range(start, 1 << 16, 4096))


def pages_sent(staged: list[tuple[Staged, int]]) -> list[tuple[int, int]]:
    """(layer, page) of all that `run_to_end` has seen, in order."""
    return sorted(
        (layer, page)
        for message, _ in staged
        for layer in message.layers
        for page in range(message.start, message.start + message.num_pages)
    )


def run_to_end(case: Case, at: dict[int, int] | None = None) -> list[tuple[Staged, int]]:
    """What was said of which offset. at: stages that are granted already, by serial."""
    places, at, staged = offsets(32768), dict(at or {}), []
    for _ in range(200):
        case.step(1)
        for message in case.said():
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
