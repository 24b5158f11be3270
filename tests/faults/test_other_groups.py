"""A writer that stops in the middle of a copy, and what else happens to that memory until it wakes up.

Other groups of the receiver's process have it too, or it is freed when the group was destroyed. The late bytes must
find nothing there but the pages that were granted to the writer.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchkv_ucx.operation import PutOperation, VectoredPut

from tests.helpers.harness import COLLECTIVE_TIMEOUT, Ranks, ask
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.small_cache import Gate, page_bytes, random_cache, small_layout
from torchkv import KVCache, KVError, KVProcessGroup, Options, PageOutOfRange, TransferTimeout
from torchkv.engine import process_leases
from torchkv.transfer.host_copy import HostCopyTransfer

WRITER, RECEIVER, OTHER = range(3)
BYSTANDER = 1  # the rank of OTHER in the group that it forms with RECEIVER
PATIENCE = 30
PAGES = [3, 9, 1, 14]
FREE = [2, 10, 11, 0]
NUM_PAGES = 16
SEEN = 64 << 10  # bytes of private memory that tests look at; the pages of all layers lie there
TIMEOUT = 2.0  # of the request whose writer stops

# Where the writer stops: before it stores into the mapped pages, or before the system call that puts into private ones.
LANES: dict[str, tuple[type[Any], ...]] = {"memory": (HostCopyTransfer,), "cma": (PutOperation, VectoredPut)}


@dataclass
class State:
    """What a rank keeps from one call to the next."""

    first: KVProcessGroup | None = None  # of all ranks
    second: KVProcessGroup | None = None  # of RECEIVER and OTHER; rank 0 is RECEIVER
    cache: KVCache | None = None
    memory: weakref.ref[Any] | None = None  # what holds the cache's bytes, if peers cannot map them
    error: KVError | None = None  # of the request whose writer stopped


state = State()


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def three(lane: str) -> Iterator[Ranks]:
    ranks = Ranks(3)
    ranks.run(join, lane)
    yield ranks
    ranks.close()


# ---------------------------------------------------------------------- in the ranks


def private_cache() -> KVCache:
    """A cache in memory that peers cannot map, and that is unmapped when it is freed."""
    shape = (NUM_PAGES, *small_layout().page_shape("k"))
    nbytes = 2 * torch.Size(shape).numel()
    memory = mmap.mmap(-1, 8 << 20)  # large, so that new mappings are likely to take its place
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    parts = [whole[i * nbytes : (i + 1) * nbytes].view(torch.bfloat16).view(shape) for i in range(4)]
    cache = KVCache(small_layout(), {"k": parts[:2], "v": parts[2:]})
    random_fill(cache, np.random.default_rng())
    state.memory = weakref.ref(memory)
    return cache


def join(lane: str) -> None:
    """The first group is registered, the second one made only."""
    rank = dist.get_rank()
    state.cache = private_cache() if lane == "cma" and rank == RECEIVER else random_cache(NUM_PAGES)
    options = Options(path="runs") if lane == "cma" else Options()
    first = dist.new_group(timeout=COLLECTIVE_TIMEOUT, backend="torchkv", pg_options=options)
    second = dist.new_group([RECEIVER, OTHER], timeout=COLLECTIVE_TIMEOUT, backend="torchkv", pg_options=options)
    assert isinstance(first, KVProcessGroup)
    state.first, state.second = first, second if isinstance(second, KVProcessGroup) else None
    first.register(state.cache)
    if rank == WRITER:
        assert first._thread is not None
        connection = first._thread.call(lambda: first._verbs.engine.connection(RECEIVER))
        assert connection.direct == (lane == "memory")
        assert lane == "memory" or connection.lane.startswith("cma"), connection.lane


def second_group() -> KVProcessGroup:
    assert state.second is not None
    return state.second


def register_second() -> None:
    second_group().register(state.cache)


def register_another() -> None:
    second_group().register(random_cache())


def write_late(lane: str) -> None:
    """The progress thread stops amid the copy of request A."""
    kv = state.first
    assert kv is not None
    reached, go_on = threading.Event(), threading.Event()
    hold_once(lane, reached, go_on)
    gate = Gate()
    gate.open.set()
    kv.send_pages("A", [5, 6, 7, 8], RECEIVER, event=gate)  # with an event, so that the resident loop has no part
    done = kv.finish("A", RECEIVER)
    assert reached.wait(PATIENCE)
    ask("stop me")
    go_on.set()
    with pytest.raises(KVError):
        done.wait(PATIENCE)
    kv.cancel("A").wait(PATIENCE)


def hold_once(lane: str, reached: threading.Event, go_on: threading.Event) -> None:
    """The next step of a copy stops until it may go on; then it goes on as if nothing had been."""
    name = "_copy" if lane == "memory" else "_step"
    real = {owner: getattr(owner, name) for owner in LANES[lane]}

    def hold() -> None:
        for owner, function in real.items():
            setattr(owner, name, function)
        reached.set()
        assert go_on.wait(PATIENCE)

    for owner, function in real.items():
        setattr(owner, name, held_copy(function, hold) if lane == "memory" else held_step(function, hold))


def held_copy(function: Callable[..., Any], hold: Callable[[], None]) -> Callable[..., Any]:
    def held(*args: Any) -> Generator[Any, None, Any]:
        hold()
        yield from function(*args)

    return held


def held_step(function: Callable[..., Any], hold: Callable[[], None]) -> Callable[..., Any]:
    def held(*args: Any) -> Any:
        hold()
        return function(*args)

    return held


def send_from_other(request: str) -> None:
    kv, cache = second_group(), state.cache
    assert cache is not None
    random_fill(cache, np.random.default_rng())
    kv.send_pages(request, [10, 11, 12, 13], 0)
    kv.finish(request, 0).wait(PATIENCE)
    dist.send(page_bytes(cache, [10, 11, 12, 13]), RECEIVER, group=kv)


def receive_from_other(request: str, pages: list[int]) -> torch.Tensor:
    """Into ``pages``, through the second group. What must be in them."""
    kv, cache = second_group(), state.cache
    assert cache is not None
    poison = page_bytes(cache, pages)
    ask(f"send {request}")
    kv.recv_pages(request, pages, BYSTANDER).wait(PATIENCE)
    expected = torch.empty_like(poison)
    dist.recv(expected, OTHER, group=kv)
    assert not torch.equal(poison, expected)
    assert torch.equal(page_bytes(cache, pages), expected)
    return expected


def lose_a_request() -> None:
    """Request A times out while its writer is stopped."""
    kv = state.first
    assert kv is not None
    rx = kv.recv_pages("A", PAGES, WRITER, timeout=TIMEOUT)
    ask("the writer may stop")
    with pytest.raises(TransferTimeout, match="'A'"):
        rx.wait(PATIENCE)
    state.error = rx.exception()
    assert state.error is not None
    state.error.__traceback__ = None
    assert not state.error.pages_safe
    assert kv.quarantined() == dict.fromkeys(PAGES, (WRITER,))


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def two_groups() -> None:
    first, second, cache = state.first, second_group(), state.cache
    assert first is not None
    assert cache is not None
    lose_a_request()
    assert second.quarantined() == dict.fromkeys(PAGES, ())
    with pytest.raises(PageOutOfRange, match=r"'B'.*page 9 shares bytes with page 9 of group .*ranks \[0\].*'A'"):
        second.recv_pages("B", [12, 9], BYSTANDER)
    receive_from_other("C", FREE)
    before = page_bytes(cache, PAGES)
    ask("the writer may go on")
    assert first.cancel("A").wait(PATIENCE)
    assert not torch.equal(page_bytes(cache, PAGES), before), "nothing came late: this test has shown nothing"
    assert second.quarantined() == first.quarantined() == {}
    receive_from_other("B", PAGES)


def live_leases() -> None:
    """Also of a request that is well: until it has ended, no other group is given its pages."""
    first, second = state.first, second_group()
    assert first is not None
    for one, other in (((first, OTHER), (second, BYSTANDER)), ((second, BYSTANDER), (first, OTHER))):
        (kv, src), (its, its_src) = one, other
        kv.recv_pages("live", [4], src)
        with pytest.raises(PageOutOfRange, match=r"page 4 shares bytes with page 4 .*is leased to request 'live'"):
            its.recv_pages("too", [5, 4], its_src)
        assert its.quarantined() == {}
        assert kv.cancel("live").wait(PATIENCE)
        its.recv_pages("now", [5, 4], its_src)
        assert its.cancel("now").wait(PATIENCE)


def destroy(warnings: list[str]) -> None:
    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    process_leases.log.addHandler(handler)
    dist.destroy_process_group(state.first)
    process_leases.log.removeHandler(handler)


def destroyed(writer_pid: int) -> None:
    cache, warnings = state.cache, list[str]()
    assert cache is not None
    lose_a_request()
    destroy(warnings)
    (warning,) = warnings
    for text in (f"rank 0 (process {writer_pid})", str(PAGES), f"{cache.nbytes} bytes"):
        assert text in warning
    register_second()
    kv = second_group()
    refusal = rf"page 3 shares .*destroyed.* rank 0 \(process {writer_pid}\) may still write.*'A'.*end those processes"
    with pytest.raises(PageOutOfRange, match=refusal):
        kv.recv_pages("B", PAGES, BYSTANDER)
    assert kv.quarantined() == dict.fromkeys(PAGES, ())
    receive_from_other("C", FREE)
    before = page_bytes(cache, PAGES)
    ask("the writer may go on")
    assert until(lambda: not torch.equal(page_bytes(cache, PAGES), before)), "nothing came late"
    with pytest.raises(PageOutOfRange, match=refusal):  # it runs, and nobody hears it any more
        kv.recv_pages("B", PAGES, BYSTANDER)
    assert state.error is not None
    assert not state.error.pages_safe
    ask("kill the writer")
    assert until(lambda: kv.quarantined() == {})
    assert state.error.pages_safe
    receive_from_other("B", PAGES)


def destroyed_and_freed() -> None:
    """New memory takes the place of the cache, if that was freed."""
    cache, memory = state.cache, state.memory
    assert cache is not None
    assert memory is not None
    address, nbytes = cache.storages[0].data_ptr(), cache.nbytes
    random_fill(cache, np.random.default_rng())
    lose_a_request()
    destroy([])
    state.first = state.cache = None
    del cache
    gc.collect()
    others = [mmap.mmap(-1, nbytes) for _ in range(8)]
    poison = np.random.default_rng().bytes(SEEN)
    for other in others:
        other[:SEEN] = poison
    before = ctypes.string_at(address, SEEN)
    ask("the writer may go on")
    assert until(lambda: ctypes.string_at(address, SEEN) != before), "nothing came late: this test has shown nothing"
    assert [other[:SEEN] == poison for other in others] == [True] * 8, "late bytes in memory of somebody else"
    assert memory() is not None
    ask("kill the writer")
    kv = second_group()
    kv.register(random_cache())
    assert until(lambda: kv.quarantined() == {} and memory() is None)


# ---------------------------------------------------------------------- the tests


def stop(ranks: Ranks, lane: str) -> None:
    """Stops the writer when RECEIVER has posted request A, amid its copy."""
    assert ranks.hear(RECEIVER) == "the writer may stop"
    ranks.start(write_late, lane, ranks=[WRITER])
    assert ranks.hear(WRITER) == "stop me"
    ranks.signal(WRITER, signal.SIGSTOP)
    ranks.tell(RECEIVER)


def go_on(ranks: Ranks) -> None:
    assert ranks.hear(RECEIVER) == "the writer may go on"
    ranks.signal(WRITER, signal.SIGCONT)
    ranks.tell(WRITER)
    ranks.tell(RECEIVER)


def send(ranks: Ranks, request: str) -> None:
    assert ranks.hear(RECEIVER) == f"send {request}"
    ranks.start(send_from_other, request, ranks=[OTHER])
    ranks.tell(RECEIVER)
    ranks.join([OTHER])


def kill(ranks: Ranks) -> None:
    assert ranks.hear(RECEIVER) == "kill the writer"
    ranks.kill(WRITER)
    ranks.tell(RECEIVER)


def test_a_page_is_leased_by_one_group_at_a_time(lane: str, three: Ranks) -> None:
    three.run(register_second, ranks=[RECEIVER, OTHER])
    three.run(live_leases, ranks=[RECEIVER])
    three.start(two_groups, ranks=[RECEIVER])
    stop(three, lane)
    send(three, "C")
    go_on(three)
    three.join([WRITER])
    send(three, "B")
    three.join([RECEIVER])


def test_a_quarantine_outlives_its_group(lane: str, three: Ranks) -> None:
    three.start(destroyed, three.pid(WRITER), ranks=[RECEIVER])
    stop(three, lane)
    three.start(register_second, ranks=[OTHER])
    assert three.hear(RECEIVER) == "send C"
    three.join([OTHER])
    three.start(send_from_other, "C", ranks=[OTHER])
    three.tell(RECEIVER)
    three.join([OTHER])
    go_on(three)
    kill(three)
    send(three, "B")
    three.join([RECEIVER])


@pytest.mark.parametrize("lane", ["cma"])
def test_memory_is_not_freed_under_a_writer(lane: str, three: Ranks) -> None:
    three.start(destroyed_and_freed, ranks=[RECEIVER])
    stop(three, lane)
    go_on(three)
    three.start(register_another, ranks=[OTHER])
    kill(three)
    three.join([RECEIVER, OTHER])
