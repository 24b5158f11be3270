"""Moving pieces between pages and staging memory on a GPU: kernels on a side stream, watched through a flag."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchkv import kernels
from torchkv.device import Device
from torchkv.devicepack import PagePacker, mismatch_slots
from torchkv.devicepages import DevicePages
from torchkv.errors import KVError, PageOutOfRange, TransportUnavailable
from torchkv.packer import Packer, mismatch
from torchkv.pieces import Piece, PieceLayout
from torchkv.plan import PairPlan
from torchkv.protocol.actions import BoundGrant, Scatter, SendOp
from torchkv.route import LocalPages
from torchkv.stagememory import Room, StageMemory
from torchkv.transport import Int64Array

__all__ = ["DevicePacker"]

# Looks at a flag between two questions to the driver whether the GPU has failed, which would leave the flag as it is:
# the driver's lock is what launches need. A thread with nothing else to do looks every 5 ms.
ASK_EVERY = 64


class DevicePacker(Packer):
    """See `Packer`."""

    elsewhere = True
    signals = True

    def __init__(self, local: LocalPages, receiving: StageMemory | None, *, device: Device) -> None:
        super().__init__(local, receiving)
        self._device = device
        self._packers: dict[tuple[int, bool], PagePacker] = {}
        self._plans: list[PairPlan] = []  # kept alive: the packers are found by identity
        self._slots: list[torch.Tensor] = []  # for mismatches; those that no kernel uses

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
        signal: tuple[int, int] | None = None,
    ) -> Iterator[int]:
        device, stream = self._device, self._device.open_stream
        upload = None
        if isinstance(pages, DevicePages):
            ids = pages.ids
        else:
            upload = device.uploads.acquire(pages, stream, ("src", op.dst, grant.generation))
            ids = upload.ids
        first = piece.start - op.start
        ids = ids[first : first + piece.num_pages]
        packer = self._packer(grant.plan, sending=True)
        errors = device.error_slot()
        common: dict[str, Any] = {"limit_tokens": grant.num_tokens, "errors": errors, "blocks": device.blocks}
        with _launching(stream):
            packer.gather(layout, piece, ids, room, **common)
            if checksum:
                packer.write_sums(layout, piece, ids, room, **common)
            if signal is not None:
                device.raise_signal(stream, *signal)
        yield from self._wait(stream)
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
        signal = None if job.signal is None else (self._receiving.signal_ptr(job.signal), job.signal.value)
        stream = device.open_stream if signal is None else device.waiting_stream
        upload = device.uploads.acquire(job.pages, stream, ("rx", job.src, job.generation))
        room = self._receiving.room(job.stage)
        packer = self._packer(job.plan, sending=False)
        errors = device.error_slot()
        slots = self._mismatch_slots() if job.checked else None
        common: dict[str, Any] = {"limit_tokens": job.num_tokens, "errors": errors, "blocks": device.blocks}
        with _launching(stream):
            if signal is not None:
                device.await_signal(stream, *signal)
            packer.scatter(job.layout, job.piece, upload.ids, room, guard=signal or (0, 0), **common)
            if slots is not None:
                packer.verify_sums(job.layout, job.piece, upload.ids, room, mismatches=slots, **common)
        yield from self._wait(stream) if signal is None else self._wait_signalled(stream, job, *signal)
        device.uploads.release(upload)
        job.written = not kernels.skipped(errors)
        bad = kernels.first_error(errors)
        assert bad is None, f"{bad}, but the ids were checked when they were posted"
        device.retire_errors(errors)
        if slots is not None:
            wrong = packer.first_mismatch(slots, job.piece, limit_tokens=job.num_tokens)
            self._slots.append(slots)
            if wrong is not None and job.written:
                raise mismatch(job, wrong)
        yield 1

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool) -> None:
        self._packer(plan, sending=sending).prepare(checksum=checksum)

    def _packer(self, plan: PairPlan, *, sending: bool) -> PagePacker:
        key = (id(plan), sending)
        if key not in self._packers:
            self._packers[key] = PagePacker(plan, self._local, sending=sending)
            self._plans.append(plan)
        return self._packers[key]

    def _mismatch_slots(self) -> torch.Tensor:
        slots = self._slots.pop() if self._slots else mismatch_slots()
        slots.zero_()
        return slots

    def _wait_signalled(self, stream: torch.cuda.Stream, job: Scatter, address: int, value: int) -> Iterator[int]:
        """The same; lets the stream go on, to leave the stage alone, if the job is stopped before its signal rises."""
        other: torch.cuda.Stream | None = None
        for _ in self._wait(stream):
            if job.stopped and other is None:
                other = self._device.open_stream
                self._device.raise_signal(other, address, value + 1)
            yield 0
        if other is not None:  # else it might fall into the word's next use
            yield from self._wait(other)

    def _wait(self, stream: torch.cuda.Stream) -> Iterator[int]:
        """Until everything enqueued so far is done. Raises ``TransportUnavailable`` if the GPU has failed."""
        flag = self._device.signal(stream, soon=True)
        for looks in itertools.count(1):
            if flag.done:
                break
            yield 0
            if looks % ASK_EVERY == 0:
                try:
                    stream.query()
                except RuntimeError as error:
                    raise TransportUnavailable(f"the GPU failed: {error}") from error
        self._device.retire(flag)


@contextmanager
def _launching(stream: torch.cuda.Stream) -> Iterator[None]:
    """Enqueues on ``stream``. Raises ``TransportUnavailable`` for what CUDA or Triton refuse."""
    try:
        with torch.cuda.stream(stream):
            yield
    except KVError:
        raise
    except RuntimeError as error:
        raise TransportUnavailable(f"the GPU refused to pack pages: {error}") from error
