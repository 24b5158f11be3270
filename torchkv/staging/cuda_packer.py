"""Packs and unpacks pieces on a GPU: kernels on side streams, whose completion the progress thread reads from memory.

The scatter is enqueued when the writer has said that the stage is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator

import torch

from torchkv.cuda.page_ids import DevicePages
from torchkv.cuda.sync_words import StreamCompletion
from torchkv.errors import PageOutOfRange, ProtocolError, TransportUnavailable
from torchkv.kernels import copies
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.gpu_context import GpuContext, check_alive, launching
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.protocol.actions import Scatter
from torchkv.staging.cuda_pack import CudaPackLauncher, PieceArgs, mismatch_buffer
from torchkv.staging.memory import StageMemory
from torchkv.staging.packer import GatherJob, Packer, mismatch
from torchkv.transfer.peer_connection import LocalPages

__all__ = ["CudaPacker"]

_Job = GatherJob | Scatter

# Reads of a completion between two questions to the driver whether the GPU has failed, which would leave the completion
# as it is. The question takes the driver's lock, which launches need. An idle thread reads every 5 ms.
ASK_EVERY = 64

LOAD_POLL = 0.002  # seconds between two checks whether kernels can be loaded
PACK = "pack pages"  # names the operation in errors


class CudaPacker(Packer):
    """The `Packer` of a rank whose cache is on a GPU."""

    asynchronous = True

    def __init__(self, local: LocalPages, receiving: StageMemory | None, *, device: GpuContext) -> None:
        super().__init__(local, receiving)
        self._device = device
        self._launchers: dict[tuple[int, bool, int], CudaPackLauncher] = {}  # (id of plan, sending, id of scales)
        # (id of the plan, sending, with checksums) whose kernels are loaded.
        self._ready: set[tuple[int, bool, bool]] = set()
        self._kept: list[tuple[PairPlan, Scales]] = []  # keeps plans and scales alive, and so their ids unique
        self._mismatches: list[torch.Tensor] = []  # free buffers, see `mismatch_buffer`

    def gather(self, job: GatherJob) -> Iterator[int]:
        device = self._device
        launcher = yield from self._loaded(job, sending=True)
        if launcher is None:
            return
        stream = device.unblocked_stream
        upload = None
        if isinstance(job.pages, DevicePages):
            ids = job.pages.ids
        else:
            upload = device.uploads.acquire(job.pages, stream, ("src", job.dst, job.generation))
            ids = upload.ids
        errors = device.take_error_words()
        args = PieceArgs(
            layout=job.layout,
            piece=job.piece,
            ids=ids[job.piece_pages],
            stage=job.stage,
            limit_tokens=job.num_tokens,
            errors=errors,
            blocks=device.blocks,
        )
        with launching(stream, PACK):
            launcher.gather(args)
            if job.checked:
                launcher.write_sums(args)
        yield from self._wait(stream)
        if upload is not None:
            device.uploads.release(upload)
        bad = copies.first_error(errors)
        device.release_error_words(errors)
        if bad is not None:
            raise PageOutOfRange(
                f"page {bad.page} (number {job.piece_pages.start + bad.position} of the ids of this call) is outside "
                f"this cache's [0, {self._local.num_pages})"
            )
        yield 1  # not the bytes, which count against what the progress thread may copy itself in one round

    def scatter(self, job: Scatter) -> Iterator[int]:
        assert self._receiving is not None
        device = self._device
        launcher = yield from self._loaded(job, sending=False)
        if launcher is None:
            return
        stream = device.unblocked_stream
        upload = device.uploads.acquire(job.pages, stream, ("rx", job.src, job.generation))
        span = self._receiving.span(job.stage)
        errors = device.take_error_words()
        mismatches = self._mismatch_buffer() if job.checked else None
        args = PieceArgs(
            layout=job.layout,
            piece=job.piece,
            ids=upload.ids,
            stage=span,
            limit_tokens=job.num_tokens,
            errors=errors,
            blocks=device.blocks,
        )
        with launching(stream, PACK):
            launcher.scatter(args)
            if mismatches is not None:
                launcher.verify_sums(args, mismatches=mismatches)
        yield from self._wait(stream)
        device.uploads.release(upload)
        bad = copies.first_error(errors)
        assert bad is None, f"{bad}, but the ids were checked when they were posted"
        device.release_error_words(errors)
        if mismatches is not None:
            wrong = launcher.first_mismatch(mismatches, job.piece, limit_tokens=job.num_tokens)
            self._mismatches.append(mismatches)
            if wrong is not None:
                raise mismatch(job, wrong)
        yield 1

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool, scales: Scales = NO_SCALES) -> None:
        launcher = self._launcher(plan, scales, sending=sending, checksum=checksum)
        self._load(launcher.kernels_for(checksum=checksum))
        self._ready.add((id(plan), sending, checksum))

    def _launcher(
        self, plan: PairPlan, scales: Scales = NO_SCALES, *, sending: bool, checksum: bool = False
    ) -> CudaPackLauncher:
        """Raises ``TransportUnavailable`` for checksums of pages that are converted."""
        if not plan.converts:
            scales = NO_SCALES  # other receivers may have a plan in common
        elif checksum:
            raise TransportUnavailable(
                "Options.checksum: on GPUs, pages that are converted to another dtype have no checksums; turn it off"
            )
        key = (id(plan), sending, id(scales))
        if key not in self._launchers:
            with self._device.on_side_stream("make tables"):
                self._launchers[key] = CudaPackLauncher(plan, self._local, sending=sending, scales=scales)
            self._kept.append((plan, scales))
        return self._launchers[key]

    def loaded(self, plan: PairPlan, scales: Scales, *, sending: bool) -> CudaPackLauncher | None:
        """What packs a plan's pieces, or unpacks them, without checksums; None till it is prepared.

        scales: of the receiver's pages.
        """
        if (id(plan), sending, False) not in self._ready:
            return None
        return self._launchers.get((id(plan), sending, id(scales if plan.converts else NO_SCALES)))

    def _loaded(self, job: _Job, *, sending: bool) -> Generator[int, None, CudaPackLauncher | None]:
        """The launcher of the job's plan, once its kernels are loaded; None if the job is stopped before.

        Kernels that `prepare` has not loaded are loaded when no stream is blocked, because loading waits for all
        streams. If a stream is blocked until this very piece arrives, its request fails by timeout.
        """
        scales = job.scales if isinstance(job, GatherJob) else self._local.scales
        launcher = self._launcher(job.plan, scales, sending=sending, checksum=job.checked)
        if (id(job.plan), sending, job.checked) in self._ready:
            return launcher
        needed = launcher.kernels_for(checksum=job.checked)
        while not all(kernel.is_loaded for kernel in needed):
            if job.stopped:
                return None
            with self._device.sync_words.no_blocked_streams() as may_load:
                if may_load:
                    self._load(needed)
                    break
            yield from self._device.pause(LOAD_POLL, lambda: job.stopped)
        self._ready.add((id(job.plan), sending, job.checked))
        return launcher

    def _load(self, needed: list[CompiledKernel]) -> None:
        with self._device.on_side_stream("load kernels"):
            for kernel in needed:
                kernel.load()

    def _mismatch_buffer(self) -> torch.Tensor:
        buffer = self._mismatches.pop() if self._mismatches else mismatch_buffer()
        buffer.zero_()
        return buffer

    def _wait(self, stream: torch.cuda.Stream) -> Iterator[int]:
        """Until everything enqueued on ``stream`` so far is done. Raises ``TransportUnavailable`` if the GPU failed."""
        while (completion := self._completion(stream)) is None:
            yield 0
        try:
            for reads in itertools.count(1):
                if completion.done:
                    break
                yield 0
                if reads % ASK_EVERY == 0:
                    check_alive(stream)
        finally:
            self._device.release_completion(completion)

    def _completion(self, stream: torch.cuda.Stream) -> StreamCompletion | None:
        """None while all sync words are in use: the caller asks again, because what is enqueued must be waited for."""
        try:
            return self._device.signal(stream, copying=True)
        except ProtocolError as error:
            if not error.retryable:
                raise
            return None
