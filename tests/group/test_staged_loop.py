"""Requests of short runs between processes that share nothing but TCP: the resident loops stage them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_group, kv_world
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.loop_ways import note_sends
from tests.helpers.ranks.small_cache import meet
from torchkv import KVCache, KVError, KVLayout, KVProcessGroup, KVWork, TransferCancelled
from torchkv.engine.engine import Engine
from torchkv.engine.resident import routes
from torchkv.engine.resident.standing_stages import StandingStages

HOSTS = {"env": {"UCX_TLS": "tcp"}, "apart": True}
PAGES, TOKENS, POISON = 24, 128, -77
W0, W1, R0, R1 = range(4)


def layout(tp_rank: int = 0, tp_size: int = 1, page_size: int = 16, order: Any = "NHD", **more: Any) -> KVLayout:
    sizes: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 8, "head_dim": 64, "v_head_dim": 32} | more
    return KVLayout.gqa(**sizes, page_size=page_size, dtype=torch.int16, order=order, tp_rank=tp_rank, tp_size=tp_size)


CASES = {
    "2 of 8 heads": {W0: layout(), R0: layout(1, 4), R1: layout(3, 4)},
    "8 of 2 heads": {W0: layout(0, 2), W1: layout(1, 2), R0: layout()},
    "larger pages there": {W0: layout(), R0: layout(0, 2, 32), R1: layout(1, 2, 64)},
    "larger pages here": {W0: layout(0, 2, 64), W1: layout(1, 2, 64), R0: layout()},
    "unlike orders": {
        W0: layout(order="HND"),
        W1: layout(order="HND"),
        R0: layout(0, 2),
        R1: layout(1, 2),
    },
}


class Staged:
    """What this rank's loop was given: whether each send was staged."""

    sends: list[bool]


@contextmanager
def noted() -> Iterator[None]:
    """Notes in `Staged` what the loop is given."""
    Staged.sends = []

    with pytest.MonkeyPatch.context() as patch:
        note_sends(patch, lambda way: Staged.sends.append(bool(way._record["staged"][0])))
        yield


def cache_of(held: KVLayout, num_pages: int = PAGES) -> KVCache:
    tensors = {
        name: [torch.empty((num_pages, *held.page_shape(name)), dtype=torch.int16) for _ in held.layers]
        for name in "kv"
    }
    return KVCache(held, tensors)


def tokens_of(cache: KVCache, name: str, number: int, pages: list[int]) -> torch.Tensor:
    """``[tokens, heads, dim]`` of some pages of a layer."""
    held = cache[name][number][pages]
    held = held.transpose(1, 2) if cache.layout.order == "HND" else held
    return held.reshape(-1, *held.shape[2:])


