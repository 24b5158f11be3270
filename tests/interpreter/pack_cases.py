"""Runs what packs pages into stages and out of them, in Triton's interpreter: in a process that test_pack.py starts."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.packing import locate_byte, stage_for, transfers
from tests.helpers.references import page_transfer
from tests.helpers.references.checksum import checksum_reference
from tests.helpers.references.page_copy import gather_reference, scatter_reference
from tests.helpers.references.page_transfer import differences, gqa
from tests.helpers.tiles import use_tiles
from tests.interpreter.page_copy_cases import BF16, CANARY, FAMILIES, Case, aligned, cases, mla
from torchkv.errors import ProtocolError
from torchkv.kernels import checksum as checksum_kernel
from torchkv.kernels import checksum_launch, copies
from torchkv.kernels.checksum_launch import SumAddresses, SumTile
from torchkv.kernels.launch import Tile
from torchkv.layout import kernel_geometry
from torchkv.layout.kernel_geometry import Geometry, PageAddressing
from torchkv.layout.layout import KVLayout
from torchkv.layout.pieces import Piece, piece_layout
from torchkv.layout.plan_segment import StridedRuns, Stripe
from torchkv.staging import cuda_pack
from torchkv.staging.cuda_pack import mismatch_buffer

assert os.environ.get("TRITON_INTERPRET") == "1", "not in the interpreter: run test_pack.py, which starts it"

# A tile costs the interpreter 20 ms, whatever its size. Small ones: so that there are several, and several columns.
SMALL_SUMS, LARGE_SUMS = SumTile(128, 32, 1), SumTile(1024, 64, 4)


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, copy=Tile(1024, 4))
    monkeypatch.setattr(checksum_launch, "TILE", LARGE_SUMS)


CUT = ("equal", "heads, many to few", "pages of 8 to 2", "pages of 2 to 8, HND")  # into pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writers, reader, gap = FAMILIES[family]
    made, expected = transfers(writers, reader, gap, monkeypatch)
    for transfer in made:
        for piece, layout in transfer.pieces(2 if family in CUT else 1):
            memory = stage_for(layout.nbytes + 256 + CANARY)
            want, stage = memory.clone(), memory[256:-CANARY]
            want[256:-CANARY] = transfer.staged(piece, layout, stage)
            transfer.fill(piece, layout, stage)
            assert torch.equal(memory, want), f"{int((memory != want).sum())} wrong bytes in the stage"
            transfer.empty(piece, layout, stage)
            assert transfer.first_mismatch(piece) is None
            assert copies.first_error(transfer.errors) is None
    assert differences(made[0].target.now(), expected) == 0


def test_a_short_piece_after_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), expected = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)
    (long, long_layout), (short, short_layout) = transfer.everything(), list(transfer.pieces(9))[-1]
    assert short_layout.nbytes < long_layout.nbytes
    stage = stage_for(long_layout.nbytes)
    transfer.fill(long, long_layout, stage)
    want = transfer.staged(short, short_layout, stage)
    transfer.fill(short, short_layout, stage)
    assert torch.equal(stage, want)
    before = transfer.target.now().copy()
    transfer.empty(short, short_layout, stage)
    assert transfer.first_mismatch(short) is None
    assert 0 < differences(transfer.target.now(), before) < differences(before, expected)


# Mismatches


TALL = {"num_layers": 3, "head_dim": 8, "dtype": torch.bfloat16}

LOW = {**TALL, "num_layers": 2}

MISMATCHES: dict[str, tuple[dict[int, KVLayout], KVLayout]] = {
    "heads": ({0: gqa(1, 2, **LOW), 1: gqa(0, 2, **LOW)}, gqa(**LOW)),
    "striped": ({i: gqa(i, 4, num_kv_heads=2, **LOW) for i in range(4)}, gqa(num_kv_heads=2, **LOW)),
    "pages of 8 to 2": ({0: gqa(page_size=8, **LOW)}, gqa(page_size=2, **LOW)),
    "pages of 2 to 8": ({0: gqa(page_size=2, **LOW)}, gqa(page_size=8, **LOW)),
    "MLA, striped": ({0: mla(num_layers=2), 1: mla(num_layers=2)}, mla(num_layers=2)),
}


@pytest.mark.parametrize("family", MISMATCHES)
def test_the_first_mismatch_is_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by layer, then component, then page, for any number of blocks and any position of the bit in its pair."""
    monkeypatch.setattr(checksum_launch, "TILE", SMALL_SUMS)
    writers, reader = MISMATCHES[family]
    transfer = transfers(writers, reader, 16, monkeypatch)[0][-1]
    piece, layout = transfer.everything()
    stage = stage_for(layout.nbytes)
    transfer.fill(piece, layout, stage)
    rng = np.random.default_rng()
    for transfer.blocks, flips in ((1, 2), (3, 3)):
        spoilt = stage_for(layout.nbytes)
        spoilt.copy_(stage)
        flipped = []
        for byte in rng.choice(layout.payload, flips, replace=False):
            offset, order, name = locate_byte(transfer, piece, layout, int(byte))
            spoilt[offset] ^= 1 << int(rng.integers(8))
            flipped.append((order, name))
        transfer.mismatches.zero_()
        transfer.empty(piece, layout, spoilt)
        assert transfer.first_mismatch(piece) == min(flipped)[1], (flipped, transfer.blocks)
    transfer.mismatches.zero_()
    transfer.empty(piece, layout, stage)
    assert transfer.first_mismatch(piece) is None
    assert copies.first_error(transfer.errors) is None


