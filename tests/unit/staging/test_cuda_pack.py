"""Packing pieces on GPUs: what needs neither a GPU nor Triton's interpreter. tests/interpreter runs the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from tests.helpers.packing import Pages, Pool
from tests.helpers.references.page_transfer import gqa
from torchkv.errors import TransportUnavailable
from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels import checksum_launch, page_copy
from torchkv.kernels import launch as kernel_launch
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.kernel_geometry import Geometry
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.layout.pieces import Piece, piece_layout
from torchkv.layout.plan_segment import StridedRuns
from torchkv.staging import cuda_pack
from torchkv.staging.cuda_pack import CudaPackLauncher

BF16 = {"num_layers": 3, "head_dim": 8, "dtype": torch.bfloat16}


# One-sided geometries


def offsets(rows: StridedRuns, *, sending: bool) -> list[int]:
    """Where each byte of a pair lies on one side, in packed order."""
    n0, s0, d0, n1, s1, d1, run = rows
    outer, inner = (s0, s1) if sending else (d0, d1)
    return [a * outer + b * inner + c for a in range(n0) for b in range(n1) for c in range(run)]


@given(
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    run=st.integers(1, 4),
    gaps=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    sending=st.booleans(),
)
def test_rows_that_are_contiguous_on_one_side_are_merged(
    counts: tuple[int, int], run: int, gaps: tuple[int, int], sending: bool
) -> None:
    """Byte order stays, whatever the strides of the other side."""
    n0, n1 = counts
    inner = run + gaps[1]
    outer = n1 * inner + gaps[0]
    rows = (
        StridedRuns(n0, outer, 777, n1, inner, 99, run) if sending else StridedRuns(n0, 777, outer, n1, 99, inner, run)
    )
    got = cuda_pack._rows(rows, sending=sending)
    assert offsets(got, sending=sending) == offsets(rows, sending=sending)
    assert offsets(got, sending=not sending) == [i for _ in range(got.per_pair) for i in range(got.run)]
    if gaps == (0, 0):
        assert got.per_pair == 1
    if gaps[1] and n1 > 1:
        assert got.run == run


def packers(writer: KVLayout, reader: KVLayout) -> tuple[PairPlan, CudaPackLauncher, CudaPackLauncher]:
    plan = compile_plan(0, {0: writer}, reader)
    rng = np.random.default_rng()
    made = (
        CudaPackLauncher(plan, Pages(Pool.random(layout, 4, rng), torch.device("cpu")).local, sending=sending)
        for layout, sending in ((writer, True), (reader, False))
    )
    return plan, *made


def shapes(packer: CudaPackLauncher) -> set[Geometry]:
    return set(packer._geometries)


def test_the_other_sides_layout_does_not_narrow_words_or_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that has two heads of four, adjacent in each token, reads whole pages; the receiver writes rows."""
    monkeypatch.setattr("tests.helpers.references.page_transfer.GAP", 16)
    _, sender, receiver = packers(gqa(1, 2, **BF16), gqa(**BF16))
    (shape,) = shapes(sender)
    assert (shape.rows.per_pair, shape.rows.run, shape.unit) == (1, 4 * 2 * 16, 16)
    (shape,) = shapes(receiver)
    assert (shape.rows.per_pair, shape.rows.run, shape.unit) == (4, 2 * 16, 16)


def test_an_odd_page_stride_narrows_words_on_its_own_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_plan(0, {0: gqa(**BF16)}, gqa(**BF16))
    units = []
    for gap in (16, 4):
        monkeypatch.setattr("tests.helpers.references.page_transfer.GAP", gap)
        pages = Pages(Pool.random(gqa(**BF16), 4, np.random.default_rng()), torch.device("cpu"))
        units += [shape.unit for shape in shapes(CudaPackLauncher(plan, pages.local, sending=gap == 16))]
    assert units == [16, 4]


def test_pages_that_kernels_cannot_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkv.layout.kernel_geometry.LIMIT", 3)
    with pytest.raises(TransportUnavailable, match="component 'k'"):
        packers(gqa(**BF16), gqa(**BF16))


# Launches


@pytest.mark.parametrize("checksum", [True, False])
def test_kernels_for_lists_what_is_launched(checksum: bool) -> None:
    _, sender, receiver = packers(gqa(1, 2, **BF16), gqa(**BF16))
    for packer, copy, summing in (
        (sender, page_copy.GATHER, checksum_kernel.WRITE),
        (receiver, page_copy.SCATTER, checksum_kernel.VERIFY),
    ):
        (shape,) = shapes(packer)
        found = [(kernel.kernel, kernel.constants) for kernel in packer.kernels_for(checksum=checksum)]
        copies = [(page_copy.copy, kernel_launch.kernel_params(shape, copy).constants)]
        sums = [(checksum_kernel.sum_pairs, checksum_launch._constants(shape, summing))]
        assert found == copies + sums[: int(checksum)]


