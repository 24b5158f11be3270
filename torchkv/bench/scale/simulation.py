"""One run: a cluster on a virtual clock serves requests that arrive at random, and what that has cost."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.bench.scale.network import Clock, LinkModel, Network
from torchkv.bench.scale.rank import Meter, SimulatedRank
from torchkv.bench.scale.workload import Shape, Workload
from torchkv.errors import KVError
from torchkv.layout.group_map import RankInfo

__all__ = ["Outcome", "Simulation"]

IN_FLIGHT = 64  # requests for which an instance that decodes has pages
WARM = 0.2  # of all requests: not counted in latencies


@dataclass(eq=False, slots=True)
class _Request:
    """Times are virtual. left: works that are not settled. waits: of its receives."""

    name: str
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    arrived: float
    left: int = 0
    receives_left: int = 0
    finished: float = 0.0  # when the last `finish` was called
    received: float = 0.0  # when the last rank that decodes had everything
    pages: dict[int, Int64Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Call:
    """A work. receives: of `recv_pages`, on ``rank``."""

    request: _Request
    rank: int
    receives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has shown; only ``cpu`` and ``wall`` differ between two runs of one seed and model.

    Seconds are of the virtual clock, unless they are of CPU. offered, served: requests a second, of all instances;
    served in the middle of the run. seconds: from the first arrival to the last end. p50, p99: from the last verb of a
    request to its success on all ranks that decode. nic, thread: the part of the time in which the busiest of all was
    busy. messages: told, by kind. frames: with acknowledgements. owed, nbytes, attested: bytes of all requests, on the
    links, and as receivers were told. cpu: measured, in seconds, by kind. digest: of all that has happened. wall:
    seconds of this process.
    """

    ranks: int
    idle: int
    prefill_tp: int
    decode_tp: int
    workload: str
    requests: int
    failed: int
    offered: float
    served: float
    seconds: float
    p50: float
    p99: float
    nic: float
    thread: float
    messages: dict[str, int]
    heard: dict[str, int]
    frames: int
    frames_heard: int
    frame_nbytes: int
    verbs: int
    steps: int
    nbytes: int
    attested: int
    owed: int
    cpu: dict[str, float]
    digest: str
    wall: float

    @property
    def messages_per_request(self) -> float:
        return sum(self.messages.values()) / self.requests

    @property
    def frames_per_request(self) -> float:
        return self.frames / self.requests

    @property
    def cpu_per_request(self) -> float:
        """Measured seconds, of all ranks together, without those of meeting."""
        return sum(seconds for kind, seconds in self.cpu.items() if kind != "meeting") / self.requests

    @property
    def cpu_per_event(self) -> float:
        """Measured seconds for one frame that came or went, or verb: what `LinkModel.cpu` stands for."""
        return self.cpu_per_request * self.requests / (self.frames + self.frames_heard + self.verbs)

    @property
    def problems(self) -> list[str]:
        """What does not add up; empty if every request has succeeded, and every byte and message has arrived."""
        found = [f"{self.failed} requests have failed"] if self.failed else []
        if not self.owed == self.nbytes == self.attested:
            found.append(f"bytes: {self.owed} owed, {self.nbytes} moved, {self.attested} attested")
        if self.messages != self.heard:
            found.append(f"messages: {self.messages} told, {self.heard} heard")
        if self.frames != self.frames_heard:
            found.append(f"frames: {self.frames} sent, {self.frames_heard} heard")
        return found