def test_a_wrong_sum_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)[0][0]
    piece, layout = transfer.everything()
    stage = stage_for(layout.nbytes)
    transfer.fill(piece, layout, stage)
    stage[layout.sections[1].sums + 8 + 7] ^= 0x80
    transfer.empty(piece, layout, stage)
    assert transfer.first_mismatch(piece) == (0, "v", 1)


def test_a_stage_that_nobody_wrote_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)[0][0]
    piece, layout = transfer.everything()
    transfer.empty(piece, layout, stage_for(layout.nbytes).zero_())
    assert transfer.first_mismatch(piece) == (0, "k", 0)


def test_a_mismatch_stays_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later launches with the same buffer keep it, or replace it by one that comes earlier in order."""
    transfer = transfers({0: gqa(**TALL)}, gqa(**TALL), 16, monkeypatch)[0][0]
    piece, layout = transfer.everything()
    stage = stage_for(layout.nbytes)
    transfer.fill(piece, layout, stage)
    transfer.blocks = 1
    for layer, first in ((1, 1), (2, 1), (0, 0)):
        spoilt = stage_for(layout.nbytes)
        spoilt.copy_(stage)
        spoilt[layout.sections[1].offset + layer * layout.sections[1].layer_stride] ^= 1
        transfer.empty(piece, layout, spoilt)
        assert transfer.first_mismatch(piece) == (first, "v", 0)


# Bad page ids


BAD = [6, -1, 1 << 40, -(1 << 63)]  # of six pages


def clipped(page: int) -> int:
    return min(max(page, -(1 << 31)), (1 << 31) - 1)


@pytest.mark.parametrize("page", BAD)
def test_a_bad_source_page_is_left_out_and_named(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch, num_tokens=16)
    piece, layout = transfer.everything()
    stage = stage_for(layout.nbytes)
    before, want = stage.clone(), transfer.staged(piece, layout, stage)
    transfer.src_pages[1] = page
    args = transfer.args(piece, layout, transfer.ids(piece), stage, blocks=2)
    transfer.sender.gather(args)
    assert copies.first_error(transfer.errors) == ("source", 1, clipped(page))
    transfer.errors.zero_()
    transfer.sender.write_sums(args)
    assert copies.first_error(transfer.errors) == ("source", 1, clipped(page))
    for section in layout.sections:
        width = section.segment.pair_nbytes
        want[section.offset + width :][:width] = before[section.offset + width :][:width]
        want[section.sums + 8 :][:8] = stage[section.sums + 8 :][:8]  # the sum of a missing page may be anything
    assert torch.equal(stage, want)


@pytest.mark.parametrize("page", BAD)
def test_a_bad_destination_page_is_left_out_and_named(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), expected = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch, num_tokens=16)
    piece, layout = transfer.everything()
    stage = stage_for(layout.nbytes)
    transfer.fill(piece, layout, stage)
    for key, tensor in expected.tensors.items():
        tensor[transfer.dst_pages[2]] = transfer.target.now().tensors[key][transfer.dst_pages[2]]
    transfer.dst_pages[2] = page
    transfer.empty(piece, layout, stage)
    assert copies.first_error(transfer.errors) == ("destination", 2, clipped(page))
    assert transfer.first_mismatch(piece) is None
    assert differences(transfer.target.now(), expected) == 0


@pytest.mark.parametrize("operation", ["base", "page_stride", "token order"])
def test_a_wrong_geometry_is_noticed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, of the bytes and of the checksums, which the sender computes from the pages that it gathers."""
    monkeypatch.setattr(
        cuda_pack, "geometry", lambda *given, **more: sabotage(operation, kernel_geometry.geometry(*given, **more))
    )
    made, expected = transfers({0: gqa(**BF16)}, gqa(1, 2, **BF16), 16, monkeypatch)
    piece, layout = made[0].everything()
    stage = stage_for(layout.nbytes)
    want = made[0].staged(piece, layout, stage)
    made[0].fill(piece, layout, stage)
    assert not torch.equal(stage, want)
    made[0].empty(piece, layout, stage)
    assert differences(made[0].target.now(), expected) > 0


