"""What Triton's compiler makes of the kernels' parameters is what torchkv hands to the driver."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.helpers.fakes.kernel import FakeCompiled
from torchkv.cuda import driver
from torchkv.errors import TransportUnavailable
from torchkv.kernels import checksum, page_copy
from torchkv.kernels.compiled import param_block

CASES = [
    pytest.param(page_copy.copy, page_copy.NUM_INTEGERS, (page_copy.GATHER, 16, 2, 1, 8, 512), id="copy"),
    pytest.param(checksum.sum_pairs, checksum.NUM_INTEGERS, (checksum.WRITE, 16, 2, 1, 8, 256), id="sums"),
]


@pytest.mark.parametrize(("kernel", "num_integers", "constants"), CASES)
def test_the_params_of_a_kernel_compiled_for_a_gpu(kernel: Any, num_integers: int, constants: tuple[int, ...]) -> None:
    types = [p.annotation for p in kernel.params[:num_integers]]
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    values = {(num_integers + i,): value for i, value in enumerate(constants)}
    source = ASTSource(kernel, signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    params = param_block(compiled, types)
    numbers = [i + 1 for i in range(num_integers)]
    block = params.pack(*numbers)
    at = 0
    for name, number in zip(types, numbers, strict=True):
        size = int(name[1:]) // 8
        at = -(-at // size) * size
        assert int.from_bytes(block[at : at + size], "little") == number
        at += size
    at = -(-at // 8) * 8
    assert not any(block[at:]), "pointers to scratch memory that the kernel does not use"
    assert (len(block) - at) % 8 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
    ],
)
def test_a_kernel_that_needs_more_of_its_launch_is_refused(change: dict[str, Any]) -> None:
    compiled = FakeCompiled([], 3)
    assert param_block(compiled, ["i64"] * 3).size == 32
    compiled.metadata = SimpleNamespace(**{**vars(compiled.metadata), **change})
    with pytest.raises(TransportUnavailable, match=r"Triton .* use Triton 3\.6"):
        param_block(compiled, ["i64"] * 3)


def test_parameters_of_other_widths_are_refused() -> None:
    with pytest.raises(TransportUnavailable, match="parameters of"):
        param_block(FakeCompiled([], 3), ["i64", "i32", "i64"])
    with pytest.raises(TransportUnavailable, match="parameters of"):
        param_block(FakeCompiled([], 3), ["i64"] * 5)


def test_a_launch_hands_the_parameters_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> int:
        *plain, kernel_params, extra = arguments
        assert (kernel_params, extra[0], extra[2], extra[4]) == (None, 1, 2, None)
        size = ctypes.c_size_t.from_address(extra[3]).value
        seen.append((*plain, ctypes.string_at(extra[1], size)))
        return 0

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuLaunchKernel=launch))
    params = struct.pack("qi", -5, 7)
    driver.launch(11, 3, 256, shared=2048, stream=13, params=params)
    assert seen == [(11, 3, 1, 1, 256, 1, 1, 2048, 13, params)]
