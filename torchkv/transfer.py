"""Moving the bytes of one verb to one peer, step by step, on whichever path was chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from torchkv import hostcopy
from torchkv.errors import KVError, TransferCancelled
from torchkv.plan import PairPlan, Slab, expand, page_pairs, pair_offsets
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.transport import Batch, Completion, Int64Array

__all__ = ["Transfer"]

# Layers are attested together once this much has moved: small enough that a receiver can start early, large
# enough that a flush and a message cost nothing beside it.
GROUP_BYTES = 16 << 20
# One step of a host copy: short enough (about two milliseconds) for the progress thread to stay responsive, and long
# beside the tenth of one that the rest of its round takes.
STEP_BYTES = 16 << 20
# Rows shorter than this are worth merging before they are copied.
SHORT_RUN = 4096
MAX_PUTS = 4

# component, first head, holders, index among them, source and destination page stride
_Key = tuple[str, int, int, int, int, int]


class Transfer:
    """One `SendOp` in execution. ``advance`` until ``finished``; then ``error`` and ``flushed`` say how it ended.

    ``report(layers, nbytes, path)`` is called whenever whole layers have become visible at the receiver.
    """

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array,
        local: LocalPages,
        route: Route,
        path: str,
        report: Callable[[tuple[int, ...], int, str], None],
    ) -> None:
        self.op = op
        self.finished = False
        self.error: KVError | None = None
        self.flushed = True
        self._grant = grant
        self._pages = pages
        self._local = local
        self.route = route
        self._path = path
        self._report = report
        self._pending: deque[tuple[Completion, int]] = deque()
        self._posted = False  # something may be on its way that only a flush can account for
        # Per slab geometry and page strides: the same for every layer that shares them.
        self._offsets: dict[_Key, tuple[Int64Array, Int64Array]] = {}
        self._spans: dict[_Key, tuple[Int64Array, Int64Array, Int64Array]] = {}
        self._steps: Iterator[int] = self._direct() if path == "direct" else self._puts()

    def advance(self) -> int:
        """Does one bounded step. Returns the bytes it moved; 0 while it waits for the transport."""
        try:
            moved = next(self._steps)
        except StopIteration:
            self.finished = True
            return 0
        except KVError as error:
            self.fail(self._named(error))
            return 0
        if moved:
            self.op.moved = True
        return moved

    def _named(self, error: KVError) -> KVError:
        """What a channel knows nothing of: which request, peer and layers its error is about."""
        layers = self.op.layers if len(self.op.layers) < 5 else (*self.op.layers[:4], "...")
        where = f"request {self.op.request!r} to rank {self.op.dst}, layers {', '.join(map(str, layers))}"
        return type(error)(f"{where}: {error}", retryable=error.retryable)

    def fail(self, error: KVError) -> None:
        """Stops: posts nothing more, and finishes once nothing of it can land any more."""
        if self.error is None and not self.finished:
            self.error = error
            self._steps = self._drain()

    def halt(self) -> None:
        self.fail(TransferCancelled(f"request {self.op.request!r}: stopped"))

    # ------------------------------------------------------------------ paths

    def _direct(self) -> Iterator[int]:
        """Stores straight into the peer's pages."""
        spans = 0
        lane = "local" if self.route.channel is None else "view"
        for layers in self._groups():
            total = 0
            for slab in self._plan.slabs_for(layers):
                for layer in slab.layers:
                    for nbytes, rows in self._copy(slab, layer):
                        total += nbytes
                        spans += rows
                        yield nbytes
            self.route.count(lane, nbytes=total)
            self._report(layers, total, "direct")
        self.route.count(lane, transfers=1, spans=spans)

    def _copy(self, slab: Slab, layer: int) -> Iterator[tuple[int, int]]:
        """Copies one component of one layer; yields (bytes, rows) a step."""
        src_ptr = self._local.ptr(slab.component, layer)
        dst_ptr = self.route.ptr(slab.component, layer)
        if slab.rows.per_pair == 1 and slab.rows.run < SHORT_RUN:
            src_off, dst_off, length = self._spans_of(slab, layer)
            ends = np.cumsum(length)
            first = 0
            while first < len(length):
                done = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, done + STEP_BYTES)))
                hostcopy.copy_spans(src_ptr, dst_ptr, src_off, dst_off, length, first, last)
                yield int(ends[last - 1]) - done, last - first
                first = last
            return
        src_off, dst_off = self._offsets_of(slab, layer)
        step = max(1, STEP_BYTES // slab.pair_nbytes)
        for first in range(0, len(src_off), step):
            last = min(first + step, len(src_off))
            hostcopy.copy_pairs(src_ptr, dst_ptr, src_off, dst_off, first, last, slab.rows)
            yield (last - first) * slab.pair_nbytes, (last - first) * slab.rows.per_pair

    def _puts(self) -> Iterator[int]:
        """One-sided writes through the transport: one batch per component and layer, a flush per group."""
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

    # ------------------------------------------------------------------ geometry

    @property
    def _plan(self) -> PairPlan:
        return self._grant.plan

    def _groups(self) -> Iterator[tuple[int, ...]]:
        """The op's layers, ascending, in groups of about `GROUP_BYTES`."""
        layers = [layer for layer in self._plan.layers if layer in set(self.op.layers)]
        if not layers or not self.op.num_pages:
            return
        tokens = self.op.num_pages * self._plan.src_page_size
        per_layer = max(1, self._plan.nbytes(tokens) // len(self._plan.layers))
        size = max(1, GROUP_BYTES // per_layer)
        for first in range(0, len(layers), size):
            yield tuple(layers[first : first + size])

    def _key(self, slab: Slab, layer: int) -> _Key:
        src_stride = self._local.placements[slab.component, layer].page_stride
        dst_stride = self.route.placements[slab.component, layer].page_stride
        return (slab.component, slab.heads.start, slab.holders, slab.index, src_stride, dst_stride)

    def _offsets_of(self, slab: Slab, layer: int) -> tuple[Int64Array, Int64Array]:
        """Byte offsets of each page pair, from the start of the tensors."""
        key = self._key(slab, layer)
        if key not in self._offsets:
            pairs = page_pairs(
                slab,
                num_src_pages=self.op.num_pages,
                start=self.op.start,
                limit_tokens=self._grant.num_tokens,
                src_page_size=self._plan.src_page_size,
                dst_page_size=self._plan.dst_page_size,
            )
            self._offsets[key] = pair_offsets(slab, pairs, self._pages, self._grant.pages, key[-2], key[-1])
        return self._offsets[key]

    def _spans_of(self, slab: Slab, layer: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The same, as merged descriptors: source offset, destination offset, length."""
        key = self._key(slab, layer)
        if key not in self._spans:
            self._spans[key] = expand(slab, *self._offsets_of(slab, layer))
        return self._spans[key]

    def _batch(self, slab: Slab, layer: int) -> Batch:
        src, dst, length = self._spans_of(slab, layer)
        ours = self._local.placements[slab.component, layer]
        theirs = self.route.placements[slab.component, layer]
        return Batch(
            local_region=np.full(len(src), self._local.regions[ours.storage], dtype=np.int64),
            local_offset=src + ours.offset,
            remote_region=np.full(len(src), theirs.storage, dtype=np.int64),
            remote_offset=dst + theirs.offset,
            length=length,
        )
