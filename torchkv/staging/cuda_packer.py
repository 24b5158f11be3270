"""Packs and unpacks pieces on a GPU: kernels on side streams, whose completion the progress thread reads from memory.

How gather and scatter are ordered:

* In general, the scatter is enqueued when the writer has said that the stage is written.
* Through a FIFO, gather and scatter run at the same time on the two GPUs, and each polls the other's progress words. A
  kernel that has polled in vain ``PATIENCE`` times stops. It is launched again after a pause, and continues where it
  stopped, so a peer that hangs does not occupy this GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator

import torch

from torchkv.cuda.page_ids import DevicePages
from torchkv.cuda.sync_words import StreamCompletion
from torchkv.errors import PageOutOfRange, ProtocolError, TransportUnavailable
from torchkv.kernels import copies
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.gpu_context import GpuContext, check_alive, launching
from torchkv.kernels.launch import FifoArgs
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.pair_plan import PairPlan
from torchkv.layout.stage_format import MAX_CHANNELS
from torchkv.protocol.actions import Scatter
from torchkv.staging.cuda_pack import CudaPackLauncher, PieceArgs, mismatch_buffer
from torchkv.staging.memory import StageMemory
from torchkv.staging.packer import FifoStage, GatherJob, Packer, mismatch
from torchkv.transfer.peer_connection import LocalPages

__all__ = ["CudaPacker"]

_Job = GatherJob | Scatter

# Reads of a completion between two questions to the driver whether the GPU has failed, which would leave the completion
# as it is. The question takes the driver's lock, which launches need. An idle thread reads every 5 ms.
ASK_EVERY = 64

# How often a FIFO kernel polls its peer's progress words in vain, some microseconds each, before it stops and leaves
# the GPU to others.
PATIENCE = 4096
# Seconds, at most, before a FIFO kernel that made no progress is launched again. There is a pause at all because a peer
# that hangs must not hold up other transfers.
LONGEST_PAUSE = 0.1
STATES = 32  # preallocated progress tensors, one for each FIFO kernel that runs at the same time
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
        # Zeroing them here also loads the kernel that fills memory. Loading it later would wait for all streams, and so
        # for ever if a stream waits for this host.
        self._states = [self._state() for _ in range(STATES)]
        if device.device.type == "cuda":
            # The zeros are written, and earlier users of that memory have ended: other streams use it from here on.
            torch.cuda.synchronize(device.device)

    @property
    def fifo_channels(self) -> int:
        return min(self._device.blocks, MAX_CHANNELS) if self._device.fifos else 0

    def gather(self, job: GatherJob) -> Iterator[int]:
        device, fifo_stage = self._device, job.fifo_stage
        assert fifo_stage is None or self.ready(job.plan), "the first step of a FIFO must enqueue it"
        launcher = yield from self._loaded(job, sending=True)
        if launcher is None:
            return
        stream = device.unblocked_stream if fifo_stage is None else device.outgoing
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

        def launch(fifo_args: FifoArgs | None) -> None:
            launcher.gather(args, fifo_args=fifo_args)
            if job.checked:
                launcher.write_sums(args)

        yield from self._run(job, stream, launch, fifo_stage, errors)
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
        stream, fifo_stage = device.unblocked_stream, None
        if job.fifo is not None:
            assert job.signal is not None
            stream = device.incoming
            fifo_stage = FifoStage(self._receiving.signal_ptr(job.signal), job.signal.value, job.fifo)
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

        def launch(fifo_args: FifoArgs | None) -> None:
            launcher.scatter(args, fifo_args=fifo_args)
            if mismatches is not None:
                launcher.verify_sums(args, mismatches=mismatches)

        yield from self._run(job, stream, launch, fifo_stage, errors)
        device.uploads.release(upload)
        job.written = not copies.unfinished(errors)
        bad = copies.first_error(errors)
        assert bad is None, f"{bad}, but the ids were checked when they were posted"
        device.release_error_words(errors)
        if mismatches is not None:
            wrong = launcher.first_mismatch(mismatches, job.piece, limit_tokens=job.num_tokens)
            self._mismatches.append(mismatches)
            if wrong is not None:
                raise mismatch(job, wrong)
        yield 1

    def _take_state(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """A progress tensor for a FIFO kernel, which ``stream`` has zeroed; `_run` gives it back."""
        with launching(stream, PACK):
            state = self._states.pop() if self._states else self._state()
            state.zero_()
        return state

    def _state(self) -> torch.Tensor:
        return torch.zeros(MAX_CHANNELS, dtype=torch.int64, device=self._device.device)

    def _run(
        self,
        job: _Job,
        stream: torch.cuda.Stream,
        launch: Callable[[FifoArgs | None], None],
        fifo_stage: FifoStage | None,
        errors: torch.Tensor,
    ) -> Iterator[int]:
        """Calls ``launch``, which enqueues on ``stream``, and waits until that is done.

        Repeats that while a FIFO kernel is unfinished and the job not stopped.

        Between launches it pauses for a quarter of the time that the last launch took, and twice as long each time,
        until a launch makes progress.
        """
        state = fifo_args = None
        if fifo_stage is not None:
            state = self._take_state(stream)
            fifo_args = FifoArgs(*fifo_stage, state.data_ptr(), PATIENCE)
        pause = 0.0
        while True:
            began = time.monotonic()
            with launching(stream, PACK):
                launch(fifo_args)
            yield from self._wait(stream)
            if not copies.unfinished(errors) or job.stopped:
                break
            waited = time.monotonic() - began
            pause = 0.0 if copies.moved(errors) else min(max(2 * pause, waited / 4), LONGEST_PAUSE)
            yield from self._device.pause(pause, lambda: job.stopped)
            if job.stopped:
                break
            errors[1] = 0
        if state is not None:
            self._states.append(state)

    def prepare(self, plan: PairPlan, *, sending: bool, checksum: bool, scales: Scales = NO_SCALES) -> None:
        launcher = self._launcher(plan, scales, sending=sending, checksum=checksum)
        self._load(launcher.kernels_for(checksum=checksum, fifo=not checksum))
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

    def loaded(self, plan: PairPlan, *, sending: bool) -> CudaPackLauncher | None:
        """What packs or unpacks pieces of a plan that converts nothing, without checksums; None till it is prepared."""
        if (id(plan), sending, False) not in self._ready:
            return None
        return self._launchers.get((id(plan), sending, id(NO_SCALES)))

    def ready(self, plan: PairPlan) -> bool:
        return (id(plan), True, False) in self._ready

    def _loaded(self, job: _Job, *, sending: bool) -> Generator[int, None, CudaPackLauncher | None]:
        """The launcher of the job's plan, once its kernels are loaded; None if the job is stopped before.

        Kernels that `prepare` has not loaded are loaded when no stream is blocked, because loading waits for all
        streams. If a stream is blocked until this very piece arrives, its request fails by timeout.
        """
        scales = job.scales if isinstance(job, GatherJob) else self._local.scales
        launcher = self._launcher(job.plan, scales, sending=sending, checksum=job.checked)
        if (id(job.plan), sending, job.checked) in self._ready:
            return launcher
        needed = launcher.kernels_for(checksum=job.checked, fifo=not job.checked)
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
