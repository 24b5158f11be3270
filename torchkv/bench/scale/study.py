"""All that `python -m torchkv.bench simulate` finds out: runs of different sizes, and what must hold in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchkv.bench.scale.calls import count_calls
from torchkv.bench.scale.memory import PeerMemory
from torchkv.bench.scale.network import LinkModel
from torchkv.bench.scale.real import Measured
from torchkv.bench.scale.resident import LoopCost
from torchkv.bench.scale.simulation import Outcome, Simulation
from torchkv.bench.scale.workload import LONG, SHORT, Shape, Workload

__all__ = ["LOADS", "Known", "Study", "calibrated", "known_peers", "message_problem"]

# Times the workload's requests: where something is busy all the time lies between the first and the last.
LOADS = {LONG.name: (1.0, 2.0, 4.0, 6.0, 8.0, 12.0), SHORT.name: (1.0, 8.0, 32.0, 64.0, 96.0, 128.0)}
BUSY = 8  # ranks that serve requests while all know `Known.peers`
COUNTED = 60  # requests
RARE = 0.01  # times the workload's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The same requests among `BUSY` ranks that know ``peers`` ranks. calls: functions of torchkv that one request
    calls, of all ranks together. cpu: measured seconds of one. digest: of all that has happened.

    strangers: as calls, in a cluster of ``peers`` ranks that are all used, by so few requests that nearly each is the
    first between two instances; and so seldom that no acknowledgement travels with another message.
    """

    peers: int
    calls: float
    strangers: float
    cpu: float
    digest: str


@dataclass(eq=False, slots=True)
class Study:
    """model: of all runs. seconds of CPU for one frame or verb are in it, measured or given."""

    model: LinkModel
    cluster: list[Outcome] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    loads: list[Outcome] = field(default_factory=list)
    memory: list[PeerMemory] = field(default_factory=list)
    loops: list[LoopCost] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What is wrong or not as claimed; empty if nothing is."""
        found = [f"{run.ranks} ranks, {run.workload}: {text}" for run in self.cluster for text in run.problems]
        found += [f"{run.ranks} ranks, {run.workload}, load: {text}" for run in self.loads for text in run.problems]
        found += filter(None, map(message_problem, self.cluster))
        if len({(known.calls, known.digest) for known in self.known}) > 1:
            calls = {known.peers: known.calls for known in self.known}
            found.append(f"a request costs more calls where more peers are known: {calls}")
        found += [f"{m.ranks} real ranks: {m.wrong} bytes are wrong" for m in self.measured if m.wrong]
        return found


def message_problem(run: Outcome) -> str:
    """Whether a request took other messages than its shape says; empty if not."""
    workload = LONG if run.workload == LONG.name else SHORT
    expected = Counter({kind: n * run.requests for kind, n in Shape(run.ranks).messages(workload.verbs).items()})
    return "" if expected == Counter(run.messages) else f"{run.ranks} ranks: {run.messages} messages, not {expected}"


def calibrated() -> float:
    """Seconds of CPU that one frame or verb takes on this machine, rounded to 0.1 us."""
    Simulation(Shape(BUSY), SHORT, requests=50).run()  # compiles, and loads from disk
    return round(Simulation(Shape(BUSY), SHORT, requests=400).run().cpu_per_event, 7)


def known_peers(peers: Sequence[int], workload: Workload, model: LinkModel, *, requests: int, seed: int) -> list[Known]:
    """peers: `BUSY` at least, themselves included."""
    found = []
    for count in peers:
        idle = count - BUSY
        run = Simulation(Shape(BUSY), workload, requests=requests, seed=seed, model=model, idle=idle).run()
        counted = Simulation(Shape(BUSY), workload, requests=COUNTED, seed=seed, model=model, idle=idle)
        strangers = Simulation(Shape(count), workload, requests=COUNTED, seed=seed, model=model, load=RARE)
        found.append(
            Known(
                peers=count,
                calls=_calls(counted),
                strangers=_calls(strangers),
                cpu=run.cpu_per_request,
                digest=run.digest,
            )
        )
    return found


def _calls(simulation: Simulation) -> float:
    return sum(count_calls(simulation.run).values()) / COUNTED