class Simulation:
    """See the module. load: times the workload's requests a second. idle: so many more ranks every rank knows."""

    def __init__(
        self,
        shape: Shape,
        workload: Workload,
        *,
        requests: int,
        seed: int = 0,
        model: LinkModel | None = None,
        load: float = 1.0,
        idle: int = 0,
    ) -> None:
        self.shape = shape
        self.workload = workload
        self.meter = Meter()
        self.clock = Clock()
        self.network = Network(self.clock, model or LinkModel())
        self.ranks: dict[int, SimulatedRank] = {}
        self.offered = workload.requests_per_second * load * len(shape.prefills)
        self._dice = random.Random(seed)
        self._total = requests
        self._idle = idle
        self._begun = 0
        self._ended: list[_Request] = []
        self._failed: set[_Request] = set()
        self._prefills, self._decodes = shape.prefills, shape.decodes
        self._groups = workload.layer_groups()
        self._met: set[tuple[int, int]] = set()
        self._digest = hashlib.blake2b(digest_size=16)
        self._free = {rank: list(range(IN_FLIGHT * workload.pages)) for each in self._decodes for rank in each}
        self._waiting: dict[tuple[int, ...], deque[_Request]] = {each: deque() for each in self._decodes}
        for kind, instances in (("p", self._prefills), ("d", self._decodes)):
            for number, members in enumerate(instances):
                infos = self._infos(f"{kind}{number}", members)
                for info in infos:
                    self.ranks[info.rank] = SimulatedRank(
                        info, infos, network=self.network, peers=self.ranks, meter=self.meter, settled=self._settled
                    )
        others = self._idle_peers(range(shape.ranks, shape.ranks + idle))
        for rank in self.ranks.values() if others else ():
            rank.meet(others)

    def _idle_peers(self, ranks: range) -> list[RankInfo]:
        size = self.shape.decode_tp
        cuts = [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]
        return [info for cut in cuts for info in self._infos(f"idle{cut[0]}", cut)]

    def _infos(self, instance: str, members: tuple[int, ...]) -> list[RankInfo]:
        return [
            RankInfo(
                rank=rank,
                incarnation=rank + 1,
                instance=instance,
                layout=self.workload.layout(number, len(members)),
                num_pages=IN_FLIGHT * self.workload.pages,
                num_slots=0,
            )
            for number, rank in enumerate(members)
        ]

    def run(self) -> Outcome:
        began = time.monotonic()
        self.clock.at(0.0, self._arrive)
        # The heap is that of all ranks together, which no real collector ever goes through.
        gc.collect()
        gc.disable()
        try:
            over = self.clock.run(lambda: len(self._ended) + len(self._failed) == self._total)
            assert over, "requests wait, and nothing will happen any more"
            seconds = self.clock.now
            self.clock.run(lambda: False)  # until everything is acknowledged
        finally:
            gc.enable()
        return self._outcome(seconds, time.monotonic() - began)

    # ------------------------------------------------------------------ applications

    def _arrive(self) -> None:
        dice, now = self._dice, self.clock.now
        request = _Request(f"request {self._begun}", dice.choice(self._prefills), dice.choice(self._decodes), now)
        self._begun += 1
        if self._begun < self._total:
            self.clock.at(now + dice.expovariate(self.offered), self._arrive)
        self._meet(request.prefill, request.decode)
        self._waiting[request.decode].append(request)
        self._admit(request.decode)

    def _meet(self, one: tuple[int, ...], other: tuple[int, ...]) -> None:
        if (one[0], other[0]) in self._met:
            return
        self._met.add((one[0], other[0]))
        for mine, theirs in ((one, other), (other, one)):
            infos = [self.ranks[rank].info for rank in theirs]
            for rank in mine:
                self.ranks[rank].meet(infos)

    def _admit(self, decode: tuple[int, ...]) -> None:
        """Begins requests as long as the instance has pages for them."""
        pages, waiting = self.workload.pages, self._waiting[decode]
        while waiting and all(len(self._free[rank]) >= pages for rank in decode):
            self._begin(waiting.popleft())

    def _begin(self, request: _Request) -> None:
        pages, clock, workload = self.workload.pages, self.clock, self.workload
        for rank in (*request.prefill, *request.decode):
            self.ranks[rank].requests += 1
        request.receives_left = request.left = len(request.decode)
        for rank in request.decode:
            free = self._free[rank]
            request.pages[rank] = np.array(free[-pages:], dtype=np.int64)
            del free[-pages:]
            self.ranks[rank].receive(request.name, request.pages[rank], request.prefill, _Call(request, rank, True))
        for number, layers in enumerate(self._groups):
            at = clock.now + workload.prefill * (number + 1) / len(self._groups)
            last = number == len(self._groups) - 1
            clock.at(at, lambda layers=layers, last=last: self._send(request, layers, last))  # type: ignore[misc]

    def _send(self, request: _Request, layers: tuple[int, ...], last: bool) -> None:
        for number in request.prefill:
            rank = self.ranks[number]
            dst = rank.group_map.owed(request.decode)
            call = _Call(request, number, False)
            rank.send(request.name, self.workload.pages, layers, dst, call)
            request.left += len(dst)
            if last:
                rank.finish(request.name, dst, call)
                request.left += len(dst)
        if last:
            request.finished = self.clock.now

    def _settled(self, call: _Call, error: KVError | None) -> None:
        request = call.request
        request.left -= 1
        self._digest.update(f"{self.clock.now!r} {request.name} {call.rank} {call.receives} {error}\n".encode())
        if error is not None:
            self._failed.add(request)
        elif call.receives:
            self._free[call.rank] += request.pages[call.rank].tolist()
            request.receives_left -= 1
            if not request.receives_left:
                request.received = self.clock.now
            self._admit(request.decode)
        if not request.left and request.finished:
            for rank in (*request.prefill, *request.decode):
                self.ranks[rank].requests -= 1
            if request not in self._failed:
                self._ended.append(request)

    # ------------------------------------------------------------------ the report

    def _outcome(self, seconds: float, wall: float) -> Outcome:
        meter, shape = self.meter, self.shape
        counted = self._ended[int(WARM * len(self._ended)) :]
        latencies = [request.received - request.finished for request in counted] or [0.0]
        ranks = self.ranks.values()
        return Outcome(
            ranks=shape.ranks,
            idle=self._idle,
            prefill_tp=shape.prefill_tp,
            decode_tp=shape.decode_tp,
            workload=self.workload.name,
            requests=self._total,
            failed=len(self._failed),
            offered=self.offered,
            served=_rate([request.received for request in self._ended]),
            seconds=seconds,
            p50=float(np.percentile(latencies, 50)),
            p99=float(np.percentile(latencies, 99)),
            nic=max(max(rank.nic.sending, rank.nic.receiving) for rank in ranks) / seconds,
            thread=max(rank.thread_seconds for rank in ranks) / seconds,
            messages=dict(sorted(meter.told.items())),
            heard=dict(sorted(meter.heard.items())),
            frames=self.network.frames,
            frames_heard=meter.frames_heard,
            frame_nbytes=self.network.frame_nbytes,
            verbs=meter.verbs,
            steps=meter.steps,
            nbytes=self.network.nbytes,
            attested=meter.attested,
            owed=self.workload.nbytes * len(self._ended),
            cpu={kind: nanoseconds / 1e9 for kind, nanoseconds in sorted(meter.cpu.items())},
            digest=self._digest.hexdigest(),
            wall=wall,
        )


def _rate(times: list[float]) -> float:
    """Of events, as a number a second: between the first fifth and the last tenth. 0 if there are too few."""
    times = sorted(times)
    first, last = len(times) // 5, len(times) * 9 // 10
    return (last - first) / (times[last] - times[first]) if first < last < len(times) else 0.0
