"""The page-copy kernels. What runs the kernel is in kernel_cases.py; here is what needs neither GPU nor interpreter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from triton_kit import FakeKernel, run_in_interpreter, shape

from torchkv import kernellaunch, kernels, pagecopy, variants
from torchkv.kernellaunch import TILE, Tile, divisor
from torchkv.slab import Rows
from torchkv.slabgeometry import Geometry, Side
from torchkv.stagememory import Room
from torchkv.staging import Stream

CASES = Path(__file__).with_name("kernel_cases.py")


def test_in_the_interpreter() -> None:
    run_in_interpreter(CASES, timeout=110)


# Division by multiplication


def divide(number: int, magic: int, shift: int) -> int:
    """`pagecopy.div`, with 64-bit registers."""
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
    assert kernellaunch.MAX_WORDS + TILE.words < 1 << 31


@settings(max_examples=300)
@given(per_row=st.integers(1, 300), first=st.integers(0, 1000))
def test_a_table_holds_all_rows_that_a_tile_touches(per_row: int, first: int) -> None:
    tile = Tile(512, 4, 64)
    what = kernellaunch.shape(shape(rows=Rows(1, 0, 0, 1, 0, 0, 16 * per_row)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernellaunch, "TILE", tile)
        table = kernellaunch._constants(pagecopy.DIRECT, what)[5]
    word = first * tile.words
    touched = (word + tile.words - 1) // per_row - word // per_row + 1
    assert table in (0, 64)
    assert touched <= table or table == 0
    assert table or per_row <= 9, "long rows are worth a table"


# Launching: with a compiled kernel in the place of the real one


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pagecopy, "copy", FakeKernel(found, pagecopy.NUM_INTEGERS))
    monkeypatch.setattr(variants.triton, "JITFunction", FakeKernel)
    monkeypatch.setattr(variants, "CALLS_COMPILED", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    variants._loaded.clear()
    yield found
    variants._loaded.clear()


def send(geometry: Geometry, num_pages: int = 4, blocks: int = 2) -> None:
    ids = torch.zeros(num_pages, dtype=torch.int64)
    kernels.copy_pages(
        torch.zeros((1, 2), dtype=torch.int64),
        ids,
        ids,
        geometry,
        first_job=0,
        num_jobs=1,
        start=0,
        limit_tokens=16 * num_pages,
        errors=torch.zeros(1, dtype=torch.int64),
        blocks=blocks,
    )


@pytest.mark.parametrize("known", [True, False])
def test_loading_compiles_all_that_a_transfer_needs(
    log: list[tuple[Any, ...]], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CALLS_COMPILED", known)
    geometry = shape()
    (variant,) = kernels.variants(geometry)
    assert not variant.is_loaded
    variant.load()
    assert variant.is_loaded
    assert [entry[0] for entry in log] == ["compile", "load"]
    log.clear()
    for num_pages in (1, 60, 100_000):
        send(geometry, num_pages)
    assert {entry[0] for entry in log} == {"start"}, "something was compiled when the data were there already"
    assert all(len(entry[2]) == pagecopy.NUM_INTEGERS + 7 for entry in log)
    # A version of Triton that is not known gets the options of an ordinary launch.
    assert all(bool(entry[3]) is not known for entry in log)


def load(*modes: int, stream: bool = False) -> None:
    for variant in kernels.variants(shape(), *modes, stream=stream):
        variant.load()


def test_other_modes_have_other_variants(log: list[tuple[Any, ...]]) -> None:
    load(pagecopy.GATHER, pagecopy.SCATTER)
    assert {entry[1][0] for entry in log if entry[0] == "compile"} == {pagecopy.GATHER, pagecopy.SCATTER}


def test_no_more_blocks_than_tiles(log: list[tuple[Any, ...]]) -> None:
    send(shape(), num_pages=TILE.words // 256 + 1, blocks=132)  # pages of 256 words: one more than a tile
    assert [entry[1] for entry in log if entry[0] == "start"] == [(2, 1, 1)]


def test_layouts_share_variants(log: list[tuple[Any, ...]]) -> None:
    """Nothing but the word's width and the number of row counts makes another variant."""
    side = Side(page_stride=8192, base=512, token_stride=512, per_page=1, num_pages=99)
    for geometry in (shape(), shape(src=side), shape(rows=Rows(1, 0, 0, 1, 0, 0, 1152), dst=side)):
        send(geometry)
    assert sum(entry[0] == "compile" for entry in log) == 1


