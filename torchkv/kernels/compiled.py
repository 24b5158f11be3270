"""Compiled variants of the Triton kernels: loaded ahead of time, and launched without Triton's dispatcher."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

__all__ = ["Variant"]

# A compiled kernel can be called without Triton's dispatcher, which takes longer to look at the type of each argument
# than a layer takes to copy. Which arguments it then expects is no documented interface and has changed before, so
# versions that this was not tried on get the ordinary launch.
CALLS_COMPILED = triton.__version__.split("+")[0].rpartition(".")[0] == "3.6"

# By the kernel's identity, because hashing it takes longer than all else here: kernels live as long as their modules.
_loaded: dict[tuple[int, int, tuple[int, ...], int], Any] = {}


class Variant(NamedTuple):
    """``kernel`` for these ``constants``, run by blocks of ``warps`` warps, on the current device.

    All of the kernel's parameters are ``num_integers`` runtime ones, annotated, and behind them the constants.
    """

    kernel: Any
    num_integers: int
    constants: tuple[int, ...]
    warps: int

    @property
    def is_loaded(self) -> bool:
        """Whether `launch` only launches."""
        return not self._is_compiled or self._key in _loaded

    def load(self) -> None:
        """Compiles it, and loads it onto the device, which waits for all of its streams. Enqueues nothing.

        Slow the first time on a machine; after that Triton finds the variant on disk.
        """
        if self._is_compiled:
            self._compiled()

    def launch(self, blocks: int, integers: tuple[int, ...]) -> None:
        """Enqueues so many blocks on the current stream. Loads it first if need be."""
        if not CALLS_COMPILED or not self._is_compiled:
            self.kernel[(blocks,)](*integers, *self.constants, num_warps=self.warps)
            return
        self._compiled()[(blocks, 1, 1)](*integers, *self.constants)

    @property
    def _is_compiled(self) -> bool:
        return isinstance(self.kernel, triton.JITFunction)  # else it is the interpreter's

    @property
    def _key(self) -> tuple[int, int, tuple[int, ...], int]:
        return id(self.kernel), torch.cuda.current_device(), self.constants, self.warps

    def _compiled(self) -> Any:
        key = self._key
        if (known := _loaded.get(key)) is not None:
            return known
        # The width of an argument comes from its annotation, so zeros will do.
        compiled = self.kernel.warmup(*[0] * self.num_integers, *self.constants, grid=(1,), num_warps=self.warps)
        _ = compiled[(1, 1, 1)]  # this is where Triton loads the code
        _loaded[key] = compiled
        return compiled