def test_equal_layers_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are (position in the group, first job, jobs); even jobs are of K, odd ones of V."""
    monkeypatch.setattr("tests.helpers.references.page_transfer.GAP", 16)
    plan, sender, _ = packers(gqa(**BF16), gqa(**BF16))
    for layers, launches in (((0, 1, 2), [(0, 0, 6)]), ((1, 2), [(0, 2, 4)]), ((0, 2), [(0, 0, 2), (2, 4, 2)])):
        layout = piece_layout(plan, Piece(layers, 0, 4), limit_tokens=16, checksum=True)
        assert [(each.position, each.first_job, each.num_jobs) for each in sender._launches(layout)] == launches


def test_segments_of_different_geometry_are_separate_launches() -> None:
    plan, sender, _ = packers(gqa(**BF16, v_head_dim=3), gqa(**BF16, v_head_dim=3))
    layout = piece_layout(plan, Piece((1, 2), 0, 4), limit_tokens=16, checksum=True)
    assert [(each.section.segment.component, each.first_job, each.num_jobs) for each in sender._launches(layout)] == [
        ("k", 1, 2),
        ("v", 4, 2),
    ]


def test_layers_of_different_alignment_are_separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the wider alignment would be misaligned in the other layer."""
    monkeypatch.setattr("tests.helpers.references.page_transfer.GAP", 16)
    plan = compile_plan(0, {0: gqa(**BF16)}, gqa(**BF16))
    local = Pages(Pool.random(gqa(**BF16), 4, np.random.default_rng()), torch.device("cpu")).local
    places = {**local.placements, ("k", 1): replace(local.placements["k", 1], offset=8)}
    sender = CudaPackLauncher(plan, replace(local, placements=places), sending=True)
    layout = piece_layout(plan, Piece((0, 1, 2), 0, 4), limit_tokens=16, checksum=True)
    launches = [(one.position, one.first_job, one.num_jobs, one.geometry.unit) for one in sender._launches(layout)]
    assert launches == [(0, 0, 2, 16), (2, 2, 1, 8), (3, 3, 3, 16)]


# Mismatches

PAIRS: dict[str, tuple[dict[int, KVLayout], KVLayout]] = {
    "equal": ({0: gqa(**BF16)}, gqa(**BF16)),
    "striped": ({i: gqa(i, 8, num_kv_heads=2, **BF16) for i in range(8)}, gqa(num_kv_heads=2, **BF16)),
    "striped, unlike pages": (
        {i: gqa(i, 4, num_kv_heads=2, page_size=2, **BF16) for i in range(4)},
        gqa(num_kv_heads=2, page_size=8, **BF16),
    ),
    "pages of 8 to 2": ({0: gqa(page_size=8, **BF16)}, gqa(page_size=2, **BF16)),
}


@pytest.mark.parametrize("family", PAIRS)
def test_every_mismatch_code_names_its_page(family: str) -> None:
    """Of two mismatches the first is named: by layer, then component, then page."""
    writers, reader = PAIRS[family]
    pages = Pages(Pool.random(reader, 4, np.random.default_rng()), torch.device("cpu"))
    limit = 96
    for rank in writers:
        plan = compile_plan(rank, writers, reader)
        receiver = CudaPackLauncher(plan, pages.local, sending=False)
        for piece in (Piece((0, 1, 2), 0, limit // plan.src_page_size), Piece((1, 2), 3, 6)):
            slots, number, last = cuda_pack.mismatch_buffer(), 0, None
            assert receiver.first_mismatch(slots, piece, limit_tokens=limit) is None
            for layer in (0, 1, 2):
                for segment in plan.segments:
                    pairs = page_pairs(
                        segment,
                        num_src_pages=piece.num_pages,
                        start=piece.start,
                        limit_tokens=limit,
                        src_page_size=plan.src_page_size,
                        dst_page_size=plan.dst_page_size,
                    )
                    for i, position in enumerate(pairs.dst_index.tolist()):
                        slots[:2] = torch.tensor([0, (number << 31 | i) + 1])
                        name = receiver.first_mismatch(slots, piece, limit_tokens=limit)
                        assert name == (layer, segment.component, position)
                        if last is not None:
                            slots[0], slots[1] = int(slots[1]), last[0]
                            assert receiver.first_mismatch(slots, piece, limit_tokens=limit) == last[1]
                        last = (number << 31 | i) + 1, name
                    number += 1
            assert last is not None
