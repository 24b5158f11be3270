"""What a group must not do: listen to the world, unpickle what it receives, or grow with every request."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks, kv_group
from tests.helpers.jobs import new_secret_file
from tests.helpers.ranks.small_cache import check_transfer, random_cache
from tests.helpers.resident import resident_kib
from torchkv import TransferCancelled

LISTEN = "0A"


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks, which no launcher has told on which hosts they run: then gloo picks its own interface."""
    ranks = Ranks(2, env={"GLOO_SOCKET_IFNAME": "lo"})
    yield ranks
    ranks.close()


def _reachable() -> list[tuple[str, str]]:
    """This process's sockets that others can send to: the table of /proc/net, and the local address as it says it."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    found = []
    for table in (
        "tcp",
        "tcp6",
        "udp",
        "udp6",
        "udplite",
        "udplite6",
        "raw",
        "raw6",
        "icmp",
        "icmp6",
        "unix",
        "packet",
    ):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else []:
            fields = line.split()
            inode, local = {"unix": (6, 7), "packet": (8, 0)}.get(table, (9, 1))
            if f"socket:[{fields[inode]}]" not in mine or len(fields) <= local:
                continue  # of another process, or without a name
            if not table.startswith("tcp") or fields[3] == LISTEN:
                found.append((table, fields[local]))
    return found


def _listeners() -> list[str]:
    """Local addresses, in /proc's hexadecimal, of this process's listening TCP sockets."""
    return [name.split(":")[0] for table, name in _reachable() if table.startswith("tcp")]


def listeners(path: str | None) -> tuple[list[str], list[str]]:
    with kv_group(path=path) as kv:
        before = _listeners()
        kv.register(random_cache())
        check_transfer(kv, 0, 1)
        return before, _listeners()


@pytest.mark.parametrize("path", [None, "slices"])
def test_only_loopback_is_listened_on(path: str | None, pair: Ranks) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    for before, after in pair.run(listeners, path):
        assert len(after) > len(before)  # the control channel listens, so the scan sees something
        assert set(after) <= loopback


@pytest.mark.parametrize("gloo", ["", "lo"])
def test_all_listen_on_the_interface_that_is_named_and_gloo_on_its_own_if_it_has_one(gloo: str) -> None:
    ranks = Ranks(2, env={"TORCHKV_INTERFACE": "127.0.0.2", **({"GLOO_SOCKET_IFNAME": gloo} if gloo else {})})
    for before, after in ranks.run(listeners, None):
        assert set(before) == ({"0100007F"} if gloo else {"0200007F"}), "of gloo alone"
        assert set(after) - set(before) == ({"0200007F"} if gloo else set()), "the control channel"
        assert len(after) > len(before)
    ranks.close()


def member_sockets(secret: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]], str]:
    """What can be reached before and after this process joins, and its address."""
    before = _reachable()
    os.environ["TORCHKV_SECRET_FILE"] = secret
    with torchkv.join(random_cache(), "alone") as kv:
        return before, _reachable(), kv.address


def test_no_socket_listens_that_the_security_page_does_not_name(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    ranks = Ranks(1, world=False)
    ((before, after, address),) = ranks.run(member_sockets, str(new_secret_file(tmp_path / "secret")))
    ranks.close()
    fresh = [each for each in after if each not in before]
    port = int(address.rpartition(":")[2])
    tcp = [name for table, name in fresh if table == "tcp"]
    assert tcp == [f"0100007F:{port:04X}"], "the control channel, and on one host nothing else"
    unix = [name for table, name in fresh if table == "unix"]
    assert sum(bool(re.fullmatch(r"@torchkv-[0-9a-f]{32}", name)) for name in unix) == 1
    assert all(name.startswith("@torchkv-") for name in unix)
    assert {table for table, _ in fresh} == {"tcp", "unix"}
    for named in ("Control channel", "UCX, TCP", "`@torchkv-`", "UCX, Unix"):
        assert f"| {named}" in page


_found: list[str] = []
_watching = threading.Event()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _watching.is_set() and not _numba_loads():
        _found.append(f"{arguments[0]}.{arguments[1]}")


def _numba_loads() -> bool:
    """numba unpickles compiled code from its cache on this machine's disk, whenever a function is first called."""
    return any(str(frame.f_globals.get("__name__")).startswith("numba.") for frame, _ in traceback.walk_stack(None))


def _a_group_s_life() -> None:
    """Register, transfers, a failure, explain."""
    with kv_group() as kv:
        kv.register(random_cache())
        for _ in range(3):
            check_transfer(kv, 0, 1)
            check_transfer(kv, 1, 0)
        kv.recv_pages("r", [1], 1 - kv.rank())
        kv.cancel("r").wait(30)
        kv.explain(1 - kv.rank())


