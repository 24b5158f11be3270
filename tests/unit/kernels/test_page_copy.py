"""The page-copy kernel without GPU or interpreter. tests/interpreter runs it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from tests.helpers.fakes.kernel import fake_launches, plain_geometry
from torchkv.kernels import copies, page_copy
from torchkv.kernels import launch as kernel_launch
from torchkv.kernels.launch import TILE, divisor
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.plan_segment import StridedRuns

# Division by multiplication


def divide(number: int, magic: int, shift: int) -> int:
    """`page_copy.div`, with 64-bit registers."""
    product = (2 * number) * (magic & 0xFFFFFFFF)
    assert product < 1 << 64
    return (product >> 32) >> shift


@settings(max_examples=500)
@given(number=st.integers(0, (1 << 31) - 1), by=st.integers(1, (1 << 31) - 1))
def test_division(number: int, by: int) -> None:
    magic, shift = divisor(by)
    assert -(1 << 31) <= magic < 1 << 31
    assert 0 <= shift < 32
    multiple = number // by * by
    for value in (number, multiple, max(0, multiple - 1), (1 << 31) - 1):
        assert divide(value, magic, shift) == value // by


def test_division_by_every_small_number() -> None:
    for by in range(1, 3000):
        magic, shift = divisor(by)
        top = ((1 << 31) - 1) // by * by
        for value in (0, by - 1, by, top - 1, top, (1 << 31) - 1, random.randrange(1 << 31)):
            assert divide(value, magic, shift) == value // by


# The tile


def test_a_tile_is_no_larger_than_what_launches_allow_for() -> None:
    assert kernel_launch.MAX_WORDS + TILE.words < 1 << 31


def test_threads_have_few_addresses_each() -> None:
    """They take registers: of the words of a step, a thread has four at most."""
    for per_row in (1, 64, 128, 256, 2048):
        params = kernel_launch.kernel_params(plain_geometry(rows=StridedRuns(1, 0, 0, 1, 0, 0, 16 * per_row)), 0)
        *_, steps, tile = params.constants
        assert params.tile == tile <= 4 * 32 * TILE.warps
        assert params.words_per_pair * steps == per_row


# Launches, with a fake in the place of the kernel


@pytest.fixture
def log() -> Iterator[list[tuple[Any, ...]]]:
    with fake_launches(page_copy, "copy", page_copy.NUM_INTEGERS) as found:
        yield found


def send(geometry: Geometry, num_pages: int = 4, blocks: int = 2) -> None:
    ids = torch.zeros(num_pages, dtype=torch.int64)
    jobs = copies.CopyJobs(
        table=torch.zeros((1, 2), dtype=torch.int64),
        geometry=geometry,
        first_job=0,
        num_jobs=1,
        start=0,
        limit_tokens=16 * num_pages,
        errors=torch.zeros(1, dtype=torch.int64),
        blocks=blocks,
    )
    copies.copy_pages(jobs, ids, ids)


def test_loading_compiles_all_that_a_transfer_needs(log: list[tuple[Any, ...]]) -> None:
    geometry = plain_geometry()
    kernel = kernel_launch.kernel_for(geometry)
    assert not kernel.is_loaded
    kernel.load()
    assert kernel.is_loaded
    assert [entry[0] for entry in log] == ["compile", "load"]
    log.clear()
    for num_pages in (1, 60, 100_000):
        send(geometry, num_pages)
    assert {entry[0] for entry in log} == {"start"}, "something was compiled at the first launch"


def test_other_modes_have_other_kernels(log: list[tuple[Any, ...]]) -> None:
    for mode in (page_copy.GATHER, page_copy.SCATTER):
        kernel_launch.kernel_for(plain_geometry(), mode).load()
    assert {entry[1][0] for entry in log if entry[0] == "compile"} == {page_copy.GATHER, page_copy.SCATTER}


def test_no_more_blocks_than_tiles(log: list[tuple[Any, ...]]) -> None:
    send(plain_geometry(), num_pages=TILE.words // 256 + 1, blocks=132)  # pages of 256 words: one more than a tile
    assert [entry[1] for entry in log if entry[0] == "start"] == [2]


def test_layouts_share_kernels(log: list[tuple[Any, ...]]) -> None:
    """Only the width of words and the numbers of row counts and of steps make another compiled kernel."""
    side = PageAddressing(page_stride=8192, base=512, token_stride=512, per_page=1, num_pages=99)
    for geometry in (
        plain_geometry(),
        plain_geometry(src=side),
        plain_geometry(rows=StridedRuns(1, 0, 0, 1, 0, 0, 8192), dst=side),
    ):
        send(geometry)
    assert sum(entry[0] == "compile" for entry in log) == 1


# Error codes


@pytest.mark.parametrize("page", [0, 7, (1 << 31) - 1, -1, -(1 << 31)])
@pytest.mark.parametrize("position", [0, 5, copies.MAX_IDS - 1])
@pytest.mark.parametrize("side", [0, 1])
def test_error_codes(side: int, position: int, page: int) -> None:
    errors = copies.error_words()
    assert copies.first_error(errors) is None
    errors[0] = (position + 1) << 33 | side << 32 | (page & 0xFFFFFFFF)
    assert copies.first_error(errors) == (("source", "destination")[side], position, page)
