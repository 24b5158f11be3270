"""The direct path on the host: this rank's loads and stores, in the peer's mapped pages."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from torchkv import hostcopy
from torchkv.offsets import PairOffsets
from torchkv.plan import Slab
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.transfer import STEP_BYTES, Report, Transfer
from torchkv.transport import Int64Array

__all__ = ["CopyTransfer"]

# Many rows shorter than this are worth merging before they are copied.
SHORT_RUN = 4096
FEW_ROWS = 64


class CopyTransfer(Transfer):
    """See `Transfer`. Every step ends before it returns, so there is never anything to drain.

    A step is a layer, or a part of one: so many bytes that nobody waits for its end for long.
    """

    posts = False

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array,
        local: LocalPages,
        route: Route,
        report: Report,
    ) -> None:
        super().__init__(op, grant, local=local, route=route, report=report)
        self._offsets = PairOffsets(op, grant, pages, local, route)

    def _run(self) -> Generator[int, None, int]:
        step = spans = 0
        lane = "local" if self.route.channel is None else "view"
        for layers in self._groups():
            total = 0
            for layer in layers:
                if step:
                    yield step
                    step = 0
                for slab in self._plan.slabs_of[layer]:
                    for nbytes, rows in self._copy(slab, layer):
                        total += nbytes
                        spans += rows
                        step += nbytes
                        if step >= STEP_BYTES:
                            yield step
                            step = 0
            self.route.count(lane, nbytes=total)
            self._report(layers, total, "direct")
        self.route.count(lane, transfers=1, spans=spans)
        return step

    def _drain(self) -> Iterator[int]:
        yield from ()

    def _copy(self, slab: Slab, layer: int) -> Iterator[tuple[int, int]]:
        """Copies one component of one layer; yields (bytes, rows), of at most `STEP_BYTES`."""
        src_ptr = self._local.ptr(slab.component, layer)
        dst_ptr = self.route.ptr(slab.component, layer)
        src_off, dst_off = self._offsets.pairs(slab, layer)
        rows, per_pair = slab.rows, slab.rows.per_pair
        if per_pair == 1 and rows.run < SHORT_RUN and len(src_off) > FEW_ROWS:
            src_off, dst_off, length = self._offsets.spans(slab, layer)
            ends = np.cumsum(length)
            first = 0
            while first < len(length):
                done = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, done + STEP_BYTES)))
                hostcopy.copy_spans(src_ptr, dst_ptr, src_off, dst_off, length, first, last)
                yield int(ends[last - 1]) - done, last - first
                first = last
            return
        pair_nbytes = per_pair * rows.run
        step = max(1, STEP_BYTES // pair_nbytes)
        for first in range(0, len(src_off), step):
            last = min(first + step, len(src_off))
            hostcopy.copy_pairs(src_ptr, dst_ptr, src_off, dst_off, first, last, rows)
            yield (last - first) * pair_nbytes, (last - first) * per_pair
