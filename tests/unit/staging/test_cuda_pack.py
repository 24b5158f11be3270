"""Packing pieces on GPUs. What runs the kernels is in pack_cases.py; here is what needs neither GPU nor interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton: pip install triton (a CUDA build of PyTorch brings it)")

from oracle import gqa
from pack_kit import Pages, Pool
from triton_kit import run_in_interpreter

from torchkv import devicepack, kernellaunch, pagecopy, pagesum, sumlaunch
from torchkv.devicepack import PagePacker
from torchkv.errors import TransportUnavailable
from torchkv.layout import KVLayout
from torchkv.pieces import Piece, piece_layout
from torchkv.plan import PairPlan, compile_plan, page_pairs
from torchkv.slab import Rows
from torchkv.slabgeometry import Geometry
from torchkv.staging import SLOTS

CASES = Path(__file__).with_name("pack_cases.py")
BF16 = {"num_layers": 3, "head_dim": 8, "dtype": torch.bfloat16}


@pytest.mark.timeout(180)
def test_in_the_interpreter() -> None:
    run_in_interpreter(CASES, timeout=170)


# One-sided geometries


def offsets(rows: Rows, *, sending: bool) -> list[int]:
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
def test_rows_that_touch_on_one_side_are_one(
    counts: tuple[int, int], run: int, gaps: tuple[int, int], sending: bool
) -> None:
    """In the same order, byte for byte, whatever the other side has."""
    n0, n1 = counts
    inner = run + gaps[1]
    outer = n1 * inner + gaps[0]
    rows = Rows(n0, outer, 777, n1, inner, 99, run) if sending else Rows(n0, 777, outer, n1, 99, inner, run)
    got = devicepack._rows(rows, sending=sending)
    assert offsets(got, sending=sending) == offsets(rows, sending=sending)
    assert offsets(got, sending=not sending) == [i for _ in range(got.per_pair) for i in range(got.run)]
    if gaps == (0, 0):
        assert got.per_pair == 1
    if gaps[1] and n1 > 1:
        assert got.run == run


def packers(writer: KVLayout, reader: KVLayout) -> tuple[PairPlan, PagePacker, PagePacker]:
    plan = compile_plan(0, {0: writer}, reader)
    rng = np.random.default_rng()
    made = (
        PagePacker(plan, Pages(Pool.random(layout, 4, rng), torch.device("cpu")).local, sending=sending)
        for layout, sending in ((writer, True), (reader, False))
    )
    return plan, *made


def shapes(packer: PagePacker) -> set[Geometry]:
    return set(packer._geometries)


def test_the_other_side_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that has two heads of four, adjacent in each token, reads whole pages; the receiver writes rows."""
    monkeypatch.setattr("oracle.GAP", 16)
    _, sender, receiver = packers(gqa(1, 2, **BF16), gqa(**BF16))
    (shape,) = shapes(sender)
    assert (shape.rows.per_pair, shape.rows.run, shape.unit) == (1, 4 * 2 * 16, 16)
    (shape,) = shapes(receiver)
    assert (shape.rows.per_pair, shape.rows.run, shape.unit) == (4, 2 * 16, 16)


def test_an_odd_stride_is_one_sides_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_plan(0, {0: gqa(**BF16)}, gqa(**BF16))
    units = []
    for gap in (16, 4):
        monkeypatch.setattr("oracle.GAP", gap)
        pages = Pages(Pool.random(gqa(**BF16), 4, np.random.default_rng()), torch.device("cpu"))
        units += [shape.unit for shape in shapes(PagePacker(plan, pages.local, sending=gap == 16))]
    assert units == [16, 4]


def test_pages_that_kernels_cannot_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkv.slabgeometry.LIMIT", 3)
    with pytest.raises(TransportUnavailable, match="component 'k'"):
        packers(gqa(**BF16), gqa(**BF16))


