"""Conversions on the host: every number of 16 or 8 bits against PyTorch, and the rows of pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.converting import SCALES, numbers, same
from torchkv import ProtocolError, convert
from torchkv.host.convert_loops import KINDS, convert_pairs

ZERO = np.zeros(1, np.int64)


@pytest.mark.parametrize("dtypes", KINDS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
@pytest.mark.parametrize("scale", SCALES)
def test_every_number(dtypes: tuple[torch.dtype, torch.dtype], scale: float) -> None:
    src = numbers(dtypes[0])
    dst = torch.full_like(src, 0, dtype=torch.uint8).repeat(2)[: len(src) * dtypes[1].itemsize].view(dtypes[1])
    nbytes, scales = len(src) * dtypes[1].itemsize, np.array([scale], np.float32)
    rows = 1, 0, 0, 1, 0, 0, nbytes
    convert_pairs(dtypes, src.data_ptr(), dst.data_ptr(), ZERO, ZERO, 0, 1, rows, 100, scales)
    assert same(dst, convert(src, dtypes[1], scale))


def test_the_reference_is_what_it_says() -> None:
    x = torch.randn(1000, dtype=torch.bfloat16) * 300
    scale = torch.tensor(0.7)
    wanted = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert same(convert(x, torch.float8_e4m3fn, 0.7), wanted)
    assert same(convert(wanted, torch.bfloat16, 0.7), (wanted.float() * scale).to(torch.bfloat16))
    assert same(convert(x, torch.float16, 0.7), x.float().to(torch.float16))
    per_head = torch.rand(4, 1) + 0.1
    assert same(
        convert(x.view(4, 250), torch.float8_e4m3fn, per_head)[2], convert(x[500:750], torch.float8_e4m3fn, per_head[2])
    )


@pytest.mark.parametrize(("head_elements", "heads"), [(6, 2), (3, 4), (12, 1), (4, 3)])
def test_each_element_has_the_scale_of_its_head(head_elements: int, heads: int) -> None:
    rng = np.random.default_rng()
    src = torch.randn(200, dtype=torch.bfloat16)
    scales = rng.uniform(0.1, 2, heads).astype(np.float32)
    dst = torch.full((100,), 0x55, dtype=torch.uint8)
    want = dst.clone()
    # Two pairs of 2 x 3 rows of 4 elements.
    rows, src_off, dst_off = (2, 40, 30, 3, 12, 6, 4), np.array([20, 120]), np.array([50, 1])
    convert_pairs(
        (torch.bfloat16, torch.float8_e4m3fn),
        src.data_ptr(),
        dst.data_ptr(),
        src_off,
        dst_off,
        0,
        2,
        rows,
        head_elements,
        scales,
    )
    for s, d in zip(src_off, dst_off, strict=True):
        for number in range(24):
            a, b, c = number // 12, number // 4 % 3, number % 4
            element = src[(s + a * 40 + b * 12) // 2 + c]
            scale = float(scales[number // head_elements % heads])
            want[d + a * 30 + b * 6 + c] = convert(element, torch.float8_e4m3fn, scale).view(torch.uint8)
    assert torch.equal(dst, want)


def test_bad_arguments_are_refused() -> None:
    pair, one = (torch.bfloat16, torch.float8_e4m3fn), np.ones(1, np.float32)
    for rows, head, scales in [
        ((1, 0, 0, 1, 0, 0, -1), 1, one),
        ((1, 0, 0, 1, 0, 0, 1), 0, one),
        ((1, 0, 0, 1, 0, 0, 1), 1, one[:0]),
        ((1, 0, 0, 1, 0, 0, 1), 1, one.astype(np.float64)),
    ]:
        with pytest.raises(ProtocolError, match="rows"):
            convert_pairs(pair, 0, 0, ZERO, ZERO, 0, 1, rows, head, scales)
    with pytest.raises(ProtocolError, match=r"entries 0..2"):
        convert_pairs(pair, 0, 0, ZERO, ZERO, 0, 2, (1, 0, 0, 1, 0, 0, 1), 1, one)
