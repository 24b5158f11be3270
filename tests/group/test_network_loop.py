"""Requests that the resident loop puts through the network: pages that no peer has mapped, over TCP.

On one host the loops share mailboxes; "apart" they do not, as on two hosts, so records go through the network, too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.loop_ways import READER, WAYS, WRITER, acquaint, note_sends
from tests.helpers.ranks.small_cache import check_transfer, meet, page_bytes, random_cache
from torchkv import KVCache, KVProcessGroup, TransferCancelled
from torchkv.core.loop.limits import MAX_GRANTED
from torchkv.engine.joining.registration import Registration
from torchkv.engine.resident import routes
from torchkv.engine.resident.notices import Notices
from torchkv.protocol.receiving.posts import Posts

WIDE = {"num_kv_heads": 8, "head_dim": 64}  # pages of 16 KiB
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture(params=[False, True], ids=["one host", "apart"])
def apart(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Loop:
    """What this rank's loop was given, which stages nothing. apart: see above."""

    def __init__(self, apart: bool) -> None:
        self.sends: list[bool] = []  # whether each went through the network
        self._apart = apart

    def __enter__(self) -> Loop:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(routes, "MAX_STAGED_RUN", 0)
        if self._apart:
            self._patch.setattr(Registration, "_connect_loop", lambda registration, metadata: None)
        note_sends(self._patch, lambda way: self.sends.append(way.network))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


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
            # One that begins with a stage is Python's, unless who asked for the prefix bound it on the loop.
            assert loop.sends == [True] or (way == "staged first" and loop.sends == [])
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
                kv.send_pages("r", pages, READER)  # and finishes it too late: it cannot succeed before it is cancelled
                if by_reader:
                    meet(kv)
                    with pytest.raises(TransferCancelled):  # of finish itself, if that is known here already
                        kv.finish("r", READER).wait(30)
                kv.cancel("r").wait(30)
            else:
                rx = kv.recv_pages("r", pages, WRITER)
                meet(kv)
                if by_reader:
                    rx.wait_layer(0, 30)
                    kv.cancel("r").wait(30)
                    meet(kv)
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


# ---------------------------------------------------------------- grants of loops that have no mailboxes


class Grants:
    """How grants have travelled. told: by this rank, in messages. bound: by its loop, without Python."""

    def __init__(self) -> None:
        self.told = self.bound = 0

    def __enter__(self) -> Grants:
        self._real = Posts.tell_grant, Notices._on_bound
        tell, bind = self._real

        def tell_grant(posts: Posts, req: Any, ranks: Any, **how: Any) -> None:
            self.told += len(ranks := list(ranks))
            tell(posts, req, ranks, **how)

        def on_bound(notices: Notices, flow: int, now: float) -> None:
            self.bound += 1
            bind(notices, flow, now)

        Posts.tell_grant, Notices._on_bound = tell_grant, on_bound
        return self

    def __exit__(self, *_: object) -> None:
        Posts.tell_grant, Notices._on_bound = self._real


def exchange(kv: KVProcessGroup, cache: KVCache, name: str, pages: int, *, writer_first: bool, **how: Any) -> None:
    """A request whose writer, or whose reader, is first by far."""
    last = cache.num_pages - 1
    sent, received = list(range(pages)), [last - page for page in range(pages)]
    if (kv.rank() == WRITER) != writer_first:
        meet(kv)
    if kv.rank() == WRITER:
        kv.send_pages(name, sent, how.get("dst", READER))
        done = kv.finish(name, how.get("dst", READER), aux=name[:200].encode())
    else:
        done = kv.recv_pages(name, received, WRITER, prefix_tokens=how.get("prefix", 0))
    if (kv.rank() == WRITER) == writer_first:
        meet(kv)
    done.wait(30)
    check_bytes(kv, cache, sent, received)


