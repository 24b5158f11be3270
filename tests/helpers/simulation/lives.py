"""Jobs that start, die and come again in a simulated world, with requests between them: see `Life`."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from tests.helpers.references.memory import Shadow, snapshot
from tests.helpers.references.page_transfer import Pool
from tests.helpers.simulation.cluster import Rank, random_faults
from tests.helpers.simulation.jobs import Job, Jobs
from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.layout.layer_groups import PAGES
from torchkv.layout.layout import KVLayout
from torchkv.protocol.receiving.request import ReceiverRequest

__all__ = ["NAMES", "Life", "Requests", "layouts", "leased_pages"]

BUSY_SECONDS = 12.0  # virtual seconds in which jobs come and go
END_SECONDS = 40.0  # virtual seconds after that, in which everything must end
BRIEF = 0.25  # a brief run takes this part of all times
NAMES = 5  # of requests; each is used again and again
TOKENS = (4, 8, 12)  # of a request, by its name's number


def layouts(tp_size: int, page_size: int, heads: int = 2) -> list[KVLayout | None]:
    return [
        KVLayout.gqa(
            num_layers=2,
            num_kv_heads=heads,
            head_dim=4,
            page_size=page_size,
            dtype=torch.int16,
            tp_rank=r,
            tp_size=tp_size,
        )
        for r in range(tp_size)
    ]


@dataclass(eq=False)
class Receiving:
    name: str
    rank: Rank
    req: ReceiverRequest
    work: KVWork
    before: Pool
    pages: list[int]
    writers: dict[int, Rank]  # by number


def tokens(name: str) -> int:
    return TOKENS[int(name[1:]) % len(TOKENS)]


def sent_pages(rank: Rank, name: str) -> list[int]:
    """A sender always sends the same pages for a name; another life of it has other bytes in them."""
    count = tokens(name) // rank.cache.layout.page_size
    return [int(name[1:]) * 6 + i for i in range(count)]


def leased_pages(rank: Rank) -> list[int]:
    return [int(page) for page in np.flatnonzero(rank.engine.receiver.leases.marks(PAGES))]


class Requests:
    """Requests between jobs, and what must hold for their bytes."""

    def __init__(self, jobs: Jobs, numbers: np.random.Generator) -> None:
        self.jobs = jobs
        self.numbers = numbers
        self.shadows: dict[int, Shadow] = {}  # by incarnation, as are the two below
        self.sources: dict[int, Pool] = {}
        self.ranks: dict[int, Rank] = {}
        self.receivings: list[Receiving] = []
        self.sends: list[tuple[Rank, KVWork]] = []
        self.problems: list[str] = []
        jobs.observers.append(self.observe)

    def start(self, name: str, tp_size: int, page_size: int) -> Job:
        job = self.jobs.start(name, layouts(tp_size, page_size))
        for rank in job.ranks:
            key = rank.engine.group_map.me.incarnation
            self.shadows[key] = Shadow(rank, self.numbers)
            self.sources[key] = snapshot(rank)
            self.ranks[key] = rank
        return job

    def post(self, rank: Rank, name: str, src: str) -> None:
        shadow = self.shadows[rank.engine.group_map.me.incarnation]
        free = [page for page in shadow.free() if page >= 40]
        count = tokens(name) // rank.cache.layout.page_size
        info = rank.engine.group_map
        if not rank.running or len(free) < count or src not in info.instances:
            return
        pages = self.jobs.world.random.sample(free, count)
        writers = {number: self.ranks[info.info[number].incarnation] for number in info.instances[src]}
        before = snapshot(rank)
        try:
            work = rank.recv_pages(name, pages, src)
        except KVError:
            return
        req = rank.engine.receiver.requests.live[name]
        self.receivings.append(Receiving(name, rank, req, work, before, pages, writers))

    def send(self, rank: Rank, name: str, dst: str) -> None:
        if not rank.running or dst not in rank.engine.group_map.instances:
            return
        try:
            self.sends.append((rank, rank.send_pages(name, sent_pages(rank, name), dst)))
            self.sends.append((rank, rank.finish(name, dst)))
        except KVError:
            rank.cancel(name)

    def observe(self, rank: Rank) -> None:
        """Checks pages whose lease has just ended, then overwrites them, as their next owner would."""
        shadow = self.shadows[rank.engine.group_map.me.incarnation]
        for generation, released in shadow.released().items():
            found = next(r for r in self.receivings if r.rank is rank and r.req.generation == generation)
            if found.req.error is None:
                self._check_success(shadow, found)
            shadow.reuse(*released)

    def _check_success(self, shadow: Shadow, found: Receiving) -> None:
        sources = {
            number: self.sources[writer.engine.group_map.me.incarnation] for number, writer in found.writers.items()
        }
        src_pages = {number: sent_pages(writer, found.name) for number, writer in found.writers.items()}
        shadow.check_received(f"request {found.name}", found.before, found.pages, sources, src_pages)

    def leases(self) -> bool:
        return any(leased_pages(shadow.rank) for shadow in self.shadows.values() if shadow.rank.running)

    def pending(self) -> list[str]:
        calls = [(r.rank, f"receive of {r.name}", r.work) for r in self.receivings]
        calls += [(rank, "send", work) for rank, work in self.sends]
        return [f"{what} never ended" for rank, what, work in calls if rank.running and not work.is_completed()]

    def check_end(self) -> None:
        self.problems += self.pending()
        for shadow in self.shadows.values():
            if shadow.rank.running:
                self.observe(shadow.rank)
                shadow.check_free("at the end")
                if leased := leased_pages(shadow.rank):
                    self.problems.append(f"rank {shadow.rank.rank} still leases {leased}")
            self.problems += shadow.problems


class Life:
    """A random run: jobs of four names come and go, requests all the while."""

    def __init__(self, seed: int, *, views: bool, brief: bool = False) -> None:
        """brief: two names, a quarter of the time, and somebody dies, leaves or is cut off for certain."""
        self.names = ("p0", "d0") if brief else ("p0", "p1", "d0", "d1")
        self.scale = BRIEF if brief else 1.0
        self.busy = BUSY_SECONDS * self.scale
        dice = self.dice = random.Random(f"joins {seed}")
        faults = random_faults(dice, slowest=1e-1)
        self.jobs = Jobs(seed, faults=faults, views=views)
        self.requests = Requests(self.jobs, np.random.default_rng(seed))
        self.now_running: dict[str, Job] = {}
        self.started: set[str] = set()
        self.restarts = 0
        self.requests.start("clock", 1, 4)  # never dies; keeps the agenda

    def run(self) -> list[str]:
        for name in self.names:
            self.jobs.at(self.scale * self.dice.uniform(0.0, 1.0), lambda name=name: self._start(name))
        at = self.scale
        while at < self.busy:
            at += self.dice.uniform(0.01, 0.3)
            self.jobs.at(at, self._request)
        for _ in range(self.dice.randint(1, 2 if self.scale < 1 else 6)):
            self.jobs.at(self.dice.uniform(1.5 * self.scale, self.busy), self._end)
        self.jobs.run(limit=self.busy + 2.0 * self.scale)
        self.jobs.run(lambda: not self.requests.pending(), limit=END_SECONDS)
        self.jobs.run(lambda: not self.requests.leases(), limit=END_SECONDS)
        self.jobs.run(limit=5.0 * self.scale)
        self.requests.check_end()
        return self.requests.problems + self._memberships()

    @property
    def receivings(self) -> list[Receiving]:
        return self.requests.receivings

    def injected(self) -> Counter[str]:
        """Faults that have happened, jobs that have joined, and those that have come again, by kind."""
        return self.jobs.world.injected + Counter(joins=len(self.started), restarts=self.restarts)

    def _start(self, name: str) -> None:
        self.restarts += name in self.started
        self.started.add(name)
        self.now_running[name] = self.requests.start(name, self.dice.choice([1, 2]), self.dice.choice([2, 4]))

    def _end(self) -> None:
        name = self.dice.choice(sorted(self.now_running))
        end = self.dice.choice([self.jobs.kill, self.jobs.leave])
        end(self.now_running.pop(name))
        self.jobs.at(
            self.jobs.world.now + self.scale * self.dice.choice([0.0, 0.05, 0.5, 2.0]), lambda: self._start(name)
        )

    def _request(self) -> None:
        """Whoever does not know the other yet calls it."""
        dice, now = self.dice, self.jobs.world.now
        p, d = (self.now_running.get(dice.choice([name for name in self.names if name[0] == kind])) for kind in "pd")
        if p is None or d is None:
            return
        if not d.knows(p):
            d.connect(p.address, rank=dice.randrange(len(d.ranks)))
        elif not p.knows(d):
            p.connect(d.address, rank=dice.randrange(len(p.ranks)))
        name = f"r{dice.randrange(NAMES)}"
        for rank in d.ranks:
            self.jobs.at(now + dice.uniform(0.0, 0.2), lambda rank=rank: self.requests.post(rank, name, p.name))
        for rank in p.ranks:
            self.jobs.at(now + dice.uniform(0.0, 0.2), lambda rank=rank: self.requests.send(rank, name, d.name))
        if dice.random() < 0.2:
            rank = dice.choice([*p.ranks, *d.ranks])
            self.jobs.at(now + dice.uniform(0.0, 0.5), lambda: rank.cancel(name) if rank.running else None)

    def _memberships(self) -> list[str]:
        """Nobody keeps anything of the dead, and knows nobody by halves."""
        lives = {rank.engine.group_map.me.incarnation for job in self.jobs.alive for rank in job.ranks}
        problems = []
        for job in self.jobs.alive:
            for rank in job.ranks:
                group_map, engine = rank.engine.group_map, rank.engine
                strangers = [number for number, info in group_map.info.items() if info.incarnation not in lives]
                if strangers:
                    problems.append(f"{job.name} rank {rank.rank} still knows ranks {strangers}, which are dead")
                if not engine.connections.keys() <= group_map.info.keys():
                    problems.append(f"{job.name} rank {rank.rank}: connections {list(engine.connections)}")
                if engine.flows is not None and not engine.flows.core.peers.slots.keys() <= group_map.info.keys():
                    problems.append(f"{job.name} rank {rank.rank}: mailboxes of {list(engine.flows.core.peers.slots)}")
        return problems
