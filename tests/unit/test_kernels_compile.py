"""The kernels, compiled for a GPU on a machine without one: the interpreter forgives much that Triton does not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchkv import pagecopy, pagesum

HOPPER = GPUTarget("cuda", 90, 32)


def binary(kernel: Any, constants: tuple[int, ...]) -> bytes:
    first = len(kernel.arg_names) - len(constants)
    types = {p.name: "i64" if "64" in str(p.annotation) else "i32" for p in kernel.params[:first]}
    signature = {**types, **dict.fromkeys(kernel.arg_names[first:], "constexpr")}
    source = ASTSource(kernel, signature, {(first + i,): value for i, value in enumerate(constants)})
    return compile(source, target=HOPPER, options={"num_warps": 8}).asm["cubin"]


@pytest.mark.parametrize("table", [0, 256])
@pytest.mark.parametrize("mode", [pagecopy.DIRECT, pagecopy.GATHER, pagecopy.SCATTER])
def test_copies(mode: int, table: int) -> None:
    assert binary(pagecopy.copy, (mode, 16, 2, 1, 2048, table))


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_copies_of_narrow_words(unit: int) -> None:
    assert binary(pagecopy.copy, (pagecopy.SCATTER, unit, 0, 0, 2048, 0))


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("mode", [pagesum.WRITE, pagesum.VERIFY])
def test_sums(mode: int, unit: int) -> None:
    assert binary(pagesum.sum_pairs, (mode, unit, 2, 1, 8, 256))
