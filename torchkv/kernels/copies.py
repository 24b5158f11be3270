"""Page copies by a GPU kernel: straight into a peer's pages, into a packed stage, or out of one.

Here arguments are checked; `torchkv.pagecopy` is the kernel, `torchkv.copyreference` says the same in plain loops.

A few blocks must fill the link, so each has much in flight: many warps with several 16-byte loads each.

Page ids come from device memory and are checked there. A pair with a bad id is left out, and its code is stored where
`first_error` finds it.
"""

from __future__ import annotations

from typing import Any

import torch

from torchkv import pagecopy
from torchkv.copyreference import BadPage
from torchkv.errors import ProtocolError
from torchkv.kernellaunch import Addresses, Flow, launch, launch_stream, shape, variants
from torchkv.slabgeometry import Geometry, Side, geometry
from torchkv.stagememory import Room
from torchkv.staging import CHUNK_UNIT, MAX_CHANNELS

__all__ = [
    "BadPage",
    "Geometry",
    "Side",
    "Flow",
    "check_stream",
    "copy_pages",
    "error_slot",
    "first_error",
    "gather",
    "geometry",
    "moved",
    "scatter",
    "skipped",
    "unfinished",
    "variants",
]

MAX_IDS = (1 << 29) - 2  # page ids of a call: what fits in an error code


def error_slot() -> torch.Tensor:
    """A fresh ``errors`` argument: int64 ``[2]``, zeros, in pinned host memory where there is a GPU."""
    return torch.zeros(2, dtype=torch.int64, pin_memory=torch.cuda.is_available())


def first_error(errors: torch.Tensor) -> BadPage | None:
    """One of the bad page ids that the kernels given ``errors`` have met, or None. Read it after they are done."""
    code = int(errors[0])
    if code in (0, pagecopy.SKIPPED):
        return None
    page = code & 0xFFFFFFFF
    return BadPage(
        side="destination" if code >> 32 & 1 else "source",
        position=(code >> 33) - 1,
        page=page - (1 << 32) if page >> 31 else page,
    )


def skipped(errors: torch.Tensor) -> bool:
    """Whether a `scatter` given ``errors`` found its stage not written. Read it after the kernels are done."""
    return int(errors[0]) == pagecopy.SKIPPED


def unfinished(errors: torch.Tensor) -> bool:
    """Whether a stream's kernel given ``errors`` has chunks left. Read it after the kernels are done.

    It is the second word, which hides no bad page in the first, and stays: zero ``errors[1]`` before the next launch.
    """
    return int(errors[1]) & 0xFFFFFFFF == pagecopy.UNFINISHED


def moved(errors: torch.Tensor) -> bool:
    """Whether a stream's kernels given ``errors`` have moved a chunk at least; reset in the same way."""
    return int(errors[1]) >> 32 == pagecopy.MOVED


def copy_pages(
    jobs: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    geometry: Geometry,
    *,
    first_job: int,
    num_jobs: int,
    start: int,
    limit_tokens: int,
    errors: torch.Tensor,
    blocks: int,
) -> None:
    """Copies the stripe of sender pages [start, start + len(src_pages)) of each job straight into the other's pages.

    Enqueued on the current stream of the current device. jobs: int64 ``[n, 2]``, source and destination base address
    of each; rows [first_job, first_job + num_jobs) are done. src_pages, dst_pages: int64 ids of the call's and of the
    grant's pages. limit_tokens: tokens of the grant. errors: see `error_slot`. blocks: thread blocks at most.
    All tensors stay unchanged until the kernel is done; addresses are trusted, page ids are not.
    Raises ``ProtocolError`` for tensors of the wrong kind and counts out of range.
    """
    _check_ids("src_pages", src_pages)
    _check_ids("dst_pages", dst_pages)
    ranks = geometry.pairs(num_src_pages=src_pages.numel(), start=start, limit_tokens=limit_tokens)
    _check_grant(geometry, dst_pages, limit_tokens)
    first = _check_launch(jobs, errors, first_job=first_job, num_jobs=num_jobs, start=start, blocks=blocks)
    where = Addresses(
        jobs=first, src_ids=src_pages.data_ptr(), dst_ids=dst_pages.data_ptr(), stage=0, errors=errors.data_ptr()
    )
    launch(pagecopy.DIRECT, geometry, where, num_jobs=num_jobs, ranks=ranks, start=start, blocks=blocks)


