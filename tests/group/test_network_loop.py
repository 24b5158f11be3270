"""Requests that the resident loop puts through the network: pages that no peer has mapped, over TCP.

On one host the loops share mailboxes; "apart" they do not, as on two hosts, so records go through the network, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.loop_ways import READER, WAYS, WRITER
from tests.helpers.ranks.small_cache import check_transfer, meet, page_bytes, random_cache
from torchkv import KVCache, KVProcessGroup, TransferCancelled
from torchkv.core.core import Core
from torchkv.engine.joining.registration import Registration

WIDE = {"num_kv_heads": 8, "head_dim": 64}  # pages of 16 KiB
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture(params=[False, True], ids=["one host", "apart"])
def apart(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Loop:
    """What this rank's loop was given. apart: see above."""

    def __init__(self, apart: bool) -> None:
        self.sends: list[bool] = []  # whether each went through the network
        self._apart = apart

    def __enter__(self) -> Loop:
        self._real = Registration._connect_loop, Core.open_send, Core.wait_for_grant
        if self._apart:
            Registration._connect_loop = lambda registration, metadata: None
        for name in ("open_send", "wait_for_grant"):
            setattr(Core, name, self._noting(getattr(Core, name)))
        return self

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(core: Core, **given: Any) -> Any:
            self.sends.append(given["network"])
            return real(core, **given)

        return call

    def __exit__(self, *_: object) -> None:
        Registration._connect_loop, Core.open_send, Core.wait_for_grant = self._real


def check_bytes(kv: KVProcessGroup, cache: KVCache, sent: list[int], received: list[int]) -> None:
    if kv.rank() == WRITER:
        torch.distributed.send(page_bytes(cache, sent), READER, group=kv)
        return
    expected = torch.empty_like(page_bytes(cache, received))
    torch.distributed.recv(expected, WRITER, group=kv)
    assert torch.equal(page_bytes(cache, received), expected)


def one_request(way: str, aux_nbytes: int, apart: bool) -> None:
    aux = bytes(range(256)) * 2
    with Loop(apart) as loop, kv_group() as kv:
        cache = random_cache(unmapped=True, **WIDE)
        kv.register(cache)
        if kv.rank() == WRITER:
            meet(kv)
            kv.prefix_tokens("r", READER)
            works = [*WAYS[way](kv), kv.finish("r", READER, aux=aux[:aux_nbytes])]
            for work in works:
                work.wait(30)
            assert sum(work.bytes for work in works) >= 3 * 2 * 2 * cache.layout.page_nbytes("k")
            # One that begins with a stage is Python's.
            assert loop.sends == ([] if way == "staged first" else [True])
        else:
            rx = kv.recv_pages("r", [7, 4, 9], WRITER)
            meet(kv)
            for layer in (1, 0):
                rx.wait_layer(layer, 30)
            rx.wait(30)
            assert rx.aux == aux[:aux_nbytes]
        check_bytes(kv, cache, [1, 2, 3], [7, 4, 9])
        meet(kv)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("aux_nbytes", [0, 100, 300])
def test_a_request(way: str, aux_nbytes: int, apart: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(one_request, way, aux_nbytes, apart)


def verbs_before_the_grant(apart: bool) -> None:
    with Loop(apart) as loop, kv_group() as kv:
        cache = random_cache(unmapped=True, **WIDE)
        kv.register(cache)
        if kv.rank() == WRITER:
            works = [kv.send_layer("r", layer, [1, 2, 3], READER) for layer in (0, 1)]
            works.append(kv.finish("r", READER))
            meet(kv)
            for work in works:
                work.wait(30)
            assert loop.sends == [True]
        else:
            meet(kv)
            kv.recv_pages("r", [7, 4, 9], WRITER).wait(30)
        check_bytes(kv, cache, [1, 2, 3], [7, 4, 9])
        meet(kv)


def test_verbs_before_the_grant(apart: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(verbs_before_the_grant, apart)


def many(apart: bool, count: int) -> None:
    """As many requests at once as there are pages, twice over, from several threads, both ways."""
    with Loop(apart) as loop, kv_group() as kv:
        kv.register(random_cache(num_pages=2 * count, unmapped=True, **WIDE))
        peer, problems = 1 - kv.rank(), []

        def serve(number: int) -> None:
            try:
                for life in range(2):
                    name = f"{number}"
                    rx = kv.recv_pages(f"{name} to {kv.rank()}", [number], peer)
                    kv.send_pages(f"{name} to {peer}", [count + number], peer)
                    kv.finish(f"{name} to {peer}", peer, aux=bytes([life])).wait(60)
                    rx.wait(60)
                    assert rx.aux == bytes([life])
            except BaseException as error:  # noqa: BLE001 - told below
                problems.append(repr(error))

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems[:3]
        assert loop.sends.count(True) > count, loop.sends  # Python takes those whose grant came at a bad moment
        check_transfer(kv, WRITER, READER)
        meet(kv)


def test_many_at_once(apart: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(many, apart, 24)


def cancelled(apart: bool, by_reader: bool) -> None:
    """In the middle of 64 MiB: pages come back once nothing can land, and the next request finds them."""
    with Loop(apart), kv_group() as kv:
        pages = list(range(64))
        cache = random_cache(num_pages=64, unmapped=True, num_layers=8, num_kv_heads=8, head_dim=256)
        kv.register(cache)
        for _ in range(3):
            if kv.rank() == WRITER:
                meet(kv)
                kv.send_pages("r", pages, READER)
                done = kv.finish("r", READER)
                if not by_reader:
                    kv.cancel("r").wait(30)
                with pytest.raises(TransferCancelled):
                    done.wait(30)
                kv.cancel("r").wait(30)
            else:
                rx = kv.recv_pages("r", pages, WRITER)
                meet(kv)
                if by_reader:
                    rx.wait_layer(0, 30)
                    kv.cancel("r").wait(30)
                with pytest.raises(TransferCancelled):
                    rx.wait(30)
                kv.cancel("r").wait(30)
                assert kv.quarantined() == {}
            meet(kv)
            check_transfer(kv, WRITER, READER)
            meet(kv)


@pytest.mark.parametrize("by_reader", [True, False], ids=["by the reader", "by the writer"])
def test_cancelled(by_reader: bool, apart: bool, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(cancelled, apart, by_reader)
