"""Gather and scatter through a stage of random bytes, compared byte for byte with the slow reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.layouts import group, instances, mla
from tests.helpers.references.checksum import checksum_reference
from tests.helpers.references.page_copy import gather_reference
from tests.helpers.references.page_transfer import Pool, differences, gqa, reference
from torchkv.arrays import Int64Array
from torchkv.host.copy_loops import STEP_BYTES
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.kernel_geometry import geometry
from torchkv.layout.layout import Component, KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.layout.pieces import Cutter, Mismatch, Piece, PieceLayout, piece_layout
from torchkv.staging import host_packer

Bytes = npt.NDArray[np.uint8]
MARGIN = 512  # canary bytes on both sides of a stage


class Stage:
    """Random bytes at a multiple of 256, between canaries."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.frombuffer(os.urandom(nbytes + 2 * MARGIN + 256), np.uint8).copy()
        self.at = MARGIN + -(self.memory.ctypes.data + MARGIN) % 256
        self.bytes = self.memory[self.at : self.at + nbytes]


@dataclass
class Side:
    """One rank's pool and its pages in one transfer."""

    pool: Pool
    pages: Int64Array

    def arguments(self, stage: Stage, limit_tokens: int, pages: slice = slice(None)) -> dict[str, Any]:
        return {
            "pages": self.pages[pages],
            "ptr": lambda component, layer: self.pool.tensors[component, layer].ctypes.data,
            "page_stride": lambda component, layer: self.pool.tensors[component, layer].shape[1],
            "stage": int(stage.bytes.ctypes.data),
            "limit_tokens": limit_tokens,
        }


def pick(layout: KVLayout, num_tokens: int, rng: np.random.Generator) -> Side:
    need = -(-num_tokens // layout.page_size)
    return Side(Pool.random(layout, need + 2, rng), rng.permutation(need + 2)[:need].astype(np.int64))


def sent_by(piece: Piece) -> slice:
    return slice(piece.start, piece.start + piece.num_pages)


def result_of(steps: Generator[int, None, Mismatch | None]) -> tuple[Mismatch | None, int]:
    """What the steps return, and the bytes they yield."""
    nbytes = 0
    while True:
        try:
            nbytes += next(steps)
        except StopIteration as end:
            return end.value, nbytes


def gather(layout: PieceLayout, piece: Piece, plan: PairPlan, *, stage: int, **given: Any) -> Iterator[int]:
    return host_packer.copy(layout, host_packer.Side(True, piece, plan, **given), stage)


def write_sums(layout: PieceLayout, piece: Piece, plan: PairPlan, *, stage: int, **given: Any) -> Iterator[int]:
    return host_packer.write_sums(layout, host_packer.Side(True, piece, plan, **given), stage)


def scatter(layout: PieceLayout, piece: Piece, plan: PairPlan, *, stage: int, **given: Any) -> Iterator[int]:
    return host_packer.copy(layout, host_packer.Side(False, piece, plan, **given), stage)


def find_bad(
    layout: PieceLayout, piece: Piece, plan: PairPlan, *, stage: int, **given: Any
) -> Generator[int, None, Mismatch | None]:
    return host_packer.find_bad(layout, host_packer.Side(False, piece, plan, **given), stage)


class Transfer:
    """One writer's part of a transfer, piece by piece. The sender's and the receiver's stage are different memory."""

    def __init__(self, plan: PairPlan, source: Side, target: Side, *, checksum: bool = True) -> None:
        self.plan, self.source, self.target = plan, source, target
        self.limit = len(target.pages) * plan.dst_page_size
        self.checksum = checksum
        self.cutter = Cutter(plan, plan.layers, 0, len(source.pages), limit_tokens=self.limit, checksum=checksum)

    def layout(self, piece: Piece) -> PieceLayout:
        return piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=self.checksum)

    def gather(self, piece: Piece, stage: Stage) -> PieceLayout:
        layout = self.layout(piece)
        given = self.source.arguments(stage, self.limit, sent_by(piece))
        assert sum(gather(layout, piece, self.plan, **given)) == layout.payload
        if self.checksum:
            assert sum(write_sums(layout, piece, self.plan, **given)) == layout.payload
        return layout

    def scatter(self, piece: Piece, stage: Stage) -> None:
        layout = self.layout(piece)
        given = self.target.arguments(stage, self.limit)
        assert sum(scatter(layout, piece, self.plan, **given)) == layout.payload

    def find_bad(self, piece: Piece, stage: Stage) -> Mismatch | None:
        layout = self.layout(piece)
        bad, nbytes = result_of(find_bad(layout, piece, self.plan, **self.target.arguments(stage, self.limit)))
        assert bad is not None or nbytes == layout.payload
        return bad

    def run(self, sizes: Callable[[int], int]) -> None:
        """Transfers everything, each piece through a new stage, in which only what the layout names may be written."""
        while not self.cutter.done:
            max_nbytes = sizes(self.cutter.least)
            piece = self.cutter.cut(max_nbytes)
            ours, theirs = Stage(max_nbytes), Stage(max_nbytes)
            expected = self.expected(piece, ours)
            self.gather(piece, ours)
            np.testing.assert_array_equal(ours.memory, expected)
            theirs.bytes[:] = ours.bytes
            before = theirs.memory.copy()
            self.scatter(piece, theirs)
            if self.checksum:
                assert self.find_bad(piece, theirs) is None
            np.testing.assert_array_equal(theirs.memory, before)

    def expected(self, piece: Piece, stage: Stage) -> Bytes:
        """What the stage should be after the gather, by the slow reference that GPU kernels are tested with too."""
        memory = stage.memory.copy()
        inside = memory[stage.at : stage.at + len(stage.bytes)]
        ids = torch.from_numpy(self.source.pages[sent_by(piece)])
        for section in self.layout(piece).sections:
            segment = section.segment
            src = [self.source.pool.tensors[segment.component, layer] for layer in section.layers]
            shape = geometry(
                segment,
                src_page_stride=src[0].shape[1],
                dst_page_stride=1,
                src_page_size=self.plan.src_page_size,
                dst_page_size=self.plan.dst_page_size,
                num_src_pages=len(src[0]),
                num_dst_pages=1,
                addresses=[],
            )
            packed = torch.zeros(section.nbytes, dtype=torch.uint8)
            sources = [torch.from_numpy(tensor.reshape(-1)) for tensor in src]
            where = {"start": piece.start, "limit_tokens": self.limit}
            assert gather_reference(sources, ids, packed, shape, **where) == set()
            for number, rows in enumerate(packed.numpy().reshape(len(section.layers), -1)):
                at = section.offset + number * section.layer_stride
                inside[at : at + len(rows)] = rows
                if self.checksum:
                    pairs = rows.reshape(-1, segment.pair_nbytes)
                    sums = np.array([checksum_reference(pair) for pair in pairs], np.int64).view(np.uint8)
                    at = section.sums + number * section.sums_stride
                    inside[at : at + len(sums)] = sums
        return memory


