"""Base addresses of the layers on both sides of a peer connection, in device memory where copy kernels read them.

They are made once for each connection and plan, and used by all requests.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from torchkv.arrays import Float32Array
from torchkv.kernels.compiled import CompiledKernel
from torchkv.kernels.copies import ScaleTable
from torchkv.kernels.launch import kernel_for
from torchkv.layout.kernel_geometry import Geometry, geometry
from torchkv.layout.pair_plan import PairPlan
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

__all__ = ["AddressGroup", "BaseAddressTable", "BaseAddressTables", "job_ranges"]


def job_ranges(jobs: Iterable[range], splits: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The launches for some jobs of a table, as few as possible: (first job, number of jobs) of each.

    A launch does consecutive jobs of equal geometry. jobs: ascending ranges of the table's rows. splits: the rows,
    ascending, whose geometry differs from that of the row before.
    """
    joined: list[range] = []
    for each in filter(None, jobs):
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    found: list[tuple[int, int]] = []
    for each in joined:
        inside = splits[bisect_right(splits, each.start) : bisect_left(splits, each.stop)]
        found += [(first, end - first) for first, end in itertools.pairwise((each.start, *inside, each.stop))]
    return found


@dataclass(frozen=True, slots=True)
class AddressGroup:
    """The jobs of a plan, each a (layer, component), that share a geometry.

    layers: global layer id of each job, ascending. table: int64 ``[len(layers), 2]`` on the GPU, base address of each
    job's source and destination tensor. scales: of the jobs, if they are converted.
    """

    geometry: Geometry
    layers: tuple[int, ...]
    table: torch.Tensor
    scales: ScaleTable | None = None

    def ranges(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """The `job_ranges` of ``layers``, ascending global ids, of which the group may lack some."""
        return job_ranges(range(bisect_left(self.layers, layer), bisect_right(self.layers, layer)) for layer in layers)


class BaseAddressTable:
    """The address groups of one connection and plan, and the kernels that copy them."""

    def __init__(self, plan: PairPlan, local: LocalPages, connection: PeerConnection) -> None:
        self.plan = plan
        self._is_loaded = False
        entries: dict[Geometry, list[_Job]] = {}
        for segment in plan.segments:
            for layer in segment.layers:
                pointers = (local.ptr(segment.component, layer), connection.ptr(segment.component, layer))
                ours, theirs = (side.placements[segment.component, layer] for side in (local, connection))
                shape = geometry(
                    segment,
                    src_page_stride=ours.page_stride,
                    dst_page_stride=theirs.page_stride,
                    src_page_size=plan.src_page_size,
                    dst_page_size=plan.dst_page_size,
                    num_src_pages=ours.num_pages,
                    num_dst_pages=theirs.num_pages,
                    addresses=pointers,
                )
                scales = connection.scales.of(segment.component, layer, segment.heads)
                entries.setdefault(shape, []).append(_Job(layer, pointers, scales))
        self.groups = [_group(shape, jobs, local.device) for shape, jobs in entries.items()]

    @property
    def is_loaded(self) -> bool:
        """Whether all kernels are loaded, so that no launch loads one."""
        self._is_loaded = self._is_loaded or all(kernel.is_loaded for kernel in self._kernels())
        return self._is_loaded

    def load(self) -> None:
        """Loads the kernels. This waits for all streams."""
        for kernel in self._kernels():
            kernel.load()

    def _kernels(self) -> list[CompiledKernel]:
        return [kernel_for(group.geometry) for group in self.groups]


class BaseAddressTables:
    """The tables of one rank, made on first use and dropped with their connections."""

    def __init__(self, local: LocalPages) -> None:
        self._local = local
        self._tables: WeakKeyDictionary[PeerConnection, list[BaseAddressTable]] = WeakKeyDictionary()

    def known(self, plan: PairPlan, connection: PeerConnection) -> BaseAddressTable | None:
        """The table for ``plan`` over ``connection``, if it was made already."""
        return next((table for table in self._tables.get(connection, ()) if table.plan is plan), None)

    def of(self, plan: PairPlan, connection: PeerConnection) -> BaseAddressTable:
        """The table for ``plan`` over ``connection``, made if need be."""
        if (table := self.known(plan, connection)) is not None:
            return table
        table = BaseAddressTable(plan, self._local, connection)
        self._tables.setdefault(connection, []).append(table)
        return table


class _Job(NamedTuple):
    layer: int
    addresses: tuple[int, int]
    scales: Float32Array


def _group(shape: Geometry, jobs: list[_Job], device: torch.device) -> AddressGroup:
    jobs.sort(key=lambda job: (job.layer, job.addresses))
    table = torch.tensor([job.addresses for job in jobs], dtype=torch.int64, device=device)
    scales = None if shape.conversion is None else ScaleTable.of((job.scales for job in jobs), device)
    return AddressGroup(shape, tuple(job.layer for job in jobs), table, scales)
