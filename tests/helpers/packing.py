"""What the tests of page packers share: random pools on a device, and what stages and pages should become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import oracle
import pytest
import torch
from oracle import Pool, differences, reference

from torchkv import kernels
from torchkv.cache import Placement
from torchkv.checksum import checksum_reference
from torchkv.copyreference import gather_reference
from torchkv.devicepack import PagePacker, mismatch_slots
from torchkv.hostpack import Mismatch
from torchkv.layout import KVLayout
from torchkv.pieces import Cutter, Piece, PieceLayout, piece_layout
from torchkv.plan import PairPlan, compile_plan, page_pairs
from torchkv.route import LocalPages
from torchkv.slab import Slab
from torchkv.stagememory import Room


class Pages:
    """A pool's bytes on a device; on the host, the pool itself."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pool = pool
        self._tensors = {key: torch.from_numpy(tensor).to(device) for key, tensor in pool.tensors.items()}
        self.local = LocalPages(
            layout=pool.layout,
            device=device,
            num_pages=len(next(iter(self._tensors.values()))),
            placements={key: Placement(i, 0, t.shape[1], len(t)) for i, (key, t) in enumerate(self._tensors.items())},
            storage_ptrs=[tensor.data_ptr() for tensor in self._tensors.values()],
            regions=range(len(self._tensors)),
        )

    def now(self) -> Pool:
        """What the device has written there so far."""
        return Pool(self._pool.layout, {key: tensor.cpu().numpy() for key, tensor in self._tensors.items()})


