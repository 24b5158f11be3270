"""What has ended is freed at once: engines freeze or stop Python's garbage collector, so nothing may be left to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.helpers.simulation.acquainted import (
    PAGE_SIZE,
    of_layer_groups,
    pair,
    run_to_success,
    some_lists,
    two_readers,
)
from tests.helpers.simulation.cluster import Cluster
from torchkv.engine.work import KVWork
from torchkv.errors import KVError, TransferCancelled

SENT, GRANTED = np.array([5, 6, 2]), [3, 1, 9]


@contextmanager
def collecting() -> Iterator[list[Any]]:
    """What only the garbage collector could free, of torchkv's, among what is made inside."""
    found: list[Any] = []
    gc.collect()
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [thing for thing in gc.garbage if type(thing).__module__.startswith("torchkv")]
    finally:
        gc.set_debug(0)
        gc.unfreeze()
        gc.garbage.clear()


def by_pages(cluster: Cluster, request: str) -> list[KVWork]:
    received = cluster[1].recv_pages(request, GRANTED, 0)
    return [received, cluster[0].send_pages(request, SENT, 1), cluster[0].finish(request, 1, aux=b"token")]


def by_layer(cluster: Cluster, request: str) -> list[KVWork]:
    received = cluster[1].recv_pages(request, GRANTED, 0)
    assert cluster.run(lambda: cluster[0].granted(request, 1) is not None, limit=5)
    works = [cluster[0].send_layer(request, layer, SENT, 1) for layer in range(3)]
    return [received, *works, cluster[0].finish(request, 1)]


def staged(cluster: Cluster, request: str) -> list[KVWork]:
    received = cluster[1].recv_pages(request, GRANTED, 0)
    return [received, cluster[0].staged_put(request, None, SENT, 1), cluster[0].finish(request, 1)]


def behind_a_prefix(cluster: Cluster, request: str) -> list[KVWork]:
    received = cluster[1].recv_pages(request, GRANTED, 0, prefix_tokens=PAGE_SIZE)
    sent = cluster[0].send_pages(request, [0, *SENT], None, origin="prompt")
    return [received, sent, cluster[0].finish(request, None)]


def with_a_timeout(cluster: Cluster, request: str) -> list[KVWork]:
    """Python serves it."""
    received = cluster[1].recv_pages(request, GRANTED, 0, timeout=5)
    received.get_future().then(lambda done: done.value())
    return [received, cluster[0].send_pages(request, SENT, 1), cluster[0].finish(request, 1)]


def to_two(cluster: Cluster, request: str) -> list[KVWork]:
    received = [rank.recv_pages(request, GRANTED, "p") for rank in cluster.ranks[1:]]
    return [*received, cluster[0].send_slice(request, None, SENT, "d"), cluster[0].finish(request, "d")]


def of_groups(cluster: Cluster, request: str) -> list[KVWork]:
    received = cluster[1].recv_pages(request, some_lists(1, 0, 3), "p")
    return [received, cluster[0].send_pages(request, some_lists(2, 0, 3), "d"), cluster[0].finish(request, "d")]


@pytest.mark.parametrize(
    ("made", "request_of"),
    [
        (pair, by_pages),
        (pair, by_layer),
        (pair, staged),
        (pair, behind_a_prefix),
        (pair, with_a_timeout),
        (two_readers, to_two),
        (of_layer_groups, of_groups),
    ],
    ids=lambda value: value.__name__,
)
def test_a_request_that_has_succeeded_leaves_nothing_to_the_collector(
    made: Callable[[], Cluster], request_of: Callable[[Cluster, str], list[KVWork]]
) -> None:
    cluster = made()
    run_to_success(cluster, request_of(cluster, "first"))  # what is made once
    with collecting() as left:
        for number in range(3):
            works = request_of(cluster, f"r{number}")
            run_to_success(cluster, works)
            if made is pair:
                works[0].wait_layer(1)
            del works
        cluster.run(lambda: False, limit=0.5)
    assert [type(thing).__name__ for thing in left] == []


def was_raised(error: KVError, ask: Callable[[], object]) -> bool:
    """Whether it raises an error like this one, which is no other's to keep."""
    try:
        ask()
    except KVError as raised:
        return raised is not error and type(raised) is type(error) and str(raised) == str(error)
    return False


@pytest.mark.parametrize("canceller", [0, 1], ids=["writer", "reader"])
@pytest.mark.parametrize("sent", [True, False])
def test_nor_does_one_that_was_cancelled(canceller: int, sent: bool) -> None:
    """Nor where its error is raised: a traceback knows its frames, and these know the work that has the error."""
    cluster = pair()

    def cancelled(request: str) -> None:
        works = [cluster[1].recv_pages(request, GRANTED, 0)]
        if sent:
            assert cluster.run(lambda: cluster[0].granted(request, 1) is not None, limit=5)
            works.append(cluster[0].send_layer(request, 0, SENT, 1))
        works.append(cluster[canceller].cancel(request))
        if not sent and canceller == 0:  # which knows no request to cancel yet
            works.append(cluster[1].cancel(request))
        assert cluster.run(lambda: all(work.is_completed() for work in works), limit=5)
        ended = cluster[0].cancel(request)
        assert cluster.run(ended.is_completed, limit=5)
        error = works[0].exception()
        assert isinstance(error, TransferCancelled)
        assert cluster.run(lambda: error.pages_safe, limit=5)
        for ask in (works[0].wait, works[0].wait, partial(works[0].wait_layer, 1)):
            assert was_raised(error, ask)

    cancelled("first")
    with collecting() as left:
        for number in range(3):
            cancelled(f"r{number}")
        cluster.run(lambda: False, limit=0.5)
    assert [type(thing).__name__ for thing in left] == []
