"""Pages of unlike dtypes: which are accepted, their scales, and every byte on the host's ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.converting import PAIRS, converting_instances, direct, pairs, staged
from tests.helpers.references import page_transfer
from tests.helpers.references.page_transfer import differences, reference
from torchkv import Component, KVCache, KVLayout, LayoutMismatch, ProtocolError, convert
from torchkv.layout import codec
from torchkv.layout.component import Conversion
from torchkv.layout.conversion import MAX_SCALES, NO_SCALES, ScaleMetadata, check_scales, decode_scales
from torchkv.layout.layout import check_compatible
from torchkv.layout.pair_plan import compile_plan, contributing, coverage_gap

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def gqa(dtype: torch.dtype = FP8, *accept: torch.dtype, **changes: Any) -> KVLayout:
    fields = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "page_size": 4, **changes}
    return KVLayout.gqa(dtype=dtype, accept=accept, **fields)


# ---------------------------------------------------------------------- accept


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_supported_conversions_are_accepted(src: torch.dtype, dst: torch.dtype) -> None:
    component = Component("k", 2, 4, dst, accept=[src, dst, src])
    assert component.accept == (src,)
    layout = gqa(dst, src)
    assert codec.decode(codec.encode(layout)) == layout
    assert layout != gqa(dst)


@pytest.mark.parametrize("src", [torch.float32, torch.float8_e5m2, torch.uint8])
def test_others_are_refused(src: torch.dtype) -> None:
    with pytest.raises(LayoutMismatch, match=f"accept names {src}, from which there is no conversion to .*fp?loat8"):
        gqa(FP8, src)
    with pytest.raises(LayoutMismatch, match="no conversion"):
        convert(torch.zeros(1).to(src), FP8)


@pytest.mark.parametrize("accept", [BF16, "bfloat16", 3, None])
def test_accept_is_a_sequence(accept: Any) -> None:
    with pytest.raises(LayoutMismatch, match=r"accept=.* give a sequence of dtypes"):
        Component("k", 2, 4, FP8, accept=accept)


def test_unlike_dtypes_need_accept_on_one_side() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(gqa(BF16), gqa(FP8), rank_a=2, rank_b=9)
    text = str(caught.value)
    assert "'k': dtype is torch.bfloat16 on rank 2 and torch.float8_e4m3fn on rank 9" in text
    assert "accept=(torch.bfloat16,) if that is rank 9, accept=(torch.float8_e4m3fn,) if it is rank 2" in text
    check_compatible(gqa(BF16), gqa(FP8, BF16), rank_a=2, rank_b=9)
    check_compatible(gqa(FP8, BF16), gqa(BF16), rank_a=2, rank_b=9)
    with pytest.raises(LayoutMismatch, match=r"no conversion between torch.float32 and torch.float8_e4m3fn"):
        check_compatible(gqa(torch.float32), gqa(FP8, BF16), rank_a=2, rank_b=9)
    with pytest.raises(LayoutMismatch, match=r"accept=.torch.float16,. if that is rank 9"):
        check_compatible(gqa(FP16), gqa(FP8, BF16), rank_a=2, rank_b=9)
    with pytest.raises(LayoutMismatch, match=r"dtype is torch.float16 on rank 2 and torch.bfloat16"):
        check_compatible(gqa(FP16), gqa(BF16, FP8), rank_a=2, rank_b=9)


def test_pages_go_only_where_they_are_accepted() -> None:
    prefill, decode = gqa(BF16), gqa(FP8, BF16)
    assert contributing({0: prefill}, decode) == (0,)
    assert coverage_gap({0: prefill}, decode) is None
    assert compile_plan(0, {0: prefill}, decode).converts
    assert contributing({1: decode}, prefill) == ()
    gap = coverage_gap({1: decode}, prefill)
    assert gap is not None
    assert "torch.float8_e4m3fn on the sender, rank 1" in gap
    assert "accept=(torch.float8_e4m3fn,)" in gap
    with pytest.raises(LayoutMismatch, match=r"dtype is torch.float8_e4m3fn on rank 1"):
        compile_plan(1, {1: decode}, prefill)


# ---------------------------------------------------------------------- scales


@pytest.mark.parametrize(
    ("given_scales", "expected"),
    [
        (0.5, [[0.5] * 2] * 2),
        ([0.5, 2.0], [[0.5] * 2, [2.0] * 2]),
        ([[0.5, 1.0], [2.0, 0.1]], [[0.5, 1.0], [2.0, 0.1]]),
        (torch.tensor([0.5, 2.0]), [[0.5] * 2, [2.0] * 2]),
        (np.float64(0.25), [[0.25] * 2] * 2),
    ],
)
def test_scales_of_every_shape_travel(given_scales: Any, expected: list[list[float]]) -> None:
    layout = gqa(FP8, BF16, tp_rank=1, tp_size=2)
    scales = check_scales(layout, {"k": given_scales})
    for held in (scales, decode_scales(layout, scales.metadata())):
        for layer in (0, 1):
            assert np.array_equal(held.of("k", layer, range(2, 4)), np.array(expected[layer], np.float32))
            assert held.of("k", layer, range(3, 4)) == np.float32(expected[layer][1])
            assert np.array_equal(held.of("v", layer, range(2, 4)), [1, 1])
    assert np.array_equal(NO_SCALES.of("k", 0, range(2)), [1, 1])
    assert check_scales(layout, None) is NO_SCALES


def test_as_few_numbers_travel_as_say_it_all() -> None:
    layout = gqa(FP8, BF16)
    rows = {"one": [[2.0] * 4] * 2, "layers": [[2.0] * 4, [3.0] * 4], "all": [[2.0, 1, 1, 1]] * 2}
    assert [len(check_scales(layout, {"k": each}).metadata()[0].values) for each in rows.values()] == [4, 8, 32]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (0.0, "finite and greater than 0"),
        (-1.0, "finite and greater than 0"),
        (float("nan"), "finite and greater than 0"),
        (1e39, "has inf: .*as float32"),
        (1e-60, "has 0.0: .*as float32"),
        ([1.0], r"shape \(1,\): give one number, one for each of the 2 layers, or 2 x 4"),
        ([[1.0, 1.0]] * 2, r"shape \(2, 2\)"),
        ([[1.0], [1.0, 2.0]], "give a number, or a list or tensor of numbers"),
        ("1.0x", "give a number"),
        ([1.0, -2.0], "has -2.0"),
    ],
)
def test_bad_scales_are_refused(bad: Any, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        check_scales(gqa(FP8, BF16), {"k": bad})


@pytest.mark.parametrize("layout", [gqa(FP8), gqa(BF16, FP16)])
def test_scales_that_nothing_uses_are_refused(layout: KVLayout) -> None:
    with pytest.raises(LayoutMismatch, match=r"would never be used.*accepts"):
        KVCache.empty(layout, 3, device="cpu", scales={"k": 2.0})


def test_scales_name_components() -> None:
    with pytest.raises(LayoutMismatch, match="no component 'q'"):
        check_scales(gqa(FP8, BF16), {"q": 1.0})
    wrong: Any = 2.0
    with pytest.raises(LayoutMismatch, match="a mapping of component names"):
        check_scales(gqa(FP8, BF16), wrong)


FLOATS: Callable[..., bytes] = lambda *numbers: np.array(numbers, "<f4").tobytes()  # noqa: E731


@pytest.mark.parametrize(
    "published",
    [
        [ScaleMetadata("q", FLOATS(1))],
        [ScaleMetadata("k", FLOATS(1)), ScaleMetadata("k", FLOATS(1))],
        [ScaleMetadata("k", b"123")],
        [ScaleMetadata("k", FLOATS(1, 2, 3))],
        [ScaleMetadata("k", b"")],
        [ScaleMetadata("k", FLOATS(0))],
        [ScaleMetadata("k", FLOATS(1, np.inf))],
        [ScaleMetadata("k", FLOATS(*[1, 1, 1, 1, 1, 1, 1, -1]))],
    ],
)
def test_hostile_scales_are_refused(published: list[ScaleMetadata]) -> None:
    with pytest.raises(ProtocolError, match=r"its published .*'[kq]'"):
        decode_scales(gqa(FP8, BF16), published)


def test_a_few_bytes_take_no_gigabytes() -> None:
    layout = gqa(FP8, BF16, num_layers=4096, num_kv_heads=1 << 20, head_dim=1)
    scales = decode_scales(layout, [ScaleMetadata("k", FLOATS(2))])
    assert scales.of("k", 4095, range(5, 7)).tolist() == [2, 2]
    assert scales.metadata()[0].values == FLOATS(2)
    with pytest.raises(ProtocolError, match="shape"):
        decode_scales(layout, [ScaleMetadata("k", bytes(4 * MAX_SCALES + 4))])


# ---------------------------------------------------------------------- plans and bytes


def test_a_plan_counts_the_bytes_of_either_side() -> None:
    plan = compile_plan(0, {0: gqa(BF16, tp_size=1)}, gqa(FP8, BF16, tp_rank=1, tp_size=2, order="HND"))
    segment = plan.segments[0]
    assert segment.conversion == Conversion(BF16, FP8, 2, 8)
    assert (segment.src_base, segment.dst_base) == (2 * 8 * 2, 0)
    assert (segment.src_token_stride, segment.dst_token_stride) == (4 * 8 * 2, 8)
    assert segment.rows == (4, 64, 8, 2, 16, 32, 8)
    assert (segment.pair_nbytes, segment.stage_nbytes) == (64, 64)
    assert segment.side_rows(sending=True).run == 16
    assert plan.nbytes(8) == 2 * 2 * 2 * 64
    back = compile_plan(0, {0: gqa(FP8)}, gqa(BF16, FP8))
    assert back.page_for_page
    assert (back.segments[0].pair_nbytes, back.segments[0].stage_nbytes) == (256, 128)


@pytest.mark.parametrize("orders", [("HND", "HND"), ("NHD", "HND"), ("HND", "NHD"), ("NHD", "NHD")])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 4), (4, 1), (8, 4)])
def test_heads_are_known_by_the_number_of_an_element(orders: tuple[Any, Any], sizes: tuple[int, int]) -> None:
    src, dst = (
        gqa(dtype, *accept, order=order, page_size=size)
        for dtype, accept, order, size in ((BF16, (), orders[0], sizes[0]), (FP8, (BF16,), orders[1], sizes[1]))
    )
    segment = compile_plan(0, {0: src}, dst).segments[0]
    conversion, rows, dim = segment.conversion, segment.rows, 8
    assert conversion is not None
    head_stride = dst.page_size * dim if orders[1] == "HND" else dim
    token_stride = dim if orders[1] == "HND" else 4 * dim
    number = 0
    for a in range(rows.n0):
        for b in range(rows.n1):
            for c in range(rows.run):
                at = a * rows.d0 + b * rows.d1 + c
                head = at // head_stride if orders[1] == "HND" else at % token_stride // head_stride
                assert number // conversion.head_elements % conversion.heads == head
                number += 1


RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(converting_instances(), st.integers(0, 1 << 32), st.sampled_from([1, 3]), st.booleans())
def test_every_byte_of_random_layouts(
    monkeypatch: pytest.MonkeyPatch,
    layouts: tuple[dict[int, KVLayout], KVLayout],
    seed: int,
    parts: int,
    checksum: bool,
) -> None:
    """Direct and staged, into random bytes, with canaries behind every page."""
    monkeypatch.setattr(page_transfer, "GAP", 16)
    rng = np.random.default_rng(seed)
    writers, reader = layouts
    made, arguments = pairs(writers, reader, rng)
    expected, poison = reference(**arguments), arguments["target"]
    moved = [direct(pair) for pair in made]
    assert differences(made[0].target, expected) == 0
    for key, rows in made[0].target.tensors.items():
        rows[:] = poison.tensors[key]
    assert [staged(pair, rng, parts=parts, checksum=checksum) for pair in made] == moved
    assert differences(made[0].target, expected) == 0
    assert sum(moved) >= differences(poison, expected) > 0


@pytest.mark.parametrize(("src", "dst"), [(BF16, FP8), (FP8, BF16)])
def test_checksums_notice_what_is_changed_on_the_way(src: torch.dtype, dst: torch.dtype) -> None:
    """Any bit of a stage, whichever side converts."""
    rng = np.random.default_rng()
    (pair,), _ = pairs({0: gqa(src)}, gqa(dst, src), rng)
    for _ in range(20):
        with pytest.raises(AssertionError, match="Mismatch"):
            staged(pair, rng, parts=1, checksum=True, spoils=True)
