"""Helpers for tests of `CudaPackLauncher`: random pools on a device, and what stages and pages should become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.references import page_transfer
from tests.helpers.references.checksum import checksum_reference
from tests.helpers.references.page_copy import gather_reference
from tests.helpers.references.page_transfer import Pool, differences, reference
from torchkv.cache import Placement
from torchkv.kernels import copies
from torchkv.layout import kernel_geometry
from torchkv.layout.descriptors import page_pairs
from torchkv.layout.layout import KVLayout
from torchkv.layout.pair_plan import PairPlan, compile_plan
from torchkv.layout.pieces import Cutter, Mismatch, Piece, PieceLayout, piece_layout
from torchkv.layout.plan_segment import PlanSegment
from torchkv.layout.stage_format import MemorySpan
from torchkv.staging.cuda_pack import CudaPackLauncher, PieceArgs, mismatch_buffer
from torchkv.transfer.peer_connection import LocalPages


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
        """The pool with what the device has written so far."""
        return Pool(self._pool.layout, {key: tensor.cpu().numpy() for key, tensor in self._tensors.items()})


@dataclass
class Transfer:
    """A transfer from one writer into the reader's pages, by two launchers and a stage."""

    plan: PairPlan
    source: Pool
    target: Pages
    src_pages: list[int]
    dst_pages: list[int]
    device: torch.device
    blocks: int = 3

    def __post_init__(self) -> None:
        self._pages = Pages(self.source, self.device)
        self.sender = CudaPackLauncher(self.plan, self._pages.local, sending=True)
        self.receiver = CudaPackLauncher(self.plan, self.target.local, sending=False)
        self.limit = len(self.dst_pages) * self.plan.dst_page_size
        self.errors, self.mismatches = copies.error_words(), mismatch_buffer()

    def pieces(self, parts: int) -> Iterator[tuple[Piece, PieceLayout]]:
        """Cuts everything that is owed into about ``parts`` pieces."""
        cutter = Cutter(self.plan, self.plan.layers, 0, len(self.src_pages), limit_tokens=self.limit, checksum=True)
        max_nbytes = max(cutter.least, -(-cutter.nbytes // parts))
        while not cutter.done:
            piece = cutter.cut(max_nbytes)
            yield piece, piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=True)

    def everything(self) -> tuple[Piece, PieceLayout]:
        piece = Piece(self.plan.layers, 0, len(self.src_pages))
        return piece, piece_layout(self.plan, piece, limit_tokens=self.limit, checksum=True)

    def ids(self, piece: Piece) -> torch.Tensor:
        return torch.tensor(self.src_pages[piece.start : piece.start + piece.num_pages], device=self.device)

    def args(
        self, piece: Piece, layout: PieceLayout, ids: torch.Tensor, stage: torch.Tensor, **changes: Any
    ) -> PieceArgs:
        given = {"limit_tokens": self.limit, "errors": self.errors, "blocks": self.blocks, **changes}
        return PieceArgs(layout=layout, piece=piece, ids=ids, stage=MemorySpan.of(stage), **given)

    def fill(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> None:
        args = self.args(piece, layout, self.ids(piece), stage)
        self.sender.gather(args)
        self.sender.write_sums(args)

    def empty(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> None:
        args = self.args(piece, layout, torch.tensor(self.dst_pages, device=self.device), stage)
        self.receiver.scatter(args)
        self.receiver.verify_sums(args, mismatches=self.mismatches)

    def first_mismatch(self, piece: Piece) -> Mismatch | None:
        return self.receiver.first_mismatch(self.mismatches, piece, limit_tokens=self.limit)

    def packed(self, piece: Piece, segment: PlanSegment, layer: int) -> torch.Tensor:
        """What one layer of a segment should become in a stage, uint8 ``[pairs, bytes of a pair]``, by plain loops."""
        there = self.target.local
        pages = self.source.tensors[segment.component, layer]
        shape = kernel_geometry.geometry(
            segment,
            src_page_stride=pages.shape[1],
            dst_page_stride=there.placements[segment.component, layer].page_stride,
            src_page_size=self.plan.src_page_size,
            dst_page_size=self.plan.dst_page_size,
            num_src_pages=len(pages),
            num_dst_pages=there.num_pages,
            addresses=[0],
        )
        ids, where = self.ids(piece).cpu(), {"start": piece.start, "limit_tokens": self.limit}
        pairs = len(shape.ordinals(num_src_pages=len(ids), **where))
        stage = torch.zeros(pairs * shape.pair_nbytes, dtype=torch.uint8)
        assert gather_reference([torch.from_numpy(pages.reshape(-1))], ids, stage, shape, **where) == set()
        return stage.view(pairs, shape.pair_nbytes)

    def staged(self, piece: Piece, layout: PieceLayout, stage: torch.Tensor) -> torch.Tensor:
        """What ``stage`` should become, on the host. Gaps and bytes after the piece stay."""
        want = stage.to("cpu", copy=True)
        for section in layout.sections:
            for i, layer in enumerate(section.layers):
                rows = self.packed(piece, section.segment, layer)
                want[section.offset + i * section.layer_stride :][: rows.numel()] = rows.view(-1)
                sums = want[section.sums + i * section.sums_stride :][: 8 * section.pairs].view(torch.int64)
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
    """A `Transfer` for each writer, all into one pool of the reader; and what that pool should become.

    gap: canary bytes behind every page.
    """
    monkeypatch.setattr(page_transfer, "GAP", gap)
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


def locate_byte(
    transfer: Transfer, piece: Piece, layout: PieceLayout, byte: int
) -> tuple[int, tuple[int, int, int], Mismatch]:
    """Of a byte of the payload: its offset in the stage, its pair's position in reporting order, its mismatch."""
    for section in layout.sections:
        if byte < section.nbytes:
            break
        byte -= section.nbytes
    index, inside = divmod(byte, section.layer_nbytes)
    segment, layer = section.segment, section.layers[index]
    pairs = page_pairs(
        segment,
        num_src_pages=piece.num_pages,
        start=piece.start,
        limit_tokens=transfer.limit,
        src_page_size=transfer.plan.src_page_size,
        dst_page_size=transfer.plan.dst_page_size,
    )
    pair = inside // segment.pair_nbytes
    order = layer, layout.sections.index(section), pair
    at = section.offset + index * section.layer_stride + inside
    return at, order, Mismatch(layer, segment.component, int(pairs.dst_index[pair]))