def granted_by_loops() -> None:
    """No message tells of a grant, however long its name, and however many its pages."""
    with Loop(True), kv_group() as kv, Grants() as grants:
        cache = random_cache(num_pages=1100, unmapped=True, num_kv_heads=4, head_dim=64)
        kv.register(cache)
        acquaint(kv, WRITER, READER)
        grants.told = grants.bound = 0
        for pages in (1, 111, 112, 113, 1100):
            for writer_first in (True, False):
                exchange(kv, cache, f"{pages}", pages, writer_first=writer_first)
        exchange(kv, cache, "n" * 1024, 3, writer_first=True)
        assert grants.told == 0
        assert grants.bound >= (6 if kv.rank() == WRITER else 0)
        # Python binds these, as the loop shows them to it.
        exchange(kv, cache, "to anybody", 3, writer_first=True, dst=None)
        exchange(kv, cache, "to anybody, late", 3, writer_first=False, dst=None)
        exchange(kv, cache, "behind a prefix", 3, writer_first=True, prefix=32)
        exchange(kv, cache, "behind a prefix, late", 3, writer_first=False, prefix=32)
        assert grants.told == 0
        meet(kv)


def test_loops_grant_through_the_network(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(granted_by_loops)


def granted_in_pieces() -> None:
    """UCX carries more than a record in several pieces: grants that are missed are told in messages."""
    with Loop(True), kv_group() as kv:
        cache = random_cache(num_pages=32, unmapped=True, **WIDE)
        kv.register(cache)
        for number in range(8):
            for writer_first in (True, False):
                exchange(kv, cache, f"{number}", 4, writer_first=writer_first)
        meet(kv)


def test_a_network_that_carries_no_grant_in_one_piece(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp in pieces", 2, env={**TCP, "UCX_TCP_TX_SEG_SIZE": "1k", "UCX_ZCOPY_THRESH": "inf"}).run(
        granted_in_pieces
    )


def too_large_for_the_loop() -> None:
    """More pages than a slot has: in a message, and what comes next by the loop."""
    with Loop(True), kv_group() as kv, Grants() as grants:
        cache = random_cache(num_pages=MAX_GRANTED + 1, unmapped=True, num_layers=1, num_kv_heads=2, head_dim=64)
        kv.register(cache)
        acquaint(kv, WRITER, READER)
        grants.told = 0
        exchange(kv, cache, "large", MAX_GRANTED + 1, writer_first=True)
        assert grants.told == int(kv.rank() == READER)
        exchange(kv, cache, "largest", MAX_GRANTED, writer_first=True)
        assert grants.told == int(kv.rank() == READER)
        meet(kv)


def test_grants_that_are_too_large_for_the_loop(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(too_large_for_the_loop)


def given_up_at_once(seed: int) -> None:
    """Readers, or writers, cancel while grants travel: messages overtake them. Each name is used again."""
    dice = random.Random(seed)
    with Loop(True), kv_group() as kv:
        cache = random_cache(num_pages=64, unmapped=True, **WIDE)
        kv.register(cache)
        acquaint(kv, WRITER, READER)
        for number in range(60):
            name, pages = f"r{number % 7}", dice.randint(1, 40)
            by_reader, both = dice.random() < 0.6, dice.random() < 0.5
            with suppress(TransferCancelled):  # unless everything is there before
                if kv.rank() == WRITER:
                    kv.send_pages(name, list(range(pages)), READER)
                    done = kv.finish(name, READER)
                else:
                    done = kv.recv_pages(name, list(range(pages)), WRITER)
                if by_reader == (kv.rank() == READER):
                    kv.cancel(name).wait(30)
                done.wait(30)
            kv.cancel(name).wait(30)
            if both:
                meet(kv)
                check_transfer(kv, WRITER, READER, request=f"after {number}")
            meet(kv)
            assert kv.quarantined() == {}


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_given_up_at_once(seed: int, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("tcp", 2, env=TCP).run(given_up_at_once, seed)