def unpickled() -> tuple[list[str], list[str]]:
    """Classes that unpickling looked up during a group's life, and in a control."""
    sys.addaudithook(_hook)
    _watching.set()
    _a_group_s_life()
    seen = list(_found)
    pickle.loads(pickle.dumps(Path("control")))  # negative control: this is what the hook would catch
    _watching.clear()
    return seen, list(_found)


def test_nothing_received_is_unpickled(pair: Ranks) -> None:
    for seen, control in pair.run(unpickled):
        assert seen == []
        assert control != []


def _owned() -> tuple[int, int, int]:
    """File descriptors, threads, resident KiB."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident_kib()


def many_requests(path: str | None, *counts: int) -> list[tuple[int, int, int]]:
    """So many requests, again and again; what this process owns after each time."""
    with kv_group(path=path) as kv:
        kv.register(random_cache())
        owned = []
        for count in counts:
            for number in range(count):
                if kv.rank() == 0:
                    with suppress(TransferCancelled):  # the receiver may have cancelled before this
                        kv.send_pages(f"request {number}", [1, 2, 3], 1)
                    if number % 10 == 9:
                        kv.cancel(f"request {number}").wait(30)
                    else:
                        kv.finish(f"request {number}", 1, aux=bytes(1000)).wait(30)
                else:
                    rx = kv.recv_pages(f"request {number}", [4, 5, 6], 0)
                    if number % 10 == 9:
                        kv.cancel(f"request {number}").wait(30)
                    else:
                        rx.wait(30)
            owned.append(_owned())
        return owned


@pytest.mark.parametrize("path", [None, "slices"])
def test_three_hundred_requests_leave_nothing_behind(path: str | None, pair: Ranks) -> None:
    for owned in pair.run(many_requests, path, 60, 100, 100, 100):
        assert len({(descriptors, threads) for descriptors, threads, _ in owned}) == 1
        resident = [kib for _, _, kib in owned]
        # An allocator may take a few MiB at any time. What leaks grows each time: 5,000 bytes a request are 448 KiB.
        assert min(after - before for before, after in itertools.pairwise(resident)) < 64


def collections_while_registering() -> int:
    """How often Python looks for garbage among all objects meanwhile."""
    found = []

    def notice(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info)

    with kv_group() as kv:
        gc.callbacks.append(notice)
        kv.register(random_cache())
        gc.callbacks.remove(notice)
    return len(found)


def test_garbage_is_collected_once_before_the_first_request() -> None:
    """Later it takes 0.2 s in the middle of one, of all threads; but it takes as long each time."""
    ranks = Ranks(2, env={"GLOO_SOCKET_IFNAME": "lo"})
    try:
        assert min(ranks.run(collections_while_registering)) >= 1
        assert ranks.run(collections_while_registering) == [0, 0]
    finally:
        ranks.close()


def many_staged(*counts: int) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """Several requests at a time through rings that go round. Of each request ten, one is cancelled on both sides."""
    with kv_group(path="staged", staging_send=24 << 10, staging_recv=20 << 10) as kv:
        kv.register(random_cache())
        kv.explain(1 - kv.rank())  # its probe is made once
        owned, engine = [], kv._verbs.engine
        for rounds in counts:
            for first in range(0, rounds, 5):
                names = [f"request {number}" for number in range(first, first + 5)]
                if kv.rank() == 0:
                    for name in names:
                        kv.staged_put(name, None, [1, 2, 3], 1)
                    works = [kv.finish(name, 1) for name in names]
                else:
                    works = [kv.recv_pages(name, [3 * i, 3 * i + 1, 3 * i + 2], 0) for i, name in enumerate(names)]
                if first % 10 == 0:
                    dist.barrier(kv)  # else it might be cancelled here before it has begun there
                    kv.cancel(names[0]).wait(30)
                for work in works[first % 10 == 0 :]:
                    work.wait(30)
            with engine.callers.changed:
                assert engine.callers.changed.wait_for(
                    lambda: engine.credits.ring.in_use == engine.credits.standing, 30
                )
            owned.append((_owned(), dict(kv.explain(1 - kv.rank()).staging)))
        return owned


def test_a_thousand_staged_requests_leave_nothing_behind(pair: Ranks) -> None:
    for owned in pair.run(many_staged, 100, 350, 350, 350):
        assert len({(descriptors, threads) for (descriptors, threads, _), _ in owned}) == 1
        resident = [kib for (_, _, kib), _ in owned]
        # As above. One leaked stage a request would be 2100 KiB each time.
        assert min(after - before for before, after in itertools.pairwise(resident)) < 512
        staging = owned[0][1]
        assert [each for _, each in owned] == [staging] * 4
        assert staging["in use"] in (0, 20 << 10 >> 3)  # but for a standing stage
        assert staging["quarantined"] == 0
        assert staging["recv"] == 20 << 10
