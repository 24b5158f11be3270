"""Instances of other hosts that vanish without a word, in a simulated world: when they are forgotten, and when not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.simulation.cluster import Rank
from tests.helpers.simulation.jobs import Job, Jobs
from tests.helpers.simulation.lives import leased_pages
from tests.helpers.simulation.requests import done
from torchkv.engine.joining import membership
from torchkv.engine.peers import Peers
from torchkv.engine.work import KVWork
from torchkv.errors import PeerLost
from torchkv.layout.layout import KVLayout

LOST_FOR_GOOD = 5.0


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOST_FOR_GOOD", LOST_FOR_GOOD)


PAGES = [40, 41]  # of receivers


def apart(tp_size: int = 2) -> tuple[Jobs, Job, Job]:
    """Two jobs that have met, on hosts that do not see each other's processes."""
    jobs = Jobs(0, sees_death=False)
    p, d = start(jobs, "p", tp_size, 2), start(jobs, "d", 1, 4)
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and d.knows(p) and p.knows(d), limit=10)
    return jobs, p, d


def start(jobs: Jobs, name: str, tp_size: int, page_size: int) -> Job:
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "page_size": page_size, "dtype": torch.int16}
    job = jobs.start(name, [KVLayout.gqa(tp_rank=rank, tp_size=tp_size, **shape) for rank in range(tp_size)])
    for each in job.memberships:
        each._host = f"the host of {name}"  # all say that they run on this one
    return job


def transfer(jobs: Jobs, name: str, p: Job, d: Job) -> None:
    receiver = d.ranks[0]
    for layer in range(2):
        pool(receiver, layer).fill_(-1)
        for rank in p.ranks:
            pool(rank, layer).random_(0, 1000)
    work = receiver.recv_pages(name, PAGES, "p")
    for rank in p.ranks:
        count = len(PAGES) * 4 // rank.cache.layout.page_size
        rank.send_pages(name, list(range(count)), "d")
        rank.finish(name, "d")
    assert jobs.run(done(work), limit=10)
    assert work.exception() is None
    for layer in range(2):
        sent = [
            pool(r, layer)[: len(PAGES) * 4 // r.cache.layout.page_size].reshape(len(PAGES) * 4, -1) for r in p.ranks
        ]
        received = pool(receiver, layer)
        assert torch.equal(received[PAGES].reshape(len(PAGES) * 4, -1), torch.cat(sent, dim=1))
        others = [page for page in range(len(received)) if page not in PAGES]
        assert bool((received[others] == -1).all())
    jobs.run(limit=1.0)  # the senders are told


def pool(rank: Rank, layer: int) -> torch.Tensor:
    tensor = rank.cache.k[layer]
    assert tensor is not None
    return tensor


def knows(job: Job) -> set[str]:
    return set(job.memberships[0].peers)


def test_one_that_vanished_is_forgotten_after_a_time_with_all_that_was_kept_of_it() -> None:
    jobs, p, d = apart()
    transfer(jobs, "r1", p, d)
    engine = d.ranks[0].engine
    broken = next(iter(engine.connections.values()))
    engine.peers.drop_connection(broken)
    jobs.kill(p)
    assert jobs.run(lambda: not d.memberships[0].peers["p"].here, limit=5)
    jobs.run(limit=LOST_FOR_GOOD - 1.0)
    assert knows(d) == {"p"}, "too early: it may answer again"
    assert jobs.run(lambda: not d.memberships[0].peers, limit=3)
    assert engine.group_map.info.keys() == {0}
    assert engine.connections.keys() == set()
    assert broken.closed
    assert not engine.peers.closing
    assert d.cluster.registrations[0]._metadata_of.keys() == {0}
    control: Any = d.cluster.registrations[0].control
    assert control._nodes.keys() == set()
    assert engine.messenger._sessions.keys() == set()
    transfer_with_the_next(jobs, d)


def transfer_with_the_next(jobs: Jobs, d: Job) -> None:
    new = start(jobs, "p", 1, 4)
    call = new.connect(d.address)
    assert jobs.run(lambda: call.ended and d.knows(new) and new.knows(d), limit=10)
    transfer(jobs, "r2", new, d)
    assert d.ranks[0].quarantined() == {}


def pause(job: Job) -> None:
    for number in range(len(job.ranks)):
        job.cluster.pause(number)


def resume(job: Job) -> None:
    for rank in job.ranks:
        job.cluster.world.resume(rank.node)


def test_one_that_comes_back_is_told_that_it_was_forgotten_and_must_join_again() -> None:
    """Its host has slept. Frames of its sessions may still travel, so this life of it is not met again."""
    jobs, p, d = apart()
    transfer(jobs, "r1", p, d)
    pause(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=LOST_FOR_GOOD + 5)
    resume(p)
    for rank in p.ranks:  # they have noticed nothing
        rank.recv_pages("r0", PAGES, "d")
    assert jobs.run(lambda: all(not each.peers for each in p.memberships), limit=5)
    again = p.connect(d.address)
    assert jobs.run(lambda: again.ended, limit=12)
    assert isinstance(again.error, PeerLost)
    assert "join again" in str(again.error)
    other = d.connect(p.address)
    assert jobs.run(lambda: other.ended, limit=12)
    assert isinstance(other.error, PeerLost)
    transfer_with_the_next(jobs, d)


def test_one_that_answers_in_time_is_kept_and_the_time_begins_anew() -> None:
    jobs, p, d = apart()
    for number in range(3):
        pause(p)
        assert jobs.run(lambda: not d.memberships[0].peers["p"].here, limit=5)
        jobs.run(limit=LOST_FOR_GOOD - 2.0)
        resume(p)
        assert jobs.run(lambda: d.knows(p) and p.knows(d), limit=5)
        transfer(jobs, f"r{number}", p, d)


def vanish_in_mid_request() -> tuple[KVWork, Job]:
    jobs, p, d = apart()
    work = d.ranks[0].recv_pages("r1", PAGES, "p")
    jobs.run(limit=0.5)
    jobs.kill(p)
    jobs.run(limit=LOST_FOR_GOOD + 20.0)
    return work, d


def test_one_that_may_still_write_is_not_forgotten() -> None:
    """Only its answer frees the pages; so what it needs for that is kept."""
    work, d = vanish_in_mid_request()
    error = work.exception()
    assert isinstance(error, PeerLost)
    assert not error.pages_safe
    assert knows(d) == {"p"}
    assert sorted(d.ranks[0].quarantined()) == PAGES == leased_pages(d.ranks[0])


def test_forgetting_one_that_may_still_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "finished", lambda self, rank: True)
    _, d = vanish_in_mid_request()
    assert knows(d) == set()


def test_who_may_still_be_written_to_is_not_told_that_all_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Left` would be a proof to it. Its messages are dropped, and it cannot be met again, either."""
    jobs, p, d = apart(1)
    transfer(jobs, "r1", p, d)
    sender = d.ranks[0].engine.sender
    number = d.memberships[0].peers["p"].ranks[0]
    monkeypatch.setattr(sender.requests, "undrainable", {(number, 7)})
    pause(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=LOST_FOR_GOOD + 5)
    assert not d.ranks[0].engine.messenger._abandoned
    resume(p)
    p.ranks[0].recv_pages("r0", PAGES, "d")
    jobs.run(limit=5.0)
    assert knows(p) == {"d"}
    again = p.connect(d.address)
    assert jobs.run(lambda: again.ended, limit=12)
