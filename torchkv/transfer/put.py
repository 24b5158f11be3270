"""Descriptors through the transport: one-sided writes, whole pages (``runs``) or head slices (``slices``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from torchkv.errors import KVError
from torchkv.offsets import PairOffsets
from torchkv.plan import Slab
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.transfer import Report, Transfer
from torchkv.transport import Batch, Completion, Int64Array

__all__ = ["PutTransfer"]

MAX_PUTS = 4


class PutTransfer(Transfer):
    """See `Transfer`. One batch per component and layer, a flush per group of layers."""

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array,
        path: str,
        local: LocalPages,
        route: Route,
        report: Report,
    ) -> None:
        super().__init__(op, grant, local=local, route=route, report=report)
        self._offsets = PairOffsets(op, grant, pages, local, route)
        self._path = path
        self._pending: deque[tuple[Completion, int]] = deque()
        self._posted = False  # something may be on its way that only a flush can account for

    def _run(self) -> Iterator[int]:
        route = self.route
        assert route.channel is not None
        spans = 0
        for layers in self._groups():
            total = 0
            for slab in self._plan.slabs_for(layers):
                for layer in slab.layers:
                    batch = self._batch(slab, layer)
                    if not len(batch):
                        continue
                    self._posted = True
                    self._pending.append((route.channel.put(batch), batch.nbytes))
                    total += batch.nbytes
                    spans += len(batch)
                    yield from self._settle(MAX_PUTS - 1)
            yield from self._settle(0)
            if total:
                yield from self._flush()
            route.count(route.lane, nbytes=total)
            self._report(layers, total, self._path)
        route.count(route.lane, transfers=1, spans=spans)

    def _settle(self, allowed: int) -> Iterator[int]:
        """Waits until at most ``allowed`` puts are pending."""
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
        assert self.route.channel is not None
        flush = self.route.channel.flush()
        while not flush.done:
            yield 0
        if flush.error is not None:
            raise flush.error
        self._posted = False

    def _drain(self) -> Iterator[int]:
        """After a failure: what was posted must have landed, or be known never to."""
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
            # The first error is the one to report; this one only means that nobody can tell any more.
            self.flushed = False

    def _batch(self, slab: Slab, layer: int) -> Batch:
        src, dst, length = self._offsets.spans(slab, layer)
        ours = self._local.placements[slab.component, layer]
        theirs = self.route.placements[slab.component, layer]
        return Batch(
            local_region=np.full(len(src), self._local.regions[ours.storage], dtype=np.int64),
            local_offset=src + ours.offset,
            remote_region=np.full(len(src), theirs.storage, dtype=np.int64),
            remote_offset=dst + theirs.offset,
            length=length,
        )
