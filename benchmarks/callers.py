"""What the verbs of a request cost the threads that call them: one after the other, and in a serving engine's loop.

In the loop the thread computes in Python for 200 us between two calls, so that every call finds the caches cold. Eight
requests follow each other, as in a step of an engine under load; no call waits for anything. The receiver has granted
them before the first verb, and nobody waits for their end: both sides ask until their works are complete. Calls name
the peer's rank, or, as engines do, an instance and nobody: then the receiver also holds a prefix.

A thread that has slept finds its core asleep and its caches empty: then a call takes several times as long, whatever it
does. The first request of each eight has slept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.bench.check import count_wrong
from torchkv.bench.engine_loop import STEP_SECONDS, compute, steps_alone
from torchkv.bench.pair import fill
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.engine.work import KVWork
from torchkv.group.arguments import Origin
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.layout import KVLayout

__all__ = ["CallersResult", "callers_cost", "run"]

LAYERS, PAGES = 32, 256
FLIGHT = 8  # requests one after another
ROUNDS, WARM_UP = 20, 5  # of that many requests
SEND_US, SEND_PAGES_US, REQUEST_US = 5.0, 10.0, 300.0  # gates

Times = dict[str, list[float]]  # by verb: seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CallersResult:
    """One way to call. Microseconds: (p50, p99) of each verb by the clock; of a whole request in ``send_layer`` calls
    the median processor time of the writer's thread and of the reader's, asking until the end included, a round's part.
    wrong: bytes.
    """

    way: str
    verbs: dict[str, tuple[float, float]]
    writer_us: float
    reader_us: float
    wrong: int

    @property
    def passed(self) -> bool:
        fast = self.verbs["send_layer"][0] <= SEND_US and self.verbs["send_pages"][0] <= SEND_PAGES_US
        return not self.wrong and fast and self.writer_us + self.reader_us <= REQUEST_US


def run(device: str) -> Iterator[Outcome]:
    for r in callers_cost(device):
        verbs = ", ".join(f"{verb} {p50:.1f} ({p99:.0f})" for verb, (p50, p99) in r.verbs.items())
        line = (
            f"callers, {device}, {r.way}: us p50 (p99): {verbs} (gates: send_layer {SEND_US:g}, send_pages "
            f"{SEND_PAGES_US:g}); a request of {LAYERS} layers takes {r.writer_us:.0f} us of the writer's thread and "
            f"{r.reader_us:.0f} of the reader's (gate {REQUEST_US:g} together); #wrong {r.wrong}"
        )
        yield Outcome(line=line, row={"callers": asdict(r), "device": device}, passed=r.passed, wrong=r.wrong)


def callers_cost(device: str) -> list[CallersResult]:
    """Measures in two fresh processes, over shared memory, or with a GPU each. Raises ``KVError``."""
    written, read = run_two(_write, _read, device)
    results = []
    for way in written:
        times, (received, wrong) = written[way], read[way]
        writer, reader = (1e6 * float(np.median(each.pop("request")[WARM_UP:])) for each in (times, received))
        # Of `send_layer` there are many a request; the others are called once.
        verbs = {verb: _percentiles(seconds) for verb, seconds in {**times, **received}.items()}
        results.append(CallersResult(way=way, verbs=verbs, writer_us=writer, reader_us=reader, wrong=wrong))
    return results


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    kept = 1e6 * np.array(seconds[len(seconds) * WARM_UP // ROUNDS :])
    return float(np.median(kept)), float(np.percentile(kept, 99))


class _Caller:
    """Times calls, and the processor time of a round. gap: what the thread does between two calls; it does not count.

    Without a gap nothing but the clock is read between two calls: a system call there would cool the caches.
    """

    def __init__(self, gap: Callable[[], object] | None) -> None:
        self._gap = gap
        self.times: Times = {}
        self._spent = self._since = 0.0

    def begin(self) -> None:
        self._spent, self._since = 0.0, time.thread_time()

    def __call__(self, verb: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = call()
        self.times.setdefault(verb, []).append(time.perf_counter() - began)
        if self._gap is not None:
            self.apart(self._gap)
        return value

    def apart(self, call: Callable[[], object]) -> None:
        """Does what is no part of a request."""
        self._spent += time.thread_time() - self._since
        call()
        self._since = time.thread_time()

    def end(self, works: list[KVWork]) -> None:
        """Asks until all requests have ended."""
        for work in works:
            while not work.is_completed():
                self.apart(self._gap or _doze)
        self._spent += time.thread_time() - self._since
        self.times.setdefault("request", []).append(self._spent / len(works))


def _doze() -> None:
    time.sleep(STEP_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """gap: see `_Caller`. src, dst, origin: arguments of the verbs. held: pages that the receiver holds."""

    gap: Callable[[], object] | None
    src: int | str = 0
    dst: int | None = 1
    origin: Origin = "prefix"
    held: int = 0


def _ways() -> dict[str, _Way]:
    size, _ = steps_alone()
    now_and_then, compute_a_step = f"every {STEP_SECONDS * 1e6:.0f} us", partial(compute, size)
    return {
        "in a row": _Way(gap=None),
        now_and_then: _Way(gap=compute_a_step),
        f"{now_and_then}, to anybody, behind a prefix": _Way(
            gap=compute_a_step, src="rank 0", dst=None, origin="prompt", held=PAGES // 4
        ),
    }


def _rest(gap: Callable[[], object] | None) -> None:
    """As between two calls: the first one finds the same caches."""
    if gap is not None:
        gap()


def _cache(device: str, num_pages: int) -> tuple[KVProcessGroup, KVCache]:
    kv = current_group(None)
    layout = KVLayout.gqa(num_layers=LAYERS, num_kv_heads=1, head_dim=8, page_size=8, dtype=torch.bfloat16)
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", kv.rank() % torch.cuda.device_count())
        torch.cuda.set_device(where)
    cache = KVCache.empty(layout, num_pages, device=where)
    kv.register(cache, instance=f"rank {kv.rank()}")
    return kv, cache


def _fill(cache: KVCache) -> None:
    """The same random bytes in every process."""
    host = KVCache.empty(cache.layout, PAGES, device="cpu")
    fill(host, seed=1)
    for storage, filled in zip(cache.storages, host.storages, strict=True):
        storage.copy_(filled)


@lru_cache
def _order(seed: int) -> Int64Array:
    return np.random.default_rng(seed + 1).permutation(PAGES)


def _write(device: str) -> dict[str, Times]:
    kv, cache = _cache(device, PAGES)
    _fill(cache)
    found = {}
    for name, way in _ways().items():
        caller, whole, dst = _Caller(way.gap), _Caller(way.gap), way.dst
        for turn in range(ROUNDS):
            dist.barrier(kv)
            _rest(way.gap)
            caller.begin()
            caller.end([_by_layer(kv, caller, f"{name} {turn} {number}", way) for number in range(FLIGHT)])
            dist.barrier(kv)
            _rest(way.gap)
            whole.begin()
            works = []
            for number in range(FLIGHT):
                request, pages = f"{name} {turn} whole {number}", _order(number)
                whole("send_pages", partial(kv.send_pages, request, pages, dst, origin=way.origin))
                works.append(whole("finish, whole", partial(kv.finish, request, dst)))
            whole.end(works)
        whole.times.pop("finish, whole")
        found[name] = {**whole.times, **caller.times}
    return found


def _by_layer(kv: KVProcessGroup, caller: _Caller, request: str, way: _Way) -> KVWork:
    """Sends a request layer by layer. The work of its end."""
    pages = _order(int(request.rsplit(maxsplit=1)[-1]))
    send = partial(kv.send_layer, request, origin=way.origin)
    caller("first send_layer", partial(send, 0, pages, way.dst))
    for layer in range(1, LAYERS):
        caller("send_layer", partial(send, layer, pages, way.dst))
    work: KVWork = caller("finish", partial(kv.finish, request, way.dst))
    return work


def _read(device: str) -> dict[str, tuple[Times, int]]:
    kv, cache = _cache(device, FLIGHT * PAGES)
    source = KVCache.empty(cache.layout, PAGES, device=cache.device)
    _fill(source)
    found = {}
    for name, way in _ways().items():
        caller, wrong, held = _Caller(way.gap), 0, way.held
        for turn in range(ROUNDS):
            for kind in ("", "whole "):
                for storage in cache.storages:
                    storage.fill_(0xDD)
                order = np.random.default_rng(turn).permutation(FLIGHT * PAGES).reshape(FLIGHT, PAGES)[:, held:]
                caller.begin()
                works = [
                    caller(
                        "recv_pages",
                        partial(
                            kv.recv_pages,
                            f"{name} {turn} {kind}{number}",
                            order[number],
                            way.src,
                            prefix_tokens=held * cache.layout.page_size,
                        ),
                    )
                    for number in range(FLIGHT)
                ]
                caller.apart(partial(dist.barrier, kv))
                caller.end(works)
                for number in range(FLIGHT):
                    sent, received = (
                        torch.from_numpy(ids).to(cache.device) for ids in (_order(number)[held:], order[number])
                    )
                    wrong += count_wrong(source, cache, sent, received)
        found[name] = caller.times, wrong
    return found
