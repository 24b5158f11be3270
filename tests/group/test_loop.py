"""Requests on the resident loop, beside it, and on both: the caller must not see a difference."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.loop_ways import READER, WAYS, WRITER
from tests.helpers.ranks.small_cache import NUM_PAGES, check_transfer, meet, page_bytes, random_cache
from tests.helpers.waiting import until
from torchkv import KVCache, KVError, KVProcessGroup, KVWork, PageOutOfRange, ProtocolError
from torchkv.engine.joining.registration import Registration
from torchkv.engine.resident.flows import Flows
from torchkv.group.reports.snapshot import stats


def without_a_loop(on: int | None) -> None:
    """Ranks without one, or one of the two, talk through Python."""
    real = Registration._make_core
    try:
        with kv_group() as kv:
            if on in (None, kv.rank()):
                Registration._make_core = lambda self: None
            kv.register(random_cache())
            assert (kv._verbs.engine.flows is None) == (on in (None, kv.rank()))
            check_transfer(kv, WRITER, READER)
            check_transfer(kv, READER, WRITER)
            meet(kv)
    finally:
        Registration._make_core = real


@pytest.mark.parametrize("on", [None, WRITER, READER], ids=["neither", "not the writer", "not the reader"])
def test_without_a_loop(on: int | None, shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2).run(without_a_loop, on)


def one_request(way: str, aux_nbytes: int, waits: str, taken_back: bool | None, python: bool | None = None) -> None:
    """taken_back: whether the loop has the request first, and python: whether Python serves it in the end.

    The loop has it before its first verb, if who asks for the prefix meets the grant before Python's thread does: None.
    """
    aux = bytes(range(256)) * (aux_nbytes // 256 + 1)
    aux = aux[:aux_nbytes]
    backs: list[object] = []
    real = Flows.take_back_send
    Flows.take_back_send = lambda self, req: backs.append(req) or real(self, req)
    try:
        with kv_group() as kv:
            cache = random_cache()
            kv.register(cache)
            if kv.rank() == WRITER:
                meet(kv)
                if not taken_back:  # a grant that comes in the middle of the first verb takes a request back, too
                    kv.prefix_tokens("r", READER)
                works = WAYS[way](kv)
                done = kv.finish("r", READER, aux=aux)
                for work in [*works, done]:
                    wait(work, waits)
                assert sum(work.bytes for work in works) >= 3 * 2 * 2 * cache.layout.page_nbytes("k")
                assert taken_back is None or bool(backs) == taken_back
                # Callers give up the GIL soon if Python has to do something, and else are left alone.
                python = taken_back if python is None else python
                assert (sys.getswitchinterval() < 0.004) == (python or waits == "future")
                # And its thread lies in wait for verbs, which takes a part of a core, only if it serves them.
                assert kv._thread is not None
                assert (kv._thread._rest_until > 0) == python
                torch.distributed.send(page_bytes(cache, [1, 2, 3]), READER, group=kv)
            else:
                rx = kv.recv_pages("r", [7, 4, 9], WRITER)
                meet(kv)
                for layer in (1, 0):
                    rx.wait_layer(layer, 30)
                wait(rx, waits)
                assert rx.aux == aux
                expected = torch.empty_like(page_bytes(cache, [7, 4, 9]))
                torch.distributed.recv(expected, WRITER, group=kv)
                assert torch.equal(page_bytes(cache, [7, 4, 9]), expected)
            meet(kv)
    finally:
        Flows.take_back_send = real


def wait(work: KVWork, how: str) -> None:
    if how == "wait":
        work.wait(30)
        return
    done = threading.Event()
    work.get_future().then(lambda _: done.set())
    assert done.wait(30)
    assert work.is_success()


@pytest.mark.parametrize("waits", ["wait", "future"])
@pytest.mark.parametrize("way", WAYS)
def test_a_request(way: str, waits: str, shared_ranks: Callable[..., Ranks]) -> None:
    python = way in ("gated", "staged", "staged first")
    shared_ranks("two", 2).run(one_request, way, 100, waits, None if way == "staged first" else python, python)


WRONG: list[tuple[type[KVError], Callable[[KVProcessGroup], object]]] = [
    (PageOutOfRange, lambda kv: kv.send_layer("r", 0, np.array([1, 2, NUM_PAGES]), READER)),
    (PageOutOfRange, lambda kv: kv.send_layer("r", 0, [1, 2, -1], READER)),
    (PageOutOfRange, lambda kv: kv.send_layer("r", 0, np.array([1, 2, 3, 4]), READER)),  # only three are granted
    (PageOutOfRange, lambda kv: kv.send_layer("r", 0, np.array([1]), READER, start=3)),
    (ProtocolError, lambda kv: kv.send_layer("r", 0, np.array([1]), READER, start=-1)),
    (ProtocolError, lambda kv: kv.send_layer("r", 2, np.array([1]), READER)),
    (ProtocolError, lambda kv: kv.send_layer("r", True, np.array([1]), READER)),
    (ProtocolError, lambda kv: kv.send_layer("r", 0, [1.5], READER)),
    (ProtocolError, lambda kv: kv.send_layer("r", 0, np.array([[1]]), READER)),
    (ProtocolError, lambda kv: kv.send_layer(["r"], 0, np.array([1]), READER)),
    (ProtocolError, lambda kv: kv.send_layer("r", 0, np.array([1]), READER, event=3)),
]


def wrong_verbs() -> None:
    """Among verbs of a request on the loop: each is refused, and nothing is lost."""
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache)
        if kv.rank() == WRITER:
            meet(kv)
            kv.prefix_tokens("r", READER)
            pages = np.array([1, 2, 3])
            core = kv._verbs.engine.flows.core
            free = len(core.sends._free_ops)
            first = kv.send_layer("r", 0, pages, READER)
            for error, verb in WRONG:
                with pytest.raises(error):
                    verb(kv)
            assert kv._verbs.engine.sender.is_on_loop("r", READER)
            second = kv.send_layer("r", 1, pages, READER)
            kv.finish("r", READER).wait(30)
            assert first.is_success()
            assert second.is_success()
            assert len(core.sends._free_ops) == free
            torch.distributed.send(page_bytes(cache, [1, 2, 3]), READER, group=kv)
        else:
            rx = kv.recv_pages("r", [7, 4, 9], WRITER)
            meet(kv)
            rx.wait(30)
            expected = torch.empty_like(page_bytes(cache, [7, 4, 9]))
            torch.distributed.recv(expected, WRITER, group=kv)
            assert torch.equal(page_bytes(cache, [7, 4, 9]), expected)
        meet(kv)


def test_wrong_verbs_among_those_of_a_request(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2).run(wrong_verbs)


@contextmanager
def held_driver(kv: KVProcessGroup) -> Iterator[None]:
    """Python's own thread stands still inside."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(60)

    assert kv._thread is not None
    thread = threading.Thread(target=kv._thread.call, args=(hold,))
    thread.start()
    assert held.wait(30)
    try:
        yield
    finally:
        release.set()
        thread.join()


