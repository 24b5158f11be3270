"""The kernels that pack a rank's pages under one plan, or unpack them, as the resident loop launches them.

See `torchkv.core.loop.launching`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.kernels import page_copy
from torchkv.layout.pair_plan import PairPlan
from torchkv.staging.cuda_pack import CudaPackLauncher
from torchkv.transfer.launch_table import launch_group

__all__ = ["PackTable"]


class PackTable:
    """words: int64, a pack table: see `torchkv.core.loop.launching.FIELDS`. Keeps alive what they point to.

    launcher: of the plan, whose jobs they are; its kernels are loaded. errors, tickets, blocks: as of
    `torchkv.transfer.launch_table.LaunchTable`.
    """

    def __init__(
        self,
        plan: PairPlan,
        launcher: CudaPackLauncher,
        *,
        device: torch.device,
        errors: int,
        tickets: int,
        blocks: int,
    ) -> None:
        self._kept: list[Any] = [launcher]
        mode = page_copy.GATHER if launcher.sending else page_copy.SCATTER
        alike = launcher.alike()
        words = [len(alike)]
        with torch.cuda.device(device):
            for each in alike:
                rows = [
                    each.first_job + bisect_left(each.layers, layer) for layer in [*plan.layers, plan.layers[-1] + 1]
                ]
                words += launch_group(
                    each.geometry,
                    launcher.table,
                    rows,
                    mode=mode,
                    aligned=each.begins_group,
                    scales=None if each.geometry.conversion is None else launcher.scales,
                    errors=errors,
                    tickets=tickets,
                    blocks=blocks,
                    kept=self._kept,
                )
        self.words: Int64Array = np.array(words, dtype=np.int64)
