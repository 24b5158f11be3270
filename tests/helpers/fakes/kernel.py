"""A Triton kernel that records what is done with it, for tests without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchkv.cuda import driver
from torchkv.kernels import compiled
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns, Stripe

__all__ = ["FakeCompiled", "fake_launches", "plain_geometry"]


def plain_geometry(**given: Any) -> Geometry:
    """A geometry with pages of 4 KiB in one run on both sides; ``given`` replaces fields."""
    side = PageAddressing(page_stride=4096, base=0, token_stride=256, per_page=1, num_pages=8)
    fields = {"stripe": Stripe(16, 1), "src": side, "dst": side, "alignment": 16}
    return Geometry(**{**fields, "rows": StridedRuns(1, 0, 0, 1, 0, 0, 4096), **given})


class FakeKernel:
    """Stands in for a Triton kernel; records what is compiled, loaded and launched in ``log``.

    num_integers: runtime parameters of the kernel, which come before its constants.
    """

    def __init__(self, log: list[tuple[Any, ...]], num_integers: int) -> None:
        self.log = log
        self.params = [SimpleNamespace(annotation="i64")] * num_integers

    def warmup(self, *arguments: int, grid: tuple[int, ...], num_warps: int) -> FakeCompiled:
        self.log.append(("compile", arguments[len(self.params) :], num_warps))
        return FakeCompiled(self.log, len(self.params))


class FakeCompiled:
    """A compiled kernel; it is loaded when its launcher is first asked for, as Triton does."""

    metadata = SimpleNamespace(
        name="fake",
        shared=1024,
        num_ctas=1,
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )

    def __init__(self, log: list[tuple[Any, ...]], num_integers: int) -> None:
        self._log = log
        self.function = 0
        self.asm = {"ptx": ".visible .entry fake(" + ".param .u64 p,\n" * num_integers + ".param .u64 scratch)\n{"}

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        if not self.function:
            self._log.append(("load",))
            self.function = 1


@contextmanager
def fake_launches(module: Any, name: str, num_integers: int) -> Iterator[list[tuple[Any, ...]]]:
    """Puts a `FakeKernel` in the place of the kernel ``name`` of ``module``, and gives the log of what it is asked.

    A launch is recorded as ("start", number of blocks, runtime parameters).
    """
    log: list[tuple[Any, ...]] = []

    def launch(function: int, blocks: int, threads: int, *, shared: int, stream: int, params: bytes) -> None:
        assert (function, shared, stream, threads % 32) == (1, 1024, 77, 0)
        *integers, scratch = struct.unpack(f"{num_integers + 1}q", params)
        assert scratch == 0
        log.append(("start", blocks, tuple(integers)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, FakeKernel(log, num_integers))
        patch.setattr("torchkv.kernels.compiled.triton.JITFunction", FakeKernel)
        patch.setattr(driver, "launch", launch)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77, device=torch.device("cpu")))
        patch.setattr(compiled, "_loaded", {})
        yield log
