"""The checksum kernel's launches, and that it compiles for GPUs. What runs it is in pack_cases.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kit import FakeKernel, shape

from torchkv import pagesum, variants
from torchkv.checksum import seed
from torchkv.errors import ProtocolError
from torchkv.slab import Rows
from torchkv.slabgeometry import Geometry, Side
from torchkv.sumlaunch import SumAddresses, launch_sums, sum_variant

NOWHERE = SumAddresses(0, 0, 0, 0, 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pagesum, "sum_pairs", FakeKernel(found, pagesum.NUM_INTEGERS))
    monkeypatch.setattr(variants.triton, "JITFunction", FakeKernel)
    monkeypatch.setattr(variants, "CALLS_COMPILED", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    variants._loaded.clear()
    yield found
    variants._loaded.clear()


def launch(mode: int, geometry: Geometry, *, num_jobs: int = 1, pairs: int = 4, blocks: int = 16) -> None:
    launch_sums(mode, geometry, NOWHERE, num_jobs=num_jobs, ranks=range(pairs), start=0, blocks=blocks)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", [pagesum.WRITE, pagesum.VERIFY])
def test_loading_compiles_all_that_a_transfer_needs(
    log: list[tuple[Any, ...]], mode: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CALLS_COMPILED", known)
    sum_variant(shape(), mode).load()
    assert [entry[0] for entry in log] == ["compile", "load"]
    log.clear()
    for pairs in (1, 60, 100_000):
        launch(mode, shape(), pairs=pairs)
    assert [entry[0] for entry in log] == ["start"] * 3, "something was compiled when the data were there already"
    assert all(len(entry[2]) == pagesum.NUM_INTEGERS + 6 for entry in log)
    assert all(entry[2][pagesum.NUM_INTEGERS] == mode for entry in log)
    assert all(bool(entry[3]) is not known for entry in log)


def test_no_more_blocks_than_tiles(log: list[tuple[Any, ...]]) -> None:
    """Pages of 256 words: eight to a tile."""
    for num_jobs, pairs, blocks, want in ((1, 8, 16, 1), (1, 9, 16, 2), (3, 8, 16, 3), (3, 800, 16, 16)):
        launch(pagesum.WRITE, shape(), num_jobs=num_jobs, pairs=pairs, blocks=blocks)
        *_, (_, grid, _, _) = log
        assert grid[0] == want, (num_jobs, pairs)


@pytest.mark.parametrize(("nbytes", "tile"), [(16, (64, 32)), (512, (64, 32)), (1040, (16, 128)), (1 << 20, (8, 256))])
def test_tiles_fit_the_pairs(nbytes: int, tile: tuple[int, int], log: list[tuple[Any, ...]]) -> None:
    """Short pairs are many to a tile, so that few threads have nothing to do."""
    side = Side(page_stride=2 << 20, base=0, token_stride=16, per_page=1, num_pages=8)
    launch(pagesum.WRITE, shape(rows=Rows(1, 0, 0, 1, 0, 0, nbytes), src=side, dst=side))
    arguments = next(entry[2] for entry in log if entry[0] == "start")
    assert arguments[-2:] == tile
    assert arguments[5] & (1 << 64) - 1 == seed(nbytes)


def test_nothing_to_do(log: list[tuple[Any, ...]]) -> None:
    launch(pagesum.WRITE, shape(), pairs=0)
    launch(pagesum.WRITE, shape(), num_jobs=0)
    assert log == []


def test_counts_out_of_range_are_refused(log: list[tuple[Any, ...]]) -> None:
    with pytest.raises(ProtocolError, match="1073741832 checksums in one launch"):
        launch(pagesum.WRITE, shape(), num_jobs=8, pairs=(1 << 27) + 1)
    with pytest.raises(ProtocolError, match="blocks must be at least 1"):
        launch(pagesum.WRITE, shape(), blocks=0)
    assert log == []
    launch(pagesum.WRITE, shape(), num_jobs=8, pairs=1 << 27)
    assert log


@pytest.mark.parametrize(("unit", "loads"), [(16, "v4.b32"), (8, "v2.b32"), (4, "b32"), (1, "b8")])
@pytest.mark.parametrize("mode", [pagesum.WRITE, pagesum.VERIFY])
def test_it_compiles_for_a_gpu(mode: int, unit: int, loads: str) -> None:
    """With loads as wide as the words, neighbours by neighbouring threads, and all of a tile's before the sums."""
    names = pagesum.sum_pairs.arg_names
    constants = (mode, unit, 2, 1, 8, 256)
    types = ["i64"] * 6 + ["i32"] * (pagesum.NUM_INTEGERS - 6) + ["constexpr"] * len(constants)
    values = {(pagesum.NUM_INTEGERS + i,): value for i, value in enumerate(constants)}
    source = ASTSource(pagesum.sum_pairs, dict(zip(names, types, strict=True)), constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["ptx"].count(f"ld.global.{loads} ") >= 8
    blocked = re.search(r"#blocked\w* = .*sizePerThread = \[1, 1, (\d)\], (.*)\}>", compiled.asm["ttgir"])
    assert blocked is not None
    assert int(blocked[1]) == max(1, unit // 4)
    if triton.__version__.startswith("3.6."):  # later ones spread a warp over several pairs: as right, not as fast
        assert "threadsPerWarp = [32, 1, 1], warpsPerCTA = [8, 1, 1]" in blocked[2]
