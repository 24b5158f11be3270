"""What flight recorder and metrics cost a verb, a request and a rate: with and without, request by request in turns.

As users turn them on and off: what `KVProcessGroup.stats` tells is counted in any case.

Two processes have three groups each: one is watched, two are not. Requests go through them by turns, forwards and
backwards, so what drifts falls out, and what is compared shares its processes, their memory and their hour. What the
two that are alike differ by shows what such a measurement can tell. This is done in several launches, because two
groups of one launch may always differ a little: each launch is one value, and the interval encloses their median.
"""

from __future__ import annotations

import gc
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.bench.check import count_wrong
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_two
from torchkv.bench.rivals.intervals import Interval, median_interval
from torchkv.cache import KVCache
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.layout import KVLayout
from torchkv.options import Options

__all__ = ["Cost", "ObservedResult", "observed_cost", "run"]

LAUNCHES = 7  # the interval encloses them all
ROUNDS = 150  # of two requests through each group, after a tenth of that to warm up
LAYERS = 16
PAGES = 16  # of 1 KiB
BULK_ROUNDS = 50
BULK_LAYERS = 2
BULK_PAGES = 64  # of 64 KiB
GATE_US = 1.0  # a verb
GATE_RATE = 0.02  # of a request's time, or a rate

WATCHED, PLAIN, ALIKE = range(3)  # groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one thing takes, and what it takes more if it is watched: the same unit, or a share of it.

    control: what it takes more in a second group that is not watched. gate: of ``more``.
    """

    plain: float
    more: Interval
    control: Interval
    gate: float

    @property
    def passed(self) -> bool:
        return self.verdict == "met"

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or ``not shown``: the interval holds the gate, or is wider than it."""
        if self.more.low > self.gate:
            return "missed"
        return "met" if self.more.high <= self.gate >= self.more.high - self.more.low else "not shown"

    def told(self, unit: str, scale: float = 1.0) -> str:
        more, control = (
            f"{scale * each.median:+.2f} [{scale * each.low:+.2f}, {scale * each.high:+.2f}]"
            for each in (self.more, self.control)
        )
        return f"{more}{unit} (control {control}): {self.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedResult:
    """costs: of each verb in microseconds of its thread's processor time; of a request of many layers and of a bulk
    request, by the clock and in processor time of both processes, as shares. scrape_ms: one scrape. wrong: bytes.
    """

    costs: dict[str, Cost]
    scrape_ms: float
    wrong: int

    @property
    def passed(self) -> bool:
        return not self.wrong and all(cost.passed for cost in self.costs.values())


def run() -> Iterator[Outcome]:
    r = observed_cost()
    parts = []
    for name, cost in r.costs.items():
        share = cost.gate == GATE_RATE
        told = cost.told("%", 100) if share else cost.told(" us")
        parts.append(f"{name} {cost.plain:.1f} us {told}")
    line = (
        f"observed: more with flight recorder and metrics, median and interval of {LAUNCHES} launches (gates "
        f"{GATE_US:g} us a verb, {100 * GATE_RATE:g}% of the rest)\n  " + "\n  ".join(parts) + f"\n  a scrape takes "
        f"{r.scrape_ms:.1f} ms; #wrong {r.wrong}"
    )
    yield Outcome(line=line, row={"observed": asdict(r), "passed": r.passed}, passed=r.passed, wrong=r.wrong)


def observed_cost() -> ObservedResult:
    """Measures in fresh processes, over shared memory."""
    launches = [run_two(_write, _read, number) for number in range(LAUNCHES)]
    costs = {}
    for verb in ("send_layer", "finish", "recv_pages"):
        side = verb == "recv_pages"
        costs[verb] = _cost([launch[side]["small"][verb] for launch in launches])
    for size, name in (("small", f"{LAYERS} layers"), ("large", "bulk")):
        costs[f"{name}, clock"] = _cost([writer[size]["clock"] for writer, _ in launches], share=True)
        processors = [np.add(*(side[size]["processor"] for side in launch)) for launch in launches]
        costs[f"{name}, processors"] = _cost(processors, share=True)
    return ObservedResult(
        costs=costs,
        scrape_ms=1e3 * statistics.median(seconds for writer, _ in launches for seconds in writer["scrapes"]),
        wrong=sum(reader["wrong"] for _, reader in launches),
    )


def _cost(launches: Sequence[Any], *, share: bool = False) -> Cost:
    """Of each launch: seconds ``[round, turn, group]``, of a round's two turns."""
    plains, mores = [], []
    for launch in launches:
        seconds = np.mean(np.asarray(launch), axis=1)
        plain = seconds[:, [PLAIN]]
        more = seconds[:, [WATCHED, ALIKE]] - plain
        mores.append(np.median(more / plain if share else 1e6 * more, axis=0))
        plains.append(1e6 * float(np.median(plain)))
    watched, alike = (median_interval(values) for values in np.transpose(mores).tolist())
    gate = GATE_RATE if share else GATE_US
    return Cost(plain=statistics.median(plains), more=watched, control=alike, gate=gate)


