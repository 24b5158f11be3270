"""Several ranks in one process, on a virtual clock: the real engine, protocol and registration over `World`.

Everything random comes from the world's generator, so a run is a function of its seed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torchkv_loopback import Faults, LoopbackTransport, World

from tests.helpers.converting import random_scales
from tests.helpers.fakes.loop_gpu import BAD_ADDRESS, FakeKernels, LoopGpu
from tests.helpers.fakes.native_network import NativeNetwork, NetworkTransport, SystemCalls
from tests.helpers.simulation.staging_rings import lagging
from torchkv.cache import KVCache
from torchkv.control.channel import PeerEvent, PeerState
from torchkv.core.core import Core
from torchkv.core.loop.limits import MAILBOX_RECORDS
from torchkv.core.runner import PART
from torchkv.engine.engine import Engine
from torchkv.engine.joining.peer_metadata import PeerMetadata
from torchkv.engine.joining.registration import Registration
from torchkv.engine.scheduler import LocalMemory
from torchkv.group.kv_verbs import KVVerbs
from torchkv.group.layer_groups import GroupedVerbs
from torchkv.group.verbs import Verbs
from torchkv.host.processes import ProcessId
from torchkv.layout.layout import KVLayout, State
from torchkv.options import Options
from torchkv.protocol.actions import BoundGrant
from torchkv.staging.memory import StageMemory
from torchkv.staging.packer import Staging

MISSED_HEARTBEATS = 5
# A round of steps takes some virtual time, so that kills and cancels also fall between two windows of one put.
ROUND_SECONDS = 1e-4
# While nothing happens, ranks look at their timers this often. Deliveries and what a test has planned keep their times.
GRAIN = 0.0625  # a power of two: multiples are exact
MAX_IDLE_ROUNDS = 200_000
NAPS = 0.7  # of all rounds, if progress threads sleep


class SimulatedControl:
    """`torchkv.control.channel.ControlChannel` over the world's datagrams.

    A peer is LOST once it has been unreachable for five heartbeats: paused, dead, or cut off in one direction. With
    ``sees_death`` it is DEAD a moment after its end; without, as on another host, a dead peer is only LOST.
    """

    def __init__(self, world: World, node: int, *, heartbeat: float, sees_death: bool) -> None:
        self.endpoint = f"node:{node}"
        self.fds = ()
        self.unread = False
        self._world = world
        self._node = node
        self._silence = MISSED_HEARTBEATS * heartbeat
        self._sees_death = sees_death
        self._grace: dict[int, float] = {}
        self._nodes: dict[int, int] = {}
        self._down_since: dict[int, float] = {}
        self._state: dict[int, PeerState] = {}

    def connect(self, rank: int, endpoint: str, process: ProcessId, *, idle: bool = False) -> None:
        self._nodes[rank] = int(endpoint.removeprefix("node:"))
        self._state[rank] = PeerState.FOUND
        self._grace[rank] = self._world.random.uniform(0.0, 0.1)

    def rouse(self, rank: int) -> None:
        """Answers of all peers matter at all times."""

    def greet(self, endpoint: str, data: bytes) -> None:
        self._world.send(self._node, int(endpoint.removeprefix("node:")), data)

    def disconnect(self, rank: int) -> None:
        del self._nodes[rank], self._state[rank], self._grace[rank]
        self._down_since.pop(rank, None)

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        for data in frames:  # each may be lost by itself
            self._world.send(self._node, self._nodes[rank], data)

    def send_at_once(self, rank: int, frames: Sequence[bytes]) -> bool:
        if self._world.random.random() < 0.2:
            return False
        self.send(rank, frames)
        return True

    def receive(self, readable: int = -1) -> list[bytes]:
        return self._world.receive(self._node)

    def events(self, now: float) -> list[PeerEvent]:
        found: list[PeerEvent] = []
        if self._world.calm and not self._down_since:
            return found
        for rank, node in self._nodes.items():
            state = self._judge(rank, node, now)
            if state is not self._state[rank]:
                self._state[rank] = state
                found.append(PeerEvent(rank, state, f"(node {node}) is {state.value}"))
        return found

    def sleep(self, seconds: float, also: Iterable[int]) -> None:
        raise AssertionError("a simulated node never sleeps")

    def close(self) -> None:
        """Nothing to release."""

    def _judge(self, rank: int, node: int, now: float) -> PeerState:
        world = self._world
        if self._state[rank] is PeerState.DEAD:
            return PeerState.DEAD
        silent = not world.runs(node) or not world.reaches(node, self._node) or not world.reaches(self._node, node)
        if not silent:
            self._down_since.pop(rank, None)
            return PeerState.FOUND
        since = self._down_since.setdefault(rank, now)
        if not world.alive(node) and self._sees_death and now >= since + self._grace[rank]:
            return PeerState.DEAD
        return PeerState.LOST if now >= since + self._silence else self._state[rank]


class Rank(Verbs):
    """The verbs of one simulated rank."""

    cache: KVCache

    def __init__(self, world: World, node: int, engine: Engine, cache: KVCache | None) -> None:
        super().__init__(engine, cache, wake=lambda: None, clock=lambda: world.now)
        self.world = world
        self.node = node
        self.rank = engine.group_map.rank

    def step(self, now: float) -> bool:
        return self.engine.step(now)

    def grants(self) -> list[BoundGrant]:
        """Those that wait for their first verb, and that Python knows, which the resident loop may have left to it."""
        with self.engine.lock:
            self.engine.catch_up()
            return self.engine.sender.grants.unmet.grants()

    @property
    def running(self) -> bool:
        return self.world.runs(self.node)

    @property
    def _verbs(self) -> Rank:
        """For what `KVVerbs` calls by other names."""
        return self

    send_pages, send_layer = KVVerbs.send_pages, KVVerbs.send_layer
    send_slice, staged_put = KVVerbs.send_slice, KVVerbs.staged_put


class GroupedRank(Rank, GroupedVerbs):
    """That of a rank whose layout has layer groups."""


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank registers. make: its cache, by default in memory of its own for each layer."""

    instance: str
    layout: KVLayout | None
    num_pages: int = 16
    num_slots: int = 0
    make: Callable[[KVLayout, int, int], KVCache] = lambda layout, pages, slots: KVCache.empty(
        layout, pages, "cpu", slots
    )


