"""Where the layers of one route lie, as tables in device memory that kernels read: made once, used by every request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchkv import kernels
from torchkv.plan import PairPlan, Slab
from torchkv.route import LocalPages, Route
from torchkv.slabgeometry import Geometry, geometry
from torchkv.transport import Int64Array
from torchkv.variants import Variant

__all__ = ["JobGroup", "JobTable"]


@dataclass(frozen=True, slots=True)
class JobGroup:
    """All (layer, component) of a plan that share a geometry.

    slab: of one of them, with its layer only; offsets of pages are the same in all. layers: global layer id of each
    job, ascending.
    addresses: int64 ``[len(layers), 2]``, source and destination address of each job. table: the same on the GPU.
    """

    geometry: Geometry
    slab: Slab
    layers: tuple[int, ...]
    addresses: Int64Array
    table: torch.Tensor

    def ranges(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """(first job, number of jobs) for ascending ``layers``, with neighbours joined."""
        found: list[tuple[int, int]] = []
        for layer in layers:
            first, end = bisect_left(self.layers, layer), bisect_right(self.layers, layer)
            if first == end:
                continue
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], end - found[-1][0])
            else:
                found.append((first, end - first))
        return found


class JobTable:
    """The job groups of one (route, plan), and what kernels for them are launched."""

    def __init__(self, plan: PairPlan, local: LocalPages, route: Route) -> None:
        self.plan = plan
        self._is_loaded = False
        entries: dict[Geometry, list[tuple[int, int, int]]] = {}
        slabs: dict[Geometry, Slab] = {}
        for slab in plan.slabs:
            for layer in slab.layers:
                pointers = (local.ptr(slab.component, layer), route.ptr(slab.component, layer))
                ours, theirs = (side.placements[slab.component, layer] for side in (local, route))
                shape = geometry(
                    slab,
                    src_page_stride=ours.page_stride,
                    dst_page_stride=theirs.page_stride,
                    src_page_size=plan.src_page_size,
                    dst_page_size=plan.dst_page_size,
                    num_src_pages=ours.num_pages,
                    num_dst_pages=theirs.num_pages,
                    addresses=pointers,
                )
                if shape not in slabs:
                    slabs[shape] = replace(slab, layers=(layer,))
                entries.setdefault(shape, []).append((layer, *pointers))
        self.groups = [_group(shape, slabs[shape], sorted(jobs), local.device) for shape, jobs in entries.items()]

    @property
    def is_loaded(self) -> bool:
        """Whether no kernel has to be loaded before it is launched."""
        self._is_loaded = self._is_loaded or all(variant.is_loaded for variant in self._variants())
        return self._is_loaded

    def load(self) -> None:
        """Loads them, which waits for all streams."""
        for variant in self._variants():
            variant.load()

    def _variants(self) -> list[Variant]:
        return [variant for group in self.groups for variant in kernels.variants(group.geometry)]

    @classmethod
    def of(cls, plan: PairPlan, local: LocalPages, route: Route) -> JobTable:
        """The route's table for ``plan``, made on first use."""
        if (table := route.job_table(plan)) is not None:
            return table
        table = cls(plan, local, route)
        route.job_tables.append(table)
        return table


def _group(shape: Geometry, slab: Slab, jobs: list[tuple[int, int, int]], device: torch.device) -> JobGroup:
    addresses = np.array([(src, dst) for _, src, dst in jobs], dtype=np.int64)
    table = torch.tensor(addresses, device=device)
    return JobGroup(shape, slab, tuple(layer for layer, *_ in jobs), addresses, table)
