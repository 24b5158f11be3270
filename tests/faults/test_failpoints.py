"""kill -9 at named moments of either side: a typed error in time, safe pages, no wrong byte, and a group that works on.

Deadlines are minutes here, so that only the detection of the death itself can end a wait in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import failpoints
from tests.helpers.harness import Ranks, kv_world
from tests.helpers.jobs import SECRET, Jobs, new_secret_file
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.member import Member, await_forgotten, leave
from tests.helpers.ranks.served import keep_loops_from_staging
from tests.helpers.ranks.small_cache import check_transfer, page_bytes, random_cache
from torchkv import KVError, PeerLost
from torchkv.engine.engine import Engine
from torchkv.engine.joining.peer_metadata import PeerMetadata
from torchkv.engine.joining.registration import Registration
from torchkv.host.processes import has_ended

SURVIVOR, VICTIM, BYSTANDER = range(3)
PATIENCE = 30  # seconds; the deadlines of the group are ten times that
SENT, GRANTED = [2, 9, 4, 7], [1, 2, 3, 8]
DEADLINES = {"TORCHKV_TIMEOUT": "300", "TORCHKV_GRANT_TIMEOUT": "300", "TORCHKV_HEARTBEAT": "60"}
STAGED = {"mid gather", "mid scatter"}  # by Python
COMPLETE = {"after the seal, before the verdict"}  # then the reader has everything, and succeeds


def register() -> None:
    kv_world().register(random_cache(), instance=f"i{kv_world().rank()}")


def write() -> None:
    kv = kv_world()
    assert kv._verbs.cache is not None
    random_fill(kv._verbs.cache, np.random.default_rng(5))
    kv.send_pages("r", SENT, SURVIVOR)
    kv.finish("r", SURVIVOR).wait(PATIENCE)
    time.sleep(PATIENCE)  # the failpoint ends this


def read() -> None:
    kv_world().recv_pages("r", GRANTED, SURVIVOR).wait(PATIENCE)
    time.sleep(PATIENCE)


def receive_from_the_victim(complete: bool) -> None:
    kv = kv_world()
    cache, source = kv._verbs.cache, random_cache()
    assert cache is not None
    random_fill(source, np.random.default_rng(5))
    random_fill(cache, np.random.default_rng(6))
    others = [page for page in range(cache.num_pages) if page not in GRANTED]
    canaries = page_bytes(cache, others)
    rx = kv.recv_pages("r", GRANTED, VICTIM)
    if complete:
        rx.wait(PATIENCE)
        assert torch.equal(page_bytes(cache, GRANTED), page_bytes(source, SENT))
    else:
        with pytest.raises(PeerLost, match=f"rank {VICTIM}") as caught:
            rx.wait(PATIENCE)
        kv.cancel("r").wait(PATIENCE)
        assert caught.value.pages_safe
    assert kv.quarantined() == {}
    # They have a new owner now. Nothing of the dead one may land in them.
    cache_of_the_next = page_bytes(cache, GRANTED)
    time.sleep(0.2)
    assert torch.equal(page_bytes(cache, GRANTED), cache_of_the_next)
    assert torch.equal(page_bytes(cache, others), canaries)


def send_to_the_victim() -> None:
    kv = kv_world()
    assert kv._verbs.cache is not None
    before = page_bytes(kv._verbs.cache, SENT)
    kv.send_pages("r", SENT, VICTIM)
    with pytest.raises(PeerLost, match=f"rank {VICTIM}"):
        kv.finish("r", VICTIM).wait(PATIENCE)
    kv.cancel("r").wait(PATIENCE)
    assert torch.equal(page_bytes(kv._verbs.cache, SENT), before)


def usable() -> None:
    check_transfer(kv_world(), SURVIVOR, BYSTANDER)
    check_transfer(kv_world(), BYSTANDER, SURVIVOR)


def killed_at(point: str, *, apart: bool = False, **env: str) -> Ranks:
    """Ranks of which one will end there."""
    return Ranks(3, env={**DEADLINES, failpoints.VARIABLE: f"{point}@{VICTIM}", **env}, apart=apart)


def apart_and_killed_at(point: str) -> Ranks:
    """The same, registered, without memory of each other mapped: Python puts or stages what they write."""
    # Without UCX_TLS a host without GPUs writes without UCX.
    ranks = killed_at(point, apart=True, TORCHKV_PATH="staged" if point in STAGED else "slices", UCX_TLS="all")
    ranks.run(keep_loops_from_staging)
    ranks.run(register)
    return ranks


@pytest.mark.parametrize("point", failpoints.OF_WRITERS)
def test_a_writer_is_killed_at(point: str) -> None:
    ranks = apart_and_killed_at(point)
    ranks.start(write, ranks=[VICTIM])
    ranks.start(receive_from_the_victim, point in COMPLETE, ranks=[SURVIVOR])
    ranks.expect_exit(VICTIM, -signal.SIGKILL)
    ranks.join([SURVIVOR])
    ranks.run(usable)
    ranks.close()


@pytest.mark.parametrize("point", failpoints.OF_READERS)
def test_a_reader_is_killed_at(point: str) -> None:
    ranks = apart_and_killed_at(point)
    ranks.start(read, ranks=[VICTIM])
    ranks.start(send_to_the_victim, ranks=[SURVIVOR])
    ranks.expect_exit(VICTIM, -signal.SIGKILL)
    ranks.join([SURVIVOR])
    ranks.run(usable)
    ranks.close()


def fail_to_register() -> None:
    with pytest.raises(PeerLost, match="start all its ranks again"):
        register()


@pytest.mark.parametrize("point", failpoints.AT_REGISTER)
def test_a_rank_is_killed_while_it_registers(point: str) -> None:
    ranks = killed_at(point)
    ranks.start(register, ranks=[VICTIM])
    ranks.start(fail_to_register, ranks=[SURVIVOR, BYSTANDER])
    ranks.expect_exit(VICTIM, -signal.SIGKILL)
    ranks.join([SURVIVOR, BYSTANDER])
    ranks.close()


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = new_secret_file(tmp_path / "secret")
    monkeypatch.setenv(SECRET, str(path))
    return path


def connect_to_the_victim(address: str) -> str:
    try:
        return Member.kv.connect(address, timeout=3.0).result(PATIENCE)
    except KVError as error:
        return type(error).__name__


@pytest.mark.parametrize("point", failpoints.AT_JOIN)
def test_an_instance_is_killed_while_another_joins_it(point: str, secret: Path, tmp_path: Path) -> None:
    ranks = Ranks(3, env={SECRET: str(secret), failpoints.VARIABLE: f"{point}@{VICTIM}"}, world=False)
    jobs = Jobs(ranks, tmp_path)
    address = jobs.start("p", [VICTIM])
    jobs.start("d", [SURVIVOR])
    ranks.start(connect_to_the_victim, address, ranks=[SURVIVOR])
    ranks.expect_exit(VICTIM, -signal.SIGKILL)
    (outcome,) = ranks.join([SURVIVOR])
    assert outcome in ("TransferTimeout", "PeerLost") or (point, outcome) == ("admitted", "p")
    jobs.run("d", await_forgotten)
    address = jobs.start("p", [BYSTANDER])
    assert jobs.run("d", connect_to_the_victim, address) == ["p"]
    jobs.transfer("r", "p", "d")
    jobs.transfer("r", "d", "p")
    for name in ("p", "d"):
        jobs.run(name, leave)
    ranks.close()


def meet_one_that_dies_at_the_last_moment(address: str) -> str:
    """What it has said of its memory is true no more when this rank maps it."""
    real = Registration.admit

    def admit(self: Registration, engine: Engine, members: Mapping[int, PeerMetadata], *, life: int) -> None:
        for metadata in members.values():
            os.kill(metadata.process.pid, signal.SIGKILL)
            while not has_ended(metadata.process):
                time.sleep(0.001)
        real(self, engine, members, life=life)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registration, "admit", admit)
        return connect_to_the_victim(address)


def test_an_instance_that_dies_before_it_is_mapped_is_lost(secret: Path, tmp_path: Path) -> None:
    ranks = Ranks(3, env={SECRET: str(secret)}, world=False)
    jobs = Jobs(ranks, tmp_path)
    address = jobs.start("p", [VICTIM])
    jobs.start("d", [SURVIVOR])
    ranks.start(meet_one_that_dies_at_the_last_moment, address, ranks=[SURVIVOR])
    ranks.expect_exit(VICTIM, -signal.SIGKILL)
    assert ranks.join([SURVIVOR]) == ["PeerLost"]
    address = jobs.start("p", [BYSTANDER])
    assert jobs.run("d", connect_to_the_victim, address) == ["p"]
    jobs.transfer("r", "p", "d")
    for name in ("p", "d"):
        jobs.run(name, leave)
    ranks.close()
