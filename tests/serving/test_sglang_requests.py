"""A prefill and a decode rank of the SGLang backend, without SGLang: byte for byte, and when pages may be released."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, new_secret_file
from tests.helpers.ranks import sglang_rank
from tests.helpers.ranks.sglang_rank import PAGE, ROW

P, D = range(2)
EMPTY: tuple[dict[str, int], ...] = ({}, {})
PAGES = [9, 3, 12]  # of the receiver

rooms = itertools.count(1)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, str]]:
    secret = new_secret_file(tmp_path_factory.mktemp("secret") / "secret")
    ranks = Ranks(2, env={SECRET: str(secret)}, world=False)
    (bootstrap,) = ranks.run(sglang_rank.begin, "p", True, ranks=[P])
    ranks.run(sglang_rank.begin, "d", False, ranks=[D])
    yield ranks, bootstrap
    ranks.run(sglang_rank.end)
    ranks.close()


@pytest.fixture
def ranks(joined: tuple[Ranks, str]) -> Iterator[Ranks]:
    yield joined[0]
    assert joined[0].run(sglang_rank.tidy) == [EMPTY, EMPTY]


@pytest.fixture
def bootstrap(joined: tuple[Ranks, str]) -> str:
    return joined[1]


def begin(ranks: Ranks, bootstrap: str, prefix: int = 0) -> int:
    """A request of which both sides know, and for which nothing has been sent. Its room."""
    room = next(rooms)
    ranks.run(sglang_rank.prefill, room, ranks=[P])
    ranks.run(sglang_rank.decode, bootstrap, room, PAGES, prefix, ranks=[D])
    assert ranks.run(sglang_rank.await_grant, 3 + prefix // PAGE, ranks=[P]) == [prefix]
    return room


@pytest.mark.parametrize("prefix", [0, 2 * PAGE])
def test_pages_and_metadata_arrive_in_chunks(ranks: Ranks, bootstrap: str, prefix: int) -> None:
    begin(ranks, bootstrap, prefix)
    ranks.run(sglang_rank.send, 1, [5, 2], prefix // PAGE, ranks=[P])
    ranks.run(sglang_rank.send, 1, [7], prefix // PAGE + 2, ranks=[P])
    assert ranks.run(sglang_rank.finish) == [True, True]
    assert ranks.run(sglang_rank.holds, 1, PAGES, prefix // PAGE, ranks=[D]) == [True]
    assert ranks.run(sglang_rank.row, ranks=[D]) == [list(range(ROW))]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a chunk"])
def test_nothing_lands_in_pages_that_an_abort_has_released(ranks: Ranks, bootstrap: str, late: bool) -> None:
    room = begin(ranks, bootstrap)
    if late:
        ranks.run(sglang_rank.send, 1, [5, 2], 0, ranks=[P])
    ranks.run(sglang_rank.abort, ranks=[D])
    begun = ranks.start(sglang_rank.await_release, room, ranks=[D])
    if not late:
        ranks.run(sglang_rank.send, 1, [5, 2], 0, ranks=[P])
    ranks.join(begun)
    ranks.run(sglang_rank.overwrite, ranks=[D])  # they are another request's now
    ranks.run(sglang_rank.send, 1, [7], 2, ranks=[P])
    assert ranks.run(sglang_rank.finish) == [False, False]
    time.sleep(0.2)
    assert ranks.run(sglang_rank.written, list(range(sglang_rank.PAGES)), ranks=[D]) == [False]


def test_pages_of_a_stopped_prefill_rank_are_not_released(ranks: Ranks, bootstrap: str) -> None:
    room = begin(ranks, bootstrap)
    ranks.run(sglang_rank.send, 1, [5, 2], 0, ranks=[P])
    ranks.signal(P, signal.SIGSTOP)
    try:
        ranks.run(sglang_rank.abort, ranks=[D])
        until = time.monotonic() + 8  # it counts as lost after five heartbeats, of a second each
        while time.monotonic() < until:
            assert ranks.run(sglang_rank.is_released, room, ranks=[D]) == [False]
            time.sleep(0.1)
    finally:
        ranks.signal(P, signal.SIGCONT)
    ranks.run(sglang_rank.await_release, room, ranks=[D])
    ranks.run(sglang_rank.overwrite, ranks=[D])
    ranks.run(sglang_rank.send, 1, [7], 2, ranks=[P])
    assert ranks.run(sglang_rank.finish) == [False, False]
    assert ranks.run(sglang_rank.written, list(range(sglang_rank.PAGES)), ranks=[D]) == [False]
    # And they go on together.
    begin(ranks, bootstrap)
    ranks.run(sglang_rank.send, 2, [5, 2, 7], 0, ranks=[P])
    assert ranks.run(sglang_rank.finish) == [True, True]
    assert ranks.run(sglang_rank.holds, 2, PAGES, ranks=[D]) == [True]


def test_an_abort_where_it_is_prefilled_ends_it_on_both_sides(ranks: Ranks, bootstrap: str) -> None:
    room = begin(ranks, bootstrap)
    ranks.run(sglang_rank.send, 1, [5, 2], 0, ranks=[P])
    ranks.run(sglang_rank.abort, ranks=[P])
    ranks.run(sglang_rank.await_failure, ranks=[D])
    ranks.run(sglang_rank.await_release, room, ranks=[D])
    assert ranks.run(sglang_rank.finish) == [False, False]


def test_pages_that_are_missing_in_the_end_fail_the_request(ranks: Ranks, bootstrap: str) -> None:
    """The prompts differ, for one: prefill has two pages, and decode wants three."""
    room = next(rooms)
    ranks.run(sglang_rank.prefill, room, ranks=[P])
    ranks.run(sglang_rank.decode, bootstrap, room, PAGES, ranks=[D])
    ranks.run(sglang_rank.await_grant, 2, ranks=[P])
    ranks.run(sglang_rank.send, 1, [5, 2], 0, ranks=[P])
    ranks.run(sglang_rank.await_failure, ranks=[D])
    ranks.run(sglang_rank.await_release, room, ranks=[D])
    assert ranks.run(sglang_rank.finish) == [False, False]


def test_nothing_but_metadata(ranks: Ranks, bootstrap: str) -> None:
    room = next(rooms)
    ranks.run(sglang_rank.prefill, room, ranks=[P])
    ranks.run(sglang_rank.decode, bootstrap, room, [], 2 * PAGE, ranks=[D])
    assert ranks.run(sglang_rank.await_grant, 2, ranks=[P]) == [2 * PAGE]
    ranks.run(sglang_rank.send, 1, [], 2, ranks=[P])
    assert ranks.run(sglang_rank.finish) == [True, True]
    assert ranks.run(sglang_rank.row, ranks=[D]) == [list(range(ROW))]