class _Lagging(Registration):
    """Registers a rank whose gathers and scatters end some time after they began."""

    def _make_staging(self, ring: StageMemory | None) -> Staging:
        assert isinstance(self.transport, LoopbackTransport)
        return lagging(super()._make_staging(ring), self.transport._world, self.transport.node)


class _OnGpu(_Lagging):
    """As `_Lagging`, for a rank whose resident loop has kernels copy, on a stream that its cluster runs."""

    def _make_core(self) -> Core:
        self.loop_gpu = LoopGpu()
        return Core(self.rank, device=self.loop_gpu.device, recorded=self.options.recorded)

    def _memory(self) -> LocalMemory:
        memory = super()._memory()
        if memory.pages is None:
            return memory
        return dataclasses.replace(memory, kernels=FakeKernels(self.loop_gpu, memory.pages))


def random_faults(dice: random.Random, *, slowest: float) -> Faults:
    """A network that is good or bad in some ways. slowest: seconds that a datagram or a piece may take at most."""
    return Faults(
        drop=dice.choice([0.0, 0.1, 0.3]),
        duplicate=dice.choice([0.0, 0.2]),
        min_delay=1e-4,
        max_delay=dice.choice([1e-3, 2e-2, slowest]),
        window=dice.choice([2, 8, 64]),
        pieces=dice.choice([1, 3, 8]),
    )


