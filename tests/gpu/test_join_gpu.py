"""Instances that are launched apart, with pages on a GPU: bytes, and what a killed one leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, Jobs, new_secret_file
from tests.helpers.ranks import member
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.member import Member, await_forgotten, await_peer, connect, leave, lose, owned

STAYS, ONE, TWO, THREE = range(4)
SLACK = 64 << 20  # bytes that the driver keeps

pytestmark = [needs_gpus(1), pytest.mark.free_memory]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    ranks = Ranks(4, env={SECRET: str(new_secret_file(tmp_path / "secret"))}, world=False)
    yield Jobs(ranks, tmp_path, device="cuda:0")
    ranks.close()


def meet(jobs: Jobs, address: str, name: str) -> None:
    jobs.run(name, connect, address)
    jobs.run("stays", await_peer, name)


def test_jobs_of_unlike_tp_exchange_pages_of_a_gpu(jobs: Jobs) -> None:
    address = jobs.start("stays", [STAYS, ONE])
    jobs.start("other", [TWO], page_size=16)
    meet(jobs, address, "other")
    for number in range(3):
        jobs.transfer(f"r{number}", "stays", "other", pages=2, page_size=16)
    jobs.run("stays", leave)
    jobs.run("other", leave)


def free_nbytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def loop_reaches(name: str) -> bool:
    kv = Member.kv
    assert kv._verbs is not None
    flows = kv._verbs.engine.flows
    return flows is not None and all(flows.core.peers.reaches(rank) for rank in kv.peers()[name].ranks)


def test_memory_of_killed_jobs_is_released(jobs: Jobs) -> None:
    address = jobs.start("stays", [STAYS])
    free = []
    for process in (ONE, TWO, THREE):
        jobs.start("comes", [process])
        meet(jobs, address, "comes")
        jobs.transfer("r", "stays", "comes")
        jobs.transfer("r", "comes", "stays")
        assert jobs.run("stays", loop_reaches, "comes") == [True]
        jobs.kill("comes")
        jobs.run("stays", await_forgotten)
        free += jobs.run("stays", free_nbytes)
    assert min(free[1:]) >= free[0] - SLACK
    jobs.run("stays", leave)


def owned_and_free() -> tuple[int, ...]:
    return (*owned(), free_nbytes())


def exchange_and_die(stays: Ranks, comes: Ranks, address: str, first: int, size: int, scratch: Path) -> None:
    """``size`` instances come, send and receive, and are killed at once while a request of each is under way."""
    names = [f"comes{first + process}" for process in range(size)]
    for process, name in enumerate(names):
        comes.start(member.join, name, 1, 0, 1, str(scratch / name), None, 8, "cuda:0", ranks=[process])
    comes.join(range(size))
    for process, name in enumerate(names):
        comes.run(connect, address, ranks=[process])
        stays.run(await_peer, name)
        for request, writers, readers in (("there", comes, stays), ("back", stays, comes)):
            src, dst, tag = (name, "stays", 1) if writers is comes else ("stays", name, 0)
            begun = readers.start(member.receive, request, src, tag, ranks=[0 if readers is stays else process])
            writers.start(member.send, request, dst, tag, 4, ranks=[0 if writers is stays else process])
            readers.join(begun)
            writers.join([0 if writers is stays else process])
    stays.start(lose, names)
    stays.hear(0)
    for process in range(size):
        comes.kill(process)
    stays.tell(0)
    stays.join([0])
    comes.close()
    stays.run(await_forgotten)


@pytest.mark.parametrize(
    ("cycles", "size"), [(3, 2), pytest.param(25, 8, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_nothing_is_left_of_many_lives(cycles: int, size: int, tmp_path: Path) -> None:
    """Also of a GPU's memory: what a life has mapped, and what was kept for it."""
    env = {SECRET: str(new_secret_file(tmp_path / "secret"))}
    stays = Ranks(1, env=env, world=False)
    (address,) = stays.run(member.join, "stays", 0, 0, 1, str(tmp_path / "stays"), None, 8, "cuda:0")
    seen = []
    for cycle in range(cycles):
        exchange_and_die(stays, Ranks(size, env=env, world=False), address, cycle * size, size, tmp_path)
        seen += stays.run(owned_and_free)
        print("after", (cycle + 1) * size, "lives: descriptors, threads, mappings, channels, KiB, free:", seen[-1])
    first, last = seen[cycles // 3], seen[-1]
    assert last[:4] == first[:4], seen
    assert last[4] - first[4] < 2 * size * cycles + 2048, seen
    assert last[5] >= first[5] - SLACK, seen
    stays.run(leave)
    stays.close()
