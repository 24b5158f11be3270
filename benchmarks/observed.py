"""What the flight recorder and metrics cost a verb, a request and a rate: with and without, in turns in one process."""

from __future__ import annotations

import gc
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.bench.check import count_wrong
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.group.verbs import Verbs
from torchkv.layout.layout import KVLayout
from torchkv.protocol.counts import Counts

__all__ = ["ObservedResult", "observed_cost", "run"]

ROUNDS = 40  # of two measurements without and two with
REQUESTS = 25  # a measurement
LAYERS = 16
PAGES = 16  # of 1 KiB
BULK_LAYERS = 8
BULK_PAGES = 64  # of 64 KiB
BULK_ROUNDS = 40
GATE_US = 1.0  # a verb
GATE_RATE = 0.02
PORT = 0  # any


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedResult:
    """Medians over pairs of rounds of the difference that watching makes.

    send_us, send_more_us: of ``send_layer``, without and more with it, in microseconds of its thread's processor time;
    finish_us, recv_us alike.
    request_us, request_more: of a whole request of many layers, and the share that it takes more. bulk_gbps, bulk_less:
    the rate of 64 KiB pages in 1e9 bytes/s, and the share that it is less. scrape_ms: one scrape, in milliseconds, for
    which the HTTP server's thread needs the GIL. wrong: bytes.
    """

    send_us: float
    send_more_us: float
    finish_us: float
    finish_more_us: float
    recv_us: float
    recv_more_us: float
    request_us: float
    request_more: float
    bulk_gbps: float
    bulk_less: float
    scrape_ms: float
    wrong: int

    @property
    def passed(self) -> bool:
        verbs = max(self.send_more_us, self.finish_more_us, self.recv_more_us)
        rates = max(self.request_more, self.bulk_less)
        return not self.wrong and verbs <= GATE_US and rates <= GATE_RATE


def run(repeats: int) -> Iterator[Outcome]:
    """repeats: not used."""
    r = observed_cost()
    line = (
        f"observed: with flight recorder and metrics, send_layer takes {r.send_more_us:+.2f} us of "
        f"{r.send_us:.1f}, finish {r.finish_more_us:+.2f} of {r.finish_us:.1f}, recv_pages {r.recv_more_us:+.2f} of "
        f"{r.recv_us:.1f} (gate 1 us); a request of {LAYERS} layers {100 * r.request_more:+.1f}% of "
        f"{r.request_us:.0f} us, 64 KiB pages {-100 * r.bulk_less:+.1f}% of {r.bulk_gbps:.1f} GB/s (gate 2%); a scrape "
        f"takes {r.scrape_ms:.1f} ms; "
        f"#wrong {r.wrong}"
    )
    yield Outcome(line=line, row={"observed": asdict(r), "passed": r.passed}, passed=r.passed, wrong=r.wrong)


def observed_cost() -> ObservedResult:
    """Measures in two fresh processes, over shared memory. Both watch, or neither does."""
    environment = {"TORCHKV_METRICS_PORT": str(PORT)}
    sent, (recv_us, recv_more_us) = run_two(_write_requests, _read_requests, environment=environment)
    rates, wrong = run_two(_write_bulk, _read_bulk, environment=environment)
    return ObservedResult(recv_us=recv_us, recv_more_us=recv_more_us, wrong=wrong, **sent, **rates)


class _Uncounted(Counts):
    """Counts nothing."""

    def ended(self, error: KVError | None) -> None:
        pass

    def moved(self, peer: int, path: str, nbytes: int) -> None:
        pass


