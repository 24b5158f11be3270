"""The direct path on GPUs: a kernel on a side stream stores this rank's pages into the peer's.

Where the pages of a verb are few long spans, the copy engines do it instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from torchkv import copyengine, cost, kernels
from torchkv.device import Device, check_alive, launching
from torchkv.devicepages import DevicePages
from torchkv.errors import KVError, PageOutOfRange, TransportUnavailable
from torchkv.events import StreamEvent, wait_on_stream
from torchkv.flags import Flag
from torchkv.jobs import JobGroup, JobTable
from torchkv.offsets import PairOffsets
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.streams import Claim
from torchkv.transfer import Report, Transfer
from torchkv.transport import Int64Array
from torchkv.uploads import Upload

__all__ = ["KernelTransfer"]

MAX_LAUNCHES = 3  # groups of layers on their way at once: the GPU never waits for this thread

# Copies of one launch: each takes a place in the stream's queue, and posting to a full one waits. MAX_COPIES is what
# ``group_bytes`` takes at 2 MiB each. Behind a gate it could be a wait for ever, if only this thread opens that gate;
# so there only as many as take little more room than a kernel does.
MAX_COPIES = 256
MAX_GATED_COPIES = 4

COPY_ENGINE = "copy-engine"  # the lane's name

_Spans = tuple[Int64Array, Int64Array, Int64Array]


class _Launch(NamedTuple):
    """A group of layers on its way. moved: lane -> bytes and spans."""

    layers: tuple[int, ...]
    moved: dict[str, tuple[int, int]]
    flag: Flag


class KernelTransfer(Transfer):
    """See `Transfer`. ``waits``: events that the stream waits for; none if the pages may be read at once.

    claim: to a stream that may wait; None if there is nothing to wait for.

    opened: called once these have all happened, so that whoever waits for the end of the copy can be awake by then.
    What has been enqueued cannot be called back: a failed transfer is drained when its kernels and copies are done,
    and those wait for the caller's event.
    """

    # A launch takes some microseconds to fill the link and to drain, which this makes a percent of the whole.
    group_bytes = 512 << 20
    posts = False  # to nothing but the GPU

    def __init__(
        self,
        op: SendOp,
        grant: BoundGrant,
        *,
        pages: Int64Array | DevicePages,
        waits: Sequence[StreamEvent],
        opened: Callable[[], None],
        claim: Claim[torch.cuda.Stream] | None,
        jobs: JobTable,
        device: Device,
        local: LocalPages,
        route: Route,
        report: Report,
    ) -> None:
        super().__init__(op, grant, local=local, route=route, report=report)
        self._pages = pages
        self._waits = list(waits)
        self._opened = opened
        self._gate: Flag | None = None  # rises when the stream has waited for all of them
        self._stream = device.open_stream if claim is None else claim.stream
        self._claim = claim
        self._jobs = jobs
        self._device = device
        # Also when all of them have happened: others share the stream, and wait on it for their own gates.
        self._max_copies = MAX_GATED_COPIES if self._waits else MAX_COPIES
        self._in_flight: deque[_Launch] = deque()
        self._lanes: set[str] = set()
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
        groups = list(self._groups())
        if groups:
            self._begun = True
            self._begin()
        for layers in groups:
            moved = self._launch(layers)
            flag = self._device.signal(self._stream, soon=not self._waits)
            self._in_flight.append(_Launch(layers, moved, flag))
            yield from self._settle(MAX_LAUNCHES - 1)
        yield from self._settle(0)
        self._release()
        for lane in self._lanes or {self._lane}:
            self.route.count(lane, transfers=1)

    def _begin(self) -> None:
        """Lets the stream wait for the gates."""
        if not self._waits:
            return
        with torch.cuda.stream(self._stream):
            for event in self._waits:
                wait_on_stream(event, self._stream)
        self._gate = self._device.signal(self._stream)

    def _gate_opens(self) -> bool:
        """Whether the gate was seen to open just now."""
        if self._gate is None or not self._gate.done:
            return False
        self._forget_gate()
        for launch in self._in_flight:
            self._device.expect(launch.flag)
        self._opened()
        return True

    def _forget_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            self._device.retire(gate)

    @cached_property
    def _ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page ids of both sides, in device memory."""
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
        self._forget_gate()
        if self._claim is not None:
            self._device.release(self._claim)
        self._device.retire_errors(self._errors)
        for upload in self._uploads:
            self._device.uploads.release(upload)

    def _launch(self, layers: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        """Enqueues copies of ``layers``; returns lane -> bytes and spans. Raises ``TransportUnavailable``."""
        moved: dict[str, tuple[int, int]] = {}
        with launching(self._stream, "copy pages"):
            for group in self._jobs.groups:
                shape = group.geometry
                limit = self._grant.num_tokens
                pairs = len(shape.pairs(num_src_pages=self.op.num_pages, start=self.op.start, limit_tokens=limit))
                ranges = group.ranges(layers) if pairs else []
                jobs = sum(count for _, count in ranges)
                spans = self._long_spans(group, jobs, pairs * shape.pair_nbytes) if jobs else None
                for first, count in ranges:
                    _, copies = moved.get(COPY_ENGINE, (0, 0))
                    if spans is not None and copies + count * len(spans[0]) <= self._max_copies:
                        self._post(group, first, count, spans)
                        lane, per_job = COPY_ENGINE, len(spans[0])
                    else:
                        self._start_kernel(group, first, count)
                        lane, per_job = self._lane, pairs * shape.rows.per_pair
                    nbytes, posted = moved.get(lane, (0, 0))
                    moved[lane] = nbytes + count * pairs * shape.pair_nbytes, posted + count * per_job
        return moved

    def _start_kernel(self, group: JobGroup, first: int, count: int) -> None:
        src, dst = self._ids
        kernels.copy_pages(
            group.table,
            src,
            dst,
            group.geometry,
            first_job=first,
            num_jobs=count,
            start=self.op.start,
            limit_tokens=self._grant.num_tokens,
            errors=self._errors,
            blocks=self._device.blocks,
        )

    def _post(self, group: JobGroup, first: int, count: int, spans: _Spans) -> None:
        src_off, dst_off, length = spans
        src, dst = group.addresses[first : first + count].T[:, :, None]
        copyengine.copy_batch((src + src_off).ravel(), (dst + dst_off).ravel(), np.tile(length, count), self._stream)

    # ------------------------------------------------------------------ kernel or copy engines

    def _long_spans(self, group: JobGroup, jobs: int, nbytes: int) -> _Spans | None:
        """What each of ``jobs`` jobs of ``group`` has to copy, ``nbytes``, if copy engines do it better; else None."""

        def pays(spans: int) -> bool:
            return cost.copy_engine_pays(spans=jobs * spans, nbytes=jobs * nbytes)

        # What costs least to find out comes first: most transfers are of layers that are small, or of scattered pages.
        if not pays(1) or self._offsets is None or not group.geometry.seamless or not pays(self._num_runs):
            return None
        spans = self._offsets.spans(group.slab, group.slab.layers[0])
        if not pays(len(spans[0])) or copyengine.available() is not None:
            return None
        return spans

    @cached_property
    def _offsets(self) -> PairOffsets | None:
        """None if only the kernel can do it, or is known to do it best: copies within one GPU were never compared."""
        if self.route.channel is None or isinstance(self._pages, DevicePages):
            return None
        return PairOffsets(self.op, self._grant, self._pages, self._local, self.route)

    @cached_property
    def _num_runs(self) -> int:
        """About the least number of spans that the pages of both sides allow, whatever the geometry."""
        assert not isinstance(self._pages, DevicePages)
        src_size, dst_size = self._plan.src_page_size, self._plan.dst_page_size
        first, end = self.op.start * src_size, (self.op.start + self.op.num_pages) * src_size
        granted = self._grant.pages[first // dst_size : -(-end // dst_size)]
        return max(cost.count_runs(self._pages), cost.count_runs(granted))

    # ------------------------------------------------------------------ the end

    def _settle(self, allowed: int) -> Iterator[int]:
        """Waits until at most ``allowed`` groups of layers are on their way, and reports those that have arrived."""
        while len(self._in_flight) > allowed:
            layers, moved, flag = self._in_flight[0]
            if not flag.done:
                yield int(self._gate_opens())
                continue
            self._in_flight.popleft()
            self._device.retire(flag)
            self._check_ids()
            for lane, (nbytes, spans) in moved.items():
                self.route.count(lane, nbytes=nbytes, spans=spans)
            self._lanes.update(moved)
            total = sum(nbytes for nbytes, _ in moved.values())
            self._report(layers, total, "direct")
            # Not the bytes: it is the GPU that has copied them, and the step that ends this need not wait its turn.
            yield 1

    def _check_ids(self) -> None:
        """Raises what the kernels found wrong with page ids, of which they have written nothing."""
        bad = kernels.first_error(self._errors)
        if bad is not None:
            mine = bad.side == "source"
            slab = self._plan.slabs[0]
            whose, side = ("this", self._local) if mine else ("the peer's", self.route)
            limit = side.placements[slab.component, slab.layers[0]].num_pages
            which = f"number {bad.position} of the {bad.side}'s ids"
            raise PageOutOfRange(f"page {bad.page} ({which}) is outside {whose} cache's [0, {limit})")

    def _drain(self) -> Iterator[int]:
        """After a failure: the kernels that are enqueued run to their end."""
        self._forget_gate()
        if self._begun:
            # Also those of a step that failed half-way, and copies of page ids into memory that others get next.
            try:
                self._in_flight.append(_Launch((), {}, self._device.signal(self._stream)))
            except KVError:
                self.flushed = False  # the first error is the one to report; this one means that nobody can tell
        while self._in_flight:
            flag = self._in_flight[0].flag
            if flag.done:
                self._in_flight.popleft()
                self._device.retire(flag)
            elif not self._is_alive():
                break
            else:
                yield 0
        if self.flushed:
            self._release()

    def _is_alive(self) -> bool:
        """Whether flags can still rise; else nobody can tell what was written."""
        try:
            check_alive(self._stream)
        except TransportUnavailable as error:
            self.flushed = False
            self.error = self.error or error
        return self.flushed
