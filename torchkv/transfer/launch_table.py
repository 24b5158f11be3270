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
from torchkv.kernels.copies import ScaleTable
from torchkv.kernels.launch import kernel_for, kernel_params
from torchkv.layout.kernel_geometry import Geometry
from torchkv.transfer.copy_tables import BaseAddressTable

__all__ = ["LaunchTable", "launch_group"]

# How many of the kernel's parameters come before those of the geometry, one more where it converts, and which of them
# are the addresses of the errors and the tickets.
_GIVEN, _ERRORS, _TICKETS = 13, 5, 6
assert page_copy.NUM_INTEGERS > _GIVEN


class LaunchTable:
    """The kernels of one connection and plan, loaded, with a block of parameters each that the loop overwrites.

    first: the position of the plan's first layer. words: int64, see `torchkv.core.loop.launching.FIELDS`. Keeps alive
    what they point to. errors, blocks: as of `torchkv.kernels.copies.CopyJobs`; the loop gives no bad page ids to
    kernels, so nobody reads the errors. tickets: of the loop's stream, see `torchkv.kernels.launch.tickets_of`.
    """

    def __init__(
        self, table: BaseAddressTable, *, first: int = 0, device: torch.device, errors: int, tickets: int, blocks: int
    ) -> None:
        assert list(table.plan.layers) == sorted(table.plan.layers)
        self._kept: list[Any] = [table]
        layers = table.plan.layers
        words = [len(table.groups)]
        with torch.cuda.device(device):
            for group in table.groups:
                rows = [0] * first + [bisect_left(group.layers, layer) for layer in [*layers, layers[-1] + 1]]
                words += launch_group(
                    group.geometry,
                    group.table,
                    rows,
                    scales=group.scales,
                    errors=errors,
                    tickets=tickets,
                    blocks=blocks,
                    kept=self._kept,
                )
        self.words: Int64Array = np.array(words, dtype=np.int64)


def launch_group(
    geometry: Geometry,
    table: torch.Tensor,
    rows: list[int],
    *,
    mode: int = page_copy.DIRECT,
    aligned: bool = False,
    scales: ScaleTable | None = None,
    errors: int,
    tickets: int,
    blocks: int,
    kept: list[Any],
) -> list[int]:
    """The `FIELDS` of jobs of one geometry, in the current device. table: of all jobs. rows, aligned: see there.

    mode: of their kernel, which is loaded. scales: of all jobs, if they are converted. kept: gets what must stay alive.
    """
    kernel, params = kernel_for(geometry, mode), kernel_params(geometry, mode)
    loaded = kernel.loaded
    assert loaded is not None
    given = [0] * (_GIVEN if scales is None else _GIVEN + 1)
    given[_ERRORS], given[_TICKETS] = errors, tickets
    block = ctypes.create_string_buffer(loaded.params.pack(*given, *params.integers), loaded.params.size)
    size = ctypes.c_size_t(loaded.params.size)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(size), 0)
    of_rows = np.array(rows, dtype=np.int64)
    kept += [block, size, extra, of_rows, table, scales]
    stripe = geometry.stripe
    window = (-1, 1) if stripe.window is None else (stripe.window.tokens, stripe.window.unit)
    fields = {
        "function": loaded.function,
        "threads": kernel.warps * WARP,
        "shared": loaded.shared,
        "params": ctypes.addressof(block),
        "extra": ctypes.addressof(extra),
        "table": table.data_ptr(),
        "rows": of_rows.ctypes.data,
        "tokens": stripe.tokens,
        "per_unit": stripe.per_unit,
        "holders": stripe.holders,
        "holder": stripe.holder,
        "window": window[0],
        "window_unit": window[1],
        "pair_words": params.words_per_pair,
        "tile_words": params.tile,
        "blocks": blocks,
        "pair_nbytes": params.pair_nbytes,
        "pair_runs": geometry.rows.per_pair,
        "aligned": int(aligned),
        "scales": 0 if scales is None else scales.addresses.data_ptr(),
    }
    return [fields[name] for name in FIELDS]
