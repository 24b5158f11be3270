"""One random run of requests with layer groups, from a seed: prefixes, absent pages, cancels, faults, kills."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.layer_groups import Lists, Views, check_received, hybrid, pools_of, shared_cache, views
from tests.helpers.references.memory import Places
from tests.helpers.simulation.cluster import Cluster, Place, Rank, random_faults
from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.layout.layer_groups import absent_allowed
from torchkv.layout.layout import KVLayout
from torchkv.options import Options
from torchkv.protocol.receiving.request import ReceiverRequest

NUM_PAGES = 48
RECV_PAGES = 32  # pages [0, RECV_PAGES) receive, the rest send
BUSY_SECONDS = 3.0
END_SECONDS = 60.0


@dataclass(eq=False)
class Request:
    """What the applications of both sides agreed upon. count: pages of each list. absent: by group."""

    name: str
    count: int
    prefix: int
    absent: dict[str, int]
    anybody: bool
    from_prompt: bool
    aux: bytes


@dataclass(eq=False)
class Received:
    request: Request
    rank: Rank
    pages: dict[str, list[int]]
    before: Views
    work: KVWork
    parts: Sequence[ReceiverRequest] = ()
    checked: bool = False


class GroupScenario:
    """`run` it: returns what went wrong. benign: the only fault is a bad network."""

    def __init__(self, seed: int, *, benign: bool = False, views: bool = False) -> None:
        self.dice = dice = random.Random(f"groups {seed}")
        self.numbers = np.random.default_rng(seed)
        self.benign = benign
        limits = {"timeout": 30.0, "grant_timeout": 60.0} if benign else {"timeout": 3.0, "grant_timeout": 8.0}
        path = None if views else dice.choice([None, "slices", "staged"])
        options = Options(
            transport="loopback", heartbeat=0.2, path=path, staging_recv=4096, staging_send=4096, **limits
        )
        self.cluster = Cluster(
            self._places(),
            seed=seed,
            faults=random_faults(dice, slowest=0.1),
            options=options,
            views=views,
            run_by_callers=True,
        )
        self.world = self.cluster.world
        self.writers = [rank for rank in self.cluster.ranks if rank.engine.group_map.me.instance == "p"]
        self.readers = [rank for rank in self.cluster.ranks if rank.engine.group_map.me.instance == "d"]
        for rank in self.cluster.ranks:
            for array in views_of(rank).values():
                array[...] = self.numbers.integers(0, 256, array.shape, dtype=np.uint8)
        self.sources = {
            rank.rank: {key: array.copy() for key, array in views_of(rank).items()} for rank in self.writers
        }
        self.shadows = {rank.rank: self._shadow(rank) for rank in self.readers}
        self.sent: dict[str, dict[int, Lists]] = {}  # by request and writer
        self.received: list[Received] = []
        self.works: list[tuple[Rank, str, KVWork]] = []
        self.problems: list[str] = []
        self.cluster.observers.append(self._observe)

    def _places(self) -> list[Place]:
        dice = self.dice
        places = []
        for name in ("p", "d"):
            size, order, page_size = dice.choice([1, 2]), dice.choice(["NHD", "HND"]), 4
            more: dict[str, Any] = {"make": shared_cache} if dice.random() < 0.6 else {}
            split = size == 2 and dice.random() < 0.3  # pipeline stages; one of them holds nothing of a group
            for r in range(size):
                layers = {"layers": [(0, 3, 2), (1, 4, 5)][r]} if split else {"tp_rank": r, "tp_size": size}
                places.append(Place(name, hybrid(order=order, page_size=page_size, **layers), NUM_PAGES, 0, **more))
        return places

    def _shadow(self, rank: Rank) -> dict[int, Places]:
        leases = rank.engine.receiver.leases

        def marks(pool: int) -> Callable[[], Any]:
            return lambda: leases.marks(pool)

        pools = pools_of(rank.cache)
        return {pool: Places(f"pool {pool} page", memory, marks(pool), self.numbers) for pool, memory in pools.items()}

    # ------------------------------------------------------------------ the run

    def run(self) -> list[str]:
        dice = self.dice
        for number in range(dice.randint(2, 5)):
            self._plan(f"r{number}")
        if not self.benign:
            self._plan_faults()
        self.cluster.run(limit=BUSY_SECONDS)
        for rank in self.cluster.ranks:
            self.cluster.resume(rank.rank)
            for other in self.cluster.ranks:
                self.cluster.heal(rank.rank, other.rank)
        # The applications give up what has failed, so that tombstones end.
        self.cluster.run(self._all_ended, limit=END_SECONDS)
        for rank in self._running():
            for name in self.sent:
                self.works.append((rank, f"cancel {name}", rank.cancel(name)))
        self.cluster.run(self._all_ended, limit=END_SECONDS)
        self.cluster.run(limit=2.0)
        self._check_end()
        return self.problems

    def _plan(self, name: str) -> None:
        dice = self.dice
        count, layout = dice.randint(1, 6), hybrid(page_size=4)
        absent = {
            group: dice.randint(0, absent_allowed(count, 4, [layout.window(layer) for layer in layers]))
            for group, layers in ((g, layout.of_group(g).component_layers(f"k.{g}")) for g in layout.groups)
        }
        request = Request(
            name,
            count,
            dice.choice([0, 4, 8]),
            absent,
            anybody=dice.random() < 0.3,
            from_prompt=dice.random() < 0.5,
            aux=name.encode() * dice.choice([0, 1, 8]),  # two records of the loop at most: mailboxes are narrow
        )
        self.sent[name] = {}
        at = dice.uniform(0.0, 1.0)
        for rank in self.readers:
            self.cluster.at(at + dice.uniform(0.0, 0.5), lambda rank=rank: self._post(request, rank))
        for rank in self.writers:
            self.cluster.at(at + dice.uniform(0.0, 0.5), lambda rank=rank: self._send(request, rank))
        if not self.benign and dice.random() < 0.3:
            who = dice.choice(self.cluster.ranks)
            self.cluster.at(at + dice.uniform(0.0, 1.0), lambda: self._cancel(who, name))

    def _plan_faults(self) -> None:
        dice = self.dice
        for _ in range(dice.choice([0, 1, 2])):
            rank, at = dice.choice(self.cluster.ranks).rank, dice.uniform(0.0, 2.0)
            match dice.choice(["pause", "partition", "kill"]):
                case "pause":
                    self.cluster.at(at, lambda rank=rank: self.cluster.pause(rank))
                    self.cluster.at(at + dice.choice([0.1, 2.0]), lambda rank=rank: self.cluster.resume(rank))
                case "partition":
                    other = dice.choice([r.rank for r in self.cluster.ranks if r.rank != rank])
                    self.cluster.at(at, lambda pair=(rank, other): self.cluster.partition(*pair))
                case "kill":
                    self.cluster.at(at, lambda rank=rank: self.cluster.kill(rank))

    # ------------------------------------------------------------------ what applications do

    def _post(self, request: Request, rank: Rank) -> None:
        if not rank.running:
            return
        pages = self._allocate(request, rank)
        if pages is None:
            if self.benign or self.world.now < BUSY_SECONDS:
                self.cluster.at(self.world.now + 0.1, lambda: self._post(request, rank))
            return
        before = {key: array.copy() for key, array in views_of(rank).items()}
        try:
            work = rank.recv_pages(request.name, pages, "p", prefix_tokens=request.prefix)
        except KVError as error:
            if self.benign:
                self.problems.append(f"recv_pages({request.name}) on rank {rank.rank}: {error}")
            return
        layer: Any = work._layer
        parts = layer.args[1].parts
        self.received.append(Received(request, rank, pages, before, work, parts))
        self._observe(rank)  # loops that go on amid verbs may end this lease before the rank's next step
        self.works.append((rank, f"recv {request.name}", work))

    def _allocate(self, request: Request, rank: Rank) -> dict[str, list[int]] | None:
        """Free pages for each group: of groups that share their memory, no page twice."""
        leases = rank.engine.receiver.leases
        free = {
            pool: [page for page in np.flatnonzero(leases.marks(pool) == 0).tolist() if page < RECV_PAGES]
            for pool in set(leases.pools.values())
            if not leases.is_of_slots(pool)
        }
        pages = {}
        for group in rank.cache.layout.groups:
            ids = free[rank.cache.pools[group, False]]
            need = request.count - request.absent[group]
            if len(ids) < need:
                return None
            chosen = self.dice.sample(ids, need)
            for page in chosen:
                ids.remove(page)
            pages[group] = [-1] * request.absent[group] + chosen
        return pages

    def _pools(self, rank: Rank) -> list[tuple[int, Places]]:
        return list(self.shadows[rank.rank].items())

    def _send(self, request: Request, rank: Rank) -> None:
        if not rank.running:
            return
        dice, layout = self.dice, rank.cache.layout
        spare = range(RECV_PAGES, NUM_PAGES)
        held = request.prefix // layout.page_size
        lists: dict[str, list[int]] = {}
        for group in layout.groups:
            mine = dice.randint(0, request.absent[group])
            lists[group] = [-1] * mine + dice.sample(spare, request.count - mine)
        self.sent[request.name][rank.rank] = lists
        dst = None if request.anybody else "d"
        start, origin = (held, "prompt") if request.from_prompt else (0, "prefix")
        more: dict[str, Any] = {"origin": origin}
        try:
            chunks = [(0, request.count)]
            if dice.random() < 0.5 and request.count > 1:
                cut = dice.randrange(1, request.count)
                chunks = [(0, cut), (cut, request.count)]
            for first, last in chunks:
                part = {group: ids[first:last] for group, ids in lists.items()}
                for layers in self._layers(layout):
                    if dice.random() < 0.5:
                        work = rank.send_slice(request.name, layers, part, dst, start=start + first, **more)
                    else:
                        work = rank.send_pages(request.name, part, dst, layers=layers, start=start + first, **more)
                    self.works.append((rank, f"send {request.name}", work))
            self.works.append((rank, f"finish {request.name}", rank.finish(request.name, dst, aux=request.aux)))
        except KVError as error:
            if self.benign:
                self.problems.append(f"{request.name} on rank {rank.rank}: {error}")
            self._cancel(rank, request.name)

    def _layers(self, layout: KVLayout) -> list[list[int] | None]:
        """Those of each verb: all at once, or one after the other."""
        return [None] if self.dice.random() < 0.5 else [[layer] for layer in layout.layers]

    def _cancel(self, rank: Rank, name: str) -> None:
        if rank.running:
            self.works.append((rank, f"cancel {name}", rank.cancel(name)))

    # ------------------------------------------------------------------ watching

    def _observe(self, rank: Rank) -> None:
        """Checks what has been received as soon as its leases end, then overwrites it, as its next owner would."""
        if rank.rank not in self.shadows:
            return
        gone = {pool: places.released() for pool, places in self._pools(rank)}
        for pool, released in gone.items():
            for generation, places in released.items():
                owner = next(
                    r for r in self.received if r.rank is rank and generation in {p.generation for p in r.parts}
                )
                if not owner.checked and all(part.ended and part.error is None for part in owner.parts):
                    self._check(owner)
                owner.checked = True
                self.shadows[rank.rank][pool].reuse(places)

    def _check(self, found: Received) -> None:
        request, rank = found.request, found.rank
        sources = {
            writer.rank: (writer.cache.layout, self.sources[writer.rank], lists)
            for writer in self.writers
            if (lists := self.sent[request.name].get(writer.rank)) is not None
        }
        for problem in check_received(rank.cache, found.before, found.pages, sources):
            self.problems.append(f"{request.name} on rank {rank.rank}: {problem}")

    # ------------------------------------------------------------------ the end

    def _running(self) -> list[Rank]:
        return [rank for rank in self.cluster.ranks if rank.running]

    def _pending(self) -> list[str]:
        return [
            f"{what} on rank {rank.rank}" for rank, what, work in self.works if rank.running and not work.is_completed()
        ]

    def _all_ended(self) -> bool:
        posted = not self.benign or len(self.received) == len(self.sent) * len(self.readers)
        return posted and not self._pending() and not any(self.world.in_flight.values())

    def _check_end(self) -> None:
        self.problems += [f"{call} never ended" for call in self._pending()]
        for rank in (rank for rank in self.readers if rank.running):
            self._observe(rank)
            for pool, places in self._pools(rank):
                self.problems += [f"rank {rank.rank}: {problem}" for problem in places.problems()]
                if leased := np.flatnonzero(rank.engine.receiver.leases.marks(pool)).tolist():
                    self.problems.append(f"rank {rank.rank} still leases {leased} of pool {pool}")
        for rank in self._running():
            if left := [*rank.engine.sender.requests.by_key, *rank.engine.receiver.requests.live]:
                self.problems.append(f"rank {rank.rank} still knows {left}")
        for found in self.received:
            if not found.rank.running:
                continue
            error = found.work.exception()
            if error is None and not found.checked and any(len(part.pages) for part in found.parts):
                self.problems.append(f"{found.request.name} succeeded unseen on rank {found.rank.rank}")
            if error is None and found.work.aux != found.request.aux:
                self.problems.append(f"{found.request.name} has aux {found.work.aux!r}")
            if error is not None and self.benign:
                self.problems.append(f"{found.request.name} failed without a fault: {error}")
            if error is None and any(part.error is not None for part in found.parts):
                self.problems.append(f"{found.request.name} succeeded although a part failed")
        self._check_instances()

    def _check_instances(self) -> None:
        """A request succeeds on all ranks of the receiving instance or on none, unless its leader was lost."""
        if any(not rank.running for rank in self.readers):
            return
        for one in self.received:
            for other in self.received:
                if one.request is other.request and one.work.is_success() and (error := other.work.exception()):
                    doubt = any(part.complete_at is not None for part in other.parts if part.error is not None)
                    if not doubt:
                        self.problems.append(f"{one.request.name} succeeded on one rank only: {error}")


def views_of(rank: Rank) -> Views:
    return views(rank.cache)
