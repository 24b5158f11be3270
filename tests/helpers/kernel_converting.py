"""As `tests.helpers.converting`, by kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import torch

from tests.helpers.converting import Pair, stage_memory
from torchkv.kernels import copies
from torchkv.layout.stage_format import MemorySpan
from torchkv.staging.cuda_pack import CudaPackLauncher, PieceArgs
from torchkv.transfer.copy_tables import BaseAddressTable

__all__ = ["direct_by_kernel", "staged_by_kernels"]

BLOCKS = 3


def direct_by_kernel(pair: Pair) -> int:
    """Straight from pages to pages. Returns the bytes of the receiver's pages."""
    table, errors = BaseAddressTable(pair.plan, pair.local, pair.connection), copies.error_words()
    src, dst = torch.tensor(pair.src_pages), torch.tensor(pair.dst_pages)
    nbytes = 0
    for group in table.groups:
        shape = group.geometry
        pairs = len(shape.ordinals(num_src_pages=len(src), start=0, limit_tokens=pair.limit))
        for first, count in group.ranges(pair.plan.layers) if pairs else []:
            jobs = copies.CopyJobs(
                table=group.table,
                geometry=shape,
                first_job=first,
                num_jobs=count,
                start=0,
                limit_tokens=pair.limit,
                errors=errors,
                blocks=BLOCKS,
                scales=group.scales,
            )
            copies.copy_pages(jobs, src, dst)
            nbytes += count * pairs * shape.pair_nbytes
    assert copies.first_error(errors) is None, copies.first_error(errors)
    return nbytes


def staged_by_kernels(pair: Pair, rng: np.random.Generator, *, parts: int) -> int:
    """Through stages. Returns the bytes of the receiver's pages in all pieces."""
    sender = CudaPackLauncher(pair.plan, pair.local, sending=True, scales=pair.scales)
    receiver = CudaPackLauncher(pair.plan, pair.remote, sending=False, scales=pair.scales)
    errors, filled = copies.error_words(), 0
    for piece, layout in pair.pieces(parts, checksum=False):
        memory = stage_memory(layout.nbytes + 64, rng)
        before = memory[layout.nbytes :].copy()
        stage = MemorySpan(memory.ctypes.data, layout.nbytes)
        mine = torch.tensor(pair.src_pages[piece.start : piece.start + piece.num_pages])
        for launch, ids in ((sender.gather, mine), (receiver.scatter, torch.tensor(pair.dst_pages))):
            launch(
                PieceArgs(
                    layout=layout,
                    piece=piece,
                    ids=ids,
                    stage=stage,
                    limit_tokens=pair.limit,
                    errors=errors,
                    blocks=BLOCKS,
                )
            )
        assert np.array_equal(memory[layout.nbytes :], before), "the gather wrote behind its stage"
        filled += layout.payload
    assert copies.first_error(errors) is None, copies.first_error(errors)
    return filled
