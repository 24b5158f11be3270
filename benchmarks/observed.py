"""What the flight recorder and metrics cost a verb, a request and a rate: with and without, in turns."""

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
from torchkv.arrays import Int64Array
from torchkv.bench.check import count_wrong
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_ranks
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import current_group
from torchkv.layout.layout import KVLayout
from torchkv.options import Options
from torchkv.protocol.counts import Counts

__all__ = ["ObservedResult", "observed_cost", "run"]

ROUNDS = 24  # of two measurements without and two with
REQUESTS = 25  # a measurement
LAYERS = 16
PAGES = 16  # of 1 KiB
BULK_LAYERS = 8
BULK_PAGES = 64  # of 64 KiB
BULK_ROUNDS = 20
GATE_US = 1.0  # a verb
GATE_RATE = 0.02


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


def run() -> Iterator[Outcome]:
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
    """Measures two pairs of fresh processes over shared memory, of which one pair watches, in turns.

    Not one pair that watches at times: CPython adapts its code to the types that it meets, so it would be slower for
    whatever it met less.
    """
    written, (recv,), plain_written, (plain_recv,) = run_ranks((_write_requests, _read_requests) * 2)
    verbs = [_difference(plain, with_it) for plain, with_it in zip(plain_written, written, strict=True)]
    recv_us, recv_more_us = _difference(plain_recv, recv)
    bulk, wrong, plain_bulk, plain_wrong = run_ranks((_write_bulk, _read_bulk) * 2)
    (send_us, send_more_us), (finish_us, finish_more_us), (request_us, request_more_us) = verbs
    return ObservedResult(
        send_us=send_us,
        send_more_us=send_more_us,
        finish_us=finish_us,
        finish_more_us=finish_more_us,
        recv_us=recv_us,
        recv_more_us=recv_more_us,
        request_us=request_us,
        request_more=request_more_us / request_us,
        bulk_gbps=statistics.median(plain_bulk["rates"]),
        bulk_less=1 - statistics.median(np.divide(bulk["rates"], plain_bulk["rates"])),
        scrape_ms=1e3 * statistics.median(bulk["scrapes"]),
        wrong=wrong + plain_wrong,
    )


class _Uncounted(Counts):
    """Counts nothing."""

    def ended(self, error: KVError | None) -> None:
        pass

    def moved(self, peer: int, path: str, nbytes: int) -> None:
        pass


class _Side:
    """One of the four ranks. The first two watch."""

    def __init__(self, *, layers: int, head_dim: int, num_pages: int) -> None:
        layout = KVLayout.gqa(num_layers=layers, num_kv_heads=4, head_dim=head_dim, page_size=16, dtype=torch.bfloat16)
        self.watches = dist.get_rank() < 2
        watching, plain = Options(metrics_port=0), Options(flight_recorder=0)
        groups = [
            dist.new_group(ranks, backend="torchkv", pg_options=options)
            for ranks, options in (([0, 1], watching), ([2, 3], plain))
        ]
        self.kv = current_group(groups[0 if self.watches else 1])
        self.cache = KVCache.empty(layout, num_pages, device="cpu")
        self.kv.register(self.cache)
        if not self.watches:
            assert self.kv._verbs is not None
            engine = self.kv._verbs.engine
            engine.sender.counts, engine.receiver.counts = _Uncounted(), _Uncounted()

    def scrape(self) -> float:
        """Seconds."""
        observation = self.kv._observation
        assert observation is not None
        assert observation._service is not None
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{observation._service.port}/metrics") as answer:
            assert b"torchkv_requests_total" in answer.read()
        return time.perf_counter() - began

    def in_turns(self, rounds: int, measure: Callable[[int], Any]) -> list[Any]:
        """What this pair measures in each round, on average. The pairs take turns: first, second, second, first, or
        the other way round, so that what drifts falls out.
        """
        found = []
        gc.disable()
        for number in range(rounds):
            first = number % 2 == 1
            got = []
            for place, watches in enumerate((first, not first, not first, first)):
                dist.barrier()
                if watches == self.watches:
                    got.append(np.asarray(measure(4 * number + place)))
            found.append(np.mean(got, axis=0).tolist())
            gc.collect()
        gc.enable()
        dist.barrier()
        return found


def _undisturbed(seconds: list[float]) -> float:
    """The lowest quarter's end: on a busy machine a median is what the other programs make of it."""
    return float(np.percentile(seconds, 25))


def _difference(plain: list[float], watched: list[float]) -> tuple[float, float]:
    """Microseconds without, and more with: medians over rounds."""
    return 1e6 * statistics.median(plain), 1e6 * statistics.median(np.subtract(watched, plain))


def _small() -> _Side:
    return _Side(layers=LAYERS, head_dim=8, num_pages=PAGES)


def _large() -> _Side:
    return _Side(layers=BULK_LAYERS, head_dim=512, num_pages=BULK_PAGES)


def _write_requests() -> list[list[float]]:
    """By round: of ``send_layer``, ``finish`` and whole requests."""
    side = _small()
    kv, clock = side.kv, time.perf_counter

    def requests(number: int) -> tuple[float, float, float]:
        sends: list[float] = []
        finishes: list[float] = []
        wholes: list[float] = []
        pages = np.arange(PAGES)
        for turn in range(REQUESTS):
            request = f"{number}.{turn}"
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

    requests(-1)  # the first requests load code
    return [list(column) for column in zip(*side.in_turns(ROUNDS, requests), strict=True)]


def _read_requests() -> list[list[float]]:
    """By round: of ``recv_pages``."""
    side = _small()
    kv = side.kv

    def requests(number: int) -> float:
        posts: list[float] = []
        pages = np.arange(PAGES)[::-1].copy()
        for turn in range(REQUESTS):
            at = time.thread_time()
            work = kv.recv_pages(f"{number}.{turn}", pages, 0)
            posts.append(time.thread_time() - at)
            work.wait()
        return _undisturbed(posts)

    requests(-1)
    return [side.in_turns(ROUNDS, requests)]


def _write_bulk() -> dict[str, list[float]]:
    side = _large()
    kv, clock = side.kv, time.perf_counter

    def bulk(number: int) -> float:
        request = f"bulk{number}"
        fill(side.cache, seed=number + 1)
        kv.prefix_tokens(request, 1)
        dist.barrier(kv)
        began = clock()
        works = [kv.send_layer(request, layer, _order(number), 1) for layer in range(BULK_LAYERS)]
        kv.finish(request, 1).wait()
        seconds = clock() - began
        return sum(work.bytes for work in works) / seconds / 1e9

    bulk(-1)
    rates = side.in_turns(BULK_ROUNDS, bulk)
    return {"rates": rates, "scrapes": [side.scrape() for _ in range(20)] if side.watches else []}


def _read_bulk() -> int:
    side = _large()
    kv, wrong = side.kv, 0
    source = KVCache.empty(side.cache.layout, BULK_PAGES, device="cpu")

    def bulk(number: int) -> int:
        nonlocal wrong
        for storage in side.cache.storages:
            storage.fill_(0xDD)
        pages = _order(number + 1000)
        work = kv.recv_pages(f"bulk{number}", pages, 0)
        dist.barrier(kv)
        work.wait()
        fill(source, seed=number + 1)
        wrong += count_wrong(source, side.cache, torch.from_numpy(_order(number)), torch.from_numpy(pages))
        return wrong

    bulk(-1)
    side.in_turns(BULK_ROUNDS, bulk)
    return wrong


def _order(seed: int) -> Int64Array:
    return np.random.default_rng(seed + 1).permutation(BULK_PAGES)