def gather(
    jobs: torch.Tensor,
    src_pages: torch.Tensor,
    stage: Room,
    geometry: Geometry,
    *,
    first_job: int,
    num_jobs: int,
    start: int,
    limit_tokens: int,
    errors: torch.Tensor,
    blocks: int,
    stream: Flow | None = None,
    first_chunk: int = 0,
) -> None:
    """Packs what `copy_pages` would copy into ``stage``: job after job, pair after pair, row after row.

    stage: at least ``num_jobs * pairs * pair_nbytes`` bytes that the current device reaches, aligned to
    ``geometry.unit``. The rest, and errors, as for `copy_pages`; the second column of ``jobs`` is not read.

    stream: packs into the slots of a stream instead, while a `scatter` unpacks them; then ``stage`` needs
    ``stream.shape.nbytes`` bytes, the same memory on both sides, ``errors`` two words, and ``blocks`` does not count.
    `unfinished` says whether to launch it again. first_chunk: chunks of the jobs that are packed before, by launches
    before this one, with the same ``state``.
    """
    _check_ids("src_pages", src_pages)
    ranks = geometry.pairs(num_src_pages=src_pages.numel(), start=start, limit_tokens=limit_tokens)
    if stream is not None:
        _check_stream(stream, errors, first_chunk)
    _check_stage(geometry, stage, num_jobs * len(ranks), stream)
    first = _check_launch(jobs, errors, first_job=first_job, num_jobs=num_jobs, start=start, blocks=blocks)
    where = Addresses(jobs=first, src_ids=src_pages.data_ptr(), dst_ids=0, stage=stage.ptr, errors=errors.data_ptr())
    given: dict[str, Any] = {"num_jobs": num_jobs, "ranks": ranks, "start": start, "blocks": blocks}
    _launch(pagecopy.GATHER, geometry, where, stream, first_chunk, **given)


def scatter(
    jobs: torch.Tensor,
    stage: Room,
    dst_pages: torch.Tensor,
    geometry: Geometry,
    *,
    num_src_pages: int,
    first_job: int,
    num_jobs: int,
    start: int,
    limit_tokens: int,
    errors: torch.Tensor,
    blocks: int,
    guard: tuple[int, int] = (0, 0),
    stream: Flow | None = None,
    first_chunk: int = 0,
) -> None:
    """Unpacks what `gather` packed from ``num_src_pages`` pages into the receiver's pages.

    guard: (address, value) of an int64 word in device memory; unless it holds that value, nothing is unpacked, and
    `skipped` says so. (0, 0): the stage is written. stream, first_chunk: as for `gather`; a stream has no guard. The
    rest, and errors, as for `copy_pages`; the first column of ``jobs`` is not read.
    """
    _check_ids("dst_pages", dst_pages)
    _check_grant(geometry, dst_pages, limit_tokens)
    ranks = geometry.pairs(num_src_pages=num_src_pages, start=start, limit_tokens=limit_tokens)
    if stream is not None:
        _check_stream(stream, errors, first_chunk)
    _check_stage(geometry, stage, num_jobs * len(ranks), stream)
    first = _check_launch(jobs, errors, first_job=first_job, num_jobs=num_jobs, start=start, blocks=blocks)
    where = Addresses(first, 0, dst_pages.data_ptr(), stage.ptr, errors.data_ptr(), *guard)
    assert stream is None or guard == (0, 0), "a stream with a guard"
    given: dict[str, Any] = {"num_jobs": num_jobs, "ranks": ranks, "start": start, "blocks": blocks}
    _launch(pagecopy.SCATTER, geometry, where, stream, first_chunk, **given)


