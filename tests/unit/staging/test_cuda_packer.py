"""`CudaPacker` on a fake GPU: what it enqueues, waits for and gives back, and how it reports failures."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.helpers.fakes.gpu import Gpu
from torchkv.errors import ChecksumMismatch, PageOutOfRange, ProtocolError, TransportUnavailable
from torchkv.layout.conversion import NO_SCALES, Scales
from torchkv.layout.pieces import Mismatch, Piece
from torchkv.protocol.receiving.stage_allocator import StagingRing
from torchkv.staging import cuda_packer
from torchkv.staging.cuda_pack import PieceArgs
from torchkv.staging.cuda_packer import ASK_EVERY, CudaPacker
from torchkv.staging.memory import StageMemory
from torchkv.staging.packer import GatherJob

PLAN: Any = SimpleNamespace(converts=False)
LAYOUT: Any = SimpleNamespace(payload=4096)
PIECE = Piece((0, 1), 3, 2)
PAGES = np.array([7, 5, 9, 4], dtype=np.int64)
RING = 1 << 16


@dataclass
class FakeKernel:
    pages: FakeLauncher
    operation: tuple[bool, bool]

    @property
    def is_loaded(self) -> bool:
        return self.operation in self.pages.loaded

    def load(self) -> None:
        PREPARED.append(self.operation)
        self.pages.loaded.add(self.operation)


class FakeLauncher:
    """In place of `CudaPackLauncher`: notes what it is told to enqueue, with which ids and which part of the stage."""

    def __init__(self, plan: Any, local: Any, *, sending: bool, scales: Any) -> None:
        self.sending = sending
        self.bad_page: int | None = None
        self.mismatch: Mismatch | None = None
        self.refuses = False
        self.loaded: set[tuple[bool, bool]] = set()

    def _enqueue(self, name: str, args: PieceArgs) -> None:
        assert (args.layout, args.piece, args.limit_tokens, args.blocks) == (LAYOUT, PIECE, 64, Gpu.blocks)
        if self.refuses:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        LOG.append((name, args.ids.tolist(), args.stage.nbytes))
        if self.bad_page is not None:
            args.errors[0] = ((1 + 1) << 33) | self.bad_page

    def kernels_for(self, *, checksum: bool) -> list[FakeKernel]:
        return [FakeKernel(self, (self.sending, checksum))]

    def gather(self, args: PieceArgs) -> None:
        self._enqueue("gather", args)

    def write_sums(self, args: PieceArgs) -> None:
        self._enqueue("write sums", args)

    def scatter(self, args: PieceArgs) -> None:
        self._enqueue("scatter", args)

    def verify_sums(self, args: PieceArgs, *, mismatches: torch.Tensor) -> None:
        assert not mismatches.any()
        self._enqueue("verify sums", args)
        mismatches[3] = 1

    def first_mismatch(self, mismatches: torch.Tensor, piece: Piece, *, limit_tokens: int) -> Mismatch | None:
        assert mismatches.any()
        return self.mismatch


LOG: list[tuple[str, list[int], int]] = []
PREPARED: list[tuple[bool, bool]] = []  # sending, with checksums


class Bench:
    def __init__(self) -> None:
        LOG.clear()
        PREPARED.clear()
        self.gpu = Gpu()
        self.stream: Any = SimpleNamespace(query=lambda: True)
        self.gpu.unblocked_stream = self.stream
        self.memory = memory = StageMemory(torch.zeros(RING, dtype=torch.uint8), 0)
        local: Any = SimpleNamespace(num_pages=16, scales=NO_SCALES)
        device: Any = self.gpu
        self.packer = CudaPacker(local, memory, device=device)
        self.stage = StagingRing(RING).allocate(8192, "r")

    def pages(self, *, sending: bool) -> Any:
        key = id(PLAN), sending, id(NO_SCALES)
        if key not in self.packer._launchers:
            self.packer.prepare(PLAN, sending=sending, checksum=False)
        return self.packer._launchers[key]

    def gather_job(self, *, checked: bool = False) -> GatherJob:
        """Of a verb that begins at page 2."""
        assert self.stage is not None
        return GatherJob(
            dst=1,
            generation=4,
            stage=self.memory.span(self.stage),
            piece=PIECE,
            layout=LAYOUT,
            plan=PLAN,
            pages=PAGES,
            start=2,
            num_tokens=64,
            checked=checked,
        )

    def gather(self, **settings: Any) -> Any:
        return self.packer.gather(self.gather_job(**settings))

    def job(self, *, checked: bool = False) -> Any:
        job: Any = SimpleNamespace(
            request="r",
            src=0,
            serial=7,
            generation=4,
            stage=self.stage,
            piece=PIECE,
            layout=LAYOUT,
            state=False,
            plan=PLAN,
            pages=PAGES,
            num_tokens=64,
            checked=checked,
            stopped=False,
        )
        return job

    def scatter(self, **settings: Any) -> Any:
        return self.packer.scatter(self.job(**settings))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda_packer, "CudaPackLauncher", FakeLauncher)
    return Bench()


@pytest.mark.parametrize("checksum", [False, True])
def test_a_gather_ends_when_its_stream_has_signalled_completion(bench: Bench, checksum: bool) -> None:
    """The piece begins at page 3 of a verb that begins at page 2: its ids are the second and third."""
    steps = bench.gather(checked=checksum)
    assert [next(steps), next(steps)] == [0, 0]
    want = [("gather", [5, 9], 8192), ("write sums", [5, 9], 8192)]
    assert want[: 1 + checksum] == LOG
    assert bench.gpu.log[-1] == "signal copying"
    assert bench.gpu.released == []
    bench.gpu.run()
    assert list(steps) == [1]
    assert bench.gpu.released == ["upload", "errors"]


def test_a_scatter_has_all_ids_of_the_grant(bench: Bench) -> None:
    steps = bench.scatter()
    assert next(steps) == 0
    assert LOG == [("scatter", [7, 5, 9, 4], 8192)]
    bench.gpu.run()
    assert list(steps) == [1]
    assert bench.gpu.released == ["upload", "errors"]


def test_a_bad_page_id_on_the_gpu_is_named_by_its_place_in_the_call(bench: Bench) -> None:
    bench.pages(sending=True).bad_page = 77
    steps = bench.gather()
    next(steps)
    bench.gpu.run()
    with pytest.raises(PageOutOfRange, match=r"page 77 \(number 2 .* \[0, 16\)"):
        next(steps)
    assert bench.gpu.released == ["upload", "errors"]


@pytest.mark.parametrize("mismatch", [None, Mismatch(1, "v", 2)])
def test_a_mismatch_names_the_page_and_its_buffer_is_used_again(bench: Bench, mismatch: Mismatch | None) -> None:
    bench.pages(sending=False).mismatch = mismatch
    for _ in range(2):
        steps = bench.scatter(checked=True)
        next(steps)
        bench.gpu.run()
        if mismatch is None:
            assert list(steps) == [1]
        else:
            with pytest.raises(ChecksumMismatch, match=r"'r' from rank 0: layer 1, component 'v', page 9 \(number 2"):
                next(steps)
    assert len(bench.packer._mismatches) == 1
    assert [name for name, *_ in LOG] == ["scatter", "verify sums"] * 2


def test_kernels_are_loaded_once_for_each_plan(bench: Bench) -> None:
    job = bench.job()
    job.plan = SimpleNamespace(converts=False)
    for each, loaded in ((bench.job(), 1), (job, 2), (bench.job(), 2)):
        steps = bench.packer.scatter(each)
        assert next(steps) == 0
        assert [(False, False)] * loaded == PREPARED
        bench.gpu.run()
        assert list(steps) == [1]
    next(bench.gather())
    assert PREPARED == [(False, False), (False, False), (True, False)]


def test_kernels_are_not_loaded_while_a_stream_waits_for_this_rank(bench: Bench) -> None:
    """The stream might wait for this very piece."""
    bench.gpu.rested, bench.gpu.holding = False, True
    steps = [bench.gather(), bench.packer.scatter(bench.job())]
    assert [next(one) for one in steps] == [0, 0]
    assert PREPARED == LOG == []
    bench.gpu.rested = True
    bench.gpu.holding = False
    assert [next(one) for one in steps] == [0, 0]
    assert PREPARED == [(True, False), (False, False)]
    assert [name for name, *_ in LOG] == ["gather", "scatter"]


def test_stopped_jobs_do_not_wait_for_kernels(bench: Bench) -> None:
    """So a failed request does not hold pages and stages until unrelated streams unblock, and is never unpacked."""
    bench.gpu.rested, bench.gpu.holding = False, True
    job, mine = bench.job(), bench.gather_job()
    scatter, gather = bench.packer.scatter(job), bench.packer.gather(mine)
    assert [next(scatter), next(gather)] == [0, 0]
    job.stopped = mine.stopped = True
    assert [list(scatter), list(gather)] == [[], []]
    assert PREPARED == LOG == bench.gpu.log[2:] == []


def test_a_plan_whose_kernels_are_loaded_for_another_plan_does_not_wait(bench: Bench) -> None:
    for sending in (True, False):
        cast(Any, bench.packer._launcher(PLAN, sending=sending)).loaded.add((sending, False))
    bench.gpu.holding = True
    assert [next(bench.gather()), next(bench.packer.scatter(bench.job()))] == [0, 0]
    assert [name for name, *_ in LOG] == ["gather", "scatter"]
    assert PREPARED == []


def test_a_kernel_that_cannot_be_loaded_fails_the_transfer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: FakeKernel) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FakeKernel, "load", load)
        with pytest.raises(TransportUnavailable, match="load kernels: No space left"):
            next(bench.gather())
    assert PREPARED == []
    next(bench.gather())
    assert PREPARED == [(True, False)]


def test_checksums_have_kernels_of_their_own(bench: Bench) -> None:
    bench.packer.prepare(PLAN, sending=False, checksum=False)
    assert PREPARED == [(False, False)]
    next(bench.packer.scatter(bench.job(checked=True)))
    assert PREPARED == [(False, False), (False, True)]


def test_without_a_free_sync_word_enqueued_work_is_still_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise ProtocolError("16384 stream operations are under way already", retryable=True)

    real = bench.gpu.signal
    monkeypatch.setattr(bench.gpu, "signal", full)
    steps = bench.gather()
    assert [next(steps), next(steps)] == [0, 0]
    monkeypatch.setattr(bench.gpu, "signal", real)
    assert next(steps) == 0
    bench.gpu.run()
    assert list(steps) == [1]
    assert len(LOG) == 1


@pytest.mark.parametrize("sending", [True, False])
def test_if_the_gpu_fails_the_transfer_does(bench: Bench, sending: bool) -> None:
    steps = bench.gather() if sending else bench.scatter()
    next(steps)

    def query() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    bench.stream.query = query
    assert [next(steps) for _ in range(ASK_EVERY - 1)] == [0] * (ASK_EVERY - 1)
    with pytest.raises(TransportUnavailable, match="the GPU failed: CUDA error"):
        next(steps)
    assert bench.gpu.released_completions == bench.gpu.completions


@pytest.mark.parametrize("sending", [True, False])
def test_a_refused_launch_fails_the_transfer(bench: Bench, sending: bool) -> None:
    bench.pages(sending=sending).refuses = True
    with pytest.raises(TransportUnavailable, match="refused to pack pages: CUDA error"):
        next(bench.gather() if sending else bench.scatter())


CONVERTING: Any = SimpleNamespace(converts=True)


def test_receivers_that_share_a_plan_have_their_own_scales_where_it_converts(bench: Bench) -> None:
    first, second = Scales(None, {}), Scales(None, {})
    for scales in (first, second, first):
        bench.packer.prepare(CONVERTING, sending=True, checksum=False, scales=scales)
        bench.packer.prepare(PLAN, sending=True, checksum=False, scales=scales)
    assert set(bench.packer._launchers) == {
        (id(CONVERTING), True, id(first)),
        (id(CONVERTING), True, id(second)),
        (id(PLAN), True, id(NO_SCALES)),
    }


@pytest.mark.parametrize("sending", [True, False])
def test_pages_that_are_converted_have_no_checksums(bench: Bench, sending: bool) -> None:
    with pytest.raises(TransportUnavailable, match=r"Options\.checksum: on GPUs, pages that are converted"):
        bench.packer.prepare(CONVERTING, sending=sending, checksum=True)
    job: Any = bench.gather_job(checked=True) if sending else bench.job(checked=True)
    job.plan = CONVERTING
    with pytest.raises(TransportUnavailable, match=r"Options\.checksum"):
        next(bench.packer.gather(job) if sending else bench.packer.scatter(job))
