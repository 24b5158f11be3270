"""A plan's kernels as the resident loop launches them: see `torchkv.core.loop.launching`."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.core.loop.launching import FIELDS
from torchkv.kernels import page_copy
from torchkv.kernels.compiled import WARP
from torchkv.kernels.launch import TILE, kernel_params, kernels_for
from torchkv.transfer.copy_tables import AddressGroup, BaseAddressTable

__all__ = ["LaunchTable"]

# How many of the kernel's parameters come before those of the geometry, and which of them is the errors' address.
_GIVEN, _ERRORS = 18, 5
assert page_copy.NUM_INTEGERS > _GIVEN


class LaunchTable:
    """The kernels of one connection and plan, loaded, with a block of parameters each that the loop overwrites.

    words: int64, see `torchkv.core.loop.launching.FIELDS`. Keeps alive what they point to. errors, blocks: as of
    `torchkv.kernels.copies.CopyJobs`; the loop gives no bad page ids to kernels, so nobody reads the errors.
    """

    def __init__(self, table: BaseAddressTable, *, device: torch.device, errors: int, blocks: int) -> None:
        assert list(table.plan.layers) == sorted(table.plan.layers)
        self._kept: list[Any] = [table]
        words = [len(table.groups)]
        with torch.cuda.device(device):
            for group in table.groups:
                fields = self._group(group, table.plan.layers, errors)
                words += [fields[name] if name != "blocks" else blocks for name in FIELDS]
        self.words: Int64Array = np.array(words, dtype=np.int64)

    def _group(self, group: AddressGroup, layers: tuple[int, ...], errors: int) -> dict[str, int]:
        geometry = group.geometry
        (kernel,) = kernels_for(geometry)
        loaded = kernel.loaded
        assert loaded is not None
        params = kernel_params(geometry)
        given = [0] * _GIVEN
        given[_ERRORS] = errors
        block = ctypes.create_string_buffer(loaded.params.pack(*given, *params.integers), loaded.params.size)
        size = ctypes.c_size_t(loaded.params.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(size), 0)
        rows = np.array([bisect_left(group.layers, layer) for layer in [*layers, layers[-1] + 1]], dtype=np.int64)
        self._kept += [block, size, extra, rows, group.table]
        stripe = geometry.stripe
        window = (-1, 1) if stripe.window is None else (stripe.window.tokens, stripe.window.unit)
        return {
            "function": loaded.function,
            "threads": kernel.warps * WARP,
            "shared": loaded.shared,
            "params": ctypes.addressof(block),
            "extra": ctypes.addressof(extra),
            "table": group.table.data_ptr(),
            "rows": rows.ctypes.data,
            "tokens": stripe.tokens,
            "per_unit": stripe.per_unit,
            "holders": stripe.holders,
            "holder": stripe.holder,
            "window": window[0],
            "window_unit": window[1],
            "pair_words": params.words_per_pair,
            "tile_words": TILE.words,
            "pair_nbytes": geometry.pair_nbytes,
            "pair_runs": geometry.rows.per_pair,
        }