def _launch(
    mode: int,
    geometry: Geometry,
    where: Addresses,
    stream: Flow | None,
    first_chunk: int,
    *,
    blocks: int,
    **given: Any,
) -> None:
    if stream is None:
        launch(mode, geometry, where, **given, blocks=blocks)
    else:
        launch_stream(mode, geometry, where, stream, **given, first_chunk=first_chunk)


def _check_ids(name: str, ids: torch.Tensor) -> None:
    if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or ids.numel() > MAX_IDS:
        raise ProtocolError(
            f"{name} must be a contiguous one-dimensional int64 tensor of at most {MAX_IDS} page ids, not {ids.dtype} "
            f"of shape {tuple(ids.shape)}"
        )


def _check_grant(geometry: Geometry, dst_pages: torch.Tensor, limit_tokens: int) -> None:
    if limit_tokens > (room := dst_pages.numel() * geometry.dst.per_page * geometry.tokens):
        raise ProtocolError(f"a grant of {limit_tokens} tokens has dst_pages for {room} tokens only")


def _check_stage(geometry: Geometry, stage: Room, pairs: int, stream: Flow | None) -> None:
    need = pairs * shape(geometry).pair_nbytes if stream is None else stream.shape.nbytes
    if stage.nbytes < need:
        what = f"{pairs} page pairs" if stream is None else f"a stream of {stream.shape.channels} channels"
        raise ProtocolError(f"a stage of {stage.nbytes} bytes for {what}, which take {need}")
    if stage.ptr % (unit := shape(geometry).unit):
        raise ProtocolError(f"a stage for this geometry must be aligned to {unit} bytes, not at {stage.ptr:#x}")


def check_stream(stream: Flow) -> None:
    """Raises ``ProtocolError`` for numbers that no stream has. Addresses and ``base`` are trusted."""
    chunk, channels = stream.shape
    if not 1 <= channels <= MAX_CHANNELS:
        raise ProtocolError(f"a stream of {channels} channels; at least 1 and at most {MAX_CHANNELS}")
    if not CHUNK_UNIT <= chunk < 1 << 31 or chunk % CHUNK_UNIT:
        raise ProtocolError(f"chunks of {chunk} bytes; a multiple of {CHUNK_UNIT} below 2 GiB")
    if stream.patience < 1:
        raise ProtocolError(f"patience must be at least 1, not {stream.patience}")


def _check_stream(stream: Flow, errors: torch.Tensor, first_chunk: int) -> None:
    check_stream(stream)
    if first_chunk < 0:
        raise ProtocolError(f"first_chunk must be at least 0, not {first_chunk}")
    if errors.numel() != 2:
        raise ProtocolError(f"errors of a stream must hold two int64, not {errors.numel()}")


def _check_launch(
    jobs: torch.Tensor, errors: torch.Tensor, *, first_job: int, num_jobs: int, start: int, blocks: int
) -> int:
    """Address of the first job's row in ``jobs``."""
    if jobs.dtype is not torch.int64 or not jobs.is_contiguous() or jobs.dim() != 2 or jobs.shape[1] != 2:
        raise ProtocolError(f"jobs must be contiguous int64 [n, 2], not {jobs.dtype} of shape {tuple(jobs.shape)}")
    if not 0 <= first_job <= first_job + num_jobs <= jobs.shape[0]:
        raise ProtocolError(f"jobs {first_job}..{first_job + num_jobs} of a table of {jobs.shape[0]}")
    if blocks < 1 or start < 0:
        raise ProtocolError(f"blocks must be at least 1 and start at least 0, not {blocks} and {start}")
    if errors.dtype is not torch.int64 or errors.numel() not in (1, 2):
        raise ProtocolError(f"errors must hold one int64 or two, not {errors.dtype} of shape {tuple(errors.shape)}")
    return jobs.data_ptr() + 16 * first_job
