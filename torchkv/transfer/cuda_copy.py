"""The direct path on GPUs: a kernel on a side stream stores this rank's pages into the peer's mapped pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from torchkv.arrays import Int64Array
from torchkv.cuda.events import StreamEvent, wait_on_stream
from torchkv.cuda.page_ids import DevicePages, PageIdUpload
from torchkv.cuda.side_streams import StreamClaim
from torchkv.cuda.sync_words import StreamCompletion
from torchkv.errors import KVError, PageOutOfRange, TransportUnavailable
from torchkv.kernels import copies
from torchkv.kernels.gpu_context import GpuContext, check_alive, launching
from torchkv.transfer.base import Transfer, TransferContext
from torchkv.transfer.copy_tables import BaseAddressTable

__all__ = ["CudaCopyTransfer"]

MAX_LAUNCHES = 3  # groups of layers enqueued at once, so that the GPU never waits for the progress thread


class _Launch(NamedTuple):
    """A group of layers that is enqueued."""

    layers: tuple[int, ...]
    nbytes: int
    spans: int
    completion: StreamCompletion


class CudaCopyTransfer(Transfer):
    """Copies with kernels on a side stream.

    waits: the gates, events that the stream waits for; empty if the pages may be read at once. claim: to a stream that
    may wait; None if there are no gates. opened: called when all gates have been seen to open, so that the receiver can
    be told that the last bytes are under way. table: base addresses of the plan's layers, its kernels loaded.

    What is enqueued cannot be called back. So a failed transfer is drained when its kernels have ended, and these wait
    for the gates.
    """

    # A launch takes some microseconds to fill the link and to drain it: about a percent of the time for so many bytes.
    group_bytes = 512 << 20
    posts = False

    def __init__(
        self,
        context: TransferContext,
        *,
        waits: Sequence[StreamEvent],
        opened: Callable[[], None],
        claim: StreamClaim[torch.cuda.Stream] | None,
        table: BaseAddressTable,
        device: GpuContext,
    ) -> None:
        super().__init__(context)
        self._waits = list(waits)
        self._opened = opened
        self._gate: StreamCompletion | None = None  # done when the stream has passed all gates
        self._stream = device.unblocked_stream if claim is None else claim.stream
        self._claim = claim
        self._table = table
        self._device = device
        self._in_flight: deque[_Launch] = deque()
        self._begun = False  # whether work may be enqueued that no completion follows yet
        self._uploads: list[PageIdUpload] = []
        self._errors = device.take_error_words()

    @property
    def gated(self) -> bool:
        try:
            self._waits = [event for event in self._waits if not event.query()]
        except RuntimeError:
            return False  # the GPU has failed, which `_drain` will find and report
        return bool(self._waits)

    def _run(self) -> Iterator[int]:
        groups = list(self._groups())
        if groups:
            self._begun = True
            self._begin()
        for layers in groups:
            nbytes, spans = self._launch(layers)
            completion = self._device.signal(self._stream, copying=not self._waits)
            self._in_flight.append(_Launch(layers, nbytes, spans, completion))
            yield from self._await_launches(MAX_LAUNCHES - 1)
        yield from self._await_launches(0)
        self._release()
        self.connection.count(self._lane, transfers=1)

    def _begin(self) -> None:
        """Makes the stream wait for the gates."""
        if not self._waits:
            return
        with torch.cuda.stream(self._stream):
            for event in self._waits:
                wait_on_stream(event, self._stream)
        self._gate = self._device.signal(self._stream)

    def _gate_opens(self) -> bool:
        """Whether all gates were seen to be open for the first time. Then also expects the end of the copies soon."""
        if self._gate is None or not self._gate.done:
            return False
        self._forget_gate()
        for launch in self._in_flight:
            self._device.mark_copying(launch.completion)
        self._opened()
        return True

    def _forget_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            self._device.release_completion(gate)

    @cached_property
    def _ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page ids of both sides in device memory: source, destination."""
        dst = self._upload("dst", self._grant.pages)
        return self._pages.ids if isinstance(self._pages, DevicePages) else self._upload("src", self._pages), dst

    @property
    def _lane(self) -> str:
        return "local" if self.connection.channel is None else "view"

    def _upload(self, whose: str, ids: Int64Array) -> torch.Tensor:
        key = (whose, self._grant.dst, self._grant.generation)
        self._uploads.append(self._device.uploads.acquire(ids, self._stream, key))
        return self._uploads[-1].ids

    def _release(self) -> None:
        """Gives back what the kernels used, which have ended or were never enqueued."""
        self._forget_gate()
        if self._claim is not None:
            self._device.release(self._claim)
        self._device.release_error_words(self._errors)
        for upload in self._uploads:
            self._device.uploads.release(upload)

    def _launch(self, layers: tuple[int, ...]) -> tuple[int, int]:
        """Enqueues copies of ``layers``. Returns their bytes and spans. Raises ``TransportUnavailable``."""
        nbytes = spans = 0
        limit = self._grant.num_tokens
        with launching(self._stream, "copy pages"):
            for group in self._table.groups:
                shape = group.geometry
                pairs = len(shape.ordinals(num_src_pages=self.op.num_pages, start=self.op.start, limit_tokens=limit))
                for first, count in group.ranges(layers) if pairs else []:
                    src, dst = self._ids
                    jobs = copies.CopyJobs(
                        table=group.table,
                        geometry=shape,
                        first_job=first,
                        num_jobs=count,
                        start=self.op.start,
                        limit_tokens=limit,
                        errors=self._errors,
                        blocks=self._device.blocks,
                        scales=group.scales,
                    )
                    copies.copy_pages(jobs, src, dst)
                    nbytes += count * pairs * shape.pair_nbytes
                    spans += count * pairs * shape.rows.per_pair
        return nbytes, spans

    def _await_launches(self, allowed: int) -> Iterator[int]:
        """Waits until at most ``allowed`` groups of layers are enqueued, and reports those that have arrived."""
        while len(self._in_flight) > allowed:
            layers, nbytes, spans, completion = self._in_flight[0]
            if not completion.done:
                yield int(self._gate_opens())
                continue
            self._in_flight.popleft()
            self._device.release_completion(completion)
            self._check_ids()
            self.connection.count(self._lane, nbytes=nbytes, spans=spans)
            self._report(layers, nbytes, "direct")
            yield 1  # not the bytes, which count against what the progress thread may copy itself in one round

    def _check_ids(self) -> None:
        """Raises ``PageOutOfRange`` for a bad page id that a kernel met. Kernels write nothing for such pages."""
        bad = copies.first_error(self._errors)
        if bad is not None:
            mine = bad.side == "source"
            segment = self._plan.segments[0]
            whose, side = ("this", self._local) if mine else ("the peer's", self.connection)
            limit = side.placements[segment.component, segment.layers[0]].num_pages
            which = f"number {bad.position} of the {bad.side}'s ids"
            raise PageOutOfRange(f"page {bad.page} ({which}) is outside {whose} cache's [0, {limit})")

    def _drain(self) -> Iterator[int]:
        """After a failure: waits for the kernels that are enqueued."""
        self._forget_gate()
        if self._begun:
            # Including those of a step that failed half-way, and uploads of page ids into memory that is used again.
            try:
                self._in_flight.append(_Launch((), 0, 0, self._device.signal(self._stream)))
            except KVError:
                self.flushed = False  # it is unknown what was written; the error to report is the first one
        while self._in_flight:
            completion = self._in_flight[0].completion
            if completion.done:
                self._in_flight.popleft()
                self._device.release_completion(completion)
            elif not self._is_alive():
                break
            else:
                yield 0
        if self.flushed:
            self._release()

    def _is_alive(self) -> bool:
        """Whether the GPU works. If it has failed, completions stay undone, and it is unknown what was written."""
        try:
            check_alive(self._stream)
        except TransportUnavailable as error:
            self.flushed = False
            self.error = self.error or error
        return self.flushed