class _Side:
    """One of the two ranks, which verbs without a recorder can be had of, too."""

    def __init__(self, instance: str, *, layers: int, head_dim: int, num_pages: int) -> None:
        layout = KVLayout.gqa(num_layers=layers, num_kv_heads=4, head_dim=head_dim, page_size=16, dtype=torch.bfloat16)
        self.kv: KVProcessGroup = current_group(None)
        self.cache = KVCache.empty(layout, num_pages, device="cpu")
        self.kv.register(self.cache, instance=instance)
        watched = self.kv._verbs
        observation = self.kv._observation
        assert watched is not None
        assert observation is not None
        assert observation._service is not None
        self._url = f"http://127.0.0.1:{observation._service.port}/metrics"
        self._both = {
            False: Verbs(watched.engine, self.cache, wake=watched._wake),
            True: watched,
        }
        self._counts: dict[Any, Counts] = {}
        for machine in (watched.engine.sender, watched.engine.receiver):
            self._counts[machine, True], self._counts[machine, False] = machine.counts, _Uncounted()

    def turn(self, watches: bool) -> None:
        """From now on the group's verbs are recorded, and its requests are counted; or not."""
        verbs = self.kv._verbs = self._both[watches]
        for machine in (verbs.engine.sender, verbs.engine.receiver):
            machine.counts = self._counts[machine, watches]
        dist.barrier()

    def scrape(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        with urllib.request.urlopen(self._url) as answer:
            assert b"torchkv_requests_total" in answer.read()
        return time.perf_counter() - began


def _paired(rounds: int, measure: Callable[[bool, int], Any]) -> list[tuple[Any, Any]]:
    """What was measured without and with, round by round. Each round is without, with, with, without, or the other
    way round, so that what drifts, or depends on what came before, falls out.
    """
    pairs = []
    gc.disable()
    for number in range(rounds):
        first = number % 2 == 1
        got: dict[bool, list[Any]] = {False: [], True: []}
        for place, watches in enumerate((first, not first, not first, first)):
            got[watches].append(np.asarray(measure(watches, 4 * number + place)))
        pairs.append((sum(got[False]) / 2, sum(got[True]) / 2))
        gc.collect()
    gc.enable()
    return pairs


def _undisturbed(seconds: list[float]) -> float:
    """The lowest quarter's end: on a busy machine a median is what the other programs make of it."""
    return float(np.percentile(seconds, 25))


def _difference(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Microseconds without, and more with."""
    without = statistics.median(pair[0] for pair in pairs)
    return 1e6 * without, 1e6 * statistics.median(pair[1] - pair[0] for pair in pairs)


def _small(instance: str) -> _Side:
    return _Side(instance, layers=LAYERS, head_dim=8, num_pages=PAGES)


def _large(instance: str) -> _Side:
    return _Side(instance, layers=BULK_LAYERS, head_dim=512, num_pages=BULK_PAGES)


def _write_requests() -> dict[str, float]:
    side = _small("writer")
    kv, clock = side.kv, time.perf_counter

    def requests(watches: bool, number: int) -> tuple[float, float, float]:
        side.turn(watches)
        sends: list[float] = []
        finishes: list[float] = []
        wholes: list[float] = []
        pages = np.arange(PAGES)
        for turn in range(REQUESTS):
            request = f"{watches}{number}.{turn}"
            kv.prefix_tokens(request, 1)
            began, at = clock(), time.thread_time()
            for layer in range(LAYERS):
                kv.send_layer(request, layer, pages, 1)
            sent = time.thread_time()
            work = kv.finish(request, 1)
            sends.append((sent - at) / LAYERS)
            finishes.append(time.thread_time() - sent)
            work.wait()
            wholes.append(clock() - began)
        return _undisturbed(sends), _undisturbed(finishes), _undisturbed(wholes)

    requests(True, -1)  # the first requests load code
    measured = _paired(ROUNDS, requests)
    send_us, send_more_us = _difference([(a[0], b[0]) for a, b in measured])
    finish_us, finish_more_us = _difference([(a[1], b[1]) for a, b in measured])
    return {
        "send_us": send_us,
        "send_more_us": send_more_us,
        "finish_us": finish_us,
        "finish_more_us": finish_more_us,
        "request_us": 1e6 * statistics.median(a[2] for a, _ in measured),
        "request_more": statistics.median(b[2] / a[2] for a, b in measured) - 1,
    }


def _read_requests() -> tuple[float, float]:
    side = _small("reader")
    kv = side.kv

    def requests(watches: bool, number: int) -> float:
        side.turn(watches)
        posts: list[float] = []
        pages = np.arange(PAGES)[::-1].copy()
        for turn in range(REQUESTS):
            at = time.thread_time()
            work = kv.recv_pages(f"{watches}{number}.{turn}", pages, 0)
            posts.append(time.thread_time() - at)
            work.wait()
        return _undisturbed(posts)

    requests(True, -1)
    return _difference(_paired(ROUNDS, requests))


def _write_bulk() -> dict[str, float]:
    side = _large("writer")
    kv, clock = side.kv, time.perf_counter

    def bulk(watches: bool, number: int) -> float:
        side.turn(watches)
        request = f"bulk{watches}{number}"
        fill(side.cache, seed=number + 1)
        kv.prefix_tokens(request, 1)
        dist.barrier()
        began = clock()
        works = [kv.send_layer(request, layer, _order(number), 1) for layer in range(BULK_LAYERS)]
        kv.finish(request, 1).wait()
        seconds = clock() - began
        return sum(work.bytes for work in works) / seconds / 1e9

    bulk(True, -1)
    rates = _paired(BULK_ROUNDS, bulk)
    return {
        "bulk_gbps": statistics.median(a for a, _ in rates),
        "bulk_less": 1 - statistics.median(b / a for a, b in rates),
        "scrape_ms": 1e3 * statistics.median(side.scrape() for _ in range(20)),
    }


def _read_bulk() -> int:
    side = _large("reader")
    kv, wrong = side.kv, 0
    source = KVCache.empty(side.cache.layout, BULK_PAGES, device="cpu")

    def bulk(watches: bool, number: int) -> int:
        nonlocal wrong
        side.turn(watches)
        for storage in side.cache.storages:
            storage.fill_(0xDD)
        pages = _order(number + 1000)
        work = kv.recv_pages(f"bulk{watches}{number}", pages, 0)
        dist.barrier()
        work.wait()
        fill(source, seed=number + 1)
        wrong += count_wrong(source, side.cache, torch.from_numpy(_order(number)), torch.from_numpy(pages))
        return wrong

    bulk(True, -1)
    _paired(BULK_ROUNDS, bulk)
    return wrong


def _order(seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed + 1).permutation(BULK_PAGES)
