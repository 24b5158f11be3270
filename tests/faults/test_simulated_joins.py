"""Instances that start, die and come again in a simulated world, with requests between them all the while.

One seed is one run: set JOIN_SEEDS="17" to replay it, "0:2000" to run more.
"""

from __future__ import annotations

import numpy as np
import pytest
from torchkv_loopback import Faults

from tests.helpers.simulation import jobs as simulated_jobs
from tests.helpers.simulation.jobs import Job, Jobs
from tests.helpers.simulation.lives import NAMES, Life, Requests, layouts, sent_pages
from tests.helpers.simulation.requests import done, seed_batches
from torchkv.engine.peers import Peers
from torchkv.engine.scheduler import TransferScheduler
from torchkv.errors import KVError, LayoutMismatch, PeerLost, ProtocolError, TransferCancelled
from torchkv.layout.group_map import GroupMap
from torchkv.protocol.sending.open_sends import OpenSends

LEAVES = 20  # seeds of `leave_in_mid_put`


# ------------------------------------------------------------------ two jobs


def pair(seed: int = 0, *, views: bool = False, sees_death: bool = True) -> tuple[Requests, Job, Job]:
    jobs = Jobs(seed, views=views, sees_death=sees_death)
    requests = Requests(jobs, np.random.default_rng())
    return requests, requests.start("p", 2, 2), requests.start("d", 1, 4)


@pytest.mark.parametrize("views", [False, True])
def test_two_jobs_meet_and_exchange_pages(views: bool) -> None:
    requests, p, d = pair(views=views)
    jobs = requests.jobs
    call = d.connect(p.memberships[1].address)
    assert jobs.run(lambda: call.ended and p.knows(d) and d.knows(p), limit=5)
    assert call.name == "p"
    for round_ in range(3):
        for rank in d.ranks:
            requests.post(rank, f"r{round_}", "p")
        for rank in p.ranks:
            requests.send(rank, f"r{round_}", "d")
        assert len(requests.receivings) == round_ + 1
        works = [r.work for r in requests.receivings] + [work for _, work in requests.sends]
        assert jobs.run(done(*works), limit=10)
        assert [work.exception() for work in works] == [None] * len(works)
        if views and round_ == 0:
            jobs.run(limit=0.5)
            assert d.ranks[0].engine.flows is not None
            assert all(
                d.ranks[0].engine.flows.core.peers.reaches(number) for number in d.memberships[0].peers["p"].ranks
            )
    requests.check_end()
    assert requests.problems == []


def test_a_job_that_cannot_work_with_the_other_is_refused() -> None:
    jobs = Jobs(0)
    p, d = jobs.start("p", layouts(1, 4)), jobs.start("d", layouts(1, 4, heads=4))
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended, limit=5)
    assert isinstance(call.error, LayoutMismatch)
    for job in (p, d):
        assert job.memberships[0].peers == {}
        assert job.ranks[0].engine.group_map.info.keys() == {0}


def test_a_second_instance_of_a_name_is_refused_while_the_first_answers() -> None:
    jobs = Jobs(0)
    p, d, other = (jobs.start(name, layouts(1, 4)) for name in ("p", "d", "p"))
    first = d.connect(p.address)
    assert jobs.run(lambda: first.ended, limit=5)
    second = d.connect(other.address, seconds=100.0)
    assert jobs.run(lambda: second.ended, limit=60)
    assert isinstance(second.error, ProtocolError)
    assert "already" in str(second.error)
    assert d.knows(p)
    own = p.connect(other.address)
    assert jobs.run(lambda: own.ended, limit=5), "its own name is refused at once"
    assert isinstance(own.error, ProtocolError)


@pytest.mark.parametrize("views", [False, True])
def test_a_killed_job_is_forgotten_and_comes_again(views: bool) -> None:
    requests, p, d = pair(views=views)
    jobs, told = requests.jobs, list[tuple[str, bool]]()
    d.memberships[0].listen(lambda name, here: told.append((name, here)))
    for life in range(5):
        call = d.connect(p.address)
        assert jobs.run(lambda: call.ended and d.knows(p) and p.knows(d), limit=10)  # noqa: B023
        requests.post(d.ranks[0], "r1", "p")
        for rank in p.ranks:
            requests.send(rank, "r1", "d")
        assert jobs.run(done(requests.receivings[-1].work), limit=10)
        assert requests.receivings[-1].work.exception() is None
        requests.post(d.ranks[0], "r2", "p")
        jobs.kill(p)
        assert jobs.run(lambda: not d.memberships[0].peers, limit=10)
        assert isinstance(requests.receivings[-1].work.exception(), PeerLost)
        engine = d.ranks[0].engine
        assert engine.group_map.info.keys() == {0}
        assert engine.connections.keys() == set()
        assert d.cluster.registrations[0]._metadata_of.keys() == {0}
        if engine.flows is not None:
            assert engine.flows.core.peers.slots == {0: 0}
            assert engine.flows.routes.known == {}
        assert told == [("p", True), ("p", False)] * (life + 1)
        p = requests.start("p", 1 + life % 2, 4)
    requests.check_end()
    assert requests.problems == []


