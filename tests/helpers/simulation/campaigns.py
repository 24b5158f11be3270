"""Campaigns of the fault lab: many short runs of the simulation, each with faults, each a function of its seed.

A campaign is a kind of run. `CAMPAIGNS` together are what every change must pass, see tests/faults/test_campaign_*.py;
``python -m torchkv.faultlab`` runs any of them with any seeds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

from tests.helpers.simulation.lives import Life
from tests.helpers.simulation.loop_runs import DIRECT
from tests.helpers.simulation.scenario import Scenario
from tests.helpers.simulation.state_flows import some_states
from torchkv.errors import KVError

__all__ = ["CAMPAIGNS", "LOOP", "Campaign", "Tally", "batches", "check", "run"]

BATCH = 100
COLLECT = 8  # runs between two garbage collections
# What a broken program raises amid a run. Anything else is a fault of the simulation, and ends the campaign.
BROKEN = (ArithmeticError, AssertionError, AttributeError, KVError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Campaign:
    """A kind of run. make: one run, from its seed. schedules: how many of them every change must pass."""

    name: str
    about: str
    schedules: int
    make: Callable[[int], Scenario | Life]


@dataclass(slots=True)
class Tally:
    """What runs have shown. faulty: in how many anything was injected. injected: faults, cancels and joins, by kind."""

    schedules: int = 0
    faulty: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    receives: int = 0
    succeeded: int = 0
    violations: list[tuple[int, str]] = field(default_factory=list)  # seed, and the first thing that was wrong

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.faulty += other.faulty
        self.injected += other.injected
        self.receives += other.receives
        self.succeeded += other.succeeded
        self.violations += other.violations


def _loop(seed: int) -> Scenario:
    return Scenario(seed, brief=True, verbs=DIRECT, loop=True, states=() if seed % 4 else None)


def _other_lanes(seed: int, **lanes: bool) -> Scenario:
    """The loop, where it does not copy into mapped host memory; now and then Python stages in between."""
    verbs = DIRECT if seed % 3 else (*DIRECT, "staged")
    return Scenario(seed, brief=True, verbs=verbs, loop=True, states=() if seed % 4 else None, **lanes)


def _converting(seed: int) -> Scenario:
    staged = {"network": True, "staged": True}
    lanes: dict[str, bool] = ({}, {"gpu": True}, {"gpu": True, **staged}, staged)[seed % 4]
    return Scenario(seed, brief=True, verbs=DIRECT, loop=True, states=(), converts=True, **lanes)


def _states(seed: int) -> Scenario:
    states, gpu, network = some_states(seed), seed % 4 > 1, seed % 2 > 0
    return Scenario(seed, brief=True, verbs=DIRECT, loop=True, states=states, gpu=gpu, network=network)


def _anybody(seed: int) -> Scenario:
    return Scenario(seed, brief=True, verbs=DIRECT, loop=seed % 3 > 0, states=() if seed % 4 else None, anybody=0.8)


def _staging(seed: int) -> Scenario:
    return Scenario(seed, brief=True, verbs=("staged",), views=seed % 2 > 0, states=())


def _puts(seed: int) -> Scenario:
    return Scenario(seed, brief=True)


def _joins(seed: int) -> Life:
    return Life(seed, views=seed % 2 > 0, brief=True)


CAMPAIGNS = {
    campaign.name: campaign
    for campaign in (
        Campaign("loop", "the resident loop, compiled, between ranks of one host", 4600, _loop),
        Campaign(
            "network",
            "the resident loop that puts through a network, as between hosts",
            700,
            partial(_other_lanes, network=True),
        ),
        Campaign(
            "calls",
            "the resident loop that writes into a host's pages by system calls",
            300,
            partial(_other_lanes, network=True, system_calls=True),
        ),
        Campaign(
            "gpu",
            "the resident loop with pages on GPUs, whose kernels end late",
            300,
            partial(_other_lanes, gpu=True),
        ),
        Campaign(
            "gpus-apart",
            "the resident loop that puts pages of GPUs through a network, as between hosts",
            200,
            partial(_other_lanes, gpu=True, network=True),
        ),
        Campaign(
            "gpus-staged",
            "the resident loop whose kernels pack pages of GPUs for a network, and unpack them",
            200,
            partial(_other_lanes, gpu=True, network=True, staged=True),
        ),
        Campaign(
            "converting",
            "the resident loop between pages of unlike dtypes, mapped, on GPUs, or staged through a network",
            300,
            _converting,
        ),
        Campaign(
            "states",
            "the resident loop where every layout has states, mapped or not, in host memory or on GPUs",
            400,
            _states,
        ),
        Campaign("anybody", "senders that know neither their receiver nor its prefix", 2300, _anybody),
        Campaign("puts", "puts of all verbs over a network, by Python", 1200, _puts),
        Campaign("staging", "staged puts, through rings that are mapped or not", 1000, _staging),
        Campaign("joins", "jobs that come, go, die and come again", 200, _joins),
    )
}

# Those of the resident loop.
LOOP = frozenset({"loop", "network", "calls", "gpu", "gpus-apart", "gpus-staged", "converting", "states"})


@cache
def _keep_what_is_loaded() -> None:
    """Once a process, behind its first run: what it has loaded is no garbage, and need not be looked at every time."""
    gc.collect()
    gc.freeze()


@contextmanager
def _few_collections() -> Iterator[None]:
    """Python does not look for garbage by itself, nor do ranks that register: between runs is enough."""
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


def batches(*names: str) -> list[tuple[str, range]]:
    """The schedules of these campaigns that every change must pass, in batches."""
    found = []
    for name in sorted(names):
        seeds = range(CAMPAIGNS[name].schedules)
        found += [(name, seeds[at : at + BATCH]) for at in range(0, len(seeds), BATCH)]
    return found


def run(name: str, seeds: Iterable[int]) -> Tally:
    """Runs a campaign with these seeds."""
    tally = Tally()
    with _few_collections():
        for seed in seeds:
            _run_one(CAMPAIGNS[name], seed, tally)
            _keep_what_is_loaded()
            if tally.schedules % COLLECT == 0:
                gc.collect()
    return tally


def check(name: str, batch: range) -> None:
    """Runs a batch of a campaign. Raises ``AssertionError`` if something is wrong, or if so few faults show nothing."""
    tally = run(name, batch)
    again = [f"{text}: python -m torchkv.faultlab --case {name} --seed {seed}" for seed, text in tally.violations]
    assert not again, "\n".join(again)
    assert tally.faulty >= 0.98 * len(batch), "schedules without a fault show nothing"
    assert len(batch) / 20 < tally.succeeded < 0.9 * tally.receives


def _run_one(campaign: Campaign, seed: int, tally: Tally) -> None:
    tally.schedules += 1
    try:
        made = campaign.make(seed)
        problems = made.run()
    except BROKEN as error:
        tally.violations.append((seed, repr(error)))
        return
    if problems:
        tally.violations.append((seed, problems[0]))
    injected = made.injected()
    tally.faulty += any(injected.values())
    tally.injected += injected
    outcomes = [receiving.work for receiving in made.receivings]
    tally.receives += len(outcomes)
    tally.succeeded += sum(work.is_success() for work in outcomes)
