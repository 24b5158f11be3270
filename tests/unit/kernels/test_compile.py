"""The kernels, compiled for a GPU on a machine without one: the interpreter forgives much that Triton does not."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchkv import kernellaunch, pagecopy, pagesum
from torchkv.kernellaunch import STREAM_WARPS

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: Any, constants: tuple[int, ...], warps: int = 8) -> Any:
    first = len(kernel.arg_names) - len(constants)
    types = {p.name: "i64" if "64" in str(p.annotation) else "i32" for p in kernel.params[:first]}
    signature = {**types, **dict.fromkeys(kernel.arg_names[first:], "constexpr")}
    source = ASTSource(kernel, signature, {(first + i,): value for i, value in enumerate(constants)})
    return compile(source, target=HOPPER, options={"num_warps": warps}).asm


def binary(kernel: Any, constants: tuple[int, ...]) -> bytes:
    return compiled(kernel, constants)["cubin"]


@pytest.mark.parametrize("table", [0, 256])
@pytest.mark.parametrize("mode", [pagecopy.DIRECT, pagecopy.GATHER, pagecopy.SCATTER])
def test_copies(mode: int, table: int) -> None:
    assert binary(pagecopy.copy, (mode, 16, 2, 1, 2048, table, 0))


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_copies_of_narrow_words(unit: int) -> None:
    assert binary(pagecopy.copy, (pagecopy.SCATTER, unit, 0, 0, 2048, 0, 0))


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("table", [0, 256])
@pytest.mark.parametrize("mode", [pagecopy.GATHER, pagecopy.SCATTER])
def test_streams(mode: int, table: int, unit: int) -> None:
    asm = compiled(pagecopy.copy, (mode, unit, 2, 1, 2048, table, kernellaunch.SLOTS), STREAM_WARPS)
    assert asm["cubin"]
    lines = [line.split("//")[0].strip() for line in asm["ptx"].splitlines()]

    def places(pattern: str) -> list[int]:
        return [number for number, line in enumerate(lines) if re.search(pattern, line)]

    barriers, stores = places(r"^bar\.sync"), places(r"st\.global\.v2\.b64" if unit == 16 else r"st\.global\.b8")
    (polls,), (told,) = places(r"\.acquire\b.*\bsys\b|\.sys\.acquire\b"), places(r"\.release\b")
    assert ".sys" in lines[told]
    assert lines[told].split()[1].startswith("atom")
    # The block has stored all of a chunk before one of its threads tells of it; one polls, and the others wait for it.
    assert any(stores[-1] < barrier < told for barrier in barriers)
    assert any(polls < barrier < stores[0] for barrier in barriers)
    # Only the words in the other's reach need more than an ordinary access: the copy itself is plain and wide.
    assert len(stores) == 2048 * (16 if unit == 16 else 1) // (32 * STREAM_WARPS * unit)
    assert not places(r"ld\.global\.nc|ld\.volatile")


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("mode", [pagesum.WRITE, pagesum.VERIFY])
def test_sums(mode: int, unit: int) -> None:
    assert binary(pagesum.sum_pairs, (mode, unit, 2, 1, 8, 256))