# Launching streams


STREAM = kernels.Flow(words=1 << 20, base=7 << 32, shape=Stream(1 << 16, 5), state=1 << 30, patience=9)


def send_stream(stream: kernels.Flow = STREAM, num_pages: int = 17) -> None:
    """Both sides; 4 KiB a page, so 17 pages take two chunks of 64 KiB."""
    ids, errors = torch.zeros(num_pages, dtype=torch.int64), kernels.error_slot()
    where = {"first_job": 1, "num_jobs": 2, "start": 0, "limit_tokens": 16 * num_pages, "errors": errors, "blocks": 1}
    jobs, room = torch.zeros((3, 2), dtype=torch.int64), Room(1 << 40, stream.shape.nbytes)
    kernels.gather(jobs, ids, room, shape(), **where, stream=stream, first_chunk=2)
    kernels.scatter(jobs, room, ids, shape(), num_src_pages=num_pages, **where, stream=stream, first_chunk=2)


@pytest.mark.parametrize("known", [True, False])
def test_loading_compiles_streams_if_asked(
    log: list[tuple[Any, ...]], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CALLS_COMPILED", known)
    load(pagecopy.GATHER, pagecopy.SCATTER, stream=True)
    compiled = [entry[1] for entry in log if entry[0] == "compile"]
    assert [(constants[0], constants[-1]) for constants in compiled] == [
        (mode, slots) for slots in (0, kernellaunch.SLOTS) for mode in (pagecopy.GATHER, pagecopy.SCATTER)
    ]
    log.clear()
    send_stream()
    assert [entry[0] for entry in log] == ["start", "start"], "something was compiled when the data were there already"
    assert all(len(entry[2]) == pagecopy.NUM_INTEGERS + 7 for entry in log)


def test_each_side_of_a_stream_waits_for_what_the_other_tells(log: list[tuple[Any, ...]]) -> None:
    send_stream()
    starts = [entry for entry in log if entry[0] == "start"]
    assert [entry[1] for entry in starts] == [(5, 1, 1)] * 2, "as many blocks as channels, whatever there is to do"
    at = 8  # of wait_at among the arguments
    words, credit = STREAM.words, STREAM.words + 8 * kernellaunch.MAX_CHANNELS
    counts = (STREAM.state, STREAM.base, STREAM.patience, 2, (1 << 16) // (16 * TILE.words), 2)
    assert starts[0][2][at : at + 8] == (credit, words, *counts)
    assert starts[1][2][at : at + 8] == (words, credit, *counts)


def test_a_stream_of_nothing_is_no_launch(log: list[tuple[Any, ...]]) -> None:
    send_stream(num_pages=0)
    assert not log


def test_every_tile_divides_a_chunk() -> None:
    assert kernels.CHUNK_UNIT % (16 * TILE.words) == 0


def test_unfinished_hides_no_bad_page() -> None:
    errors = kernels.error_slot()
    assert not kernels.unfinished(errors)
    for moved in (False, True):
        errors[1] = pagecopy.MOVED << 32 | pagecopy.UNFINISHED if moved else pagecopy.UNFINISHED
        assert kernels.unfinished(errors)
        assert kernels.moved(errors) is moved
        assert kernels.first_error(errors) is None
    errors[0] = 1 << 33 | 7
    assert kernels.unfinished(errors)
    assert kernels.first_error(errors) == ("source", 0, 7)


# Error codes


@pytest.mark.parametrize("page", [0, 7, (1 << 31) - 1, -1, -(1 << 31)])
@pytest.mark.parametrize("position", [0, 5, kernels.MAX_IDS - 1])
@pytest.mark.parametrize("side", [0, 1])
def test_error_codes(side: int, position: int, page: int) -> None:
    errors = kernels.error_slot()
    assert kernels.first_error(errors) is None
    errors[0] = (position + 1) << 33 | side << 32 | (page & 0xFFFFFFFF)
    assert kernels.first_error(errors) == (("source", "destination")[side], position, page)
