"""The direct path on GPUs: a kernel on a side stream stores this rank's pages into the peer's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from torchkv import kernels
from torchkv.device import Device
from torchkv.devicepages import DevicePages
from torchkv.errors import KVError, PageOutOfRange, TransportUnavailable
from torchkv.events import StreamEvent, wait_on_stream
from torchkv.flags import Flag
from torchkv.jobs import JobTable
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.transfer import Report, Transfer
from torchkv.transport import Int64Array
from torchkv.uploads import Upload

__all__ = ["KernelTransfer"]

MAX_LAUNCHES = 3  # groups of layers on their way at once: the GPU never waits for this thread


class KernelTransfer(Transfer):
    """See `Transfer`. ``waits``: events that the stream waits for; none if the pages may be read at once.

    A kernel that has been enqueued cannot be called back: a failed transfer is drained when its kernels are done,
    and those wait for the caller's event.
    """

    # A launch takes some microseconds to fill the link and to drain, which this makes a percent of the whole.
    group_bytes = 512 << 20

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array | DevicePages,
        waits: Sequence[StreamEvent],
        stream: torch.cuda.Stream,
        jobs: JobTable,
        device: Device,
        local: LocalPages,
        route: Route,
        report: Report,
    ) -> None:
        super().__init__(op, grant, local=local, route=route, report=report)
        self._pages = pages
        self._waits = list(waits)
        self._stream = stream
        self._jobs = jobs
        self._device = device
        self._in_flight: deque[tuple[tuple[int, ...], int, int, Flag]] = deque()
        self._begun = False  # something may have been enqueued that no flag follows yet
        self._uploads: list[Upload] = []
        self._errors = device.error_slot()

    @property
    def gated(self) -> bool:
        try:
            self._waits = [event for event in self._waits if not event.query()]
        except RuntimeError:
            return False  # the GPU has failed: `_drain` asks it again, and says so
        return bool(self._waits)

    def _run(self) -> Iterator[int]:
        spans = 0
        groups = list(self._groups())
        if groups:
            self._begun = True
            src, dst = self._begin()
        for layers in groups:
            nbytes, rows = self._launch(layers, src, dst)
            self._in_flight.append((layers, nbytes, rows, self._device.signal(self._stream)))
            spans += rows
            yield from self._settle(MAX_LAUNCHES - 1)
        yield from self._settle(0)
        self._release()
        self.route.count(self._lane, transfers=1, spans=spans)

    def _begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lets the stream wait for the gates; returns the page ids of both sides, in device memory."""
        with torch.cuda.stream(self._stream):
            for event in self._waits:
                wait_on_stream(event, self._stream)
        dst = self._upload("dst", self._grant.pages)
        return self._pages.ids if isinstance(self._pages, DevicePages) else self._upload("src", self._pages), dst

    @property
    def _lane(self) -> str:
        return "local" if self.route.channel is None else "view"

    def _upload(self, whose: str, ids: Int64Array) -> torch.Tensor:
        key = (whose, self._grant.dst, self._grant.generation)
        self._uploads.append(self._device.uploads.acquire(ids, self._stream, key))
        return self._uploads[-1].ids

    def _release(self) -> None:
        """The kernels have ended, or never began: what they shared with others is free."""
        self._device.release(self._stream, self.op.request)
        self._device.retire_errors(self._errors)
        for upload in self._uploads:
            self._device.uploads.release(upload)

    def _launch(self, layers: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> tuple[int, int]:
        """Enqueues kernels for ``layers``; returns bytes and rows. Raises ``TransportUnavailable``."""
        try:
            return self._enqueue(layers, src, dst)
        except KVError:
            raise
        except RuntimeError as error:  # CUDA's and Triton's
            raise TransportUnavailable(f"the GPU refused a copy kernel: {error}") from error

    def _enqueue(self, layers: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> tuple[int, int]:
        nbytes = rows = 0
        with torch.cuda.stream(self._stream):
            for group in self._jobs.groups:
                shape = group.geometry
                limit = self._grant.num_tokens
                pairs = len(shape.pairs(num_src_pages=self.op.num_pages, start=self.op.start, limit_tokens=limit))
                for first, count in group.ranges(layers) if pairs else ():
                    kernels.copy_pages(
                        group.table,
                        src,
                        dst,
                        shape,
                        first_job=first,
                        num_jobs=count,
                        start=self.op.start,
                        limit_tokens=limit,
                        errors=self._errors,
                        blocks=self._device.blocks,
                    )
                    nbytes += count * pairs * shape.pair_nbytes
                    rows += count * pairs * shape.rows.per_pair
        return nbytes, rows

    def _settle(self, allowed: int) -> Iterator[int]:
        """Waits until at most ``allowed`` groups of layers are on their way, and reports those that have arrived."""
        while len(self._in_flight) > allowed:
            layers, nbytes, _, flag = self._in_flight[0]
            if not flag.done:
                yield 0
                continue
            self._in_flight.popleft()
            self._device.retire(flag)
            self._check_ids()
            self.route.count(self._lane, nbytes=nbytes)
            self._report(layers, nbytes, "direct")
            yield nbytes

    def _check_ids(self) -> None:
        """Raises what the kernels found wrong with page ids, of which they have written nothing."""
        bad = kernels.first_error(self._errors)
        if bad is not None:
            limit = self._local.num_pages if bad.side == "source" else self.route.num_pages
            raise PageOutOfRange(f"page {bad.page}, number {bad.position} of the {bad.side}, is outside [0, {limit})")

    def _drain(self) -> Iterator[int]:
        """After a failure: the kernels that are enqueued run to their end."""
        if self._begun:
            # Also those of a step that failed half-way, and copies of page ids into memory that others get next.
            try:
                self._in_flight.append(((), 0, 0, self._device.signal(self._stream)))
            except KVError:
                self.flushed = False  # the first error is the one to report; this one means that nobody can tell
        while self._in_flight:
            *_, flag = self._in_flight[0]
            if flag.done:
                self._in_flight.popleft()
                self._device.retire(flag)
            elif self._is_broken():
                break
            else:
                yield 0
        if self.flushed:
            self._release()

    def _is_broken(self) -> bool:
        """Whether the GPU has failed, so that no flag will ever rise, and nobody can tell what was written."""
        try:
            self._stream.query()
        except RuntimeError as error:
            self.flushed = False
            self.error = self.error or TransportUnavailable(f"the GPU failed: {error}")
        return not self.flushed