# Launches


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_variants_are_what_is_launched(checksum: bool, stream: bool) -> None:
    _, sender, receiver = packers(gqa(1, 2, **BF16), gqa(**BF16))
    for packer, copy, summing in (
        (sender, pagecopy.GATHER, pagesum.WRITE),
        (receiver, pagecopy.SCATTER, pagesum.VERIFY),
    ):
        (shape,) = shapes(packer)
        found = [(variant.kernel, variant.constants) for variant in packer.variants(checksum=checksum, stream=stream)]
        copies = [
            (pagecopy.copy, kernellaunch._constants(copy, kernellaunch.shape(shape), slots)) for slots in (0, SLOTS)
        ]
        sums = [(pagesum.sum_pairs, sumlaunch._constants(shape, summing))]
        assert found == copies[: 1 + stream] + sums[: int(checksum)]


def test_equal_layers_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are (position in the group, first job, jobs); even jobs are of K, odd ones of V."""
    monkeypatch.setattr("oracle.GAP", 16)
    plan, sender, _ = packers(gqa(**BF16), gqa(**BF16))
    for layers, runs in (((0, 1, 2), [(0, 0, 6)]), ((1, 2), [(0, 2, 4)]), ((0, 2), [(0, 0, 2), (2, 4, 2)])):
        layout = piece_layout(plan, Piece(layers, 0, 4), limit_tokens=16, checksum=True)
        assert [(run.position, run.first_job, run.num_jobs) for run in sender._runs(layout)] == runs


def test_slabs_that_are_unlike_are_launches_of_their_own() -> None:
    plan, sender, _ = packers(gqa(**BF16, v_head_dim=3), gqa(**BF16, v_head_dim=3))
    layout = piece_layout(plan, Piece((1, 2), 0, 4), limit_tokens=16, checksum=True)
    assert [(run.segment.slab.component, run.first_job, run.num_jobs) for run in sender._runs(layout)] == [
        ("k", 1, 2),
        ("v", 4, 2),
    ]


def test_layers_that_are_aligned_unlike_are_not_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else words would be read across what one of them is aligned to."""
    monkeypatch.setattr("oracle.GAP", 16)
    plan = compile_plan(0, {0: gqa(**BF16)}, gqa(**BF16))
    local = Pages(Pool.random(gqa(**BF16), 4, np.random.default_rng()), torch.device("cpu")).local
    places = {**local.placements, ("k", 1): replace(local.placements["k", 1], offset=8)}
    sender = PagePacker(plan, replace(local, placements=places), sending=True)
    layout = piece_layout(plan, Piece((0, 1, 2), 0, 4), limit_tokens=16, checksum=True)
    runs = [(run.position, run.first_job, run.num_jobs, run.geometry.unit) for run in sender._runs(layout)]
    assert runs == [(0, 0, 2, 16), (2, 2, 1, 8), (3, 3, 3, 16)]


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
def test_every_code_names_its_page(family: str) -> None:
    """Of two, the earlier: by layer, then component, then page."""
    writers, reader = PAIRS[family]
    pages = Pages(Pool.random(reader, 4, np.random.default_rng()), torch.device("cpu"))
    limit = 96
    for rank in writers:
        plan = compile_plan(rank, writers, reader)
        receiver = PagePacker(plan, pages.local, sending=False)
        for piece in (Piece((0, 1, 2), 0, limit // plan.src_page_size), Piece((1, 2), 3, 6)):
            slots, number, last = devicepack.mismatch_slots(), 0, None
            assert receiver.first_mismatch(slots, piece, limit_tokens=limit) is None
            for layer in (0, 1, 2):
                for slab in plan.slabs:
                    pairs = page_pairs(
                        slab,
                        num_src_pages=piece.num_pages,
                        start=piece.start,
                        limit_tokens=limit,
                        src_page_size=plan.src_page_size,
                        dst_page_size=plan.dst_page_size,
                    )
                    for i, position in enumerate(pairs.dst_index.tolist()):
                        slots[:2] = torch.tensor([0, (number << 31 | i) + 1])
                        name = receiver.first_mismatch(slots, piece, limit_tokens=limit)
                        assert name == (layer, slab.component, position)
                        if last is not None:
                            slots[0], slots[1] = int(slots[1]), last[0]
                            assert receiver.first_mismatch(slots, piece, limit_tokens=limit) == last[1]
                        last = (number << 31 | i) + 1, name
                    number += 1
            assert last is not None