def check(
    writers: Mapping[int, KVLayout],
    reader: KVLayout,
    *,
    num_tokens: int = 19,
    checksum: bool = True,
    sizes: Callable[[int], int] | None = None,
    seed: int | None = None,
) -> None:
    """All writers send ``num_tokens`` (rounded up to pages); pools have odd strides and canaries behind each page."""
    rng = np.random.default_rng(seed)
    sources = {rank: pick(layout, num_tokens, rng) for rank, layout in writers.items()}
    target = pick(reader, num_tokens, rng)
    untouched = {rank: side.pool.copy() for rank, side in sources.items()}
    expected = reference(
        untouched,
        {rank: side.pages.tolist() for rank, side in sources.items()},
        target.pool,
        target.pages.tolist(),
    )
    assert differences(target.pool, expected) > 0, "the transfer must have something to do"
    for rank, side in sources.items():
        transfer = Transfer(compile_plan(rank, writers, reader), side, target, checksum=checksum)
        # From a page of one layer up to many layers in a stage.
        transfer.run(sizes or (lambda least: least * int(rng.choice([1, 2, 5, 20, 80]))))
        assert differences(side.pool, untouched[rank]) == 0
    assert differences(target.pool, expected) == 0


# Every class of layout pair


@pytest.mark.parametrize(("senders", "readers"), [(1, 1), (1, 4), (4, 1), (4, 2), (2, 8), (8, 2)])
@pytest.mark.parametrize("orders", ["NN", "NH", "HN", "HH"])
def test_tensor_parallel_sizes_and_orders(senders: int, readers: int, orders: str) -> None:
    """With 8 ranks for 4 heads, heads are replicated and their pages striped over the holders."""
    order = {"N": "NHD", "H": "HND"}
    rank = int(np.random.default_rng().integers(readers))
    check(group(gqa, senders, order=order[orders[0]]), gqa(rank, readers, order=order[orders[1]]))


