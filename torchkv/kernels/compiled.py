"""Compiled Triton kernels: loaded ahead of time, and launched without Triton's dispatcher where that was tested."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

__all__ = ["CompiledKernel"]

# Triton's dispatcher inspects the type of each argument, which takes longer than copying a layer. A compiled kernel can
# be called without it. Which arguments it then expects is not documented and has changed before, so versions other than
# the tested one get the ordinary launch.
CALLS_COMPILED = triton.__version__.split("+")[0].rpartition(".")[0] == "3.6"

# Keyed by the identity of the kernel, because hashing a kernel takes longer than the rest of a launch. Identities stay
# valid: kernels are module globals.
_loaded: dict[tuple[int, int, tuple[int, ...], int], Any] = {}


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
        finds the compiled kernel on disk.
        """
        if self._is_compiled:
            self._compiled()

    def launch(self, blocks: int, integers: tuple[int, ...]) -> None:
        """Enqueues ``blocks`` thread blocks on the current stream. Loads the kernel first if it is not loaded.

        integers: the values of the runtime parameters.
        """
        if not CALLS_COMPILED or not self._is_compiled:
            self.kernel[(blocks,)](*integers, *self.constants, num_warps=self.warps)
            return
        self._compiled()[(blocks, 1, 1)](*integers, *self.constants)

    @property
    def _is_compiled(self) -> bool:
        return isinstance(self.kernel, triton.JITFunction)  # Triton's interpreter has a class of its own

    @property
    def _key(self) -> tuple[int, int, tuple[int, ...], int]:
        return id(self.kernel), torch.cuda.current_device(), self.constants, self.warps

    def _compiled(self) -> Any:
        key = self._key
        if (known := _loaded.get(key)) is not None:
            return known
        # Zeros will do: the width of an argument comes from its annotation, not from the value.
        compiled = self.kernel.warmup(*[0] * self.num_integers, *self.constants, grid=(1,), num_warps=self.warps)
        _ = compiled[(1, 1, 1)]  # Triton loads the code when this is first asked for
        _loaded[key] = compiled
        return compiled
