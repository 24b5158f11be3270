"""Loops that write other bytes, or to other places, where pages are converted, or layouts have states."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.simulation.broken.swapping import Break, swap
from torchkv.core import sends
from torchkv.core.loop import copying, sending, stripes, unpacking
from torchkv.core.receives import Receives, with_slot
from torchkv.engine.resident.routes import _Positions
from torchkv.kernels import page_copy
from torchkv.kernels.copies import ScaleTable
from torchkv.kernels.launch import KernelParams, kernel_params
from torchkv.layout.kernel_geometry import Geometry
from torchkv.transfer import launch_table

__all__ = ["CONVERTS_BREAKS", "CONVERTS_GPUS_STAGED_BREAKS", "CONVERTS_STAGED_BREAKS", "STATES_BREAKS"]


def _copies_what_it_is_to_convert() -> None:
    swap(sending, converts=lambda seg: False)


def _scales_all_heads_alike() -> None:
    real = stripes.conversion
    swap(copying, conversion=lambda seg: (*real(seg)[:-1], 1))


def _gives_kernels_one_scale_a_job() -> None:
    real = ScaleTable.of

    def alike(rows: Any, device: torch.device) -> ScaleTable:
        return real([row if row is None else row[:1].repeat(len(row)) for row in rows], device)

    swap(ScaleTable, of=alike)


def _counts_stages_as_pages() -> None:
    """A kernel that packs, or unpacks, takes what it reads or writes there for pages of the receiver."""

    def counted(geometry: Geometry, mode: int) -> KernelParams:
        params = kernel_params(geometry, mode)
        return params._replace(pair_nbytes=kernel_params(geometry, page_copy.DIRECT).pair_nbytes)

    swap(launch_table, kernel_params=counted)


def _takes_states_for_pages() -> None:
    real = _Positions.__init__
    swap(_Positions, __init__=lambda self, plan, first=0: real(self, plan))


def _writes_to_another_slot() -> None:
    real = with_slot
    swap(sends, with_slot=lambda pages, slot: real(pages, None if slot is None else slot ^ 1))


def _forgets_states_that_have_arrived() -> None:
    real = Receives.state

    def state(self: Receives, flow: int) -> Any:
        found = real(self, flow)
        for writer in found.writers:
            writer.states = [False] * len(writer.states)
        return found

    swap(Receives, state=state)


def _takes_no_piece_for_a_narrower_one() -> None:
    """The receiver reads a piece as if it held the elements of its pages."""
    swap(unpacking, sizes=lambda seg: (1, 1, 1), converts=lambda seg: False)


CONVERTS_BREAKS: dict[str, Break] = {
    "copies what it is to convert": (_copies_what_it_is_to_convert, True),
    "scales all heads alike": (_scales_all_heads_alike, True),
}


STATES_BREAKS: dict[str, Break] = {
    "takes states for pages": (_takes_states_for_pages, True),
    "writes to another slot": (_writes_to_another_slot, True),
    "forgets states that have arrived": (_forgets_states_that_have_arrived, True),
}


CONVERTS_STAGED_BREAKS: dict[str, Break] = {
    "scales all heads alike": (_scales_all_heads_alike, True),
    "takes no piece for a narrower one": (_takes_no_piece_for_a_narrower_one, True),
}


CONVERTS_GPUS_STAGED_BREAKS: dict[str, Break] = {
    "gives kernels one scale a job": (_gives_kernels_one_scale_a_job, True),
    "counts stages as pages": (_counts_stages_as_pages, True),
}
