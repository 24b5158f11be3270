"""The direct path on the host: the progress thread copies this rank's pages into the peer's mapped pages."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from torchkv.host import convert_loops, copy_loops
from torchkv.host.copy_loops import SHORT_RUN, STEP_BYTES
from torchkv.layout.plan_segment import PlanSegment
from torchkv.transfer.base import Transfer

__all__ = ["HostCopyTransfer"]

# With more page pairs than this, of one short run each, runs are merged across pages before they are copied.
FEW_PAIRS = 64


class HostCopyTransfer(Transfer):
    """Copies on the progress thread. A step's bytes are in place when it returns, so there is nothing to drain.

    A step is a layer, or a part of one of about ``STEP_BYTES``, so that the thread stays responsive.
    """

    posts = False

    def _run(self) -> Generator[int, None, int]:
        step = spans = 0
        lane = "local" if self.connection.channel is None else "view"
        for layers in self._groups():
            total = 0
            for layer in layers:
                if step:
                    yield step
                    step = 0
                for segment in self._plan.segments_of[layer]:
                    for nbytes, rows in self._copy(segment, layer):
                        total += nbytes
                        spans += rows
                        step += nbytes
                        if step >= STEP_BYTES:
                            yield step
                            step = 0
            self.connection.count(lane, nbytes=total)
            self._report(layers, total, "direct")
        self.connection.count(lane, transfers=1, spans=spans)
        return step

    def _drain(self) -> Iterator[int]:
        yield from ()

    def _copy(self, segment: PlanSegment, layer: int) -> Iterator[tuple[int, int]]:
        """Copies one segment of one layer in parts of about ``STEP_BYTES``. Yields (bytes, runs) of each part."""
        src_ptr = self._local.ptr(segment.component, layer)
        dst_ptr = self.connection.ptr(segment.component, layer)
        src_off, dst_off = self._offsets.pairs(segment, layer)
        rows, per_pair = segment.rows, segment.rows.per_pair
        conversion = segment.conversion
        if conversion is None and per_pair == 1 and rows.run < SHORT_RUN and len(src_off) > FEW_PAIRS:
            src_off, dst_off, length = self._offsets.spans(segment, layer)
            ends = np.cumsum(length)
            first = 0
            while first < len(length):
                done = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, done + STEP_BYTES)))
                copy_loops.copy_spans(src_ptr, dst_ptr, src_off, dst_off, length, first, last)
                yield int(ends[last - 1]) - done, last - first
                first = last
            return
        pair_nbytes = per_pair * rows.run
        step = max(1, STEP_BYTES // pair_nbytes)
        for first in range(0, len(src_off), step):
            last = min(first + step, len(src_off))
            if conversion is None:
                copy_loops.copy_pairs(src_ptr, dst_ptr, src_off, dst_off, first, last, rows)
            else:
                dtypes, heads = (conversion.src, conversion.dst), conversion.head_elements
                scales = self.connection.scales.of(segment.component, layer, segment.heads)
                convert_loops.convert_pairs(
                    dtypes, src_ptr, dst_ptr, src_off, dst_off, first, last, rows, heads, scales
                )
            yield (last - first) * pair_nbytes, (last - first) * per_pair
