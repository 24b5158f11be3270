"""For the tests of Triton kernels without a GPU: a kernel that only notes what is done with it, and the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchkv.slab import Rows
from torchkv.slabgeometry import Geometry, Side

__all__ = ["FakeKernel", "run_in_interpreter", "shape"]


def shape(**given: Any) -> Geometry:
    """Pages of 4 KiB in one run on both sides, but for what is ``given``."""
    side = Side(page_stride=4096, base=0, token_stride=256, per_page=1, num_pages=8)
    fields = {"tokens": 16, "holders": 1, "index": 0, "per_unit": 1, "src": side, "dst": side, "alignment": 16}
    return Geometry(**{**fields, "rows": Rows(1, 0, 0, 1, 0, 0, 4096), **given})


class FakeKernel:
    """Takes the place of a Triton kernel; notes what is compiled, loaded and launched.

    num_integers: runtime arguments of the kernel, which come before its constants.
    """

    def __init__(self, log: list[tuple[Any, ...]], num_integers: int) -> None:
        self.log = log
        self.num_integers = num_integers

    def warmup(self, *arguments: int, grid: tuple[int, ...], num_warps: int) -> FakeKernel:
        self.log.append(("compile", arguments[self.num_integers :], num_warps))
        return FakeCompiled(self.log, self.num_integers)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: int, **options: int) -> None:
            self.log.append(("start", grid, arguments, options))

        return start


class FakeCompiled(FakeKernel):
    """One variant; loaded when it is first asked for what launches it, as Triton does."""

    is_loaded = False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if not self.is_loaded:
            self.log.append(("load",))
            self.is_loaded = True
        return super().__getitem__(grid)


def run_in_interpreter(cases: Path, *, timeout: float) -> None:
    """Triton reads TRITON_INTERPRET when a kernel is defined, so the cases have a process to themselves."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    overrides = ["-o", "addopts=--strict-markers"]
    done = subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
