"""Prefill and decode on two hosts that share nothing but a network: every path, broken links, a peer that vanishes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import torchkv
from tests.helpers.harness import Ranks
from tests.helpers.hosts import Hosts, unavailable
from tests.helpers.jobs import SECRET, Jobs, new_secret_file
from tests.helpers.ranks.member import Member, await_forgotten, await_peer, connect, fill, footprint, footprint_within
from tests.helpers.waiting import until
from torchkv import KVError
from torchkv.engine.joining import membership
from torchkv.engine.resident import routes

P0, P1, NEW0, NEW1, D, E = range(6)
HOST = (0, 0, 0, 0, 1, 1)  # of each process
PAGES = [9, 10]  # of requests that fail; `member.receive` uses the first ones
HEARTBEAT = 0.5
MOMENT = 0.6  # seconds; TCP then sends again within 1.4 s, and a peer is lost after five heartbeats
BOTH_WAYS = ((0, 1), (1, 0))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := unavailable():  # asked here, because it makes namespaces
        pytest.skip(why)
    with Hosts() as made:
        yield made


@pytest.fixture
def jobs(hosts: Hosts, tmp_path: Path) -> Iterator[Jobs]:
    env = {
        SECRET: str(new_secret_file(tmp_path / "secret")),
        "TORCHKV_INTERFACE": "eth0",
        "TORCHKV_HEARTBEAT": str(HEARTBEAT),
        "GLOO_SOCKET_IFNAME": "lo",  # the ranks of an instance are on one host
    }
    ranks = Ranks(6, env=env, world=False, holders=[hosts.holders[host] for host in HOST])
    ranks.run(short_runs)
    made = Jobs(ranks, tmp_path)
    meet(made, made.start("p", [P0, P1]), made.start("d", [D], page_size=16))
    yield made
    ranks.close()


def short_runs() -> None:
    """The resident loop puts runs as short as those of these tests, if no path is forced, and stages none."""
    routes.MIN_RUN, routes.MAX_STAGED_RUN = 1, 0


def meet(jobs: Jobs, prefill: str, decode: str) -> None:
    """They meet by the address of either."""
    assert jobs.run("d", connect, prefill) == ["p"]
    assert jobs.run("p", connect, decode) == ["d", "d"]


def links() -> set[str]:
    kv = Member.kv
    return {kv.explain(rank).link for peer in kv.peers().values() for rank in peer.ranks}


def force(path: str | None) -> None:
    assert Member.kv._verbs is not None
    Member.kv._verbs.forced_path = path


def test_every_path_carries_the_bytes_over_the_network(jobs: Jobs) -> None:
    for found in jobs.run("p", links):
        assert all("tcp" in link for link in found), found
    for path in (None, "slices", "staged"):
        jobs.run("p", force, path)
        for number in range(3):
            jobs.transfer(f"{path} {number}", "p", "d", pages=2, page_size=16)
    jobs.run("p", force, None)
    jobs.start("e", [E])
    jobs.transfer("of unlike TP", "p", "e", address=jobs.run("p", address)[0])
    jobs.transfer("and back", "e", "p")
    jobs.start("q", [NEW0])
    jobs.run("q", force, "runs")
    jobs.transfer("whole pages", "q", "e", address=jobs.run("q", address)[0])


def address() -> str:
    return Member.kv.address


# ---------------------------------------------------------------------- links that break


def serve(dst: str, count: int) -> None:
    for number in range(count):
        Member.kv.send_pages(f"r{number}", [3, 4], dst)
        Member.kv.finish(f"r{number}", dst).wait(30)


def consume(src: str, count: int) -> None:
    for number in range(count):
        Member.kv.recv_pages(f"r{number}", [1 + number % 8], src).wait(30)


def stage_short_runs() -> None:
    """As usual: and none of these tests are longer."""
    routes.MIN_RUN = 4096


def staged_by_loop() -> bool:
    """Whether the loop has packed anything for a peer."""
    assert Member.kv._verbs is not None
    flows = Member.kv._verbs.engine.flows
    assert flows is not None
    return bool((flows.core._memory[0]["peers"]["packed"] > 0).any())


@pytest.mark.parametrize("staged", [False, True], ids=["put", "staged"])
@pytest.mark.parametrize("ways", [BOTH_WAYS, BOTH_WAYS[:1], BOTH_WAYS[1:]], ids=["both", "to decode", "to prefill"])
def test_a_link_that_is_cut_for_a_moment_fails_nothing(
    hosts: Hosts, jobs: Jobs, ways: tuple[tuple[int, int], ...], staged: bool
) -> None:
    if staged:
        jobs.ranks.run(stage_short_runs)
    begun = jobs.ranks.start(consume, "p", 400, ranks=jobs.of["d"][0])
    begun += jobs.ranks.start(serve, "d", 400, ranks=jobs.of["p"][0])
    for _ in range(2):
        time.sleep(0.2)
        with hosts.cut_while(*ways):
            time.sleep(MOMENT)
    jobs.ranks.join(begun)
    assert jobs.run("p", staged_by_loop)[0] == staged
    jobs.transfer("after", "p", "d", pages=2, page_size=16)


def break_connections() -> int:
    """Ends those over TCP that peers have opened to this process' UCX. How many.

    Both ends live, and so do the connections of their messengers.
    """
    assert Member.kv._verbs is not None
    (messenger, *_) = Member.kv._verbs.engine.peers._control.endpoint.split()
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in tcp_sockets()]
        listening = {each for each in sockets if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        ports = {each.getsockname()[1] for each in listening} - {int(messenger.rpartition(":")[2])}
        opened = [each for each in sockets if each not in listening and each.getsockname()[1] in ports]
        for each in opened:
            each.shutdown(socket.SHUT_RDWR)
        return len(opened)


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process' sockets on the link between the hosts."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if fd.readlink().name.startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(fd.name)))
                is_tcp = (found.family, found.type) == (socket.AF_INET, socket.SOCK_STREAM)
                if is_tcp and found.getsockname()[0] in Hosts.addresses:
                    yield found
                else:
                    found.close()


def meanwhile(count: int, begin: Callable[[str], torchkv.KVWork]) -> tuple[int, list[str]]:
    """Requests one after another, whatever becomes of them. Amid them connections break: how many, and the errors."""
    errors = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(count):
            if number == count // 4:
                broken = pool.submit(break_connections)
            try:
                begin(f"r{number}").wait(30)
            except KVError as error:
                errors.append(type(error).__name__)
                Member.kv.cancel(f"r{number}")
        return broken.result(), errors


def serve_meanwhile(dst: str, count: int) -> tuple[int, list[str]]:
    def begin(name: str) -> torchkv.KVWork:
        Member.kv.send_pages(name, [3, 4], dst)
        return Member.kv.finish(name, dst)

    return meanwhile(count, begin)


def consume_meanwhile(src: str, count: int) -> tuple[int, list[str]]:
    """A page of a request that has failed may be written to as long as its writers live."""

    def begin(name: str) -> torchkv.KVWork:
        page = max(set(range(Member.cache.num_pages)) - Member.kv.quarantined().keys())
        return Member.kv.recv_pages(name, [page], src)

    return meanwhile(count, begin)


def has_lane() -> bool:
    """Whether the loop reaches a rank of another host, as far as it knows."""
    assert Member.kv._verbs is not None
    flows = Member.kv._verbs.engine.flows
    assert flows is not None
    return any(flows.core.peers.lane(rank) is not None for rank in flows.core.peers.slots)


@pytest.mark.parametrize("staged", [False, True], ids=["put", "staged"])
def test_connections_that_break_fail_what_is_being_put_and_nothing_else(jobs: Jobs, staged: bool) -> None:
    """Nobody waits for a deadline, and the loop goes on over new ones."""
    if staged:
        jobs.ranks.run(stage_short_runs)
    begun = jobs.ranks.start(consume_meanwhile, "p", 400, ranks=jobs.of["d"][0])
    begun += jobs.ranks.start(serve_meanwhile, "d", 400, ranks=jobs.of["p"][0])
    ended = jobs.ranks.join(begun)
    assert sum(broken for broken, _ in ended) > 0
    for _, errors in ended:
        assert set(errors) <= {"PeerLost"}
        assert len(errors) <= 8  # for each connection what is being put, and what begins before that is noticed
    jobs.transfer("after", "p", "d", pages=2, page_size=16)
    assert all(jobs.run("p", has_lane))


def begin_to_send() -> None:
    fill(Member.cache, 0)
    Member.works = [Member.kv.send_pages("r", [3, 4, 5, 6], "d")]


def begin_to_receive() -> None:
    Member.works = [Member.kv.recv_pages("r", PAGES, "p")]


def await_arrival() -> None:
    until(lambda: Member.works[0].bytes > 0, "the first bytes have come")


def failure() -> tuple[str, float, bool, dict[int, tuple[int, ...]]]:
    """Why the first work has failed, after how many seconds, whether its pages are safe, and what is quarantined."""
    began, work = time.monotonic(), Member.works[0]
    with pytest.raises(KVError) as caught:
        work.wait(30)
    return type(caught.value).__name__, time.monotonic() - began, caught.value.pages_safe, Member.kv.quarantined()


def still_quarantined() -> dict[int, tuple[int, ...]]:
    return Member.kv.quarantined()


def cancel() -> None:
    Member.kv.cancel("r").wait(30)
    assert Member.kv.quarantined() == {}


def begin(jobs: Jobs, path: str = "slices") -> None:
    """A request of which some bytes have arrived, and which nobody finishes.

    Not on the cheapest path, which may be staged: then nobody can write to its pages.
    """
    jobs.run("p", force, path)
    jobs.run("d", begin_to_receive)
    jobs.run("p", begin_to_send)
    jobs.run("d", await_arrival)


@pytest.mark.parametrize("ways", [BOTH_WAYS, BOTH_WAYS[:1], BOTH_WAYS[1:]], ids=["both", "to decode", "to prefill"])
def test_a_link_that_stays_cut_fails_requests_and_frees_no_page_until_it_is_healed(
    hosts: Hosts, jobs: Jobs, ways: tuple[tuple[int, int], ...]
) -> None:
    begin(jobs)
    with hosts.cut_while(*ways):
        ((kind, seconds, safe, quarantined),) = jobs.run("d", failure)
        assert (kind, safe) == ("PeerLost", False)
        assert seconds < 5 * HEARTBEAT + 2
        assert sorted(quarantined) == PAGES
        time.sleep(1.0)
        assert jobs.run("d", still_quarantined) == [quarantined]
    jobs.run("d", await_peer, "p")
    jobs.run("p", await_peer, "d")
    for name in ("d", "p"):
        jobs.run(name, cancel)
    jobs.run("p", force, None)
    jobs.transfer("after", "p", "d", pages=2, page_size=16)


@pytest.mark.parametrize(("path", "in_doubt"), [("slices", PAGES), ("staged", [])])
def test_a_peer_that_vanishes_without_a_word_leaves_its_pages_in_quarantine(
    hosts: Hosts, jobs: Jobs, path: str, in_doubt: list[int]
) -> None:
    """No FIN arrives. Nobody can know whether its writes still travel, whoever takes its place. Staged ones end in the
    receiver's ring."""
    begin(jobs, path)
    with hosts.cut_while(*BOTH_WAYS):
        jobs.kill("p")
        ((kind, seconds, safe, quarantined),) = jobs.run("d", failure)
        assert (kind, safe) == ("PeerLost", not in_doubt)
        assert seconds < 5 * HEARTBEAT + 2
        assert sorted(quarantined) == in_doubt
    jobs.start("p", [NEW0, NEW1])
    assert jobs.run("p", connect, jobs.run("d", address)[0]) == ["d", "d"]
    jobs.run("d", await_peer, "p")
    jobs.transfer("after", "p", "d", pages=2, page_size=16)
    assert jobs.run("d", still_quarantined) == [quarantined]


def lose_for_good_after(seconds: float) -> None:
    membership.LOST_FOR_GOOD = seconds


def test_a_peer_that_vanishes_when_all_is_done_is_forgotten(hosts: Hosts, jobs: Jobs) -> None:
    """With its connections and mappings. Nobody ever says that it has ended."""
    jobs.start("e", [E])
    jobs.run("e", lose_for_good_after, 1.0)
    left = None
    for processes in ([], [NEW0, NEW1]):  # the first time UCX keeps what it needs for other hosts
        if processes:
            jobs.start("p", processes)
        met = jobs.run("p", connect, jobs.run("e", address)[0])
        assert set(met) == {"e"}
        jobs.run("e", await_peer, "p")
        jobs.transfer(f"request {processes}", "p", "e")
        connected = jobs.run("e", footprint)[0]
        with hosts.cut_while(*BOTH_WAYS):
            jobs.kill("p")
            jobs.run("e", await_forgotten)
        # UCX's connections that p had opened end when TCP gives them up: soon, now that p's host can say so.
        left = jobs.run("e", footprint_within, left or (connected[0] - 1, *connected[1:]))[0]
