"""Copies of pages by one GPU kernel: straight into a peer's pages, into a packed stage, or out of a packed stage.

This module checks the arguments of a copy. `torchkv.kernels.launch` turns them into a launch, and
`torchkv.kernels.page_copy` is the kernel. The tests compare it with plain loops
(``tests/helpers/references/page_copy.py``).

A *job* is one (layer, component). One launch copies the same page pairs of several jobs.

Page ids are read from device memory and checked by the kernel. It skips a pair with a bad id, and stores a code in the
``errors`` argument (`error_words`), which `first_error` decodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchkv.arrays import Float32Array
from torchkv.errors import ProtocolError
from torchkv.kernels import page_copy
from torchkv.kernels.launch import Addresses, kernel_params, launch, tickets_of
from torchkv.layout.kernel_geometry import BadPage, Geometry
from torchkv.layout.stage_format import MemorySpan

__all__ = [
    "CopyJobs",
    "ScaleTable",
    "copy_pages",
    "error_words",
    "first_error",
    "gather",
    "scatter",
]

MAX_IDS = (1 << 29) - 2  # page ids of a call: the position of an id must fit in an error code


class ScaleTable(NamedTuple):
    """The scales of some jobs. addresses: int64 ``[jobs]``, of each job's float32 ``[heads]``, which lie in ``values``.

    Jobs without a conversion have none.
    """

    addresses: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, rows: Iterable[Float32Array | None], device: torch.device) -> ScaleTable:
        """The table of jobs that have these scales, in device memory."""
        held = [np.zeros(0, np.float32) if row is None else row for row in rows]
        values = torch.from_numpy(np.concatenate([*held, np.zeros(1, np.float32)])).to(device)
        ends = np.cumsum([0, *(4 * len(row) for row in held)], dtype=np.int64)
        return cls(torch.from_numpy(values.data_ptr() + ends[:-1]).to(device), values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJobs:
    """Which jobs a call copies, and which page pairs of each.

    table: int64 ``[n, 2]`` in device memory, the source and destination base address of each job. Rows
    [first_job, first_job + num_jobs) are copied.
    geometry: that the jobs have in common.
    start: the first sender page's position, in sender pages after the prefix.
    limit_tokens: tokens of the grant; pairs beyond them are left out.
    errors: see `error_words`.
    blocks: the largest number of thread blocks. A few blocks must fill the link, so each is large: many warps with
    several 16-byte loads each.
    scales: of all jobs of the table, for a geometry with a conversion.

    Tensors must stay unchanged until the kernel is done. The kernel checks page ids, but trusts addresses.
    """

    table: torch.Tensor
    geometry: Geometry
    first_job: int
    num_jobs: int
    start: int
    limit_tokens: int
    errors: torch.Tensor
    blocks: int
    scales: ScaleTable | None = None

    def ranks(self, num_src_pages: int) -> range:
        """Positions in the writer's stripe of the page pairs in ``num_src_pages`` sender pages from ``start`` on."""
        return self.geometry.ordinals(num_src_pages=num_src_pages, start=self.start, limit_tokens=self.limit_tokens)

    def check(self) -> int:
        """Returns the address of the first job's row.

        Raises ``ProtocolError`` for tensors of the wrong kind and counts out of range.
        """
        table, errors, end = self.table, self.errors, self.first_job + self.num_jobs
        if table.dtype is not torch.int64 or not table.is_contiguous() or table.dim() != 2 or table.shape[1] != 2:
            raise ProtocolError(
                f"the table of jobs must be contiguous int64 [n, 2], not {table.dtype} of shape {tuple(table.shape)}"
            )
        if not 0 <= self.first_job <= end <= table.shape[0]:
            raise ProtocolError(f"jobs {self.first_job}..{end} of a table of {table.shape[0]}")
        if self.blocks < 1 or self.start < 0:
            raise ProtocolError(f"blocks must be at least 1 and start at least 0, not {self.blocks} and {self.start}")
        if errors.dtype is not torch.int64 or errors.numel() != 1:
            raise ProtocolError(f"errors must hold one int64, not {errors.dtype} of shape {tuple(errors.shape)}")
        return table.data_ptr() + 16 * self.first_job

    def scales_address(self) -> int:
        """The address of the first job's word in the table of scales. Raises ``ProtocolError`` if it is missing."""
        if self.geometry.conversion is None:
            return 0
        if self.scales is None or len(self.scales.addresses) != self.table.shape[0]:
            raise ProtocolError("jobs that are converted need as many scales as the table has rows")
        return self.scales.addresses.data_ptr() + 8 * self.first_job


def error_words() -> torch.Tensor:
    """A fresh ``errors`` argument: int64 ``[1]``, zero, in pinned host memory where there is a GPU."""
    return torch.zeros(1, dtype=torch.int64, pin_memory=torch.cuda.is_available())


