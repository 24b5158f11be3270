"""Staging on a GPU, without one: what is enqueued, waited for and given back, and how failures come out."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_fake import Gpu

from torchkv import devicepacker
from torchkv.devicepacker import ASK_EVERY, DevicePacker
from torchkv.errors import ChecksumMismatch, PageOutOfRange, TransportUnavailable
from torchkv.hostpack import Mismatch
from torchkv.pieces import Piece
from torchkv.stagememory import StageMemory
from torchkv.staging import StagingRing

PLAN: Any = SimpleNamespace()
LAYOUT: Any = SimpleNamespace(payload=4096)
PIECE = Piece((0, 1), 3, 2)
PAGES = np.array([7, 5, 9, 4], dtype=np.int64)
RING = 1 << 16


class FakePages:
    """In place of `PagePacker`: notes what it is told to enqueue, with which ids and which part of the stage."""

    def __init__(self, plan: Any, local: Any, *, sending: bool) -> None:
        assert plan is PLAN
        self.sending = sending
        self.bad_page: int | None = None
        self.mismatch: Mismatch | None = None
        self.refuses = False

    def _enqueue(self, name: str, *args: Any, errors: torch.Tensor, **_: Any) -> None:
        layout, piece, ids, stage = args
        assert (layout, piece) == (LAYOUT, PIECE)
        if self.refuses:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        LOG.append((name, ids.tolist(), stage.nbytes))
        if self.bad_page is not None:
            errors[0] = ((1 + 1) << 33) | self.bad_page

    def gather(self, *args: Any, **settings: Any) -> None:
        self._enqueue("gather", *args, **settings)

    def write_sums(self, *args: Any, **settings: Any) -> None:
        self._enqueue("write sums", *args, **settings)

    def scatter(self, *args: Any, **settings: Any) -> None:
        self._enqueue("scatter", *args, **settings)

    def verify_sums(self, *args: Any, mismatches: torch.Tensor, **settings: Any) -> None:
        assert not mismatches.any()
        self._enqueue("verify sums", *args, **settings)
        mismatches[3] = 1

    def first_mismatch(self, mismatches: torch.Tensor, piece: Piece, *, limit_tokens: int) -> Mismatch | None:
        assert mismatches.any()
        return self.mismatch


LOG: list[tuple[str, list[int], int]] = []


class Bench:
    def __init__(self) -> None:
        LOG.clear()
        self.gpu = Gpu()
        self.stream: Any = SimpleNamespace(query=lambda: True)
        self.gpu.open_stream = self.stream  # type: ignore[attr-defined]
        self.memory = memory = StageMemory(torch.zeros(RING, dtype=torch.uint8), 0)
        local: Any = SimpleNamespace(num_pages=16)
        device: Any = self.gpu
        self.packer = DevicePacker(local, memory, device=device)
        self.stage = StagingRing(RING).allocate(8192, "r")
        self.op: Any = SimpleNamespace(start=2, dst=1)
        self.grant: Any = SimpleNamespace(generation=4, plan=PLAN, num_tokens=64)

    def pages(self, *, sending: bool) -> Any:
        return self.packer._packer(PLAN, sending=sending)

    def gather(self, *, checksum: bool = False) -> Any:
        assert self.stage is not None
        room = self.memory.room(self.stage)
        return self.packer.gather(self.op, self.grant, PAGES, PIECE, LAYOUT, room, checksum=checksum)

    def scatter(self, *, checked: bool = False) -> Any:
        job: Any = SimpleNamespace(
            request="r",
            src=0,
            generation=4,
            stage=self.stage,
            piece=PIECE,
            layout=LAYOUT,
            state=False,
            plan=PLAN,
            pages=PAGES,
            num_tokens=64,
            checked=checked,
        )
        return self.packer.scatter(job)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(devicepacker, "PagePacker", FakePages)
    return Bench()


@pytest.mark.parametrize("checksum", [False, True])
def test_a_gather_is_over_when_the_gpu_says_so(bench: Bench, checksum: bool) -> None:
    """The piece begins at page 3 of a verb that begins at page 2: its ids are the second and third."""
    steps = bench.gather(checksum=checksum)
    assert [next(steps), next(steps)] == [0, 0]
    want = [("gather", [5, 9], 8192), ("write sums", [5, 9], 8192)]
    assert want[: 1 + checksum] == LOG
    assert bench.gpu.log[-1] == "signal soon"
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
def test_a_mismatch_names_the_page_and_its_slots_are_used_again(bench: Bench, mismatch: Mismatch | None) -> None:
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
    assert len(bench.packer._slots) == 1
    assert [name for name, *_ in LOG] == ["scatter", "verify sums"] * 2


def test_a_gpu_that_fails_ends_the_wait(bench: Bench) -> None:
    steps = bench.gather()
    next(steps)

    def query() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    bench.stream.query = query
    assert [next(steps) for _ in range(ASK_EVERY - 1)] == [0] * (ASK_EVERY - 1)
    with pytest.raises(TransportUnavailable, match="the GPU failed: CUDA error"):
        next(steps)


@pytest.mark.parametrize("sending", [True, False])
def test_a_launch_that_is_refused_is_an_error_of_the_transfer(bench: Bench, sending: bool) -> None:
    bench.pages(sending=sending).refuses = True
    with pytest.raises(TransportUnavailable, match="refused to pack pages: CUDA error"):
        next(bench.gather() if sending else bench.scatter())
