"""Pages that change their dtype on their way, between real processes: every byte against the reference."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks.convert_cases import CONVERT_CASES, PARTLY, staged
from tests.helpers.ranks.lane_transfer import Case, Report, check_reports, random_fill, transfer, without_nan
from tests.helpers.ranks.small_cache import NUM_PAGES, meet, page_bytes, small_layout
from torchkv import (
    KVCache,
    KVError,
    KVLayout,
    KVMember,
    KVProcessGroup,
    LayoutMismatch,
    Options,
    RingExhausted,
    TransportUnavailable,
    convert,
    join,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

SMALL_RINGS = {"staging_send": 10 << 10, "staging_recv": 12 << 10, "checksum": True}
TCP = {"env": {"UCX_TLS": "tcp"}, "apart": True}


def run(ranks: Ranks, one: Case, *, adopted: bool, **options: Any) -> list[Report]:
    function = functools.partial(transfer, adopted=adopted, seed=secrets.randbits(64), **options)
    return ranks.run(function, one)


@pytest.mark.parametrize("one", [*CONVERT_CASES, PARTLY], ids=lambda one: one.name)
def test_direct_over_shared_memory(one: Case, four: Ranks) -> None:
    reports = run(four, one, adopted=False)
    check_reports(reports, one, ("view",))
    assert {reports[reader].path for reader in one.readers} == {"direct"}


@pytest.mark.parametrize("one", CONVERT_CASES, ids=lambda one: one.name)
def test_staged_into_a_mapped_ring(one: Case, four: Ranks) -> None:
    reports = run(four, one, adopted=False, path="staged", staging_send=0, staging_recv=12 << 10)
    check_reports(reports, staged(one), ("view",))


@pytest.mark.parametrize("one", CONVERT_CASES, ids=lambda one: one.name)
def test_staged_over_tcp_with_checksums(one: Case, shared_ranks: Callable[..., Ranks]) -> None:
    """No path is forced: of those over puts, only staging can convert."""
    reports = run(shared_ranks("hosts", 4, **TCP), one, adopted=True, **SMALL_RINGS)
    check_reports(reports, staged(one), ("tcp/",))
    assert {reports[reader].path for reader in one.readers} == {"staged"}


# ---------------------------------------------------------------------- refusals


def layouts_of(rank: int, *accept: torch.dtype, **changes: Any) -> KVLayout:
    """Rank 0 holds bfloat16, the others fp8."""
    return small_layout(**({"dtype": BF16} if rank == 0 else {"dtype": FP8, "accept": accept}), **changes)


def registered(kv: KVProcessGroup, **changes: Any) -> KVCache:
    """A cache of rank 0, "prefill", or of "decode", which accepts the other's pages."""
    cache = KVCache.empty(layouts_of(kv.rank(), BF16, **changes), NUM_PAGES, device="cpu")
    random_fill(cache, np.random.default_rng())
    without_nan(cache)
    kv.register(cache, instance="prefill" if kv.rank() == 0 else "decode")
    return cache


def not_accepted() -> str:
    with kv_group() as kv:
        cache = KVCache.empty(layouts_of(kv.rank()), NUM_PAGES, device="cpu")
        with pytest.raises(LayoutMismatch) as caught:
            kv.register(cache, instance="prefill" if kv.rank() == 0 else "decode")
        return str(caught.value)


def test_a_dtype_that_is_not_accepted_is_refused_on_all_ranks(four: Ranks) -> None:
    for message in four.run(not_accepted):
        assert "'k': dtype is torch.bfloat16 on rank 0 and torch.float8_e4m3fn on rank 1" in message
        assert "give the receiver's component accept=(torch.bfloat16,) if that is rank 1" in message


def forced_puts(path: str) -> tuple[str, str, str]:
    with kv_group(path=path, staging_recv=1 << 20) as kv:
        cache = registered(kv)
        before = page_bytes(cache, list(range(NUM_PAGES)))
        text, shown, why = "", "", ""
        if kv.rank() == 0:
            with pytest.raises(TransportUnavailable) as caught:
                kv.send_pages("r", [1, 2], 1)
            text, seen = str(caught.value), kv.explain(1)
            shown, why = seen.path, seen.why
        meet(kv)
        assert torch.equal(page_bytes(cache, list(range(NUM_PAGES))), before)
        return text, shown, why


