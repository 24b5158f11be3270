"""Tiles and steps of the kernels that copy pages, as a test wants them."""

from __future__ import annotations

import pytest

from torchkv.kernels import launch, steps
from torchkv.kernels.launch import Tile

__all__ = ["ONE_STEP", "STEPS", "use_steps", "use_tiles"]

# How many words must lie side by side in a step: for tests whose pages are small.
STEPS, ONE_STEP = 1, 1 << 30


def use_steps(monkeypatch: pytest.MonkeyPatch, side_by_side: int) -> None:
    """Has kernels copy in as many steps as that allows. side_by_side: `STEPS` or `ONE_STEP`."""
    monkeypatch.setattr(steps, "SIDE_BY_SIDE", side_by_side)
    launch.kernel_params.cache_clear()


def use_tiles(
    monkeypatch: pytest.MonkeyPatch, *, copy: Tile, convert: Tile | None = None, side_by_side: int = STEPS
) -> None:
    """As `use_steps`, with these tiles."""
    monkeypatch.setattr(launch, "TILE", copy)
    monkeypatch.setattr(launch, "CONVERT_TILE", convert or copy)
    use_steps(monkeypatch, side_by_side)
