"""Compiled Triton kernels: loaded ahead of time, and launched by the CUDA driver without Triton's dispatcher."""

from __future__ import annotations

import inspect
import re
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from torchkv.cuda import driver
from torchkv.errors import TransportUnavailable

__all__ = ["WARP", "CompiledKernel", "LoadedKernel"]

_FORMATS = {"i32": ("i", "32"), "i64": ("q", "64")}  # Triton's name of a type -> of `struct`; bits
WARP = 32  # threads


class LoadedKernel(NamedTuple):
    """A kernel on one GPU. function: its ``CUfunction``. shared: bytes of shared memory of a block."""

    function: int
    shared: int
    params: struct.Struct


# Keyed by the identity of the kernel, because hashing a kernel takes longer than the rest of a launch. Identities stay
# valid: kernels are module globals.
_loaded: dict[tuple[int, int, tuple[int, ...], int], LoadedKernel] = {}


class CompiledKernel(NamedTuple):
    """A Triton kernel for given constants and block size, on the current device.

    kernel: its parameters are ``num_integers`` annotated runtime parameters, then ``constants``. warps: of a block.
    """

    kernel: Any
    num_integers: int
    constants: tuple[int, ...]
    warps: int

    @property
    def is_loaded(self) -> bool:
        """Whether `launch` need not compile or load anything."""
        return not self._is_compiled or self._key in _loaded

    def load(self) -> None:
        """Compiles the kernel and loads it onto the device. Enqueues nothing.

        Loading waits for all streams of the device. Compiling is slow, but after the first time on a machine Triton
        finds the compiled kernel on disk. Raises ``TransportUnavailable`` if this version of Triton gives kernels
        parameters that `launch` does not know.
        """
        if self._is_compiled:
            self._load()

    @property
    def loaded(self) -> LoadedKernel | None:
        """The kernel on the current device; None if it is not loaded."""
        return _loaded.get(self._key) if self._is_compiled else None

    def launch(self, blocks: int, integers: tuple[int, ...]) -> None:
        """Enqueues ``blocks`` thread blocks on the current stream. Loads the kernel first if it is not loaded.

        integers: the values of the runtime parameters.
        """
        if not self._is_compiled:
            self.kernel[(blocks,)](*self._typed(integers), *self.constants, num_warps=self.warps)
            return
        # Triton's dispatcher inspects the type of each argument, which takes longer than copying a layer.
        loaded = self._load()
        stream = torch.cuda.current_stream().cuda_stream
        params = loaded.params.pack(*integers)
        driver.launch(loaded.function, blocks, self.warps * WARP, shared=loaded.shared, stream=stream, params=params)

    def _typed(self, integers: tuple[int, ...]) -> list[Any]:
        """Arguments for Triton's interpreter, of the types that the kernel declares.

        Left to itself it goes by values, and cannot make a pointer of an address below 2**31, where the heap of some
        builds of Python lies.
        """
        from triton.runtime.interpreter import TensorHandle

        declared = list(inspect.signature(self.kernel.fn).parameters.values())[: self.num_integers]
        typed = []
        for value, parameter in zip(integers, declared, strict=True):
            name = str(parameter.annotation).removeprefix("tl.")
            kind = getattr(tl, name)
            typed.append(tl.tensor(TensorHandle(np.array([value], dtype=name), kind), kind))
        return typed

    @property
    def _is_compiled(self) -> bool:
        return isinstance(self.kernel, triton.JITFunction)  # Triton's interpreter has a class of its own

    @property
    def _key(self) -> tuple[int, int, tuple[int, ...], int]:
        return id(self.kernel), torch.cuda.current_device(), self.constants, self.warps

    def _load(self) -> LoadedKernel:
        key = self._key
        if (known := _loaded.get(key)) is not None:
            return known
        # Zeros will do: the width of an argument comes from its annotation, not from the value.
        compiled = self.kernel.warmup(*[0] * self.num_integers, *self.constants, grid=(1,), num_warps=self.warps)
        params = param_block(compiled, [p.annotation for p in self.kernel.params[: self.num_integers]])
        _ = compiled[(1, 1, 1)]  # Triton loads the code when this is first asked for
        loaded = _loaded[key] = LoadedKernel(compiled.function, compiled.metadata.shared, params)
        return loaded


def param_block(compiled: Any, types: list[str]) -> struct.Struct:
    """How the runtime parameters of a compiled kernel lie in memory. types: Triton's names of them.

    Behind those that the kernel declares, Triton adds pointers to scratch memory, which are null for a kernel that uses
    none. Raises ``TransportUnavailable`` if there is anything else, which another version of Triton may add.
    """
    declared = compiled.asm["ptx"].partition(".entry")[2].partition("{")[0]
    bits = re.findall(r"\.param\s+\.[busf](\d+)", declared)
    scratch = len(bits) - len(types)
    metadata = compiled.metadata
    if (
        bits != [*(_FORMATS[name][1] for name in types), *("64" for _ in range(scratch))]
        or (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.num_ctas) != (0, 0, 1)
        or (metadata.launch_cooperative_grid, metadata.launch_pdl) != (False, False)
    ):
        raise TransportUnavailable(
            f"Triton {triton.__version__} compiled {metadata.name} to parameters of {bits} bits with {metadata}, which "
            "torchkv does not know how to launch; use Triton 3.6 or 3.7"
        )
    # Native alignment. Pad bytes in the place of the pointers: zeros, that is null.
    return struct.Struct("".join(_FORMATS[name][0] for name in types) + f"0q{8 * scratch}x")