def picked(dice: np.random.Generator, held: KVLayout) -> list[int]:
    return [int(page) for page in dice.permutation(PAGES)[: TOKENS // held.page_size]]


def request(kv: KVProcessGroup, cache: KVCache | None, layouts: dict[int, KVLayout], name: str, by_layer: bool) -> str:
    """Fresh bytes into poisoned pages, which are compared token by token; on a reader, the path."""
    rank, dice = kv.rank(), np.random.default_rng()
    source: dict[tuple[str, int], torch.Tensor] = {}
    path, mine = "", []
    if rank in (R0, R1) and cache is not None:
        for tensor in (*cache["k"], *cache["v"]):
            tensor.fill_(POISON)
        mine = picked(dice, layouts[rank])
        rx = kv.recv_pages(name, mine, "prefill")
        rx.wait(30)
        path = rx.path
    elif cache is not None:
        random_fill(cache, dice)
        mine = picked(dice, layouts[rank])
        works: list[KVWork] = []
        if by_layer:
            works = [kv.send_slice(name, layer, mine, "decode") for layer in cache.layout.layers]
        else:
            works = [kv.send_pages(name, mine, "decode")]
        works.append(kv.finish(name, "decode"))
        for work in works:
            work.wait(30)
        layers = range(len(cache.layout.layers))
        source = {(part, layer): tokens_of(cache, part, layer, mine).clone() for part in "kv" for layer in layers}
    everyone: list[Any] = [None] * kv.size()
    dist.all_gather_object(everyone, source, group=kv)
    if rank in (R0, R1) and cache is not None:
        check(cache, mine, layouts, everyone)
    return path


def check(cache: KVCache, mine: list[int], layouts: dict[int, KVLayout], sources: list[Any]) -> None:
    heads = cache.layout.heads
    others = [page for page in range(PAGES) if page not in mine]
    for part in "kv":
        for layer in range(len(cache.layout.layers)):
            found = tokens_of(cache, part, layer, mine)
            for writer in (W0, W1):
                if writer not in layouts:
                    continue
                held = layouts[writer].heads
                both = [head for head in heads if head in held]
                expected = sources[writer][part, layer][:, [head - held[0] for head in both]]
                at = [head - heads[0] for head in both]
                if sources[W1] and layouts[W0].heads == layouts.get(W1, layouts[W0]).heads:
                    other = sources[1 - writer][part, layer][:, [head - held[0] for head in both]]
                    assert ((found[:, at] == expected) | (found[:, at] == other)).all()  # holders take turns
                else:
                    assert torch.equal(found[:, at], expected)
            assert (cache[part][layer][others] == POISON).all()


def requests(name: str) -> None:
    """The first ones meet no standing stage yet; then all are staged by the loops."""
    layouts = CASES[name]
    with noted(), kv_group() as kv:
        rank = kv.rank()
        cache = cache_of(layouts[rank]) if rank in layouts else None
        instance = None if cache is None else "prefill" if rank in (W0, W1) else "decode"
        kv.register(cache, instance=instance)
        ready = 0
        for number in range(60):
            before = len(Staged.sends)
            path = request(kv, cache, layouts, f"r{number}", number % 2 == 1)
            now = Staged.sends[before:]
            mine = cache is None or (path == "staged" if rank in (R0, R1) else bool(now) and all(now))
            everyone: list[Any] = [None] * kv.size()
            dist.all_gather_object(everyone, mine, group=kv)
            ready = ready + 1 if all(everyone) else 0
            if ready == 6:
                break
        assert ready == 6, (rank, Staged.sends)
        meet(kv)


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **HOSTS).run(requests, name)


MIDDLE = {"order": "HND", "head_dim": 128, "v_head_dim": 128}  # runs of 4 KiB a head
MIDDLES = {W0: layout(**MIDDLE), R0: layout(1, 4, **MIDDLE), R1: layout(3, 4, **MIDDLE)}


def runs_of_middle_length(packed: bool) -> None:
    """The writer alone decides by cost whether they are staged; its readers take both. Until there is a stage, it puts.

    packed: whether packing costs less.
    """
    with noted(), kv_group() as kv, pytest.MonkeyPatch.context() as patch:
        rank = kv.rank()
        if rank == W0:
            patch.setattr(routes, "is_cheaper_packed", lambda plan, costs: packed)
        else:
            patch.setattr(routes, "is_cheaper_packed", lambda plan, costs: not packed)
        cache = cache_of(MIDDLES[rank]) if rank in MIDDLES else None
        kv.register(cache, instance=None if cache is None else "prefill" if rank == W0 else "decode")
        meet(kv)
        ready = 0
        for number in range(60):
            before = len(Staged.sends)
            path = request(kv, cache, MIDDLES, f"r{number}", number % 2 == 1)
            everyone: list[Any] = [None] * kv.size()
            dist.all_gather_object(everyone, (Staged.sends[before:], path), group=kv)
            sends = everyone[W0][0]
            assert packed or not any(sends)
            if len(set(sends)) == 1 and len(sends) == 2:  # both by the loop, in one way
                assert {everyone[reader][1] for reader in (R0, R1)} == {"staged" if sends[0] else "slices"}
                ready += sends[0] == packed
            if ready == 6:
                break
        assert ready == 6, Staged.sends
        if rank == W0:
            assert kv.explain(R0).path == ("staged" if packed else "slices")
        meet(kv)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "put"])
def test_runs_of_middle_length(packed: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **HOSTS).run(runs_of_middle_length, packed)


def knows(engine: Engine, request: str) -> bool:
    """Whether Python knows the grant."""
    with engine.lock:
        engine.catch_up()
        return engine.sender.grants.waiting(request, R0) is not None


def to_one_rank() -> None:
    """A call whose destination is a number goes a straight way, which must not keep the route that puts."""
    with noted(), kv_group() as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "is_cheaper_packed", lambda plan, costs: True)
        real = StandingStages.to
        patch.setattr(StandingStages, "to", lambda stages, *way: real(stages, *way) if len(Staged.sends) > 5 else 0)
        kv.register(cache_of(MIDDLES[kv.rank()]) if kv.rank() in (W0, R0) else None)
        for number in range(20):
            name, rx = f"r{number}", kv.recv_pages(f"r{number}", [3, 4], W0) if kv.rank() == R0 else None
            meet(kv)
            if rx is not None:
                rx.wait(30)
            elif kv.rank() == W0:
                assert kv._verbs is not None
                engine = kv._verbs.engine
                while not knows(engine, name):  # else the general way would wait for it
                    time.sleep(1e-3)
                kv.send_pages(name, [1, 2], R0)
                kv.finish(name, R0).wait(30)
        assert kv.rank() != W0 or Staged.sends == [False] * 6 + [True] * 14
        meet(kv)


def test_a_route_that_puts_becomes_one_that_stages(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **HOSTS).run(to_one_rank)


BIG = {"num_layers": 16, "head_dim": 128, "v_head_dim": 128}
LAYOUTS = {W0: layout(**BIG), R0: layout(1, 4, **BIG)}