@pytest.mark.parametrize("sizes", [(16, 4), (4, 16), (1, 16), (16, 1), (1, 1)])
@pytest.mark.parametrize("orders", ["NN", "NH", "HN", "HH"])
def test_page_sizes(sizes: tuple[int, int], orders: str) -> None:
    """19 tokens end within the last page of either side."""
    order = {"N": "NHD", "H": "HND"}
    writers = group(gqa, 2, num_layers=1, page_size=sizes[0], order=order[orders[0]])
    check(writers, gqa(1, 4, num_layers=1, page_size=sizes[1], order=order[orders[1]]))


def test_latents_striped_over_replicas() -> None:
    check({rank: mla(tp_rank=rank, tp_size=4) for rank in range(4)}, mla(page_size=16), num_tokens=90)
    check({rank: mla(tp_rank=rank, tp_size=4) for rank in range(4)}, mla(), num_tokens=90, checksum=False)


def test_components_of_unlike_width_in_some_layers_only() -> None:
    def layout(rank: int, size: int, order: str) -> KVLayout:
        components = [
            Component("k", 4, 3, torch.uint8),
            Component("v", 4, 5, torch.bfloat16),
            Component("index", 1, 7, torch.uint8, sharded=False, layers=(1, 3)),
            Component("draft_k", 2, 3, torch.uint8, layers=(4,)),
        ]
        given: dict[str, Any] = {"tp_rank": rank, "tp_size": size, "order": order}
        return KVLayout(components, num_layers=4, page_size=4, layers=range(5), **given)

    check({rank: layout(rank, 2, "NHD") for rank in range(2)}, layout(1, 4, "HND"))


def test_pipeline_stages_with_a_layer_held_twice() -> None:
    check({0: gqa(num_layers=3, layers=(0, 1)), 1: gqa(num_layers=3, layers=(1, 2))}, gqa(num_layers=3), num_tokens=40)


@pytest.mark.parametrize("head_dim", [64, 1024], ids=["short", "long"])
@pytest.mark.parametrize("chunk", [1, 20_000, 1 << 20])
def test_runs_and_chunks_of_every_kind(monkeypatch: pytest.MonkeyPatch, head_dim: int, chunk: int) -> None:
    """Rows of a page, whole pages on both sides of SHORT_RUN, cut where a chunk ends."""
    monkeypatch.setattr(host_packer, "CHUNK_BYTES", chunk)
    check({0: gqa(head_dim=head_dim)}, gqa(head_dim=head_dim), num_tokens=40)
    check(group(gqa, 2, head_dim=head_dim), gqa(head_dim=head_dim, page_size=8), num_tokens=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=instances(), tokens=st.integers(1, 14), checksum=st.booleans(), seed=st.integers(0, 1 << 60))
def test_any_pair(pair: tuple[dict[int, KVLayout], KVLayout], tokens: int, checksum: bool, seed: int) -> None:
    check(*pair, num_tokens=tokens, checksum=checksum, seed=seed)


# Steps


def test_steps_are_bounded() -> None:
    """About 80 MiB in steps of at most STEP_BYTES. A layer of 10 MiB is more than a chunk; small chunks are joined."""
    rng = np.random.default_rng()
    large = gqa(num_layers=4, num_kv_heads=8, head_dim=128, page_size=16)
    plan = compile_plan(0, {0: large}, large)
    pages = rng.permutation(320).astype(np.int64)
    pool = Pool.random(large, 320, rng)
    transfer = Transfer(plan, Side(pool, pages), Side(pool.copy(), pages))
    stage = Stage(transfer.cutter.nbytes)
    piece = transfer.cutter.cut(len(stage.bytes))
    assert transfer.cutter.done
    layout = transfer.layout(piece)
    where = (layout, piece, plan)
    ours = transfer.source.arguments(stage, transfer.limit, sent_by(piece))
    theirs = transfer.target.arguments(stage, transfer.limit)
    verbs: list[Iterator[int]] = [
        gather(*where, **ours),
        write_sums(*where, **ours),
        scatter(*where, **theirs),
        find_bad(*where, **theirs),
    ]
    for steps in map(list, verbs):
        assert sum(steps) == layout.payload
        assert max(steps) <= STEP_BYTES
        assert min(steps[:-1]) >= STEP_BYTES // 2


