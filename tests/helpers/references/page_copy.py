"""What `torchkv.kernels.copies` does, as plain loops over tensors of bytes: slow, on any device, one row at a time.

The specification that the kernels are tested against, and a stand-in for them where there is no Triton.
Addresses are tensors here: ``sources[j]`` and ``targets[j]`` are uint8 ``[nbytes]`` from job j's base address on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchkv.layout.kernel_geometry import BadPage, Geometry, PageAddressing
from torchkv.layout.plan_segment import first_owed

__all__ = ["copy_pages_reference", "gather_reference", "scatter_reference"]


def copy_pages_reference(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    geometry: Geometry,
    *,
    start: int,
    limit_tokens: int,
) -> set[BadPage]:
    """See `torchkv.kernels.copy_pages`. Returns all bad page ids that pairs of the stripe have met."""
    bad: set[BadPage] = set()
    for pair in _pairs(geometry, src_pages.numel(), start, limit_tokens):
        src = _offset(geometry, geometry.src, "source", pair, src_pages, start, bad)
        dst = _offset(geometry, geometry.dst, "destination", pair, dst_pages, 0, bad)
        if src is None or dst is None:
            continue
        for source, target in zip(sources, targets, strict=True):
            for src_row, dst_row in _rows(geometry):
                _copy(source, src + src_row, target, dst + dst_row, geometry.rows.run)
    return bad


def gather_reference(
    sources: Sequence[torch.Tensor],
    src_pages: torch.Tensor,
    stage: torch.Tensor,
    geometry: Geometry,
    *,
    start: int,
    limit_tokens: int,
) -> set[BadPage]:
    """See `torchkv.kernels.gather`. Returns all bad page ids that pairs of the stripe have met."""
    bad: set[BadPage] = set()
    at = 0
    for source in sources:
        for pair in _pairs(geometry, src_pages.numel(), start, limit_tokens):
            src = _offset(geometry, geometry.src, "source", pair, src_pages, start, bad)
            for src_row, _ in _rows(geometry):
                if src is not None:
                    _copy(source, src + src_row, stage, at, geometry.rows.run)
                at += geometry.rows.run
    return bad


def scatter_reference(
    stage: torch.Tensor,
    targets: Sequence[torch.Tensor],
    dst_pages: torch.Tensor,
    geometry: Geometry,
    *,
    num_src_pages: int,
    start: int,
    limit_tokens: int,
) -> set[BadPage]:
    """See `torchkv.kernels.scatter`. Returns all bad page ids that pairs of the stripe have met."""
    bad: set[BadPage] = set()
    at = 0
    for target in targets:
        for pair in _pairs(geometry, num_src_pages, start, limit_tokens):
            dst = _offset(geometry, geometry.dst, "destination", pair, dst_pages, 0, bad)
            for _, dst_row in _rows(geometry):
                if dst is not None:
                    _copy(stage, at, target, dst + dst_row, geometry.rows.run)
                at += geometry.rows.run
    return bad


def _pairs(geometry: Geometry, num_src_pages: int, start: int, limit_tokens: int) -> Iterator[int]:
    """The pairs of this writer's stripe, numbered from the prefix."""
    stripe = geometry.stripe
    for pair in range(start * geometry.src.per_page, (start + num_src_pages) * geometry.src.per_page):
        if (pair + 1) * geometry.tokens > limit_tokens:
            return
        if pair * geometry.tokens < first_owed(limit_tokens, stripe.window):
            continue
        if pair // stripe.per_unit % stripe.holders == stripe.holder:
            yield pair


def _offset(
    geometry: Geometry,
    side: PageAddressing,
    name: str,
    pair: int,
    pages: torch.Tensor,
    first_page: int,
    bad: set[BadPage],
) -> int | None:
    """Where a pair begins on one side, in bytes from a job's base; None, and one more in ``bad``, for a bad page id."""
    token = pair * geometry.tokens
    page_size = side.per_page * geometry.tokens
    position = token // page_size - first_page
    page = int(pages[position])
    if not 0 <= page < side.num_pages:
        bad.add(BadPage(name, position, min(max(page, -(1 << 31)), (1 << 31) - 1)))
        return None
    return page * side.page_stride + side.base + token % page_size * side.token_stride


def _rows(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """Offsets of each row of a pair on both sides."""
    n0, s0, d0, n1, s1, d1, _ = geometry.rows
    for a in range(n0):
        for b in range(n1):
            yield a * s0 + b * s1, a * d0 + b * d1


def _copy(source: torch.Tensor, src: int, target: torch.Tensor, dst: int, nbytes: int) -> None:
    if src + nbytes > source.numel() or dst + nbytes > target.numel():
        raise IndexError(f"{nbytes} bytes from {src} of {source.numel()} to {dst} of {target.numel()}")
    target[dst : dst + nbytes] = source[src : src + nbytes]
