"""Launches of the checksum kernel, and that it compiles for GPUs. Tests that run it are in pack_cases.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.helpers.fakes.kernel import fake_launches, plain_geometry
from torchkv.errors import ProtocolError
from torchkv.host.checksum import seed
from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels.checksum_launch import SumAddresses, launch_sums, sum_kernel
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns

NOWHERE = SumAddresses(0, 0, 0, 0, 0)


@pytest.fixture
def log() -> Iterator[list[tuple[Any, ...]]]:
    with fake_launches(checksum_kernel, "sum_pairs", checksum_kernel.NUM_INTEGERS) as found:
        yield found


def launch(mode: int, geometry: Geometry, *, num_jobs: int = 1, pairs: int = 4, blocks: int = 16) -> None:
    launch_sums(mode, geometry, NOWHERE, num_jobs=num_jobs, ranks=range(pairs), start=0, blocks=blocks)


@pytest.mark.parametrize("mode", [checksum_kernel.WRITE, checksum_kernel.VERIFY])
def test_loading_compiles_all_that_a_transfer_needs(log: list[tuple[Any, ...]], mode: int) -> None:
    sum_kernel(plain_geometry(), mode).load()
    assert [entry[0] for entry in log] == ["compile", "load"]
    assert log[0][1][0] == mode
    log.clear()
    for pairs in (1, 60, 100_000):
        launch(mode, plain_geometry(), pairs=pairs)
    assert [entry[0] for entry in log] == ["start"] * 3, "something was compiled at the first launch"


def test_no_more_blocks_than_tiles(log: list[tuple[Any, ...]]) -> None:
    """Pages of 256 words, eight of them in a tile."""
    for num_jobs, pairs, blocks, want in ((1, 8, 16, 1), (1, 9, 16, 2), (3, 8, 16, 3), (3, 800, 16, 16)):
        launch(checksum_kernel.WRITE, plain_geometry(), num_jobs=num_jobs, pairs=pairs, blocks=blocks)
        *_, (_, blocks, _) = log
        assert blocks == want, (num_jobs, pairs)


@pytest.mark.parametrize(("nbytes", "tile"), [(16, (64, 32)), (512, (64, 32)), (1040, (16, 128)), (1 << 20, (8, 256))])
def test_tiles_fit_the_pairs(nbytes: int, tile: tuple[int, int], log: list[tuple[Any, ...]]) -> None:
    """A tile takes many short pairs, so that few threads are idle."""
    side = PageAddressing(page_stride=2 << 20, base=0, token_stride=16, per_page=1, num_pages=8)
    launch(checksum_kernel.WRITE, plain_geometry(rows=StridedRuns(1, 0, 0, 1, 0, 0, nbytes), src=side, dst=side))
    assert next(entry[1] for entry in log if entry[0] == "compile")[-2:] == tile
    assert next(entry[2] for entry in log if entry[0] == "start")[5] & (1 << 64) - 1 == seed(nbytes)


def test_nothing_to_do(log: list[tuple[Any, ...]]) -> None:
    launch(checksum_kernel.WRITE, plain_geometry(), pairs=0)
    launch(checksum_kernel.WRITE, plain_geometry(), num_jobs=0)
    assert log == []


def test_counts_out_of_range_are_refused(log: list[tuple[Any, ...]]) -> None:
    with pytest.raises(ProtocolError, match="1073741832 checksums in one launch"):
        launch(checksum_kernel.WRITE, plain_geometry(), num_jobs=8, pairs=(1 << 27) + 1)
    with pytest.raises(ProtocolError, match="blocks must be at least 1"):
        launch(checksum_kernel.WRITE, plain_geometry(), blocks=0)
    assert log == []
    launch(checksum_kernel.WRITE, plain_geometry(), num_jobs=8, pairs=1 << 27)
    assert log


@pytest.mark.parametrize(("unit", "loads"), [(16, "v4.b32"), (8, "v2.b32"), (4, "b32"), (1, "b8")])
@pytest.mark.parametrize("mode", [checksum_kernel.WRITE, checksum_kernel.VERIFY])
def test_it_compiles_for_a_gpu(mode: int, unit: int, loads: str) -> None:
    """Loads are as wide as words, neighbouring threads load neighbouring words, and sums begin after a tile's loads."""
    names = checksum_kernel.sum_pairs.arg_names
    constants = (mode, unit, 2, 1, 8, 256)
    types = ["i64"] * 6 + ["i32"] * (checksum_kernel.NUM_INTEGERS - 6) + ["constexpr"] * len(constants)
    values = {(checksum_kernel.NUM_INTEGERS + i,): value for i, value in enumerate(constants)}
    source = ASTSource(checksum_kernel.sum_pairs, dict(zip(names, types, strict=True)), constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["ptx"].count(f"ld.global.{loads} ") >= 8
    blocked = re.search(r"#blocked\w* = .*sizePerThread = \[1, 1, (\d)\], (.*)\}>", compiled.asm["ttgir"])
    assert blocked is not None
    assert int(blocked[1]) == max(1, unit // 4)
    if triton.__version__.startswith("3.6."):  # later versions spread a warp over several pairs: correct, but slower
        assert "threadsPerWarp = [32, 1, 1], warpsPerCTA = [8, 1, 1]" in blocked[2]
