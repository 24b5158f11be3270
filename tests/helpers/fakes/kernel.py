"""A Triton kernel that records what is done with it, for tests without a GPU."""

from __future__ import annotations

from typing import Any

from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns, Stripe

__all__ = ["FakeKernel", "plain_geometry"]


def plain_geometry(**given: Any) -> Geometry:
    """A geometry with pages of 4 KiB in one run on both sides; ``given`` replaces fields."""
    side = PageAddressing(page_stride=4096, base=0, token_stride=256, per_page=1, num_pages=8)
    fields = {"stripe": Stripe(16, 1), "src": side, "dst": side, "alignment": 16}
    return Geometry(**{**fields, "rows": StridedRuns(1, 0, 0, 1, 0, 0, 4096), **given})


class FakeKernel:
    """Stands in for a Triton kernel; records what is compiled, loaded and launched in ``log``.

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
    """A compiled kernel; it is loaded when its launcher is first asked for, as Triton does."""

    is_loaded = False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if not self.is_loaded:
            self.log.append(("load",))
            self.is_loaded = True
        return super().__getitem__(grid)