@pytest.mark.parametrize("path", ["runs", "slices"])
def test_puts_cannot_be_forced(path: str, four: Ranks) -> None:
    text, shown, why = four.run(forced_puts, path)[0]
    assert f"path '{path}' to rank 1" in text
    assert "converted to another dtype" in text
    assert "force 'direct' or 'staged'" in text
    assert (shown, why) == ("none", text)


def required_puts() -> None:
    words = r"path 'runs' to rank \d: it puts bytes as they are"
    with kv_group(require="runs") as kv, pytest.raises(TransportUnavailable, match=words):
        registered(kv)


def test_required_puts_are_refused_at_register(four: Ranks) -> None:
    four.run(required_puts)


def without_a_ring() -> None:
    with kv_group(staging_recv=0) as kv:
        registered(kv)
        if kv.rank() == 1:
            rx = kv.recv_pages("r", [1], 0)
        meet(kv)
        if kv.rank() == 0:
            with pytest.raises(TransportUnavailable, match="no staging ring; pages that are converted"):
                kv.send_pages("r", [1], 1).wait(30)
            kv.cancel("r").wait(30)
        meet(kv)
        if kv.rank() == 1:
            with pytest.raises(KVError):
                rx.wait(30)


def test_without_a_ring_there_is_no_path_over_a_network(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **TCP).run(without_a_ring)


def in_a_ring_too_small() -> None:
    with kv_group(staging_recv=100) as kv:
        registered(kv)
        rx = kv.recv_pages("r", [1], 0) if kv.rank() == 1 else None
        meet(kv)
        if kv.rank() == 0:
            with pytest.raises(RingExhausted, match=r"one page of a layer takes 512 bytes .*rank 1 has 100"):
                kv.send_pages("r", [1], 1).wait(30)
            kv.cancel("r").wait(30)
        elif rx is not None:
            with pytest.raises(KVError):
                rx.wait(30)


def test_a_ring_too_small_is_an_error_and_no_put(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **TCP).run(in_a_ring_too_small)


def the_other_way() -> None:
    """Decode has pages that prefill does not accept."""
    with kv_group() as kv:
        registered(kv)
        text = r"component 'k' is torch.float8_e4m3fn on the sender.*accept=\(torch.float8_e4m3fn,\)"
        if kv.rank() == 0:
            with pytest.raises(LayoutMismatch, match=text):
                kv.recv_pages("r", [1], 1)
        else:
            with pytest.raises(LayoutMismatch, match=text):
                kv.send_pages("r", [1], 0)
            with pytest.raises(LayoutMismatch, match=text):
                kv.finish("r", 0)
            assert "accept=(torch.float8_e4m3fn,)" in kv.explain(0).why


def test_pages_that_are_not_accepted_do_not_go(four: Ranks) -> None:
    four.run(the_other_way)


def explained() -> tuple[str, str]:
    with kv_group() as kv:
        registered(kv)
        seen = kv.explain(1) if kv.rank() == 0 else None
        return ("", "") if seen is None else (seen.path, seen.why)


def test_explain_says_why_puts_are_not_offered(shared_ranks: Callable[..., Ranks]) -> None:
    path, why = shared_ranks("hosts", 4, **TCP).run(explained)[0]
    assert path == "staged"
    assert "converted to another dtype, which puts cannot do (runs, slices)" in why
    assert shared_ranks("four", 4).run(explained)[0] == ("direct", "")


# ---------------------------------------------------------------------- beside others


def both_kinds_of_requests() -> None:
    """Ranks 1 and 2 hold fp8: between them pages are copied; from rank 0 they are converted."""
    with kv_group() as kv:
        layout = layouts_of(kv.rank(), BF16)
        cache = KVCache.empty(
            layout, NUM_PAGES, device="cpu", scales=None if kv.rank() == 0 else {"k": 0.5, "v": [1, 2]}
        )
        random_fill(cache, np.random.default_rng(kv.rank()))
        without_nan(cache)
        kv.register(cache, instance=f"instance-{kv.rank()}")
        if kv.rank() == 0:
            kv.send_pages("r", [1, 2], 1)
            kv.finish("r", 1).wait(30)
        elif kv.rank() == 1:
            rx = kv.recv_pages("r", [5, 3], 0)
            rx.wait(30)
            assert rx.bytes == 2 * 2 * 2 * 16 * 2 * 8
            kv.send_pages("on", [5, 3], 2)
            kv.finish("on", 2).wait(30)
        elif kv.rank() == 2:
            kv.recv_pages("on", [4, 9], 1).wait(30)
        everyone: list[Any] = [None] * kv.size()
        dist.all_gather_object(everyone, [cache.k[0].float(), cache.v[1].float()], group=kv)
        if kv.rank() in (1, 2):
            pages = [5, 3] if kv.rank() == 1 else [4, 9]
            for ours, theirs, scale in zip((cache.k[0], cache.v[1]), everyone[0], (0.5, 2.0), strict=True):
                expected = convert(theirs[[1, 2]].to(BF16), FP8, scale)
                assert torch.equal(ours.view(torch.uint8)[pages], expected.view(torch.uint8))


