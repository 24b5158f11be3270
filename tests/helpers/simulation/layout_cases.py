"""Runs a layout case in one process: the real engines over a simulated network with delays, by one lane or another."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torchkv_loopback import Faults

from tests.helpers.ranks.lane_transfer import AUX, Bytes, Case, Pool, Report, check_reader, prepare, submit, tally
from tests.helpers.simulation.cluster import Cluster, Place, Rank
from torchkv.engine.joining.registration import Registration
from torchkv.engine.work import KVWork

__all__ = ["MILD", "PUTS", "RANKS", "VIEWS", "Lane", "Pooled", "run"]

RANKS = 4
LIMIT = 30.0  # virtual seconds
# Each put goes in several windows, whose pieces overtake one another.
MILD = Faults(min_delay=1e-4, max_delay=5e-3, window=32, pieces=4)


@dataclass(frozen=True)
class Lane:
    name: str  # in the counters, and of the test
    views: bool
    adopted: bool


PUTS = Lane("loopback", views=False, adopted=True)
VIEWS = Lane("view", views=True, adopted=False)


class Pooled(Cluster):
    """A cluster over given pools, where `Cluster` would make caches of its own. Notes whether any put ever flew."""

    def __init__(self, case: Case, pools: Mapping[int, Pool], *, seed: int, views: bool) -> None:
        self._pools = pools
        self.put = False
        instances = {**dict.fromkeys(case.writers, "prefill"), **dict.fromkeys(case.readers, "decode")}
        places = [Place(instances.get(rank, f"rank{rank}"), None) for rank in range(RANKS)]
        super().__init__(places, seed=seed, faults=MILD, views=views)
        self.observers.append(self._note_puts)

    def _registration(self, index: int, place: Place, sees_death: bool, views: bool) -> Registration:
        registration = super()._registration(index, place, sees_death, views)
        registration.cache = self._pools[index].cache if index in self._pools else None
        return registration

    def _note_puts(self, rank: Rank) -> None:
        self.put |= any(self.world.in_flight.values())


@dataclass
class Traffic:
    """What the ranks have asked for."""

    received: dict[int, KVWork] = field(default_factory=dict)  # by reader
    arrived: dict[int, list[Bytes]] = field(default_factory=dict)  # by reader: its memory when its work was done
    sent: dict[int, list[KVWork]] = field(default_factory=dict)  # by writer
    finished: list[KVWork] = field(default_factory=list)

    def works(self) -> list[KVWork]:
        return [*self.received.values(), *(work for works in self.sent.values() for work in works), *self.finished]

    def over(self, pools: Mapping[int, Pool]) -> bool:
        """Whether every work is done. Keeps what a reader holds then: bytes that land later were promised too early."""
        for reader, rx in self.received.items():
            if rx.is_completed() and reader not in self.arrived:
                self.arrived[reader] = pools[reader].now()
        return all(work.is_completed() for work in self.works())


def move(cluster: Pooled, case: Case, pools: Mapping[int, Pool], rngs: Mapping[int, np.random.Generator]) -> Traffic:
    """Runs the request to its end. Raises if any part of it fails."""
    traffic = Traffic()
    for reader in case.readers:
        traffic.received[reader] = cluster[reader].recv_pages(
            "r", pools[reader].pages, "prefill", prefix_tokens=case.prefix
        )
    assert cluster.run(lambda: granted(cluster, case), limit=LIMIT), "a grant never came"
    for writer in case.writers:
        assert cluster[writer].prefix_tokens("r", "decode") == case.prefix
        layout, pages = case.layouts[writer], pools[writer].pages
        traffic.sent[writer], done = submit(cluster[writer], case, layout, pages, rngs[writer])
        traffic.finished.append(done)
    assert not any(work.is_completed() for work in traffic.received.values()), "done before anything could move"
    assert cluster.run(lambda: traffic.over(pools), limit=LIMIT), f"not over after {LIMIT:g} virtual seconds"
    for work in traffic.works():
        assert work.wait()  # raises what the operation failed with
    assert all(rx.aux == AUX for rx in traffic.received.values())
    return traffic


def granted(cluster: Pooled, case: Case) -> bool:
    """Whether every writer knows the prefix, so that asking for it does not block the only thread there is."""
    for writer in case.writers:
        owed = {reader for reader in case.readers if cluster[writer].engine.group_map.owes(reader)}
        if owed - {grant.dst for grant in cluster[writer].grants()}:
            return False
    return True


def run(case: Case, lane: Lane, make: type[Pooled] = Pooled) -> tuple[list[Report], Pooled]:
    """Runs all ranks' parts of ``case`` over a cluster of class ``make``. Raises on any wrong byte."""
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    rngs = {rank: np.random.default_rng([seed, rank]) for rank in case.layouts}
    pools = {
        rank: prepare(case, layout, rngs[rank], adopted=lane.adopted, scales=case.scales.get(rank))
        for rank, layout in case.layouts.items()
    }
    cluster = make(case, pools, seed=seed, views=lane.views)
    traffic = move(cluster, case, pools, rngs)
    for writer in case.writers:
        assert pools[writer].holds(pools[writer].before), "a transfer changed its source"
    for reader, arrived in traffic.arrived.items():
        assert pools[reader].holds(arrived), "bytes landed after their transfer was done"
    return [report(rank, cluster, case, pools, traffic) for rank in range(RANKS)], cluster


def report(rank: int, cluster: Pooled, case: Case, pools: Mapping[int, Pool], traffic: Traffic) -> Report:
    lanes, spans = tally(connection.counters for connection in cluster[rank].engine.connections.values())
    rx = traffic.received.get(rank)
    sources = {writer: pools[writer].source() for writer in case.writers}
    return Report(
        lanes=lanes,
        spans=spans,
        sent=sum(work.bytes for work in traffic.sent.get(rank, ())),
        received=0 if rx is None else rx.bytes,
        expected=0
        if rx is None
        else check_reader(case, pools[rank], traffic.arrived[rank], sources, case.scales.get(rank)),
        path="" if rx is None else rx.path,
    )
