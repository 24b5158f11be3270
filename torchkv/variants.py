"""Compiled variants of the Triton kernels: loaded ahead of time, and launched without Triton's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import triton

__all__ = ["enqueue", "load"]

# A compiled kernel can be called without Triton's dispatcher, which takes longer to look at the type of each argument
# than a layer takes to copy. Which arguments it then expects is no documented interface and has changed before, so
# versions that this was not tried on get the ordinary launch.
CALLS_COMPILED = triton.__version__.split("+")[0].rpartition(".")[0] == "3.6"

# By the kernel's identity, because hashing it takes longer than all else here: kernels live as long as their modules.
_loaded: dict[tuple[int, int, tuple[int, ...], int], Any] = {}


def load(kernel: Any, num_integers: int, constants: tuple[int, ...], warps: int) -> None:
    """Compiles, and loads onto the current device, what `enqueue` with these ``constants`` needs. Enqueues nothing.

    kernel: all of its parameters are ``num_integers`` runtime ones, annotated, and behind them constants. Slow the
    first time on a machine; after that Triton finds the variant on disk.
    """
    if isinstance(kernel, triton.JITFunction):  # not the interpreter
        _compiled(kernel, torch.cuda.current_device(), num_integers, constants, warps)


def enqueue(kernel: Any, blocks: int, integers: tuple[int, ...], constants: tuple[int, ...], warps: int) -> None:
    """Launches ``blocks`` blocks of ``warps`` warps on the current stream of the current device."""
    if not CALLS_COMPILED or not isinstance(kernel, triton.JITFunction):  # the latter: the interpreter
        kernel[(blocks,)](*integers, *constants, num_warps=warps)
        return
    compiled = _compiled(kernel, torch.cuda.current_device(), len(integers), constants, warps)
    compiled[(blocks, 1, 1)](*integers, *constants)


def _compiled(kernel: Any, device: int, num_integers: int, constants: tuple[int, ...], warps: int) -> Any:
    """One variant, compiled for the current device or taken from Triton's cache, and loaded there."""
    key = (id(kernel), device, constants, warps)
    if (known := _loaded.get(key)) is not None:
        return known
    # The width of an argument comes from its annotation, so zeros will do.
    compiled = kernel.warmup(*[0] * num_integers, *constants, grid=(1,), num_warps=warps)
    if CALLS_COMPILED:
        _ = compiled.run  # reading it loads the code onto the device, which takes a while and waits for all streams
    _loaded[key] = compiled
    return compiled
