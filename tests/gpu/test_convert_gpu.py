"""Pages that change their dtype on their way between caches on GPUs: every number, and every kind of layout."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.converting import PAIRS, SCALES, close_calls, numbers, same
from tests.helpers.harness import Ranks
from tests.helpers.ranks import convert_loop
from tests.helpers.ranks.convert_cases import CONVERT_CASES, PARTLY, converting, staged
from tests.helpers.ranks.gpu_pair import gpu_group, needs_gpus
from tests.helpers.ranks.lane_transfer import Case, Report, check_reports, transfer
from tests.helpers.ranks.layout_cases import gqa
from tests.helpers.ranks.served import put_by_the_loop
from tests.helpers.ranks.small_cache import small_layout
from torchkv import KVCache, KVLayout, TransportUnavailable, convert

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Of the size of real models: wide words, several tiles a page.
WIDE = {"num_kv_heads": 8, "head_dim": 128}
GPU_CASES = [
    *CONVERT_CASES,
    PARTLY,
    converting("quantize-wide-2to1", gqa, BF16, FP8, writers=(0, 1), writer=WIDE, reader=WIDE, tokens=400),
    converting("dequantize-wide", gqa, FP8, BF16, writer=WIDE, reader={**WIDE, "order": "HND"}, tokens=400),
]
SMALL_RING = {"path": "staged", "staging_recv": 48 << 10, "staging_send": 0}


@needs_gpus(1)
@pytest.mark.parametrize("native", [True, False], ids=["native", "as on older GPUs"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_every_number(dtypes: tuple[torch.dtype, torch.dtype], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against PyTorch on the host and on the GPU, with scales whose quotients are denormal or nearly a tie, too."""
    # Imported here because they import Triton, which a machine without a GPU need not have.
    from torchkv.kernels import copies, launch
    from torchkv.layout.kernel_geometry import geometry
    from torchkv.layout.pair_plan import compile_plan

    if native and torch.cuda.get_device_capability() < launch.NATIVE:
        pytest.skip("needs a GPU that converts to fp8 itself")
    if not native:
        monkeypatch.setattr(launch, "NATIVE", (99, 0))
    source = numbers(dtypes[0])
    there, dim = source.cuda(), len(source)
    fields: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": dim, "page_size": 1}
    reader = KVLayout.gqa(dtype=dtypes[1], accept=(dtypes[0],), **fields)
    segment = compile_plan(0, {0: KVLayout.gqa(dtype=dtypes[0], **fields)}, reader).segments[0]
    target = torch.empty(dim, dtype=dtypes[1], device="cuda")
    addresses = there.data_ptr(), target.data_ptr()
    ids, errors = torch.zeros(1, dtype=torch.int64, device="cuda"), copies.error_words()
    shape = geometry(
        segment,
        src_page_stride=there.nbytes,
        dst_page_stride=target.nbytes,
        src_page_size=1,
        dst_page_size=1,
        num_src_pages=1,
        num_dst_pages=1,
        addresses=addresses,
    )
    for scale in [*SCALES, *(close_calls(dtypes[0], 200) if dtypes[1] is FP8 else ())]:
        copies.copy_pages(
            copies.CopyJobs(
                table=torch.tensor([addresses], dtype=torch.int64, device="cuda"),
                geometry=shape,
                first_job=0,
                num_jobs=1,
                start=0,
                limit_tokens=1,
                errors=errors,
                blocks=16,
                scales=copies.ScaleTable.of([torch.tensor([scale]).numpy()], there.device),
            ),
            ids,
            ids,
        )
        torch.cuda.synchronize()
        assert copies.first_error(errors) is None
        assert same(target.cpu(), convert(source, dtypes[1], scale)), f"scale {scale}: not what the host computes"
        assert same(target.cpu(), convert(there, dtypes[1], scale).cpu()), f"scale {scale}: not what this GPU computes"


def run(ranks: Ranks, one: Case, **options: Any) -> list[Report]:
    function = functools.partial(transfer, adopted=True, seed=secrets.randbits(64), device="cuda", **options)
    return ranks.run(function, one)


@needs_gpus(1)
@pytest.mark.parametrize("one", GPU_CASES, ids=lambda one: one.name)
def test_direct(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    reports = run(gpu_ranks(4), one)
    check_reports(reports, one, ("view",))
    assert {reports[reader].path for reader in one.readers} == {"direct"}


def by_loops_apart(one: Case, options: dict[str, Any]) -> tuple[int, int]:
    with put_by_the_loop():
        return convert_loop.requests(one, options, device="cuda")


def check_share(found: list[tuple[int, int]], share: float) -> None:
    carried, expected = (sum(numbers) for numbers in zip(*found, strict=True))
    assert carried == share * expected > 0


LOOP_CASES = [*convert_loop.CASES, *GPU_CASES[-2:]]


@needs_gpus(1)
@pytest.mark.parametrize("one", LOOP_CASES, ids=lambda one: one.name)
def test_resident_loops_convert(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    check_share(gpu_ranks(4).run(functools.partial(convert_loop.requests, device="cuda"), one, {}), 1)


@needs_gpus(1)
@pytest.mark.parametrize("one", LOOP_CASES, ids=lambda one: one.name)
def test_resident_loops_convert_into_a_mapped_ring(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    found = gpu_ranks(4).run(functools.partial(convert_loop.requests, device="cuda"), one, {"path": "staged"})
    check_share(found, staged(one).link_share)


@needs_gpus(1)
@pytest.mark.parametrize("one", LOOP_CASES, ids=lambda one: one.name)
def test_resident_loops_convert_as_between_hosts(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    check_share(gpu_ranks(4, apart=True).run(by_loops_apart, one, {}), staged(one).link_share)


@needs_gpus(1)
@pytest.mark.parametrize("one", [*CONVERT_CASES, *GPU_CASES[-2:]], ids=lambda one: one.name)
def test_staged_into_a_mapped_ring(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    check_reports(run(gpu_ranks(4), one, **SMALL_RING), staged(one), ("view",))


@needs_gpus(1)
@pytest.mark.parametrize("one", [CONVERT_CASES[3], CONVERT_CASES[6], CONVERT_CASES[11]], ids=lambda one: one.name)
def test_staged_by_puts(one: Case, gpu_ranks: Callable[..., Ranks]) -> None:
    """As between hosts: the ring is not mapped."""
    reports = run(gpu_ranks(4, apart=True), one, **{**SMALL_RING, "staging_send": 40 << 10})
    check_reports(reports, staged(one), ("cuda_ipc/",))


@needs_gpus(1)
def test_a_large_verb_through_a_large_ring(gpu_ranks: Callable[..., Ranks]) -> None:
    one = converting("large", gqa, BF16, FP8, writer=WIDE, reader=WIDE, tokens=4096)
    check_reports(run(gpu_ranks(4), one, path="staged"), staged(one), ("view",))


def refused() -> None:
    with gpu_group(checksum=True) as kv:
        prefill = kv.rank() == 0
        dtype = {"dtype": BF16} if prefill else {"dtype": FP8, "accept": (BF16,)}
        cache = KVCache.empty(small_layout(**dtype), 4, group=kv)
        with pytest.raises(TransportUnavailable, match=r"Options\.checksum.*converted"):
            kv.register(cache, instance="prefill" if prefill else "decode")


@needs_gpus(1)
def test_checksums_are_refused_at_register(gpu_ranks: Callable[..., Ranks]) -> None:
    gpu_ranks(2).run(refused)
