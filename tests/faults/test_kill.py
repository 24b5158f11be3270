"""SIGKILL of a peer at every stage of a request: ``PeerLost``, never a hang, and the rest of the group goes on.

Deadlines are minutes here, so that only the detection of the death itself can end a wait in time.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_world
from tests.helpers.ranks.loop_ways import acquaint
from tests.helpers.ranks.small_cache import Never, check_transfer, random_cache
from torchkv import KVError, KVProcessGroup, KVWork, PageOutOfRange, PeerLost, TransferCancelled

SURVIVOR, VICTIM, BYSTANDER = range(3)
PATIENCE = 30  # seconds; the deadlines of the group are ten times that
PAGES = [1, 2, 3]

# A pool that takes a while to send: 6 layers of 2 * 4 MiB, for 64 pages.
BIG = {"num_layers": 6, "num_kv_heads": 8, "head_dim": 256, "page_size": 16}
BIG_PAGES = range(64)


def join(instances: list[str], big: bool, unmapped: bool = False) -> None:
    kv = kv_world()
    cache = random_cache(num_pages=64, unmapped=unmapped, **BIG) if big else random_cache()
    kv.register(cache, instance=instances[kv.rank()])


def join_apart(instances: list[str]) -> None:
    """With pages that the loops put, and loops that have met."""
    kv = kv_world()
    kv.register(random_cache(unmapped=True, num_kv_heads=8, head_dim=64), instance=instances[kv.rank()])
    acquaint(kv, SURVIVOR, VICTIM, BYSTANDER)


def expect_lost(call: Callable[[], Any]) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        call()
    check_names_victim(caught.value)
    return caught.value


def check_names_victim(error: PeerLost) -> None:
    assert re.search(rf"rank {VICTIM}", str(error))
    assert error.retryable


def expect_lost_work(start: Callable[[], KVWork]) -> None:
    """The loss may be known when the call is made, or a moment later."""
    expect_lost(lambda: start().wait(PATIENCE))


def pages_are_free_again(kv: KVProcessGroup, rx: KVWork) -> None:
    """The victim's death is known, so nothing of it can land any more."""
    kv.cancel("r").wait(PATIENCE)
    assert kv.quarantined() == {}
    error = rx.exception()
    assert isinstance(error, KVError)
    assert error.pages_safe


# ---------------------------------------------------------------------- victims: whatever they do, they are killed


def write_nothing() -> None:
    ask("ready")


def write_half(pages: Any) -> None:
    """All layers but the last, which waits for an event that never comes."""
    kv = kv_world()
    layers = kv._verbs.cache.layout.layers
    kv.send_pages("r", pages, SURVIVOR, layers=layers[:-1])
    kv.send_pages("r", pages, SURVIVOR, layers=layers[-1], event=Never())
    kv.finish("r", SURVIVOR)
    ask("ready")


def write_all() -> None:
    kv = kv_world()
    kv.send_pages("r", PAGES, SURVIVOR)
    kv.finish("r", SURVIVOR, aux=b"last words").wait(PATIENCE)
    ask("ready")


def read(pages: Any) -> None:
    kv_world().recv_pages("r", pages, SURVIVOR)
    ask("ready")


def read_and_cancel() -> None:
    kv = kv_world()
    kv.recv_pages("r", PAGES, SURVIVOR)
    dist.recv(torch.empty(1), SURVIVOR)  # it has sent: else it would wait for another grant for a while
    kv.cancel("r").wait(PATIENCE)
    ask("ready")


# ---------------------------------------------------------------------- survivors


def receive_unsent() -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", PAGES, VICTIM)
    ask("kill now")
    expect_lost(lambda: rx.wait(PATIENCE))
    expect_lost(lambda: rx.wait_layer(0, PATIENCE))
    pages_are_free_again(kv, rx)
    expect_lost(lambda: kv.recv_pages("later", PAGES, VICTIM))


