"""Runs what converts pages in kernels, in Triton's interpreter: in a process that test_convert.py starts."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.converting import PAIRS, SCALES, close_calls, converting_instances, numbers, pairs, retyped, same
from tests.helpers.exact_fma import exact_fma
from tests.helpers.kernel_converting import direct_by_kernel, staged_by_kernels
from tests.helpers.references import page_transfer
from tests.helpers.references.page_transfer import Pool, differences, gqa, reference
from tests.helpers.tiles import use_tiles
from tests.interpreter.page_copy_cases import BF16, FAMILIES
from torchkv import ProtocolError, TransportUnavailable, convert
from torchkv.kernels import copies
from torchkv.kernels.launch import Tile
from torchkv.kernels.page_convert import normal, over
from torchkv.layout.conversion import check_scales
from torchkv.layout.layout import KVLayout

assert os.environ.get("TRITON_INTERPRET") == "1", "not in the interpreter: run test_convert.py, which starts it"

# In numpy, which the interpreter computes with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
__all__ = ["exact_fma"]  # which all tests use
QUANTIZE = (torch.bfloat16, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=Tile(512, 4), convert=Tile(128, 4))
    monkeypatch.setattr(page_transfer, "GAP", 16)


def wrong_bytes(writers: dict[int, KVLayout], reader: KVLayout, rng: np.random.Generator, parts: int = 2) -> list[int]:
    """The numbers of wrong bytes after direct copies, and through stages."""
    made, arguments = pairs(writers, reader, rng, num_tokens=11)
    expected, poison, target = reference(**arguments), arguments["target"], made[0].target
    assert differences(poison, expected) > 0
    moved, found = [direct_by_kernel(pair) for pair in made], [differences(target, expected)]
    for key, rows in target.tensors.items():
        rows[:] = poison.tensors[key]
    assert [staged_by_kernels(pair, rng, parts=parts) for pair in made] == moved
    return [*found, differences(target, expected)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if "unit" not in name and name != "fp8"])
def test_every_byte_of_every_family(family: str) -> None:
    writers, reader, _ = FAMILIES[family]
    names = [component.name for component in reader.components]
    (src, dst), rng = QUANTIZE, np.random.default_rng()
    theirs, ours = dict.fromkeys(names, src), dict.fromkeys(names, dst)
    there = {rank: retyped(layout, theirs, {}) for rank, layout in writers.items()}
    assert wrong_bytes(there, retyped(reader, ours, theirs), rng) == [0, 0]


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_every_pair_of_dtypes(dtypes: tuple[torch.dtype, torch.dtype], order: Any) -> None:
    fields = {**BF16, "head_dim": 12}
    writer = gqa(**{**fields, "dtype": dtypes[0]})
    reader = gqa(1, 2, order=order, accept=(dtypes[0],), **{**fields, "dtype": dtypes[1]})
    assert wrong_bytes({0: writer}, reader, np.random.default_rng()) == [0, 0]


@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(converting_instances(), st.integers(0, 1 << 32))
def test_every_byte_of_random_layouts(layouts: tuple[dict[int, KVLayout], KVLayout], seed: int) -> None:
    assert wrong_bytes(*layouts, np.random.default_rng(seed)) == [0, 0]


def whole(dtypes: tuple[torch.dtype, torch.dtype], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of the source, and what the kernel makes of it, through a pool of one page a head."""
    src = numbers(dtypes[0])
    dim = len(src)
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": dim, "v_head_dim": 8, "page_size": 1}
    writer = KVLayout.gqa(dtype=dtypes[0], **fields)
    reader = KVLayout.gqa(dtype=dtypes[1], accept=(dtypes[0],), **fields)
    (pair,), _ = pairs({0: writer}, reader, np.random.default_rng(), num_tokens=1)
    pair.source.tensors["k", 0][pair.src_pages[0], : src.nbytes] = src.view(torch.uint8).numpy()
    if torch.float8_e4m3fn in dtypes:
        pair.connection.scales = check_scales(reader, {"k": scale})
    direct_by_kernel(pair)
    nbytes = dim * dtypes[1].itemsize
    return src, torch.from_numpy(pair.target.tensors["k", 0][pair.dst_pages[0], :nbytes].copy()).view(dtypes[1])


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_number(dtypes: tuple[torch.dtype, torch.dtype], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=Tile(512, 4), convert=Tile(4096, 4))
    src, got = whole(dtypes, scale)
    assert same(got, convert(src, dtypes[1], scale))


@pytest.mark.parametrize("src", [torch.bfloat16, torch.float16])
def test_quotients_next_to_where_fp8_rounds(src: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=Tile(512, 4), convert=Tile(4096, 4))
    for scale in close_calls(src, 30):
        source, got = whole((src, torch.float8_e4m3fn), scale)
        assert same(got, convert(source, torch.float8_e4m3fn, scale)), f"scale {scale!r}"


@triton.jit
def quotients(numbers: Any, found: Any, scale: Any, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    power, divisor = normal(tl.zeros([COUNT], tl.float32) + tl.load(scale))
    tl.store(found + at, over(tl.load(numbers + at), power, divisor, tl.div_rn(1.0, divisor)))


@pytest.mark.parametrize("src", [torch.bfloat16, torch.float16])
def test_quotients_with_a_sign(src: torch.dtype) -> None:
    """What GPUs round to fp8 that convert natively: zeros keep their sign, and NaN stays NaN."""
    given = numbers(src)
    found = torch.zeros(len(given), dtype=torch.float32)
    for scale in [*SCALES, *close_calls(src, 10)]:
        quotients[(1,)](given.float(), found, torch.tensor([scale]), len(given))
        rounded = found.clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same(rounded, convert(given, torch.float8_e4m3fn, scale)), f"scale {scale!r}"


def test_a_bad_page_is_reported_and_nothing_is_written_for_it() -> None:
    writer = gqa(**BF16)
    reader = gqa(accept=(torch.bfloat16,), **{**BF16, "dtype": torch.float8_e4m3fn})
    (pair,), arguments = pairs({0: writer}, reader, np.random.default_rng(), num_tokens=8)
    pair.src_pages[1] = 99
    with pytest.raises(AssertionError, match=r"BadPage.*source.*position=1, page=99"):
        direct_by_kernel(pair)
    poison: Pool = arguments["target"]
    page = pair.dst_pages[1]
    assert all(np.array_equal(rows[page], poison.tensors[key][page]) for key, rows in pair.target.tensors.items())


def test_jobs_without_scales_and_pages_off_the_size_of_an_element_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = gqa(**BF16)
    reader = gqa(accept=(torch.bfloat16,), **{**BF16, "dtype": torch.float8_e4m3fn})
    (pair,), _ = pairs({0: writer}, reader, np.random.default_rng())
    with monkeypatch.context() as patch:
        patch.setattr(copies.CopyJobs, "scales", None)
        with pytest.raises((ProtocolError, AttributeError)):
            direct_by_kernel(pair)
    monkeypatch.setattr(page_transfer, "GAP", 3)
    (pair,), _ = pairs({0: writer}, reader, np.random.default_rng())
    with pytest.raises(TransportUnavailable, match="no multiple of 2 bytes"):
        direct_by_kernel(pair)