class _Side:
    """One process: its groups, in the order of their numbers, all with the same cache: pages that lie elsewhere may be
    slower by more than what is measured here. launch: says in which order the groups are made.
    """

    def __init__(self, launch: int, *, layers: int, head_dim: int, num_pages: int) -> None:
        layout = KVLayout.gqa(num_layers=layers, num_kv_heads=4, head_dim=head_dim, page_size=16, dtype=torch.bfloat16)
        self.cache = KVCache.empty(layout, num_pages, device="cpu")
        made: dict[int, KVProcessGroup] = {}
        for number in np.roll((WATCHED, PLAIN, ALIKE), launch).tolist():
            options = Options(metrics_port=0) if number == WATCHED else Options(flight_recorder=0)
            kv = current_group(dist.new_group([0, 1], backend="torchkv", pg_options=options))
            kv.register(KVCache(layout, {name: self.cache[name] for name in ("k", "v")}))
            made[number] = kv
        self.groups = [made[number] for number in sorted(made)]

    def scrape(self) -> float:
        """Seconds."""
        observation = self.groups[WATCHED]._observation
        assert observation is not None
        assert observation._service is not None
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{observation._service.port}/metrics") as answer:
            assert b"torchkv_requests_total" in answer.read()
        return time.perf_counter() - began

    def in_turns(self, rounds: int, measure: Callable[[int, int], dict[str, float]]) -> dict[str, Any]:
        """What ``measure(group, number of the request)`` finds: ``[round, turn, group]``, without what warms up."""
        found: dict[str, list[list[list[float]]]] = {}
        gc.disable()
        for number in range(-(rounds // 10), rounds):
            order = np.roll((WATCHED, PLAIN, ALIKE), number).tolist()
            for turn, groups in enumerate((order, order[::-1])):
                got = {group: measure(group, 2 * number + turn) for group in groups}
                if number >= 0:
                    for name in got[PLAIN]:
                        table = found.setdefault(name, [[] for _ in range(rounds)])
                        table[number].append([got[group][name] for group in (WATCHED, PLAIN, ALIKE)])
            if number % 25 == 0:
                gc.collect()
        gc.enable()
        return {name: np.array(table) for name, table in found.items()}


def _small(launch: int) -> _Side:
    return _Side(launch, layers=LAYERS, head_dim=8, num_pages=PAGES)


def _large(launch: int) -> _Side:
    return _Side(launch, layers=BULK_LAYERS, head_dim=512, num_pages=BULK_PAGES)


def _write(launch: int) -> dict[str, Any]:
    small = _small(launch)

    def request(group: int, number: int) -> dict[str, float]:
        kv = small.groups[group]
        name, pages = f"{group} {number}", np.arange(PAGES)
        kv.prefix_tokens(name, 1)
        began, spent, at = time.perf_counter(), time.process_time(), time.thread_time()
        for layer in range(LAYERS):
            kv.send_layer(name, layer, pages, 1)
        sent = time.thread_time()
        work = kv.finish(name, 1)
        finished = time.thread_time()
        work.wait()
        return {
            "clock": time.perf_counter() - began,
            "processor": time.process_time() - spent,
            "send_layer": (sent - at) / LAYERS,
            "finish": finished - sent,
        }

    found = {"small": small.in_turns(ROUNDS, request)}
    scrapes = [small.scrape() for _ in range(5)]
    large = _large(launch)
    fill(large.cache, seed=launch + 1)

    def bulk(group: int, number: int) -> dict[str, float]:
        kv = large.groups[group]
        name, pages = f"{group} {number}", _order(number)
        kv.prefix_tokens(name, 1)
        began, spent = time.perf_counter(), time.process_time()
        for layer in range(BULK_LAYERS):
            kv.send_layer(name, layer, pages, 1)
        kv.finish(name, 1).wait()
        return {"clock": time.perf_counter() - began, "processor": time.process_time() - spent}

    return {**found, "large": large.in_turns(BULK_ROUNDS, bulk), "scrapes": scrapes}


def _read(launch: int) -> dict[str, Any]:
    small = _small(launch)

    def request(group: int, number: int) -> dict[str, float]:
        kv = small.groups[group]
        pages = np.arange(PAGES)[::-1].copy()
        spent, at = time.process_time(), time.thread_time()
        work = kv.recv_pages(f"{group} {number}", pages, 0)
        posted = time.thread_time()
        work.wait()
        return {"recv_pages": posted - at, "processor": time.process_time() - spent}

    found = {"small": small.in_turns(ROUNDS, request)}
    large, wrong = _large(launch), 0
    source = KVCache.empty(large.cache.layout, BULK_PAGES, device="cpu")
    fill(source, seed=launch + 1)

    def bulk(group: int, number: int) -> dict[str, float]:
        nonlocal wrong
        kv, cache = large.groups[group], large.cache
        for storage in cache.storages:
            storage.fill_(0xDD)
        pages = _order(number + 1000)
        spent = time.process_time()
        kv.recv_pages(f"{group} {number}", pages, 0).wait()
        spent = time.process_time() - spent
        wrong += count_wrong(source, cache, torch.from_numpy(_order(number)), torch.from_numpy(pages))
        return {"processor": spent}

    return {**found, "large": large.in_turns(BULK_ROUNDS, bulk), "wrong": wrong}


def _order(number: int) -> Int64Array:
    return np.random.default_rng(number + 1000).permutation(BULK_PAGES)