def _scaled(dice: random.Random) -> Callable[[KVLayout, int, int], KVCache]:
    """Makes caches with random scales for each layer and head, where a conversion has any."""
    numbers = np.random.default_rng(dice.getrandbits(32))

    def make(layout: KVLayout, pages: int, slots: int) -> KVCache:
        scales = {name: rows.tolist() for name, rows in random_scales(layout, numbers).items()}
        return KVCache.empty(layout, pages, "cpu", slots, scales=scales)

    return make


def random_places(
    dice: random.Random,
    states: Sequence[State] = (),
    *,
    readers: int = 0,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> list[Place]:
    """Two instances whose layouts can be reconciled: TP, replicated heads, MLA, PP, windows, orders, page sizes.

    readers: ranks of the second, if the first is to have one; 0: of both any number. dtypes: of the two; pages are
    converted between them. None: of both alike.
    """
    kind = dice.choice(["gqa", "gqa", "replicated", "mla", "pp"])
    sizes = {"p": 1, "d": readers} if readers else {"p": dice.choice([1, 2]), "d": dice.choice([1, 2])}
    pages = {"p": dice.choice([2, 4]), "d": dice.choice([2, 4])}
    order = {"p": dice.choice(["NHD", "HND"]), "d": dice.choice(["NHD", "HND"])}
    num_layers = dice.choice([2, 3])
    v_head_dim = dice.choice([None, 3])
    windows = dice.choice([{}, {}, {0: 2}, {0: 3, 1: 5}])
    places = []
    for name in ("p", "d"):
        for r in range(sizes[name]):
            ours, theirs = (torch.int16, None) if dtypes is None else dtypes if name == "p" else dtypes[::-1]
            common = {"num_layers": num_layers, "page_size": pages[name], "dtype": ours, "order": order[name]}
            common |= {"windows": windows, "states": states, "accept": () if theirs is None else (theirs,)}
            if kind == "mla":
                layout = KVLayout.mla(latent_dim=3, rope_dim=1, tp_rank=r, tp_size=sizes[name], **common)
            else:
                split = kind == "pp" and name == "p"
                layout = KVLayout.gqa(
                    num_kv_heads=1 if kind == "replicated" else 2,
                    head_dim=2,
                    v_head_dim=v_head_dim,
                    tp_rank=0 if split else r,
                    tp_size=1 if split else sizes[name],
                    layers=range(r, num_layers, sizes[name]) if split else None,
                    **common,
                )
            place = Place(name, layout, 64, 16 if states else 0)
            places.append(place if dtypes is None else dataclasses.replace(place, make=_scaled(dice)))
    return places


def _narrow(core: Core, dice: random.Random) -> None:
    """Turns of a few bytes, mailboxes of a few records, grants in parts: much happens in the middle of a request.

    And a loop that now and then gets no processor, while Python goes on.
    """
    core.world["turn"] = dice.choice([1, 48, 200, 1 << 20])
    core.world["window"] = dice.choice([2, 3, 9, MAILBOX_RECORDS])
    core.world["part"] = dice.choice([200, 600, PART])
    turns, step = dice.choice([1.0, 1.0, 0.6, 0.2]), core.runner.step
    core.runner.step = lambda: dice.random() < turns and step()


def _run_by_callers(core: Core, dice: random.Random) -> None:
    """Perhaps the loop goes on amid verbs: see `torchkv.core.thread`."""
    often = dice.choice([0.0, 0.0, 0.5, 1.0])
    core.runner.told = lambda **_: dice.random() < often and core.world["lock"] == 0 and core.runner.step()


class Cluster:
    """Ranks of one group, registered by the real code; a list stands in for the exchange of peer metadata.

    world: an existing one, in which a second group begins while frames of the first are still under way. sees_death:
    whether ranks can tell a dead peer from a lost one. sleeps: whether in many rounds only loops go on, and the
    applications, because nothing has woken a rank's progress thread. lag: whether gathers and scatters end some time
    after they began, as on a GPU. gpu: whether resident loops have kernels copy; implies ``lag``. network: whether they
    put pages, none of which is mapped. system_calls: whether that network is one of `SystemCalls`. apart: whether only
    loops of one instance map each other's mailboxes, as on several hosts. run_by_callers: see `_run_by_callers`.
    observers: called with a rank after each of its steps.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        seed: int = 0,
        faults: Faults | None = None,
        options: Options | None = None,
        world: World | None = None,
        sees_death: bool = True,
        views: bool = False,
        secret: bytes | None = None,
        sleeps: bool = False,
        lag: bool = False,
        gpu: bool = False,
        network: bool = False,
        system_calls: bool = False,
        apart: bool = False,
        run_by_callers: bool = False,
    ) -> None:
        self._kind = _OnGpu if gpu else _Lagging if lag else Registration
        self.gpus: dict[int, LoopGpu] = {}  # by rank
        self._gpu_due: dict[int, float] = {}  # by rank: when its stream goes on
        self._pace = random.Random(f"pace {seed}").choice([0.0, 0.01, 0.4])  # seconds for which a stream rests at most
        self.world = World(seed, faults=faults or Faults(min_delay=1e-4, max_delay=2e-3)) if world is None else world
        lanes = SystemCalls if system_calls else NativeNetwork
        self.network = lanes(self.world) if network else None
        self._apart = apart
        self.options = options or Options(transport="loopback", timeout=3.0, grant_timeout=8.0, heartbeat=0.2)
        self.observers: list[Callable[[Rank], None]] = []
        self.ranks: list[Rank] = []
        self._sleeps = sleeps
        self._naps = random.Random(f"naps {seed}")
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = 0
        self._secret = secret
        self.registrations = [self._registration(i, place, sees_death, views) for i, place in enumerate(places)]
        everyone = [registration.metadata().encode() for registration in self.registrations]
        self.cards = [PeerMetadata.decode(metadata) for metadata in everyone]
        for registration in self.registrations:
            engine = registration.engine([PeerMetadata.decode(metadata) for metadata in everyone])
            kind = GroupedRank if engine.group_map.parts else Rank
            self.ranks.append(kind(self.world, cast(Any, registration.transport).node, engine, registration.cache))
            registration.warm(engine)
            if isinstance(registration, _OnGpu) and registration.cache is not None:
                self.gpus[engine.group_map.rank] = registration.loop_gpu
                self._gpu_due[engine.group_map.rank] = 0.0
            if engine.flows is not None:
                _narrow(engine.flows.core, random.Random(f"loop {seed} {engine.group_map.rank}"))
                if run_by_callers:
                    _run_by_callers(engine.flows.core, random.Random(f"callers {seed} {engine.group_map.rank}"))
        if self.network is not None:
            dice = random.Random(f"lanes {seed}")
            self.network.pieces = dice.choice([0.0, 0.0, 0.0, 0.0, 0.1, 0.5])
            self.network.slowness = dice.choice([1.0, 1.0, 5.0, 20.0])  # frames overtake them
            self._make_lanes(dice)

    def _registration(self, index: int, place: Place, sees_death: bool, views: bool) -> Registration:
        world = self.world
        incarnation, drawn = world.random.getrandbits(62), world.random.randbytes(32)
        self._secret = self._secret or drawn  # the same for all
        network = self.network
        transport = LoopbackTransport(world, views=views) if network is None else NetworkTransport(world, network)
        registration = self._kind(
            rank=index,
            instance=place.instance,
            cache=None if place.layout is None else place.make(place.layout, place.num_pages, place.num_slots),
            options=self.options,
            transport=transport,
            control=SimulatedControl(world, transport.node, heartbeat=self.options.heartbeat, sees_death=sees_death),
            incarnation=incarnation,
            secret=self._secret,
        )
        if self._apart:
            connect = registration._connect_loop
            registration._connect_loop = lambda metadata: (
                connect(metadata) if metadata.instance == place.instance else None
            )
        return registration

    def _make_lanes(self, dice: random.Random) -> None:
        """Most ranks have had to do with most others before: their loops have lanes to them."""
        for rank in self.ranks:
            for other in self.ranks:
                if rank is not other and rank.engine.flows is not None and dice.random() < 0.8:
                    rank.engine.flows.routes.lane(other.rank, rank.engine.connection(other.rank))

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Runs ``action`` between two rounds, as soon as the virtual clock has reached ``time``."""
        heapq.heappush(self._agenda, (time, self._noted, action))
        self._noted += 1

    def run(self, until: Callable[[], bool] = lambda: False, *, limit: float) -> bool:
        """Steps all ranks for at most ``limit`` virtual seconds. Whether ``until`` came true."""
        end = self.world.now + limit
        for _ in range(MAX_IDLE_ROUNDS):
            busy = self.round()
            if until():
                return True
            if self.world.now >= end:
                return False
            if busy:
                self.world.advance(self.world.now + self.world.random.uniform(0.0, ROUND_SECONDS))
            else:
                self.world.advance(self.next_wake(end))
        raise AssertionError(f"{MAX_IDLE_ROUNDS} rounds did not reach {end:g} s: some rank is always busy")

    @property
    def planned(self) -> int:
        """How many actions of `at` are still to come."""
        return len(self._agenda)

    def _keep_agenda(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.world.now:
            heapq.heappop(self._agenda)[2]()

    def round(self) -> bool:
        """Does what is due, and steps every rank once. Whether there was anything to do."""
        self._keep_agenda()
        busy = False
        order = [rank for rank in self.ranks if rank.running]
        self.world.random.shuffle(order)
        for rank in order:
            if not rank.running:
                continue
            flows = rank.engine.flows
            asleep = flows is not None and self._sleeps and self._naps.random() < NAPS
            busy |= flows.core.runner.step() if flows is not None and asleep else rank.step(self.world.now)
            for observe in self.observers:
                observe(rank)
        return self._run_gpus() or busy

    def _run_gpus(self) -> bool:
        """Runs streams that are due; also those of paused processes, for a GPU does not wait for its host."""
        ran = False
        for rank, gpu in self.gpus.items():
            if gpu.pending and self.world.now >= self._gpu_due[rank] and self.world.alive(self.ranks[rank].node):
                gpu.run(self.world.random.choice([1, 1, 4]))
                self._gpu_due[rank] = self.world.now + self.world.random.uniform(0.0, self._pace)
                ran = True
        return ran

    def break_gpu(self, rank: int) -> None:
        """From now on its driver refuses what the rank's resident loop asks for."""
        self.gpus[rank].broken = BAD_ADDRESS

    def next_wake(self, end: float) -> float:
        """When there will be something to do, ``end`` at the latest."""
        now = self.world.now
        timer = min((now + rank.engine.next_wake(now) for rank in self.ranks if rank.running), default=end)
        wakes = [math.floor(timer / GRAIN + 1) * GRAIN]
        wakes += [self._gpu_due[rank] for rank, gpu in self.gpus.items() if gpu.pending]
        if self._agenda:
            wakes.append(self._agenda[0][0])
        return max(min([*wakes, end]), now)

    # ------------------------------------------------------------------ faults

    def kill(self, rank: int) -> None:
        self.world.kill(self.ranks[rank].node)
        if rank in self.gpus:
            self.gpus[rank].pending.clear()  # its context ends with it

    def pause(self, rank: int) -> None:
        self.world.pause(self.ranks[rank].node)

    def resume(self, rank: int) -> None:
        self.world.resume(self.ranks[rank].node)

    def partition(self, src: int, dst: int) -> None:
        """Cuts the network from ``src`` to ``dst``, but not from ``dst`` to ``src``."""
        self.world.partition(self.ranks[src].node, self.ranks[dst].node)

    def heal(self, src: int, dst: int) -> None:
        self.world.heal(self.ranks[src].node, self.ranks[dst].node)

    def sever(self, src: int, dst: int) -> None:
        """Breaks the data channels from ``src`` to ``dst``, though both processes live."""
        self.world.sever(self.ranks[src].node, self.ranks[dst].node)
