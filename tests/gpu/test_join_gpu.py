"""Instances that are launched apart, with pages on a GPU: bytes, and what a killed one leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.jobs import SECRET, Jobs, new_secret_file
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.member import Member, await_forgotten, await_peer, connect, leave

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
    return flows is not None and all(flows.core.reaches(rank) for rank in kv.peers()[name].ranks)


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