def first_error(errors: torch.Tensor) -> BadPage | None:
    """One of the bad page ids that kernels with these ``errors`` met, or None. Read it after the kernels are done."""
    code = int(errors[0])
    if code == 0:
        return None
    page = code & 0xFFFFFFFF
    return BadPage(
        side="destination" if code >> 32 & 1 else "source",
        position=(code >> 33) - 1,
        page=page - (1 << 32) if page >> 31 else page,
    )


def copy_pages(jobs: CopyJobs, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Copies the sender's pages straight into the receiver's: of each job, those pairs that are in the writer's stripe.

    Enqueued on the current stream of the current device. src_pages: int64 ids of the sender pages
    [start, start + len(src_pages)). dst_pages: int64 ids of the grant's pages. Raises ``ProtocolError`` for tensors of
    the wrong kind and counts out of range.
    """
    _check_ids("src_pages", src_pages)
    _check_ids("dst_pages", dst_pages)
    _check_grant(jobs, dst_pages)
    addresses = Addresses(
        jobs=jobs.check(),
        src_ids=src_pages.data_ptr(),
        dst_ids=dst_pages.data_ptr(),
        stage=0,
        errors=jobs.errors.data_ptr(),
    )
    _launch(page_copy.DIRECT, jobs, addresses, jobs.ranks(src_pages.numel()))


def gather(jobs: CopyJobs, src_pages: torch.Tensor, stage: MemorySpan) -> None:
    """Packs what `copy_pages` would copy into ``stage``: job after job, pair after pair, row after row.

    stage: at least ``num_jobs * pairs * pair_nbytes`` bytes that the current device reaches, aligned to
    ``geometry.unit``. The kernel does not read the second column of ``jobs.table``. Stream, ids and errors as for
    `copy_pages`.
    """
    _check_ids("src_pages", src_pages)
    ranks = jobs.ranks(src_pages.numel())
    _check_stage(page_copy.GATHER, jobs, stage, len(ranks))
    addresses = Addresses(
        jobs=jobs.check(), src_ids=src_pages.data_ptr(), dst_ids=0, stage=stage.ptr, errors=jobs.errors.data_ptr()
    )
    _launch(page_copy.GATHER, jobs, addresses, ranks)


def scatter(jobs: CopyJobs, stage: MemorySpan, dst_pages: torch.Tensor, *, num_src_pages: int) -> None:
    """Unpacks what `gather` packed from ``num_src_pages`` pages into the receiver's pages.

    The kernel does not read the first column of ``jobs.table``. Stream, ids and errors as for `copy_pages`.
    """
    _check_ids("dst_pages", dst_pages)
    _check_grant(jobs, dst_pages)
    ranks = jobs.ranks(num_src_pages)
    _check_stage(page_copy.SCATTER, jobs, stage, len(ranks))
    addresses = Addresses(
        jobs=jobs.check(), src_ids=0, dst_ids=dst_pages.data_ptr(), stage=stage.ptr, errors=jobs.errors.data_ptr()
    )
    _launch(page_copy.SCATTER, jobs, addresses, ranks)


def _launch(mode: int, jobs: CopyJobs, addresses: Addresses, ranks: range) -> None:
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    where = addresses._replace(tickets=tickets_of(stream), scales=jobs.scales_address())
    launch(mode, jobs.geometry, where, num_jobs=jobs.num_jobs, ranks=ranks, start=jobs.start, blocks=jobs.blocks)


def _check_ids(name: str, ids: torch.Tensor) -> None:
    if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or ids.numel() > MAX_IDS:
        raise ProtocolError(
            f"{name} must be a contiguous one-dimensional int64 tensor of at most {MAX_IDS} page ids, not {ids.dtype} "
            f"of shape {tuple(ids.shape)}"
        )


def _check_grant(jobs: CopyJobs, dst_pages: torch.Tensor) -> None:
    capacity = dst_pages.numel() * jobs.geometry.dst.per_page * jobs.geometry.tokens
    if jobs.limit_tokens > capacity:
        raise ProtocolError(f"a grant of {jobs.limit_tokens} tokens has dst_pages for {capacity} tokens only")


def _check_stage(mode: int, jobs: CopyJobs, stage: MemorySpan, pairs_per_job: int) -> None:
    pairs, params = jobs.num_jobs * pairs_per_job, kernel_params(jobs.geometry, mode)
    need = pairs * params.pair_nbytes
    if stage.nbytes < need:
        raise ProtocolError(f"a stage of {stage.nbytes} bytes for {pairs} page pairs, which take {need}")
    if stage.ptr % params.unit:
        raise ProtocolError(f"a stage for this geometry must be aligned to {params.unit} bytes, not at {stage.ptr:#x}")