def receive_from_the_dead() -> None:
    kv = kv_world()
    ask("kill now")
    expect_lost_work(lambda: kv.recv_pages("r", PAGES, VICTIM))
    kv.cancel("r").wait(PATIENCE)
    assert kv.quarantined() == {}


def receive_half(pages: Any) -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", pages, VICTIM)
    rx.wait_layer(0, PATIENCE)
    ask("kill now")
    expect_lost(lambda: rx.wait(PATIENCE))
    pages_are_free_again(kv, rx)


def receive_all() -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", PAGES, VICTIM)
    rx.wait(PATIENCE)
    ask("kill now")
    assert rx.aux == b"last words"
    assert rx.exception() is None
    expect_lost_work(lambda: kv.recv_pages("later", PAGES, VICTIM))
    kv.cancel("later").wait(PATIENCE)  # over a network it takes a moment until nothing of the victim can land


def send_ungranted() -> None:
    kv = kv_world()
    works = [kv.send_pages("r", PAGES, VICTIM), kv.finish("r", VICTIM)]
    ask("kill now")
    for work in works:
        expect_lost(lambda work=work: work.wait(PATIENCE))
    expect_lost(lambda: kv.send_pages("r", PAGES, VICTIM))  # a tombstone
    expect_lost(lambda: kv.prefix_tokens("other", VICTIM))
    expect_lost(lambda: kv.finish("other", VICTIM))
    expect_lost(lambda: kv.send_pages("other", PAGES, [BYSTANDER, VICTIM]))
    kv.cancel("r").wait(PATIENCE)


def send_to_one_who_cancels() -> None:
    kv = kv_world()
    work = kv.send_pages("r", PAGES, VICTIM, event=Never())
    dist.send(torch.ones(1), VICTIM)
    with pytest.raises(TransferCancelled, match="'r'"):
        work.wait(PATIENCE)
    ask("kill now")
    expect_lost(lambda: kv.prefix_tokens("other", VICTIM))
    for verb in (lambda: kv.send_pages("r", PAGES, VICTIM), lambda: kv.finish("r", VICTIM)):
        with pytest.raises(TransferCancelled, match="'r'"):  # a tombstone repeats its own error, not the latest news
            verb()
    kv.cancel("r").wait(PATIENCE)


def send_half(pages: Any) -> None:
    kv = kv_world()
    last = kv._verbs.cache.layout.layers[-1]
    moving = kv.send_pages("r", pages, VICTIM)
    gated = kv.send_pages("r", pages, VICTIM, layers=last, event=Never())
    done = kv.finish("r", VICTIM)
    assert kv.prefix_tokens("r", VICTIM) == 0  # granted
    ask("kill now")
    for work in (gated, done):
        expect_lost(lambda work=work: work.wait(PATIENCE))
    try:  # it may have been through before the kill
        moving.wait(PATIENCE)
    except PeerLost as error:
        check_names_victim(error)
    kv.cancel("r").wait(PATIENCE)


def send_all_without_a_verdict() -> None:
    """The victim's instance has a second rank, which never posts: everything is sent, success is not known."""
    kv = kv_world()
    kv.send_pages("r", PAGES, VICTIM).wait(PATIENCE)
    done = kv.finish("r", VICTIM)
    ask("kill now")
    expect_lost(lambda: done.wait(PATIENCE))
    kv.cancel("r").wait(PATIENCE)


# ---------------------------------------------------------------------- the tests

ALONE = ["a", "b", "c"]
DEADLINES = {"TORCHKV_TIMEOUT": "300", "TORCHKV_GRANT_TIMEOUT": "300", "TORCHKV_HEARTBEAT": "60"}


def usable(first: int, second: int) -> None:
    check_transfer(kv_world(), first, second)
    check_transfer(kv_world(), second, first)