def sabotage(operation: str, geometry: Geometry) -> Geometry:
    if operation == "token order":
        return replace(geometry, rows=geometry.rows._replace(s1=0, d1=0))
    src = replace(geometry.src, **{operation: max(0, getattr(geometry.src, operation) - 16)})
    dst = replace(geometry.dst, **{operation: max(0, getattr(geometry.dst, operation) - 16)})
    return replace(geometry, src=src, dst=dst)


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**BF16)}, gqa(**BF16), 16, monkeypatch)
    piece, layout = transfer.everything()
    stage, ids, granted = stage_for(layout.nbytes), transfer.ids(piece), torch.tensor(transfer.dst_pages)
    before, target = stage.clone(), transfer.target.now().copy()
    args = partial(transfer.args, piece, layout, blocks=2)
    odd = stage_for(layout.nbytes + 1)[1:]
    for wrong_ids, wrong_stage, more in (
        (-1, stage, {}),
        (None, stage[:-1], {}),
        (None, stage.to(torch.int16), {}),
        (None, odd, {}),
        (None, stage, {"blocks": 0}),
    ):
        mine, theirs = ids[:wrong_ids], granted[:wrong_ids]
        with pytest.raises(ProtocolError):
            transfer.sender.write_sums(args(mine, wrong_stage, **more))
        with pytest.raises(ProtocolError):
            transfer.receiver.verify_sums(args(theirs, wrong_stage, **more), mismatches=transfer.mismatches)
        if wrong_stage.numel() >= stage.numel():  # a copy needs no room for sums
            with pytest.raises(ProtocolError):
                transfer.sender.gather(args(mine, wrong_stage, **more))
            with pytest.raises(ProtocolError):
                transfer.receiver.scatter(args(theirs, wrong_stage, **more))
    with pytest.raises(ProtocolError, match="int64"):
        transfer.sender.gather(args(ids.int(), stage))
    with pytest.raises(ProtocolError, match="mismatches"):
        transfer.receiver.verify_sums(args(granted, stage), mismatches=transfer.mismatches[:0])
    assert torch.equal(stage, before)
    assert differences(transfer.target.now(), target) == 0


# Layers that one side lacks, and layers with different placements


