"""Instances that are launched apart, in one simulated world: each a `Cluster` of its own, which the others meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from torchkv_loopback import Faults, World

from tests.helpers.simulation.cluster import MAX_IDLE_ROUNDS, ROUND_SECONDS, Cluster, Place, Rank
from torchkv.engine.joining.membership import Membership
from torchkv.engine.progress import DRAIN, FAREWELL
from torchkv.errors import KVError, TransferCancelled
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

__all__ = ["Connecting", "Job", "Jobs"]

CLOSES = TransferCancelled("the instance closes")


class Connecting:
    """A call of `Membership.connect`, and how it ended."""

    def __init__(self) -> None:
        self.name = ""
        self.error: KVError | None = None

    def __call__(self, name: str, error: KVError | None) -> None:
        assert not self.ended
        self.name, self.error = name, error

    @property
    def ended(self) -> bool:
        return bool(self.name) or self.error is not None


class Job:
    """One life of an instance. Its ranks are in `Rank.rank` order; ``memberships`` go with them."""

    def __init__(self, name: str, cluster: Cluster, secret: bytes) -> None:
        self.name = name
        self.cluster = cluster
        self.ranks = cluster.ranks
        self.alive = True
        self.memberships: list[Membership] = []
        for rank, registration in zip(cluster.ranks, cluster.registrations, strict=True):
            membership = Membership(rank.engine, registration, registration.control, cluster.cards, secret=secret)
            rank.engine.exchange.newcomers = membership
            self.memberships.append(membership)

    @property
    def address(self) -> str:
        return self.memberships[0].address

    def connect(self, address: str, *, rank: int = 0, seconds: float = 10.0) -> Connecting:
        call = Connecting()
        self.memberships[rank].connect(address, call, seconds=seconds, now=self.cluster.world.now)
        return call

    def knows(self, other: Job) -> bool:
        """Whether every rank of this job has every rank of the other one for a member, and takes it to be here."""
        theirs = [rank.engine.group_map.me.incarnation for rank in other.ranks]
        for rank, membership in zip(self.ranks, self.memberships, strict=True):
            peer = membership.peers.get(other.name)
            info = rank.engine.group_map.info
            if peer is None or not peer.here or [info[number].incarnation for number in peer.ranks] != theirs:
                return False
        return True


class Jobs:
    """Starts, steps and kills jobs. Everything random comes from the world's generator."""

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults | None = None,
        options: Options | None = None,
        sees_death: bool = True,
        views: bool = False,
    ) -> None:
        self.world = World(seed, faults=faults or Faults(min_delay=1e-4, max_delay=2e-3))
        self.options = options or Options(transport="loopback", timeout=3.0, grant_timeout=8.0, heartbeat=0.2)
        self.all: list[Job] = []
        self.observers: list[Callable[[Rank], None]] = []
        self._secret = self.world.random.randbytes(32)
        self._seeds = random.Random(f"jobs {seed}")
        self._sees_death = sees_death
        self._views = views

    def start(self, name: str, layouts: Sequence[KVLayout | None], *, num_pages: int = 64) -> Job:
        cluster = Cluster(
            [Place(name, layout, num_pages) for layout in layouts],
            seed=self._seeds.getrandbits(32),
            world=self.world,
            options=self.options,
            sees_death=self._sees_death,
            views=self._views,
            secret=self._secret,
        )
        cluster.observers.append(self._observe)
        job = Job(name, cluster, self._secret)
        self.all.append(job)
        return job

    @property
    def alive(self) -> list[Job]:
        return [job for job in self.all if job.alive]

    def kill(self, job: Job) -> None:
        job.alive = False
        for rank in range(len(job.ranks)):
            job.cluster.kill(rank)

    def leave(self, job: Job) -> None:
        """The job closes, each rank as `ProgressThread` does it, and then its processes end."""
        job.alive = False
        for rank in job.ranks:
            rank.engine.fail_all(CLOSES, self.world.now)
            rank.step = partial(self._drain, job, rank, self.world.now + DRAIN)

    def _drain(self, job: Job, rank: Rank, deadline: float, now: float) -> bool:
        engine = rank.engine
        busy = engine.step(now)
        if now >= deadline or not (engine.moving or engine.awaits_writers):
            engine.end_all(CLOSES, now)
            engine.leave(now)
            rank.step = partial(self._say_so, job, rank, now + FAREWELL)
        return busy

    def _say_so(self, job: Job, rank: Rank, deadline: float, now: float) -> bool:
        if rank.engine.is_heard(now) or now >= deadline:
            job.cluster.kill(rank.rank)
            return True
        return False

    def at(self, time: float, action: Callable[[], None]) -> None:
        self.all[0].cluster.at(time, action)

    def run(self, until: Callable[[], bool] = lambda: False, *, limit: float) -> bool:
        """As `Cluster.run`, for all jobs."""
        world, end = self.world, self.world.now + limit
        for _ in range(MAX_IDLE_ROUNDS):
            busy = False
            for job in list(self.all):
                busy |= job.cluster.round()
            if until():
                return True
            if world.now >= end:
                return False
            if busy:
                world.advance(world.now + world.random.uniform(0.0, ROUND_SECONDS))
            else:
                world.advance(min(job.cluster.next_wake(end) for job in self.all))
        raise AssertionError(f"{MAX_IDLE_ROUNDS} rounds did not reach {end:g} s: some rank is always busy")

    def _observe(self, rank: Rank) -> None:
        for observe in self.observers:
            observe(rank)
