"""The resident loop whose simulated GPU runs the kernels themselves, in Triton's interpreter: test_loop.py starts it.

Elsewhere `tests.helpers.fakes.loop_gpu` does what the parameters of a launch say. Here the loop's launches meet the
kernels: parameters, page ids, tickets and stages are those that the loop has written.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.helpers.exact_fma import exact_fma
from tests.helpers.fakes import loop_gpu
from tests.helpers.simulation.campaigns import run
from tests.helpers.tiles import use_tiles
from tests.interpreter.convert_cases import pytestmark
from torchkv.kernels.launch import Tile

assert os.environ.get("TRITON_INTERPRET") == "1", "not in the interpreter: run test_loop.py, which starts it"

__all__ = ["exact_fma", "pytestmark"]  # which all tests use


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, int, int]]]:
    """How many launches there were, by the kernel's name, its mode and its number of steps."""
    found: Counter[tuple[str, int, int]] = Counter()
    tickets, errors = (ctypes.c_int32 * 2)(), ctypes.c_int64()

    def interpreted(block: bytes, function: int, blocks: int, bad_ids: list[int]) -> None:
        kernel, given = loop_gpu.launched(block, function)
        assert (given["tickets"], given["errors"]) == (ctypes.addressof(tickets), 0)
        given["errors"] = ctypes.addressof(errors)
        word, number = ctypes.c_int64.from_address(given["completion"]), given["number"]
        assert word.value == number - 1
        kernel.launch(blocks, tuple(given.values()))
        assert (list(tickets), errors.value, word.value) == ([0, 0], 0, number)
        constants = dict(zip(kernel.kernel.arg_names[len(given) :], kernel.constants, strict=True))
        found[kernel.kernel.fn.__name__, constants["MODE"], constants["STEPS"]] += 1

    use_tiles(monkeypatch, copy=Tile(64, 1))
    monkeypatch.setattr(loop_gpu, "run_kernel", interpreted)
    monkeypatch.setattr(loop_gpu, "end_kernel", lambda *arguments: None)  # kernels do that themselves
    monkeypatch.setattr(loop_gpu, "TICKETS", ctypes.addressof(tickets))
    yield found
    assert {steps for _, _, steps in found} > {1}, "everything was copied in one step"


@pytest.mark.parametrize(
    ("campaign", "seeds", "kernel", "modes"),
    [
        ("gpu", range(12), "copy", {0}),
        ("gpus-staged", range(20), "copy", {1, 2}),
        ("converting", range(1, 48, 4), "convert", {0}),
        ("converting", range(2, 80, 4), "convert", {1, 2}),
        ("states", range(2, 40, 4), "copy", {0}),
    ],
    ids=["pages", "staged", "converted", "converted and staged", "states"],
)
def test_nothing_breaks(
    campaign: str, seeds: range, kernel: str, modes: set[int], launches: Counter[tuple[str, int, int]]
) -> None:
    """Every call ends, and every byte of what was received is right."""
    tally = run(campaign, seeds)
    assert not tally.violations
    assert tally.succeeded > 0
    assert {mode for name, mode, _ in launches if name == kernel} >= modes