def big_cache(kv: KVProcessGroup) -> KVCache | None:
    if kv.rank() not in LAYOUTS:
        kv.register(None)
        return None
    cache = cache_of(LAYOUTS[kv.rank()], 256)
    random_fill(cache, np.random.default_rng())
    kv.register(cache, instance="prefill" if kv.rank() == W0 else "decode")
    return cache


def warm(kv: KVProcessGroup) -> None:
    """Until the loop stages."""
    for number in range(60):
        before = len(Staged.sends)
        if kv.rank() == W0:
            kv.send_pages(f"w{number}", [1, 2], R0)
            kv.finish(f"w{number}", R0).wait(30)
        elif kv.rank() == R0:
            kv.recv_pages(f"w{number}", [3, 4], W0).wait(30)
        everyone: list[Any] = [None] * kv.size()
        dist.all_gather_object(everyone, any(Staged.sends[before:]), group=kv)
        if everyone[W0]:
            return
    raise AssertionError("nothing was staged by the loop")


def cancelled(by_reader: bool) -> None:
    """Amid pieces: pages come back once nothing can be written to them, and later requests have their own bytes."""
    pages = list(range(256))
    with noted(), kv_group() as kv:
        cache = big_cache(kv)
        warm(kv)
        for turn in range(4):
            if kv.rank() == W0:
                meet(kv)
                kv.send_pages("r", pages, R0)  # and finishes it too late: it cannot succeed before it is cancelled
                if by_reader:
                    meet(kv)
                    with pytest.raises(TransferCancelled):  # of finish itself, if that is known here already
                        kv.finish("r", R0).wait(30)
                else:
                    time.sleep(0.003 * turn)
                kv.cancel("r").wait(30)
            elif kv.rank() == R0:
                assert cache is not None
                rx = kv.recv_pages("r", pages, W0)
                meet(kv)
                if by_reader:
                    rx.wait_layer(0, 30)
                    kv.cancel("r").wait(30)
                    meet(kv)
                with pytest.raises(TransferCancelled):
                    rx.wait(30)
                kv.cancel("r").wait(30)
                assert kv.quarantined() == {}
                for tensor in (*cache["k"], *cache["v"]):
                    tensor.fill_(POISON)
            else:
                meet(kv)
                if by_reader:
                    meet(kv)
            meet(kv)
            exchanged(kv, cache, f"after {turn}")


def exchanged(kv: KVProcessGroup, cache: KVCache | None, name: str) -> None:
    """A request of half of the pages; the other half stays as it is."""
    source = None
    if kv.rank() == W0:
        assert cache is not None
        random_fill(cache, np.random.default_rng())
        pages = [int(page) for page in np.random.default_rng().permutation(256)[:128]]
        kv.send_pages(name, pages, R0)
        kv.finish(name, R0).wait(30)
        source = [cache[part][layer][pages][:, :, 2:4].clone() for part in "kv" for layer in range(16)]
    elif kv.rank() == R0:
        kv.recv_pages(name, list(range(0, 256, 2)), W0).wait(30)
    everyone: list[Any] = [None] * kv.size()
    dist.all_gather_object(everyone, source, group=kv)
    if kv.rank() == R0:
        assert cache is not None
        found = [cache[part][layer] for part in "kv" for layer in range(16)]
        for ours, theirs in zip(found, everyone[W0], strict=True):
            assert torch.equal(ours[0::2], theirs)
            assert (ours[1::2] == POISON).all()


@pytest.mark.parametrize("by_reader", [True, False], ids=["by the reader", "by the writer"])
def test_cancelled(by_reader: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("hosts", 4, **HOSTS).run(cancelled, by_reader)


def begin_to_be_killed() -> None:
    """The writer sends for long; it is killed amid pieces."""
    kv = kv_world()
    with noted():
        big_cache(kv)
        warm(kv)
        if kv.rank() == W0:
            ask("ready")
            while True:
                kv.send_pages("r", list(range(256)), R0)
                time.sleep(1e-3)
        elif kv.rank() == R0:
            rx = kv.recv_pages("r", list(range(256)), W0)
            ask("ready")
            with pytest.raises(KVError):
                rx.wait(30)
            kv.cancel("r").wait(30)
            assert kv.quarantined() == {}


@pytest.mark.parametrize("milliseconds", [0, 5, 20])
def test_a_writer_that_is_killed(milliseconds: int) -> None:
    """Its death is seen: pages are free, and everybody's calls end."""
    ranks = Ranks(3, **HOSTS)
    try:
        ranks.start(begin_to_be_killed)
        for rank in (R0, W0):
            ranks.hear(rank)
            ranks.tell(rank)
        time.sleep(milliseconds / 1000 + secrets.randbelow(1000) / 1e6)
        ranks.kill(W0)
        ranks.join([R0])
    finally:
        ranks.close()
