"""Moving pieces between pages and staging memory on a GPU: kernels on a side stream, watched through a flag."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from torchkv import kernels
from torchkv.device import Device, check_alive, launching
from torchkv.devicepack import PagePacker, mismatch_slots
from torchkv.devicepages import DevicePages
from torchkv.errors import KVError, PageOutOfRange, ProtocolError
from torchkv.flags import Flag
from torchkv.kernels import Flow
from torchkv.packer import Early, Packer, mismatch
from torchkv.pieces import Piece, PieceLayout
from torchkv.plan import PairPlan
from torchkv.protocol.actions import BoundGrant, Scatter, SendOp
from torchkv.route import LocalPages
from torchkv.stagememory import Room, StageMemory
from torchkv.staging import MAX_CHANNELS
from torchkv.transport import Int64Array
from torchkv.variants import Variant

__all__ = ["DevicePacker"]

# Looks at a flag between two questions to the driver whether the GPU has failed, which would leave the flag as it is:
# the driver's lock is what launches need. A thread with nothing else to do looks every 5 ms.
ASK_EVERY = 64

PATIENCE = 4096  # looks of a stream's kernel at its peer's words, of some microseconds: then others may use the GPU
# Seconds at most between two of its kernels that wait in vain: what hangs must not hold up other transfers.
LONGEST_PAUSE = 0.1
STATES = 32  # of streams at once
LOAD_POLL = 0.002  # seconds between two looks whether kernels can be loaded
PACK = "pack pages"


class DevicePacker(Packer):
    """See `Packer`."""

    elsewhere = True

    def __init__(self, local: LocalPages, receiving: StageMemory | None, *, device: Device) -> None:
        super().__init__(local, receiving)
        self._device = device
        self.signals = device.signals
        self._packers: dict[tuple[int, bool], PagePacker] = {}  # by plan and side
        self._ready: set[tuple[int, bool, bool]] = set()  # those whose kernels are loaded; without checksums, or with
        self._plans: list[PairPlan] = []  # kept alive: the packers are found by identity
        self._slots: list[torch.Tensor] = []  # for mismatches; those that no kernel uses
        # Of streams; the same. Zeros, which loads what zeroes them: while a stream waits for the host, that would wait.
        self._states = [self._state() for _ in range(STATES)]
        if device.device.type == "cuda":
            torch.cuda.synchronize(device.device)  # nothing else uses that memory any more

    @property
    def channels(self) -> int:
        return min(self._device.blocks, MAX_CHANNELS)

    def gather(
        self,
        op: SendOp,
        grant: BoundGrant,
        pages: Int64Array | DevicePages,
        piece: Piece,
        layout: PieceLayout,
        room: Room,
        *,
        checksum: bool,
        early: Early | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        device = self._device
        assert early is None or self.ready(grant.plan, checksum=checksum), "the first step of an early piece enqueues"
        packer = yield from self._loaded(grant.plan, stopped, sending=True, checksum=checksum)
        if packer is None:
            return
        stream = device.open_stream if early is None or early.stream is None else device.outgoing
        upload = None
        if isinstance(pages, DevicePages):
            ids = pages.ids
        else:
            upload = device.uploads.acquire(pages, stream, ("src", op.dst, grant.generation))
            ids = upload.ids
        first = piece.start - op.start
        ids = ids[first : first + piece.num_pages]
        errors = device.error_slot()
        common: dict[str, Any] = {"limit_tokens": grant.num_tokens, "errors": errors, "blocks": device.blocks}
        state = None if early is None or early.stream is None else self._take_state(stream)
        flow = None if early is None else _flow(early, state)

        def launch() -> None:
            packer.gather(layout, piece, ids, room, stream=flow, **common)
            if checksum:
                packer.write_sums(layout, piece, ids, room, **common)
            if early is not None and flow is None:
                device.raise_signal(stream, early.address, early.value)

        yield from self._run(stream, launch, state, errors, lambda: self._wait(stream), stopped)
        if upload is not None:
            device.uploads.release(upload)
        bad = kernels.first_error(errors)
        device.retire_errors(errors)
        if bad is not None:
            raise PageOutOfRange(
                f"page {bad.page} (number {piece.start - op.start + bad.position} of the ids of this call) is outside "
                f"this cache's [0, {self._local.num_pages})"
            )
        yield 1  # not the bytes: it is the GPU that has copied them

    def scatter(self, job: Scatter) -> Iterator[int]:
        assert self._receiving is not None
        device = self._device
        packer = yield from self._loaded(job.plan, lambda: job.stopped, sending=False, checksum=job.checked)
        if packer is None:
            return
        if job.signal is None:
            yield from self._scatter(job, packer, device.open_stream, None)
            return
        early = Early(self._receiving.signal_ptr(job.signal), job.signal.value, job.stream)
        if job.stream is not None:
            yield from self._scatter(job, packer, device.incoming, early)
            return
        with device.waiting_stream(job.src, job.serial) as stream:
            yield from self._scatter(job, packer, stream, early)

    def _scatter(
        self, job: Scatter, packer: PagePacker, stream: torch.cuda.Stream, early: Early | None
    ) -> Iterator[int]:
        """early: how it is told that the stage is written; None if it is."""
        assert self._receiving is not None
        device = self._device
        upload = device.uploads.acquire(job.pages, stream, ("rx", job.src, job.generation))
        room = self._receiving.room(job.stage)
        errors = device.error_slot()
        slots = self._mismatch_slots() if job.checked else None
        common: dict[str, Any] = {"limit_tokens": job.num_tokens, "errors": errors, "blocks": device.blocks}
        state = None if job.stream is None else self._take_state(stream)
        flow = None if early is None else _flow(early, state)
        guard = (0, 0) if early is None or flow is not None else (early.address, early.value)

        def launch() -> None:
            if guard[0]:
                device.await_signal(stream, *guard)
            packer.scatter(job.layout, job.piece, upload.ids, room, guard=guard, stream=flow, **common)
            if slots is not None:
                packer.verify_sums(job.layout, job.piece, upload.ids, room, mismatches=slots, **common)

        def wait() -> Iterator[int]:
            return self._wait_guarded(stream, job, guard[0]) if guard[0] else self._wait(stream)

        try:
            yield from self._run(stream, launch, state, errors, wait, lambda: job.stopped)
        except KVError:
            if guard[0]:  # what may be enqueued must not wait for ever, nor unpack what comes late
                device.dismiss(device.open_stream, guard[0])
                device.forget_signal(guard[0])
            raise
        device.uploads.release(upload)
        job.written = not kernels.skipped(errors) and not kernels.unfinished(errors)
        bad = kernels.first_error(errors)
        assert bad is None, f"{bad}, but the ids were checked when they were posted"
        device.retire_errors(errors)
        if slots is not None:
            wrong = packer.first_mismatch(slots, job.piece, limit_tokens=job.num_tokens)
            self._slots.append(slots)
            if wrong is not None and job.written:
                raise mismatch(job, wrong)
        yield 1

    def _take_state(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """Of a stream's kernels on ``stream``, until `_run` has ended."""
        if self._states:
            return self._states.pop()
        with torch.cuda.stream(stream):
            return self._state()

    def _state(self) -> torch.Tensor:
        return torch.zeros(MAX_CHANNELS, dtype=torch.int64, device=self._device.device)

    def _run(
        self,
        stream: torch.cuda.Stream,
        launch: Callable[[], None],
        state: torch.Tensor | None,
        errors: torch.Tensor,
        wait: Callable[[], Iterator[int]],
        stopped: Callable[[], bool],
    ) -> Iterator[int]:
        """Enqueues ``launch``, and waits for its end; again and again, if it is a stream that waited in vain.

        In between it pauses: a quarter of what it has waited, and twice as long each time, until something has moved.
        """
        if state is not None:
            with launching(stream, PACK):
                state.zero_()
        pause = 0.0
        while True:
            began = time.monotonic()
            with launching(stream, PACK):
                launch()
            yield from wait()
            if not kernels.unfinished(errors) or stopped():
                break
            waited = time.monotonic() - began
            pause = 0.0 if kernels.moved(errors) else min(max(2 * pause, waited / 4), LONGEST_PAUSE)
            yield from self._device.pause(pause, stopped)
            if stopped():
                break
            errors[1] = 0
        if state is not None:
            self._states.append(state)

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool) -> None:
        self._load(self._packer(plan, sending=sending).variants(checksum=checksum, stream=not checksum))
        self._ready.add((id(plan), sending, checksum))

    def _packer(self, plan: PairPlan, *, sending: bool) -> PagePacker:
        key = (id(plan), sending)
        if key not in self._packers:
            with self._device.beside_the_model("make tables"):
                self._packers[key] = PagePacker(plan, self._local, sending=sending)
            self._plans.append(plan)
        return self._packers[key]

    def ready(self, plan: PairPlan, *, checksum: bool) -> bool:
        return (id(plan), True, checksum) in self._ready

    def _loaded(
        self, plan: PairPlan, stopped: Callable[[], bool], *, sending: bool, checksum: bool
    ) -> Generator[int, None, PagePacker | None]:
        """The plan's, with its kernels loaded: if they are not, as soon as it is `Device.quiet`. None if ``stopped``.

        That can be too late for what a stream waits for, which then fails for want of time.
        """
        packer = self._packer(plan, sending=sending)
        if (id(plan), sending, checksum) in self._ready:
            return packer
        needed = packer.variants(checksum=checksum, stream=not checksum)
        while not all(variant.is_loaded for variant in needed):
            if stopped():
                return None
            with self._device.quiet() as quiet:
                if quiet:
                    self._load(needed)
                    break
            yield from self._device.pause(LOAD_POLL, stopped)
        self._ready.add((id(plan), sending, checksum))
        return packer

    def _load(self, needed: list[Variant]) -> None:
        with self._device.beside_the_model("load kernels"):
            for variant in needed:
                variant.load()

    def _mismatch_slots(self) -> torch.Tensor:
        slots = self._slots.pop() if self._slots else mismatch_slots()
        slots.zero_()
        return slots

    def _wait_guarded(self, stream: torch.cuda.Stream, job: Scatter, address: int) -> Iterator[int]:
        """As `_wait`; if the job is stopped before its signal rises, lets the stream go on without the stage."""
        other: torch.cuda.Stream | None = None
        for _ in self._wait(stream):
            if job.stopped and other is None:
                other = self._device.open_stream
                self._device.dismiss(other, address)
            yield 0
        self._device.forget_signal(address)
        if other is not None:  # else it might fall into the word's next use
            yield from self._wait(other)

    def _wait(self, stream: torch.cuda.Stream) -> Iterator[int]:
        """Until everything enqueued so far is done. Raises ``TransportUnavailable`` if the GPU has failed."""
        while (flag := self._signal(stream)) is None:
            yield 0
        try:
            for looks in itertools.count(1):
                if flag.done:
                    break
                yield 0
                if looks % ASK_EVERY == 0:
                    check_alive(stream)
        finally:
            self._device.retire(flag)

    def _signal(self, stream: torch.cuda.Stream) -> Flag | None:
        """None as long as all flags are in use: what is enqueued is watched all the same."""
        try:
            return self._device.signal(stream, soon=True)
        except ProtocolError as error:
            if not error.retryable:
                raise
            return None


def _flow(early: Early, state: torch.Tensor | None) -> Flow | None:
    """How kernels stream, each side's with a ``state`` of its own; None if they do not."""
    if early.stream is None or state is None:
        return None
    return Flow(early.address, early.value, early.stream, state.data_ptr(), PATIENCE)
