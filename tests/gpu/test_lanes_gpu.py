"""Every kind of layout between caches on GPUs, over every lane, each proved by the counters of ``explain``."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.lane_transfer import Case, Report, check_reports, transfer
from tests.helpers.ranks.layout_cases import CASES, case, gqa, mla, tp
from torchkv.errors import TransportUnavailable
from torchkv.transport import load_transport


@dataclass(frozen=True)
class Lane:
    name: str
    prefixes: tuple[str, ...]  # of the lane's name in explain
    adopted: bool
    options: tuple[tuple[str, Any], ...] = ()
    apart: bool = False  # see `Ranks`


VIEW = Lane("view", ("view",), adopted=True)
OWN = Lane("view-own-memory", ("view",), adopted=False)
PUT = Lane("put", ("cuda_ipc/",), adopted=True, options=(("path", "slices"),))
# Every case takes several pieces, and the rings go round. A ring that is mapped needs no other.
SMALL_RING = (("path", "staged"), ("checksum", True), ("staging_recv", 48 << 10), ("staging_send", 0))
SMALL_RINGS = (*SMALL_RING[:-1], ("staging_send", 40 << 10))
STAGED = Lane("staged", ("view",), adopted=True, options=SMALL_RING)
STAGED_PUT = Lane("staged-put", ("cuda_ipc/",), adopted=True, options=SMALL_RINGS, apart=True)
NVSHMEM_STAGED = Lane("nvshmem-staged", ("view",), adopted=False, options=(("transport", "nvshmem"), *SMALL_RING))
NVSHMEM_VIEW = Lane("nvshmem-view", ("view",), adopted=False, options=(("transport", "nvshmem"),))
NVSHMEM_PUT = Lane("nvshmem-put", ("nvshmem/",), adopted=False, options=(("transport", "nvshmem"), ("path", "slices")))

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "uint8": torch.uint8}
WIDE, MLA = {"num_kv_heads": 8, "head_dim": 128}, {"latent_dim": 512, "rope_dim": 64}
NARROWER = {"num_kv_heads": 8, "head_dim": 64}  # of which a page of 32 tokens can be staged by these lanes
GPU_CASES = [
    *CASES,
    *(case(f"1to1-{name}", tp(gqa, (0,), dtype=dtype), tp(gqa, (2,), dtype=dtype)) for name, dtype in DTYPES.items()),
    *(
        case(f"2to2-HND-{name}", tp(gqa, (0, 1), dtype=dtype), tp(gqa, (2, 3), dtype=dtype, order="HND"), chunks=2)
        for name, dtype in DTYPES.items()
    ),
    # Of the size of real models: wide runs, whose pages are copied in several steps.
    case("2to1-wide", tp(gqa, (0, 1), **WIDE), tp(gqa, (2,), **WIDE), tokens=400, verb="send_slice"),
    case("1to2-wide-NHDtoHND", tp(gqa, (0,), **WIDE), tp(gqa, (2, 3), order="HND", **WIDE), tokens=400, chunks=2),
    case("32to16-wide", tp(gqa, (0, 1), page_size=32, **NARROWER), tp(gqa, (2,), **NARROWER), tokens=400),
    case("mla-striped-wide", tp(mla, (0, 1), **MLA), tp(mla, (2,), page_size=64, **MLA), tokens=400, chunks=2),
]


def why_no_nvshmem() -> str | None:
    try:
        return load_transport("nvshmem").available()
    except TransportUnavailable as error:
        return str(error)


NO_NVSHMEM = why_no_nvshmem()


def run(ranks: Ranks, one: Case, lane: Lane) -> list[Report]:
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    function = functools.partial(transfer, adopted=lane.adopted, seed=seed, device="cuda", **dict(lane.options))
    return ranks.run(function, one)


def compact(one: Case) -> Case:
    """The same with ranks numbered from 0, none left out."""
    number = {rank: index for index, rank in enumerate(sorted(one.layouts))}
    return dataclasses.replace(
        one,
        layouts={number[rank]: layout for rank, layout in one.layouts.items()},
        writers=tuple(number[rank] for rank in one.writers),
        readers=tuple(number[rank] for rank in one.readers),
    )


@needs_gpus(1)
@pytest.mark.parametrize("one", GPU_CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", [VIEW, PUT, STAGED, STAGED_PUT], ids=lambda lane: lane.name)
def test_layout_over_lane(one: Case, lane: Lane, gpu_ranks: Callable[..., Ranks]) -> None:
    check_reports(run(gpu_ranks(4, apart=lane.apart), one, lane), one, lane.prefixes)


@needs_gpus(1)
@pytest.mark.parametrize("one", [CASES[0], CASES[3], CASES[11]], ids=lambda one: one.name)
def test_layout_in_memory_of_torchkv(one: Case, gpu_ranks: Callable[[int], Ranks]) -> None:
    check_reports(run(gpu_ranks(4), one, OWN), one, OWN.prefixes)


# The number of ranks varies slowest, so that each set of ranks is made once.
BY_SIZE: list[Case] = sorted((compact(case) for case in GPU_CASES), key=lambda one: len(one.layouts))


@needs_gpus(2)
@pytest.mark.skipif(NO_NVSHMEM is not None, reason=f"NVSHMEM does not work here: {NO_NVSHMEM}")
@pytest.mark.parametrize("one", BY_SIZE, ids=lambda one: one.name)
@pytest.mark.parametrize("lane", [NVSHMEM_VIEW, NVSHMEM_PUT, NVSHMEM_STAGED], ids=lambda lane: lane.name)
def test_layout_over_nvshmem(one: Case, lane: Lane, gpu_ranks: Callable[[int], Ranks]) -> None:
    size = len(one.layouts)
    if size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs, one a rank; found {torch.cuda.device_count()}")
    check_reports(run(gpu_ranks(size), one, lane), one, lane.prefixes)


@needs_gpus(1)
@pytest.mark.parametrize("path", ["direct", "slices", "runs", "staged"])
def test_forced_path_is_taken(path: str, gpu_ranks: Callable[[int], Ranks]) -> None:
    lane = VIEW if path in ("direct", "staged") else PUT
    lane = dataclasses.replace(lane, options=(("path", path),))
    reports = run(gpu_ranks(4), CASES[0], lane)
    check_reports(reports, CASES[0], lane.prefixes)
    assert reports[CASES[0].readers[0]].path == path


@needs_gpus(1)
@pytest.mark.parametrize(("taken", "claimed"), [(PUT, VIEW), (VIEW, PUT)], ids=["put", "view"])
def test_the_other_lane_is_told_apart(taken: Lane, claimed: Lane, gpu_ranks: Callable[[int], Ranks]) -> None:
    """Negative control of the proof by counters."""
    reports = run(gpu_ranks(4), CASES[0], taken)
    with pytest.raises(AssertionError, match=claimed.prefixes[0]):
        check_reports(reports, CASES[0], claimed.prefixes)