def test_requests_that_convert_and_others_share_a_group(four: Ranks) -> None:
    four.run(both_kinds_of_requests)


def layer_groups() -> None:
    """Each layer group has a page list, and scales, of its own."""
    groups = {"full": [0], "sliding": [1]}
    scales = {"k.full": 0.5, "v.full": [0.25], "k.sliding": [[2.0, 4.0]], "v.sliding": 1.0}
    with kv_group() as kv:
        writes = kv.rank() == 0
        layout = layouts_of(kv.rank(), BF16, groups=groups)
        cache = KVCache.empty(layout, NUM_PAGES, device="cpu", scales=None if writes else scales)
        random_fill(cache, np.random.default_rng(kv.rank()))
        without_nan(cache)
        kv.register(cache, instance="prefill" if writes else f"decode-{kv.rank()}")
        names = ["k.full", "v.full", "k.sliding", "v.sliding"]
        held = [next(tensor for tensor in cache[name] if tensor is not None) for name in names]
        if writes:
            kv.send_pages("r", {"full": [1, 2], "sliding": [7, 8]}, 1)
            kv.finish("r", 1).wait(30)
        elif kv.rank() == 1:
            kv.recv_pages("r", {"full": [5, 3], "sliding": [4, 9]}, 0).wait(30)
        everyone: list[Any] = [None] * kv.size()
        dist.all_gather_object(everyone, [tensor.float() for tensor in held], group=kv)
        if kv.rank() == 1:
            factors = [0.5, 0.25, torch.tensor([2.0, 4.0])[:, None], 1.0]
            for name, ours, theirs, scale in zip(names, held, everyone[0], factors, strict=True):
                src, dst = ([1, 2], [5, 3]) if name.endswith("full") else ([7, 8], [4, 9])
                expected = convert(theirs[src].to(BF16), FP8, scale)
                assert torch.equal(ours.view(torch.uint8)[dst], expected.view(torch.uint8)), name


def test_layer_groups_have_their_pages_and_scales(four: Ranks) -> None:
    four.run(layer_groups)


def joined(name: str, dtype: torch.dtype, *accept: torch.dtype, **scales: float) -> KVMember:
    options = Options(timeout=5.0, grant_timeout=10.0, staging_send=1 << 20, staging_recv=1 << 20)
    cache = KVCache.empty(small_layout(dtype=dtype, accept=accept), NUM_PAGES, device="cpu", scales=scales or None)
    for tensor in (*cache.k, *cache.v):
        assert tensor is not None
        tensor.copy_(torch.randn(tensor.shape))
    return join(cache, name, options=options)


def test_instances_that_join_are_told_the_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, str(new_secret_file(tmp_path / "secret")))
    with joined("p", BF16) as p, joined("d", FP8, BF16, k=0.5, v=0.25) as d, joined("strict", FP8) as strict:
        assert d.connect(p.address).result(20) == "p"
        rx = d.recv_pages("r", [1, 2], "p")
        p.send_pages("r", [3, 4], None)
        p.finish("r", None).wait(20)
        rx.wait(20)
        source, target = p._verbs.cache, d._verbs.cache
        assert source is not None
        assert target is not None
        for name, scale in (("k", 0.5), ("v", 0.25)):
            for theirs, ours in zip(source[name], target[name], strict=True):
                assert theirs is not None
                assert ours is not None
                expected = convert(theirs[[3, 4]], FP8, scale)
                assert torch.equal(ours[[1, 2]].view(torch.uint8), expected.view(torch.uint8))
        with pytest.raises(LayoutMismatch, match=r"accept=\(torch.bfloat16,\)"):
            strict.connect(p.address).result(20)