@pytest.mark.parametrize(("senders", "rank"), [(1, 3), (2, 5)], ids=["whole", "slices"])
def test_a_step_writes_what_it_yields(monkeypatch: pytest.MonkeyPatch, senders: int, rank: int) -> None:
    monkeypatch.setattr(host_packer, "CHUNK_BYTES", 100)
    transfer, piece = one_piece(group(gqa, senders, num_layers=1), rank, gqa(num_layers=1))
    keys, values = transfer.layout(piece).sections
    stage = Stage(values.offset + values.nbytes)
    poison = stage.bytes.copy()
    given = transfer.source.arguments(stage, transfer.limit, sent_by(piece))
    done = steps = 0
    for nbytes in gather(transfer.layout(piece), piece, transfer.plan, **given):
        done += nbytes
        steps += 1
        end = done if done <= keys.nbytes else values.offset + done - keys.nbytes
        np.testing.assert_array_equal(stage.bytes[end:], poison[end:])
        assert (stage.bytes[max(0, end - 16) : end] != poison[max(0, end - 16) : end]).any()
    assert steps > 2


def test_each_layer_may_have_a_page_stride_of_its_own() -> None:
    transfer, piece = one_piece(*PAIRS[0])
    stage, other = Stage(transfer.layout(piece).nbytes), Stage(transfer.layout(piece).nbytes)
    other.bytes[:] = stage.bytes
    layout = transfer.gather(piece, stage)
    tensors = dict(transfer.source.pool.tensors)
    for (component, layer), tensor in transfer.source.pool.tensors.items():
        tensors[component, layer] = np.pad(tensor, ((0, 0), (0, 5 * layer)))
    wider = Side(Pool(transfer.source.pool.layout, tensors), transfer.source.pages)
    given = wider.arguments(other, transfer.limit, sent_by(piece))
    assert len({given["page_stride"]("k", layer) for layer in piece.layers}) == len(piece.layers) > 1
    assert sum(gather(layout, piece, transfer.plan, **given)) == layout.payload
    assert sum(write_sums(layout, piece, transfer.plan, **given)) == layout.payload
    np.testing.assert_array_equal(other.bytes, stage.bytes)


# Checksums


def corrupted(layout: PieceLayout, piece: Piece, transfer: Transfer, offset: int) -> Mismatch | None:
    """The page that the byte at ``offset`` of a stage belongs to, found by enumeration; None for an unused byte."""
    for section in layout.sections:
        segment = section.segment
        pairs = page_pairs(
            segment,
            num_src_pages=piece.num_pages,
            start=piece.start,
            limit_tokens=transfer.limit,
            src_page_size=transfer.plan.src_page_size,
            dst_page_size=transfer.plan.dst_page_size,
        )
        for number, layer in enumerate(section.layers):
            data = section.offset + number * section.layer_stride
            sums = section.sums + number * section.sums_stride
            for first, size in ((data, segment.pair_nbytes), (sums, 8)):
                if first <= offset < first + len(pairs) * size:
                    pair = (offset - first) // size
                    return Mismatch(layer, segment.component, int(pairs.dst_index[pair]))
    return None


def one_piece(writers: Mapping[int, KVLayout], rank: int, reader: KVLayout) -> tuple[Transfer, Piece]:
    rng = np.random.default_rng()
    plan = compile_plan(rank, writers, reader)
    transfer = Transfer(plan, pick(writers[rank], 38, rng), pick(reader, 38, rng))
    return transfer, transfer.cutter.cut(1 << 20)