@pytest.fixture
def new_ranks() -> Iterator[Callable[..., Ranks]]:
    """Ranks for one test: one of them will be dead at its end."""
    made: list[Ranks] = []

    def make(env: dict[str, str], **options: Any) -> Ranks:
        made.append(Ranks(3, env={**DEADLINES, **env}, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def scenario(ranks: Ranks, victim: Callable[[], Any], survivor: Callable[[], Any]) -> None:
    ranks.start(victim, ranks=[VICTIM])
    ranks.start(survivor, ranks=[SURVIVOR])
    assert ranks.hear(VICTIM) == "ready"
    assert ranks.hear(SURVIVOR) == "kill now"
    ranks.kill(VICTIM)
    ranks.tell(SURVIVOR)
    ranks.join([SURVIVOR])


@pytest.mark.parametrize(
    ("victim", "survivor"),
    [
        pytest.param(write_nothing, receive_from_the_dead, id="before-the-grant"),
        pytest.param(write_nothing, receive_unsent, id="granted"),
        pytest.param(functools.partial(write_half, PAGES), functools.partial(receive_half, PAGES), id="half-sent"),
        pytest.param(write_all, receive_all, id="sealed"),
    ],
)
def test_a_writer_is_killed(
    victim: Callable[[], Any], survivor: Callable[[], Any], new_ranks: Callable[..., Ranks]
) -> None:
    ranks = new_ranks({})
    ranks.run(join, ALONE, False)
    scenario(ranks, victim, survivor)
    ranks.run(usable, SURVIVOR, BYSTANDER)


@pytest.mark.parametrize(
    ("victim", "survivor", "instances"),
    [
        pytest.param(write_nothing, send_ungranted, ALONE, id="before-the-grant"),
        pytest.param(read_and_cancel, send_to_one_who_cancels, ALONE, id="after-its-cancel"),
        pytest.param(functools.partial(read, PAGES), functools.partial(send_half, PAGES), ALONE, id="half-sent"),
        pytest.param(functools.partial(read, PAGES), send_all_without_a_verdict, ["a", "b", "b"], id="sealed"),
    ],
)
def test_a_receiver_is_killed(
    victim: Callable[[], Any],
    survivor: Callable[[], Any],
    instances: list[str],
    new_ranks: Callable[..., Ranks],
) -> None:
    ranks = new_ranks({})
    ranks.run(join, instances, False)
    scenario(ranks, victim, survivor)
    if instances == ALONE:
        ranks.run(usable, SURVIVOR, BYSTANDER)


@pytest.mark.parametrize("victim_writes", [True, False], ids=["writer", "receiver"])
@pytest.mark.parametrize("env", [{"TORCHKV_PATH": "slices"}, {}], ids=["by Python", "by the loop"])
def test_killed_in_the_middle_of_puts_over_tcp(
    env: dict[str, str], victim_writes: bool, new_ranks: Callable[..., Ranks]
) -> None:
    """No lane but TCP, 48 MiB: the kill falls among puts that are on their way."""
    ranks = new_ranks({"UCX_TLS": "tcp", **env})
    ranks.run(join, ALONE, True, not env)
    victim, survivor = (write_half, receive_half) if victim_writes else (read, send_half)
    scenario(ranks, functools.partial(victim, BIG_PAGES), functools.partial(survivor, BIG_PAGES))
    ranks.run(usable, SURVIVOR, BYSTANDER)


@pytest.mark.parametrize(
    ("victim", "survivor"),
    [
        pytest.param(write_nothing, receive_unsent, id="granted"),
        pytest.param(functools.partial(write_half, PAGES), functools.partial(receive_half, PAGES), id="half sent to"),
        pytest.param(write_all, receive_all, id="sealed"),
        pytest.param(write_nothing, send_ungranted, id="before its grant"),
        pytest.param(read_and_cancel, send_to_one_who_cancels, id="after its cancel"),
        pytest.param(functools.partial(read, PAGES), functools.partial(send_half, PAGES), id="half sent"),
    ],
)
def test_killed_when_loops_grant_through_the_network(
    victim: Callable[[], Any], survivor: Callable[[], Any], new_ranks: Callable[..., Ranks]
) -> None:
    ranks = new_ranks({"UCX_TLS": "tcp"}, apart=True)
    ranks.run(join_apart, ALONE)
    scenario(ranks, victim, survivor)
    ranks.run(usable, SURVIVOR, BYSTANDER)


# What carries the bytes; whether the pages are many, so that a kill falls among puts that are on their way; whether no
# peer maps them, so that the loop puts them.
LANES = {
    "no UCX": ({}, False, False),
    "UCX, mapped memory": ({"UCX_TLS": "all"}, False, False),
    "UCX, cma": ({"UCX_TLS": "all", "TORCHKV_PATH": "runs"}, False, False),
    "UCX, TCP": ({"UCX_TLS": "tcp", "TORCHKV_PATH": "slices"}, True, False),
    "UCX, TCP, by the loop": ({"UCX_TLS": "tcp"}, True, True),
}


def forks(pid_file: str, run: Callable[[], None]) -> None:
    """As ``run``. A child inherits every descriptor, and outlives its parent."""
    if (child := os.fork()) == 0:
        time.sleep(3 * PATIENCE)
        os._exit(0)
    Path(pid_file).write_text(str(child), encoding="ascii")
    run()


@pytest.mark.parametrize("victim_writes", [True, False], ids=["writer", "receiver"])
@pytest.mark.parametrize("lane", LANES)
def test_a_forked_child_of_the_dead_keeps_no_pages(
    lane: str, victim_writes: bool, new_ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    env, big, unmapped = LANES[lane]
    pages = BIG_PAGES if big else PAGES
    victim, survivor = (write_half, receive_half) if victim_writes else (read, send_half)
    pid_file = tmp_path / "child"
    ranks = new_ranks(env)
    ranks.run(join, ALONE, big, unmapped)
    try:
        scenario(
            ranks,
            functools.partial(forks, str(pid_file), functools.partial(victim, pages)),
            functools.partial(survivor, pages),
        )
        ranks.run(usable, SURVIVOR, BYSTANDER)
    finally:
        child = int(pid_file.read_text(encoding="ascii"))
        os.kill(child, signal.SIGKILL)  # it is there: the test has shown something


def hold_pages() -> None:
    """A dead writer of one request must not free the pages of another's."""
    kv = kv_world()
    doomed = kv.recv_pages("doomed", [1, 2], VICTIM)
    healthy = kv.recv_pages("healthy", [3, 4], BYSTANDER)
    ask("kill now")
    expect_lost(lambda: doomed.wait(PATIENCE))
    kv.cancel("doomed").wait(PATIENCE)
    with pytest.raises(PageOutOfRange, match=r"page 3 .*'healthy'"):
        kv.recv_pages("greedy", [1, 3], BYSTANDER)
    ask("finish the other")
    healthy.wait(PATIENCE)
    assert healthy.bytes > 0


def send_healthy() -> None:
    kv = kv_world()
    kv.send_pages("healthy", [5, 6], SURVIVOR)
    kv.finish("healthy", SURVIVOR).wait(PATIENCE)


def test_a_death_ends_only_the_requests_it_concerns(new_ranks: Callable[..., Ranks]) -> None:
    ranks = new_ranks({})
    ranks.run(join, ALONE, False)
    ranks.start(hold_pages, ranks=[SURVIVOR])
    assert ranks.hear(SURVIVOR) == "kill now"
    ranks.kill(VICTIM)
    ranks.tell(SURVIVOR)
    assert ranks.hear(SURVIVOR) == "finish the other"
    ranks.run(send_healthy, ranks=[BYSTANDER])
    ranks.tell(SURVIVOR)
    ranks.join([SURVIVOR])