@dataclass
class Transfer:
    """From one writer into the reader's pages, by page packers."""

    plan: PairPlan
    source: Pool
    target: Pages
    src_pages: list[int]
    dst_pages: list[int]
    device: torch.device
    blocks: int = 3

    def __post_init__(self) -> None:
        self._pages = Pages(self.source, self.device)
        self.sender = PagePacker(self.plan, self._pages.local, sending=True)
        self.receiver = PagePacker(self.plan, self.target.local, sending=False)
        self.limit = len(self.dst_pages) * self.plan.dst_page_size
        self.errors, self.mismatches = kernels.error_slot(), mismatch_slots()

    def pieces(self, parts: int) -> Iterator[tuple[Piece, PieceLayout]]:
        """All that is owed, in about so many pieces."""
        cutter = Cutter(self.plan, self.plan.layers, 0, len(self.src_pages), limit_tokens=self.limit, checksum=True)
        room = max(cutter.least, -(-cutter.nbytes // parts))
        while not cutter.done:
            piece = cutter.cut(room)
            yield piece, piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=True)

    def everything(self) -> tuple[Piece, PieceLayout]:
        piece = Piece(self.plan.layers, 0, len(self.src_pages))
        return piece, piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=True)

    def ids(self, piece: Piece) -> torch.Tensor:
        return torch.tensor(self.src_pages[piece.start : piece.start + piece.num_pages], device=self.device)

    def fill(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> None:
        common = {"limit_tokens": self.limit, "errors": self.errors, "blocks": self.blocks}
        self.sender.gather(layout, piece, self.ids(piece), Room.of(stage), **common)
        self.sender.write_sums(layout, piece, self.ids(piece), Room.of(stage), **common)

    def empty(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> None:
        common = {"limit_tokens": self.limit, "errors": self.errors, "blocks": self.blocks}
        ids = torch.tensor(self.dst_pages, device=self.device)
        self.receiver.scatter(layout, piece, ids, Room.of(stage), **common)
        self.receiver.verify_sums(layout, piece, ids, Room.of(stage), **common, mismatches=self.mismatches)

    def first_mismatch(self, piece: Piece) -> Mismatch | None:
        return self.receiver.first_mismatch(self.mismatches, piece, limit_tokens=self.limit)

    def packed(self, piece: Piece, slab: Slab, layer: int) -> torch.Tensor:
        """What one layer of a segment should look like in the stage, ``[pairs, bytes of a pair]``; by plain loops."""
        there = self.target.local
        pages = self.source.tensors[slab.component, layer]
        shape = kernels.geometry(
            slab,
            src_page_stride=pages.shape[1],
            dst_page_stride=there.placements[slab.component, layer].page_stride,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
            num_src_pages=len(pages),
            num_dst_pages=there.num_pages,
            addresses=[0],
        )
        ids, where = self.ids(piece).cpu(), {"start": piece.start, "limit_tokens": self.limit}
        pairs = len(shape.pairs(num_src_pages=len(ids), **where))
        stage = torch.zeros(pairs * shape.pair_nbytes, dtype=torch.uint8)
        assert gather_reference([torch.from_numpy(pages.reshape(-1))], ids, stage, shape, **where) == set()
        return stage.view(pairs, shape.pair_nbytes)

    def staged(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> torch.Tensor:
        """What ``stage`` should become, on the host: other bytes stay, the gaps too."""
        want = stage.to("cpu", copy=True)
        for segment in layout.segments:
            for i, layer in enumerate(segment.layers):
                rows = self.packed(piece, segment.slab, layer)
                want[segment.offset + i * segment.layer_stride :][: rows.numel()] = rows.view(-1)
                sums = want[segment.sums + i * segment.sums_stride :][: 8 * segment.pairs].view(torch.int64)
                sums[:] = torch.tensor([checksum_reference(row.numpy()) for row in rows])
        return want


def transfers(
    writers: Mapping[int, KVLayout],
    reader: KVLayout,
    gap: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_tokens: int = 11,
    device: str = "cpu",
) -> tuple[list[Transfer], Pool]:
    """One for each writer, all into one pool of the reader; and what that pool should become.

    gap: canary bytes behind every page.
    """
    monkeypatch.setattr(oracle, "GAP", gap)
    rng = np.random.default_rng()

    def pick(layout: KVLayout) -> tuple[Pool, list[int]]:
        need = -(-num_tokens // layout.page_size)
        return Pool.random(layout, need + 2, rng), [int(page) for page in rng.permutation(need + 2)[:need]]

    chosen = {rank: pick(layout) for rank, layout in writers.items()}
    sources, pages = {rank: pool for rank, (pool, _) in chosen.items()}, {r: ids for r, (_, ids) in chosen.items()}
    target, dst_pages = pick(reader)
    expected = reference(sources, pages, target, dst_pages)
    assert differences(target, expected) > 0, "the poison is not what is expected"
    there = Pages(target, torch.device(device))
    made = [
        Transfer(compile_plan(rank, writers, reader), sources[rank], there, pages[rank], dst_pages, there.local.device)
        for rank in writers
    ]
    return made, expected


def stage_for(nbytes: int) -> torch.Tensor:
    """Random bytes, aligned like the stages of a ring."""
    memory = torch.randint(0, 256, (nbytes + 256,), dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:nbytes]


def place(
    transfer: Transfer, piece: Piece, layout: PieceLayout, byte: int
) -> tuple[int, tuple[int, int, int], Mismatch]:
    """Of this byte of the payload: its offset in the stage, its pair's place in the order, and its name."""
    for segment in layout.segments:
        if byte < segment.nbytes:
            break
        byte -= segment.nbytes
    index, inside = divmod(byte, segment.layer_nbytes)
    slab, layer = segment.slab, segment.layers[index]
    pairs = page_pairs(
        slab,
        num_src_pages=piece.num_pages,
        start=piece.start,
        limit_tokens=transfer.limit,
        src_page_size=transfer.plan.src_page_size,
        dst_page_size=transfer.plan.dst_page_size,
    )
    pair = inside // slab.pair_nbytes
    order = layer, layout.segments.index(segment), pair
    at = segment.offset + index * segment.layer_stride + inside
    return at, order, Mismatch(layer, slab.component, int(pairs.dst_index[pair]))