def test_layers_of_unlike_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with different alignments in the middle of a segment: several launches, the same bytes."""
    monkeypatch.setattr(cuda_pack, "geometry", lambda *given, **more: uneven(kernel_geometry.geometry(*given, **more)))
    made, expected = transfers({0: gqa(**TALL)}, gqa(**TALL), 16, monkeypatch)
    for piece, layout in made[0].pieces(2):
        stage = stage_for(layout.nbytes)
        want = made[0].staged(piece, layout, stage)
        made[0].fill(piece, layout, stage)
        assert torch.equal(stage, want)
        made[0].empty(piece, layout, stage)
        assert made[0].first_mismatch(piece) is None
    assert differences(made[0].target.now(), expected) == 0


CALLS = iter(range(1 << 30))


def uneven(geometry: Geometry) -> Geometry:
    return replace(geometry, alignment=8) if next(CALLS) % 3 == 1 else geometry


def test_some_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,), _ = transfers({0: gqa(**TALL)}, gqa(**TALL), 16, monkeypatch)
    piece = Piece((0, 2), 1, 1)
    layout = piece_layout(transfer.plan, piece, limit_tokens=transfer.limit, checksum=True)
    stage, before = stage_for(layout.nbytes), transfer.target.now().copy()
    want = transfer.staged(piece, layout, stage)
    transfer.fill(piece, layout, stage)
    assert torch.equal(stage, want)
    transfer.empty(piece, layout, stage)
    assert transfer.first_mismatch(piece) is None
    assert np.array_equal(transfer.target.now().tensors["k", 1], before.tensors["k", 1])
    page, width = transfer.dst_pages[1], -page_transfer.GAP
    for key in (("k", 0), ("v", 2)):
        sent = transfer.source.tensors[key][transfer.src_pages[1], :width]
        assert np.array_equal(transfer.target.now().tensors[key][page, :width], sent)


# The checksum kernel by itself, with any strides

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def launch(
    mode: int, case: Case, jobs: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor, blocks: int
) -> tuple[kernel_geometry.BadPage | None, torch.Tensor]:
    errors, mismatches = copies.error_words(), mismatch_buffer()
    ranks = case.geometry.ordinals(num_src_pages=len(case.src_ids), start=case.start, limit_tokens=case.limit)
    where = SumAddresses(
        jobs.data_ptr(), ids.data_ptr(), sums.data_ptr(), mismatches=mismatches.data_ptr(), errors=errors.data_ptr()
    )
    start = case.start if mode == checksum_kernel.WRITE else 0
    checksum_launch.launch_sums(mode, case.geometry, where, num_jobs=len(jobs), ranks=ranks, start=start, blocks=blocks)
    return copies.first_error(errors), mismatches


@FEW
@given(case=cases(), blocks=st.integers(1, 5))
def test_sums_are_the_reference(case: Case, blocks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_launch, "TILE", SMALL_SUMS)
        pools, src = case.pools(), torch.tensor(case.src_ids)
        where = {"start": case.start, "limit_tokens": case.limit}
        pairs = len(case.geometry.ordinals(num_src_pages=len(src), **where))
        packed = torch.zeros(case.num_jobs * pairs * case.geometry.pair_nbytes, dtype=torch.uint8)
        bad = gather_reference(pools.sources, src, packed, case.geometry, **where)
        want = [checksum_reference(row.numpy()) for row in packed.view(-1, case.geometry.pair_nbytes)]
        memory = torch.randint(-(1 << 62), 1 << 62, (len(want) + 2,))
        canaries = memory[[0, -1]]
        error, mismatches = launch(checksum_kernel.WRITE, case, pools.addresses, src, memory[1:], blocks)
        assert memory[1:-1].tolist() == want  # both take a bad page for zeros
        assert torch.equal(memory[[0, -1]], canaries)
        assert error in (bad or {None})
        assert not mismatches.any()


@FEW
@given(case=cases(), blocks=st.integers(1, 5), data=st.data())
def test_sums_are_compared(case: Case, blocks: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_launch, "TILE", SMALL_SUMS)
        pools, dst = case.pools(), torch.tensor(case.dst_ids)
        where = {"start": case.start, "limit_tokens": case.limit}
        pairs = len(case.geometry.ordinals(num_src_pages=len(case.src_ids), **where))
        stage = aligned(case.num_jobs * pairs * case.geometry.pair_nbytes)
        bad = scatter_reference(stage, pools.targets, dst, case.geometry, num_src_pages=len(case.src_ids), **where)
        sums = torch.tensor(
            [checksum_reference(row.numpy()) for row in stage.view(-1, case.geometry.pair_nbytes)], dtype=torch.int64
        )
        jobs = pools.addresses
        jobs[:, 0] = torch.arange(case.num_jobs).flip(0)  # reported in reverse order of jobs
        error, mismatches = launch(checksum_kernel.VERIFY, case, jobs, dst, sums, blocks)
        assert error in (bad or {None})
        assert not mismatches.any()
        if bad or not len(sums):
            return
        wrong = data.draw(st.lists(st.integers(0, len(sums) - 1), min_size=1, unique=True))
        for i in wrong:
            sums[i] ^= 1 << data.draw(st.integers(0, 62))
        _, mismatches = launch(checksum_kernel.VERIFY, case, jobs, dst, sums, blocks)
        codes = [((case.num_jobs - 1 - i // pairs) << 31 | i % pairs) + 1 for i in wrong]
        assert int(mismatches[mismatches != 0].min()) == min(codes)
        assert not mismatches[blocks:].any()


def test_pages_far_apart() -> None:
    """Pages 2 GiB apart: the pool is one page of real memory, reached through a large page id."""
    run, stride, page = 64, (1 << 31) - 16, 5
    far = PageAddressing(page_stride=stride, base=0, token_stride=run, per_page=1, num_pages=page + 1)
    rows = StridedRuns(1, 0, 0, 1, 0, 0, run)
    geometry = Geometry(stripe=Stripe(1, 1), rows=rows, src=far, dst=far, alignment=16)
    source, sums = aligned(run), torch.zeros(1, dtype=torch.int64)
    case = Case(geometry, [page], [page], 0, 1, 1)
    jobs = torch.tensor([[source.data_ptr() - page * stride, 0]])
    assert launch(checksum_kernel.WRITE, case, jobs, torch.tensor([page]), sums, 1)[0] is None
    assert sums.tolist() == [checksum_reference(source.numpy())]