def without_pythons_thread(order: str) -> None:
    with kv_group() as kv:
        cache = random_cache()
        kv.register(cache)
        meet(kv)
        with held_driver(kv):
            meet(kv)
            if kv.rank() == WRITER:
                if order == "the grant first":
                    meet(kv)
                elif order == "asked for":
                    assert kv.prefix_tokens("r", READER) == 0
                works = [*WAYS["layers"](kv), kv.finish("r", READER, aux=b"aux")]
                if order == "the verbs first":
                    meet(kv)
                for work in works:
                    work.wait(30)
                torch.distributed.send(page_bytes(cache, [1, 2, 3]), READER, group=kv)
            else:
                if order == "the verbs first":
                    meet(kv)
                rx = kv.recv_pages("r", [7, 4, 9], WRITER)
                if order == "the grant first":
                    meet(kv)
                rx.wait(30)
                assert rx.aux == b"aux"
                expected = torch.empty_like(page_bytes(cache, [7, 4, 9]))
                torch.distributed.recv(expected, WRITER, group=kv)
                assert torch.equal(page_bytes(cache, [7, 4, 9]), expected)
            meet(kv)


@pytest.mark.parametrize("order", ["the grant first", "the verbs first", "asked for"])
def test_a_healthy_request_needs_no_thread_of_pythons(order: str, shared_ranks: Callable[..., Ranks]) -> None:
    """But the callers' own: the progress threads of both ranks stand still all the while."""
    shared_ranks("two", 2).run(without_pythons_thread, order)


def served(kv: KVProcessGroup) -> KVCache:
    """Both ranks know that a request has succeeded, and have called nothing since. This rank's cache."""
    cache = random_cache()
    kv.register(cache)
    if kv.rank() == WRITER:
        meet(kv)
        kv.prefix_tokens("r", READER)
        kv.send_pages("r", np.array([1, 2, 3]), READER)
        kv.finish("r", READER).wait(30)
    else:
        rx = kv.recv_pages("r", [7, 4, 9], WRITER)
        meet(kv)
        rx.wait(30)
    return cache


def the_last_request() -> None:
    with kv_group() as kv:
        served(kv)
        assert kv._verbs is not None
        engine = kv._verbs.engine
        until(lambda: not (engine.sender.requests.by_key or engine.receiver.requests.live), "its pages are free")
        meet(kv)


def reports() -> None:
    """What a request has moved is counted as soon as its end is known."""
    with kv_group() as kv:
        cache = served(kv)
        if kv.rank() == WRITER:
            carried = sum(lane.nbytes for lane in kv.explain(READER).lanes.values())
            assert carried == 3 * 2 * 2 * cache.layout.page_nbytes("k")
        else:
            assert kv._verbs is not None
            assert stats(kv._verbs).receives == {"success": 1}
        meet(kv)


def test_reports_of_a_request_that_has_just_ended(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2).run(reports)


def test_the_end_of_the_last_request_is_acted_upon_without_another_call(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2).run(the_last_request)


@pytest.mark.parametrize("nbytes", [0, 256, 257, 60_000])
def test_aux_of_any_length(nbytes: int, shared_ranks: Callable[..., Ranks]) -> None:
    """The loop carries 256 bytes; more go through Python."""
    shared_ranks("two", 2).run(one_request, "layers", nbytes, "wait", nbytes > 256)


def test_no_index_is_out_of_bounds() -> None:
    """The loop's own tests once more, compiled with checks of bounds, in a process of its own."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/core"]
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
