"""The put paths: the transport writes whole pages (``runs``) or head slices (``slices``), one descriptor per run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from torchkv.errors import KVError
from torchkv.layout.plan_segment import PlanSegment
from torchkv.transfer.base import Transfer, TransferContext
from torchkv.transport.interface import Batch, Completion

__all__ = ["PutTransfer"]

MAX_PUTS = 4  # batches under way at once


class PutTransfer(Transfer):
    """Posts one batch of descriptors per component and layer, and flushes once per group of layers."""

    def __init__(self, context: TransferContext, *, path: str) -> None:
        super().__init__(context)
        self._path = path
        self._pending: deque[tuple[Completion, int]] = deque()
        self._posted = False  # puts may be under way whose arrival only a flush tells

    def _run(self) -> Iterator[int]:
        connection = self.connection
        assert connection.channel is not None
        spans = 0
        for layers in self._groups():
            total = 0
            for segment in self._plan.segments_for(layers):
                for layer in segment.layers:
                    batch = self._batch(segment, layer)
                    if not len(batch):
                        continue
                    self._posted = True
                    self._pending.append((connection.channel.put(batch), batch.nbytes))
                    total += batch.nbytes
                    spans += len(batch)
                    yield from self._await_puts(MAX_PUTS - 1)
            yield from self._await_puts(0)
            if total:
                yield from self._flush()
            connection.count(connection.lane, nbytes=total)
            self._report(layers, total, self._path)
        connection.count(connection.lane, transfers=1, spans=spans)

    def _await_puts(self, allowed: int) -> Iterator[int]:
        """Waits until at most ``allowed`` batches are pending."""
        while len(self._pending) > allowed:
            completion, nbytes = self._pending[0]
            if not completion.done:
                yield 0
                continue
            self._pending.popleft()
            if completion.error is not None:
                raise completion.error
            yield nbytes

    def _flush(self) -> Iterator[int]:
        assert self.connection.channel is not None
        flush = self.connection.channel.flush()
        while not flush.done:
            yield 0
        if flush.error is not None:
            raise flush.error
        self._posted = False

    def _drain(self) -> Iterator[int]:
        """After a failure: waits until what was posted has landed, or is known never to land."""
        for completion, _ in self._pending:
            completion.cancel()
        for completion, _ in self._pending:
            while not completion.done:
                yield 0
        self._pending.clear()
        if not self._posted:
            return
        try:
            yield from self._flush()
        except KVError:
            self.flushed = False  # it is unknown what still lands; the error to report is the first one

    def _batch(self, segment: PlanSegment, layer: int) -> Batch:
        src, dst, length = self._offsets.spans(segment, layer)
        ours = self._local.placements[segment.component, layer]
        theirs = self.connection.placements[segment.component, layer]
        return Batch(
            local_region=np.full(len(src), self._local.regions[ours.storage], dtype=np.int64),
            local_offset=src + ours.offset,
            remote_region=np.full(len(src), theirs.storage, dtype=np.int64),
            remote_offset=dst + theirs.offset,
            length=length,
        )