@pytest.mark.parametrize("views", [False, True])
def test_errors_name_a_rank_of_another_instance_by_what_it_calls_itself(views: bool) -> None:
    """Each side numbers the ranks of the other one itself: a number alone would name another rank, or none."""
    requests, p, d = pair(views=views)
    jobs = requests.jobs
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and p.knows(d) and d.knows(p), limit=5)
    (first, second), (reader,) = p.ranks, d.ranks
    assert [reader.engine.group_map.name(number) for number in d.memberships[0].peers["p"].ranks] == [
        "rank 0 of instance 'p'",
        "rank 1 of instance 'p'",
    ]
    assert reader.engine.group_map.names(d.memberships[0].peers["p"].ranks) == "ranks [0, 1] of instance 'p'"
    ungranted = second.send_pages("r3", sent_pages(second, "r3"), "d")
    requests.post(reader, "r1", "p")
    requests.send(first, "r1", "d")
    assert jobs.run(done(requests.receivings[-1].work, ungranted), limit=20)
    assert "rank 0 of instance 'd' has not posted recv_pages" in str(ungranted.exception())
    assert "waiting for writer ranks [1] of instance 'p'" in str(requests.receivings[-1].work.exception())
    requests.post(reader, "r2", "p")
    requests.send(second, "r2", "d")
    reader.cancel("r2")
    refused = requests.sends[-1][1]
    assert jobs.run(done(refused), limit=10)
    assert "its receiver, rank 0 of instance 'd'" in str(refused.exception())
    requests.post(reader, "r4", "p")
    jobs.kill(p)
    assert jobs.run(done(requests.receivings[-1].work), limit=10)
    assert "of instance 'p' (node" in str(requests.receivings[-1].work.exception())


@pytest.mark.parametrize("views", [False, True])
def test_a_job_that_closes_is_forgotten_although_nobody_sees_its_processes_end(views: bool) -> None:
    """As one of another host: it says that it leaves."""
    requests, p, d = pair(views=views, sees_death=False)
    jobs = requests.jobs
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and d.knows(p) and p.knows(d), limit=10)
    requests.post(d.ranks[0], "r1", "p")
    requests.post(d.ranks[0], "r2", "p")
    for rank in p.ranks:
        requests.send(rank, "r1", "d")
    requests.send(p.ranks[0], "r2", "d")
    jobs.run(limit=0.001)
    jobs.leave(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=3)
    assert isinstance(requests.receivings[1].work.exception(), (PeerLost, TransferCancelled))
    assert d.ranks[0].quarantined() == {}
    requests.check_end()
    assert requests.problems == []


def leave_in_mid_put(seed: int) -> list[str]:
    """A writer closes while its puts are under way on a slow network. What went wrong."""
    jobs = Jobs(seed, faults=Faults(min_delay=1e-4, max_delay=5e-2, window=2, pieces=8))
    requests = Requests(jobs, np.random.default_rng(seed))
    p, d = requests.start("p", 1, 2), requests.start("d", 1, 2)
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and d.knows(p) and p.knows(d), limit=20)
    names = [f"r{number}" for number in range(NAMES)]
    for name in names:
        requests.post(d.ranks[0], name, "p")
    for name in names:
        requests.send(p.ranks[0], name, "d")
    jobs.run(limit=jobs.world.random.uniform(0.01, 0.2))
    jobs.leave(p)
    assert jobs.run(lambda: not d.memberships[0].peers, limit=20)
    jobs.run(limit=1.0)
    requests.check_end()
    return requests.problems


@pytest.mark.parametrize("seed", range(LEAVES))
def test_a_writer_that_closes_says_so_when_its_puts_have_landed(seed: int) -> None:
    assert leave_in_mid_put(seed) == []


