"""The kernels, compiled for a GPU on a machine without one: the interpreter accepts much that Triton does not."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels import page_convert, page_copy
from torchkv.kernels.launch import TILE

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: Any, constants: tuple[int, ...], warps: int = 8) -> Any:
    first = len(kernel.arg_names) - len(constants)
    types = {p.name: "i64" if "64" in str(p.annotation) else "i32" for p in kernel.params[:first]}
    signature = {**types, **dict.fromkeys(kernel.arg_names[first:], "constexpr")}
    source = ASTSource(kernel, signature, {(first + i,): value for i, value in enumerate(constants)})
    return compile(source, target=HOPPER, options={"num_warps": warps}).asm


def binary(kernel: Any, constants: tuple[int, ...]) -> bytes:
    return compiled(kernel, constants)["cubin"]


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("mode", [page_copy.DIRECT, page_copy.GATHER, page_copy.SCATTER])
def test_copies(mode: int, steps: int) -> None:
    asm = compiled(page_copy.copy, (mode, 16, 2, 1, steps, TILE.words // max(steps, 2)), TILE.warps)
    assert asm["cubin"]
    # All words of a thread are on their way before the first is written.
    moved = re.findall(r"(ld|st)\.global\.v2\.b64", asm["ptx"])
    assert moved == ["ld"] * (len(moved) // 2) + ["st"] * (len(moved) // 2)
    assert len(moved) == 2 * TILE.words // max(steps, 2) * steps // (32 * TILE.warps)


def test_the_end_is_told_once_all_has_been_written() -> None:
    """All threads of each block have met, and the whole system can see what they wrote, before the block has ended."""
    ptx = compiled(page_copy.copy, (page_copy.DIRECT, 16, 2, 1, 8, 512), TILE.warps)["ptx"]
    order = r"st\.global\.v2\.b64|bar\.sync|atom\.global\.sys\.acq_rel\.add\.u32|st\.global\.b64"
    last = re.findall(order, ptx)[-5:]
    assert last == ["st.global.v2.b64", "bar.sync", "atom.global.sys.acq_rel.add.u32", "bar.sync", "st.global.b64"]


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_copies_of_narrow_words(unit: int) -> None:
    assert binary(page_copy.copy, (page_copy.SCATTER, unit, 0, 0, 8, 512))


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("mode", [page_copy.DIRECT, page_copy.GATHER, page_copy.SCATTER])
@pytest.mark.parametrize("native", [0, 1])
def test_conversions(mode: int, kind: int, native: int) -> None:
    steps, elements, tile = 4, 8, 512
    asm = compiled(page_convert.convert, (mode, kind, elements, 1, steps, tile, native))
    assert asm["cubin"]
    # A true division for each address, no flush of denormals to zero, no product and sum with one rounding but the four
    # corrections of each of a thread's elements.
    words = tile // (8 * 32)
    assert asm["ptx"].count("div.rn.f32") == (words if kind <= 1 else 0)
    fused = [line for line in asm["ptx"].splitlines() if "fma" in line and ", 0f00000000" not in line]  # plus 0: exact
    assert len(fused) == (4 * words * steps * elements if kind <= 1 else 0)
    assert not re.search(r"div\.(full|approx)|\.ftz", asm["ptx"])
    # Wide accesses: 16 bytes of the wider side.
    assert re.search(r"(ld|st)\.global\.v4\.b32", asm["ptx"])


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("mode", [checksum_kernel.WRITE, checksum_kernel.VERIFY])
def test_sums(mode: int, unit: int) -> None:
    assert binary(checksum_kernel.sum_pairs, (mode, unit, 2, 1, 8, 256))
