"""Instances of other hosts that vanish without a word, in a simulated world: when they are forgotten, and when not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.faults.test_simulated_joins import Requests, leased_pages
from tests.helpers.simulation.jobs import Job, Jobs
from tests.helpers.simulation.requests import done
from torchkv.engine import membership
from torchkv.engine.peers import Peers
from torchkv.errors import PeerLost

LOST_FOR_GOOD = 5.0


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOST_FOR_GOOD", LOST_FOR_GOOD)


def apart(tp_size: int = 2) -> tuple[Requests, Job, Job]:
    """Two jobs that have met, on hosts that do not see each other's processes."""
    jobs = Jobs(0, sees_death=False)
    requests = Requests(jobs, np.random.default_rng())
    p, d = start(requests, "p", tp_size, 2), start(requests, "d", 1, 4)
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and d.knows(p) and p.knows(d), limit=10)
    return requests, p, d


def start(requests: Requests, name: str, tp_size: int, page_size: int) -> Job:
    job = requests.start(name, tp_size, page_size)
    for each in job.memberships:
        each._host = f"the host of {name}"  # all say that they run on this one
    return job


def transfer(requests: Requests, name: str, p: Job, d: Job) -> None:
    requests.post(d.ranks[0], name, "p")
    for rank in p.ranks:
        requests.send(rank, name, "d")
    assert requests.jobs.run(done(requests.receivings[-1].work), limit=10)
    assert requests.receivings[-1].work.exception() is None
    requests.jobs.run(limit=1.0)  # the senders are told


def knows(job: Job) -> set[str]:
    return set(job.memberships[0].peers)


def test_one_that_vanished_is_forgotten_after_a_time_with_all_that_was_kept_of_it() -> None:
    requests, p, d = apart()
    transfer(requests, "r1", p, d)
    jobs, engine = requests.jobs, d.ranks[0].engine
    jobs.kill(p)
    assert jobs.run(lambda: not d.memberships[0].peers["p"].here, limit=5)
    jobs.run(limit=LOST_FOR_GOOD - 1.0)
    assert knows(d) == {"p"}, "too early: it may answer again"
    assert jobs.run(lambda: not d.memberships[0].peers, limit=3)
    assert engine.group_map.info.keys() == {0}
    assert engine.connections.keys() == set()
    assert not engine.peers.closing
    assert d.cluster.registrations[0]._metadata_of.keys() == {0}
    control: Any = d.cluster.registrations[0].control
    assert control._nodes.keys() == set()
    assert engine._messenger._sessions.keys() == set()
    transfer_with_the_next(requests, d)


def transfer_with_the_next(requests: Requests, d: Job) -> None:
    new = start(requests, "p", 1, 4)
    call = new.connect(d.address)
    assert requests.jobs.run(lambda: call.ended and d.knows(new) and new.knows(d), limit=10)
    transfer(requests, "r2", new, d)
    requests.check_end()
    assert requests.problems == []


def pause(job: Job) -> None:
    for number in range(len(job.ranks)):
        job.cluster.pause(number)


def resume(job: Job) -> None:
    for rank in job.ranks:
        job.cluster.world.resume(rank.node)


def test_one_that_comes_back_is_told_that_it_was_forgotten_and_must_join_again() -> None:
    """Its host has slept. Frames of its sessions may still travel, so this life of it is not met again."""
    requests, p, d = apart()
    transfer(requests, "r1", p, d)
    jobs = requests.jobs
    pause(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=LOST_FOR_GOOD + 5)
    resume(p)
    for rank in p.ranks:  # they have noticed nothing
        requests.post(rank, "r0", "d")
    assert jobs.run(lambda: all(not each.peers for each in p.memberships), limit=5)
    again = p.connect(d.address)
    assert jobs.run(lambda: again.ended, limit=12)
    assert isinstance(again.error, PeerLost)
    assert "join again" in str(again.error)
    other = d.connect(p.address)
    assert jobs.run(lambda: other.ended, limit=12)
    assert isinstance(other.error, PeerLost)
    transfer_with_the_next(requests, d)


def test_one_that_answers_in_time_is_kept_and_the_time_begins_anew() -> None:
    requests, p, d = apart()
    for number in range(3):
        pause(p)
        jobs = requests.jobs
        assert jobs.run(lambda: not d.memberships[0].peers["p"].here, limit=5)
        jobs.run(limit=LOST_FOR_GOOD - 2.0)
        resume(p)
        assert jobs.run(lambda: d.knows(p) and p.knows(d), limit=5)
        transfer(requests, f"r{number}", p, d)
    assert requests.problems == []


def vanish_in_mid_request() -> tuple[Requests, Job]:
    requests, p, d = apart()
    requests.post(d.ranks[0], "r1", "p")
    requests.jobs.run(limit=0.5)
    requests.jobs.kill(p)
    requests.jobs.run(limit=LOST_FOR_GOOD + 20.0)
    return requests, d


def test_one_that_may_still_write_is_not_forgotten() -> None:
    """Only its answer frees the pages; so what it needs for that is kept."""
    requests, d = vanish_in_mid_request()
    assert isinstance(requests.receivings[-1].work.exception(), PeerLost)
    assert not requests.receivings[-1].work.exception().pages_safe
    assert knows(d) == {"p"}
    assert sorted(d.ranks[0].quarantined()) == sorted(requests.receivings[-1].pages) == leased_pages(d.ranks[0])


def test_forgetting_one_that_may_still_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "finished", lambda self, rank: True)
    _, d = vanish_in_mid_request()
    assert knows(d) == set()


def test_who_may_still_be_written_to_is_not_told_that_all_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Left` would be a proof to it. Its messages are dropped, and it cannot be met again, either."""
    requests, p, d = apart(1)
    transfer(requests, "r1", p, d)
    sender = d.ranks[0].engine.sender
    number = d.memberships[0].peers["p"].ranks[0]
    monkeypatch.setattr(sender, "_undrainable", {(number, 7)})
    jobs = requests.jobs
    pause(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=LOST_FOR_GOOD + 5)
    assert not d.ranks[0].engine._messenger._abandoned
    resume(p)
    requests.post(p.ranks[0], "r0", "d")
    jobs.run(limit=5.0)
    assert knows(p) == {"d"}
    again = p.connect(d.address)
    assert jobs.run(lambda: again.ended, limit=12)