def test_a_job_that_comes_again_before_the_first_is_missed() -> None:
    """Its greetings arrive while the dead one still counts as here: it is admitted as soon as that has changed."""
    requests, p, d = pair()
    jobs = requests.jobs
    first = d.connect(p.address)
    assert jobs.run(lambda: first.ended and p.knows(d) and d.knows(p), limit=5)
    jobs.kill(p)
    new = requests.start("p", 1, 4)
    call = d.connect(new.address)
    assert jobs.run(lambda: call.ended and d.knows(new) and new.knows(d), limit=10)
    assert call.name == "p"
    requests.post(d.ranks[0], "r0", "p")
    requests.send(new.ranks[0], "r0", "d")
    assert jobs.run(done(requests.receivings[-1].work), limit=10)
    assert requests.receivings[-1].work.exception() is None


def test_where_death_is_not_seen_the_lost_one_makes_room_for_the_next() -> None:
    """As between hosts: the dead job is only silent. Its name passes on; what it may still write to is not given up."""
    jobs = Jobs(0, sees_death=False)
    requests = Requests(jobs, np.random.default_rng())
    p, d = requests.start("p", 1, 4), requests.start("d", 1, 4)
    call = d.connect(p.address)
    assert jobs.run(lambda: call.ended and p.knows(d), limit=5)
    jobs.kill(p)
    new = requests.start("p", 2, 2)
    again = new.connect(d.address)
    assert jobs.run(lambda: again.ended and d.knows(new) and new.knows(d), limit=10)
    requests.post(d.ranks[0], "r0", "p")
    for rank in new.ranks:
        requests.send(rank, "r0", "d")
    assert jobs.run(done(requests.receivings[-1].work), limit=10)
    assert requests.receivings[-1].work.exception() is None


def test_a_verb_that_named_a_rank_which_is_forgotten_meanwhile() -> None:
    requests, p, d = pair()
    jobs = requests.jobs
    call = p.connect(d.address)
    assert jobs.run(lambda: call.ended and p.knows(d) and d.knows(p), limit=5)
    sender = p.ranks[0]
    number = p.memberships[0].peers["d"].ranks[0]
    resolve = sender.engine.group_map.targets

    def slow(peers: object, operation: str) -> tuple[int, ...]:
        found = resolve("d", operation)
        jobs.kill(d)
        assert jobs.run(lambda: not p.memberships[0].peers, limit=10)
        return found

    sender.engine.group_map.targets = slow
    with pytest.raises(PeerLost):
        sender.send_pages("r", [0], "d")
    sender.engine.group_map.targets = resolve
    with pytest.raises(ProtocolError, match="no instance"):
        sender.send_pages("r", [0], "d")
    with pytest.raises(ProtocolError, match="no rank"):
        sender.send_pages("r", [0], number)


# ------------------------------------------------------------------ many jobs


@pytest.mark.parametrize("views", [False, True], ids=["puts", "loop"])
@pytest.mark.parametrize(
    "batch", seed_batches("JOIN_SEEDS", "0:20", 10), ids=lambda batch: f"{batch.start}:{batch.stop}"
)
def test_nothing_breaks_while_jobs_come_and_go(batch: range, views: bool) -> None:
    outcomes: list[KVError | None] = []
    for seed in batch:
        life = Life(seed, views=views)
        problems = life.run()
        assert not problems, f"seed {seed}: {problems}"
        outcomes += [r.work.exception() for r in life.requests.receivings if r.work.is_completed()]
    if len(batch) > 1:
        assert outcomes.count(None) > len(outcomes) / 10, "most of this was checked on nothing"
        assert any(isinstance(error, PeerLost) for error in outcomes)


# -- negative controls ------------------------------------------------------------------------------------------------


def _caught(*, views: bool) -> bool:
    for seed in range(200, 230):
        try:
            if Life(seed, views=views).run():
                return True
        except (AssertionError, KeyError):
            return True
    return False


def test_a_map_that_mixes_lives_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupMap, "remove", lambda self, rank: None)
    assert _caught(views=True)


def test_leaving_while_puts_are_under_way_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_jobs, "DRAIN", 0.0)
    monkeypatch.setattr(OpenSends, "has_landed", lambda self, rank: True)
    monkeypatch.setattr(TransferScheduler, "moves_to", lambda self, rank: False)
    assert any(leave_in_mid_put(seed) for seed in range(LEAVES))


def test_forgetting_before_the_dead_has_drained_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "gone", lambda self, rank: rank in self.lost)
    assert _caught(views=False)