PAIRS: Sequence[tuple[dict[int, KVLayout], int, KVLayout]] = [
    (group(gqa, 2, num_layers=3), 5, gqa(num_layers=3, page_size=16, order="HND")),
    (group(gqa, 8, num_layers=3), 13, gqa(1, 2, num_layers=3)),
    ({rank: mla(tp_rank=rank, tp_size=2, page_size=8) for rank in range(2)}, 1, mla(page_size=4)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=["heads", "replicas", "latents"])
def test_one_flipped_byte_anywhere_is_found_and_named(pair: tuple[dict[int, KVLayout], int, KVLayout]) -> None:
    transfer, piece = one_piece(*pair)
    stage = Stage(transfer.layout(piece).nbytes + 300)
    layout = transfer.gather(piece, stage)
    owners = [corrupted(layout, piece, transfer, offset) for offset in range(len(stage.bytes))]
    assert owners[-300:] == [None] * 300
    assert sum(owner is not None for owner in owners) >= layout.payload
    assert {owner.layer for owner in owners if owner} == set(transfer.plan.layers)
    assert len({owner.position for owner in owners if owner}) > 1
    bits = 1 << np.random.default_rng().integers(8, size=len(owners), dtype=np.uint8)
    for offset, (bit, owner) in enumerate(zip(bits, owners, strict=True)):
        stage.bytes[offset] ^= bit
        transfer.scatter(piece, stage)
        assert transfer.find_bad(piece, stage) == owner, offset
        stage.bytes[offset] ^= bit


@pytest.mark.parametrize("chunk", [1, 200, STEP_BYTES])
def test_the_first_of_several_mismatches_is_named_by_layer_then_component_then_page(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(host_packer, "CHUNK_BYTES", chunk)
    transfer, piece = one_piece(*PAIRS[0])
    stage = Stage(transfer.layout(piece).nbytes)
    layout = transfer.gather(piece, stage)
    keys, values = layout.sections
    spoiled = [
        (values, 2, 0, Mismatch(2, "v", 0)),
        (values, 1, 4, Mismatch(1, "v", 1)),
        (keys, 1, 9, Mismatch(1, "k", 2)),
        (keys, 1, 8, Mismatch(1, "k", 2)),
        (keys, 1, 0, Mismatch(1, "k", 0)),
        (values, 0, 9, Mismatch(0, "v", 2)),
    ]
    for section, number, pair, named in spoiled:
        stage.bytes[section.offset + number * section.layer_stride + pair * section.segment.pair_nbytes] ^= 1
        transfer.scatter(piece, stage)
        assert transfer.find_bad(piece, stage) == named


def test_a_page_overwritten_after_the_scatter_is_found() -> None:
    """Checksums are computed from the receiver's pages, not from the stage."""
    transfer, piece = one_piece(*PAIRS[0])
    stage = Stage(transfer.layout(piece).nbytes)
    transfer.gather(piece, stage)
    transfer.scatter(piece, stage)
    assert transfer.find_bad(piece, stage) is None
    page = int(transfer.target.pages[1])
    heads = transfer.plan.segments[0].heads
    transfer.target.pool.element("v", 2, page, 0, heads.start)[0] ^= 0x40
    assert transfer.find_bad(piece, stage) == Mismatch(2, "v", 1)


# A stage used again


def test_a_short_piece_after_a_long_one_unpacks_none_of_its_bytes() -> None:
    """Two requests use one stage; the second's pages hold its own bytes, or what they held before."""
    writers = group(gqa, 2)
    stage = Stage(1 << 16)
    long, piece = one_piece(writers, 3, gqa())
    long.gather(piece, stage)
    long.scatter(piece, stage)
    rng = np.random.default_rng()
    source, target = pick(writers[5], 6, rng), pick(gqa(), 6, rng)
    others = pick(writers[3], 0, rng)
    pages = {3: [], 5: source.pages.tolist()}
    expected = reference({3: others.pool, 5: source.pool}, pages, target.pool, target.pages.tolist())
    short = Transfer(compile_plan(5, writers, gqa()), source, target)
    while not short.cutter.done:
        piece = short.cutter.cut(short.cutter.least)
        assert short.layout(piece).nbytes < long.layout(Piece(long.plan.layers, 0, 10)).nbytes
        short.gather(piece, stage)
        short.scatter(piece, stage)
        assert short.find_bad(piece, stage) is None
    assert differences(target.pool, expected) == 0


# Negative control


@pytest.mark.parametrize("broken", ["offset", "stride", "page", "start"])
def test_negative_control_wrong_copies_are_noticed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def spoil(name: str, change: Callable[..., Any]) -> None:
        right = getattr(host_packer, name)
        monkeypatch.setattr(host_packer, name, lambda *given, **named: change(right, *given, **named))

    if broken == "page":
        spoil("page_pairs", lambda right, segment, **named: right(segment, **{**named, "start": named["start"] + 1}))
    elif broken == "start":
        spoil(
            "Side",
            lambda right, sending, *given, pages, **named: right(
                sending, *given, pages=pages[::-1].copy() if sending else pages, **named
            ),
        )
    elif broken == "stride":
        spoil("StridedRuns", lambda right, *rows: right(*rows[:4], rows[4] + 1, *rows[5:]))
    else:
        spoil("copy", lambda right, layout, side, stage: right(layout, side, stage + side.sending))
    with pytest.raises((AssertionError, IndexError)):
        check(group(gqa, 2), gqa(), num_tokens=30, checksum=False)
