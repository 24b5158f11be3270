"""The fixed cost of a request: grant, one tiny layer, seal and verdict, compared with a bare UCX round trip.

A round trip of UCX is one of many in a row, for which both sides spin. So are these requests, but for the first of each
batch: that one comes after work of another kind, when callers and loops may sleep. It is reported by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from torchkv.cache import KVCache
from torchkv.errors import TransportUnavailable
from torchkv.group.process_group import current_group
from torchkv.layout.layout import KVLayout

__all__ = ["RequestResult", "request_cost", "run"]

PAGES = 16  # half of which is granted, one by one; the others must keep their bytes
BATCH = PAGES // 2  # requests in a row
WARM_UP = 50
BATCHES = 100
PINGS = 1000  # half of them before the requests, half after
GATE_ROUND_TRIPS = 6  # of requests that follow one another
GATE_FIRST_US = 500.0
POISON = 0xDD
MAX_ADDRESS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Microseconds.

    p50_us, p99_us: of a whole request that follows another. first_p50_us, first_p99_us: of the first of a batch.
    ucx_p50_us, ucx_p99_us: of a round trip of 8 bytes over UCX alone. nbytes, lane: what a request moves, and the lane
    that carries it. wrong: bytes, over all rounds.
    """

    rounds: int
    nbytes: int
    lane: str
    p50_us: float
    p99_us: float
    first_p50_us: float
    first_p99_us: float
    ucx_p50_us: float
    ucx_p99_us: float
    wrong: int

    @property
    def ratio(self) -> float:
        """Median request to median round trip."""
        return self.p50_us / self.ucx_p50_us

    @property
    def ratio_p99(self) -> float:
        """p99 of requests to the median round trip: the p99 of round trips depends on the machine alone."""
        return self.p99_us / self.ucx_p50_us

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.ratio <= GATE_ROUND_TRIPS and self.first_p50_us <= GATE_FIRST_US


def run() -> Iterator[Outcome]:
    r = request_cost()
    line = (
        f"request: recv_pages, grant, one layer of {r.nbytes} bytes ({r.lane}), finish and verdict, in a row: "
        f"p50 {r.p50_us:.0f} us, p99 {r.p99_us:.0f} us, which is {r.ratio:.1f}x (gate {GATE_ROUND_TRIPS}x) and "
        f"{r.ratio_p99:.1f}x of a bare UCX round trip (p50 {r.ucx_p50_us:.1f} us, p99 {r.ucx_p99_us:.1f} us); "
        f"after other work: p50 {r.first_p50_us:.0f} us (gate {GATE_FIRST_US:.0f}), p99 {r.first_p99_us:.0f} us; "
        f"#wrong {r.wrong}"
    )
    verdict = {"wrong": r.wrong, "passed": r.passed}
    row = {"request": asdict(r), "ratio": r.ratio, "ratio_p99": r.ratio_p99, **verdict}
    yield Outcome(line=line, row=row, passed=r.passed, wrong=r.wrong)


def request_cost() -> RequestResult:
    """Measures in two fresh processes, over shared memory.

    A request lasts from the receiver's call of ``recv_pages`` until both sides know the verdict. The sender waits
    for the grant before it sends.
    """
    written, read = run_two(_write, _read)
    # All processes of a host read one monotonic clock, so times of the two sides can be subtracted.
    ended = np.maximum(written["ended"], read["ended"])
    microseconds = ((ended - np.asarray(read["began"])) / 1e3).reshape(-1, BATCH)[WARM_UP // BATCH :]
    first, following = microseconds[:, 0], microseconds[:, 1:]
    pings = np.asarray(written["pings"]) / 1e3
    return RequestResult(
        rounds=microseconds.size,
        nbytes=written["nbytes"],
        lane=written["lane"],
        p50_us=float(np.median(following)),
        p99_us=float(np.percentile(following, 99)),
        first_p50_us=float(np.median(first)),
        first_p99_us=float(np.percentile(first, 99)),
        ucx_p50_us=float(np.median(pings)),
        ucx_p99_us=float(np.percentile(pings, 99)),
        wrong=read["wrong"],
    )


def _layout() -> KVLayout:
    return KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.bfloat16)


def _orders(batch: int) -> tuple[Int64Array, Int64Array]:
    """The source pages of a batch's requests, and their target pages. Both sides know them."""
    rng = np.random.default_rng(batch)
    return rng.permutation(PAGES)[:BATCH], rng.permutation(PAGES)[:BATCH]


def _batches() -> range:
    return range(WARM_UP // BATCH + BATCHES)


def _write() -> dict[str, Any]:
    kv = current_group(None)
    cache = KVCache.empty(_layout(), PAGES, device="cpu")
    kv.register(cache, instance="writer")
    pings = _ping(PINGS // 2)
    ended: list[int] = []
    nbytes = 0
    for batch in _batches():
        fill(cache, seed=batch)
        source, _ = _orders(batch)
        requests = [(f"request {batch} {number}", source[number : number + 1]) for number in range(BATCH)]
        dist.barrier()
        for request, page in requests:
            kv.prefix_tokens(request, 1)
            work = kv.send_layer(request, 0, page, 1)
            kv.finish(request, 1).wait()
            ended.append(time.monotonic_ns())
        nbytes = work.bytes
        dist.barrier()
    lanes = kv.explain(1).lanes
    lane = max(lanes, key=lambda name: lanes[name].nbytes)
    return {"ended": ended, "pings": pings + _ping(PINGS // 2), "nbytes": nbytes, "lane": lane}


def _read() -> dict[str, Any]:
    kv = current_group(None)
    cache = KVCache.empty(_layout(), PAGES, device="cpu")
    kv.register(cache, instance="reader")
    _pong(PINGS // 2)
    expected = KVCache.empty(_layout(), PAGES, device="cpu")
    began: list[int] = []
    ended: list[int] = []
    wrong = 0
    for batch in _batches():
        source, target = _orders(batch)
        requests = [(f"request {batch} {number}", target[number : number + 1]) for number in range(BATCH)]
        dist.barrier()
        # After the barrier, so that the sender already waits for its grant when the clock starts.
        for storage in cache.storages:
            storage.fill_(POISON)
        fill(expected, seed=batch)
        for request, page in requests:
            began.append(time.monotonic_ns())
            kv.recv_pages(request, page, 0).wait()
            ended.append(time.monotonic_ns())
        wrong += count_wrong(expected, cache, torch.from_numpy(source), torch.from_numpy(target))
        wrong += _touched(cache, target)
        dist.barrier()
    _pong(PINGS // 2)
    return {"began": began, "ended": ended, "wrong": wrong}


def _touched(cache: KVCache, pages: Int64Array) -> int:
    """How many bytes outside of ``pages`` have been overwritten."""
    others = torch.from_numpy(~np.isin(np.arange(PAGES), pages))
    tensors = [tensor for name in ("k", "v") for tensor in cache[name] if tensor is not None]
    return sum(int((tensor.view(torch.uint8)[others] != POISON).sum()) for tensor in tensors)


class _Tags:
    """UCXX's tagged messages between the two processes: a UCX worker and an endpoint to the other process."""

    def __init__(self) -> None:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        context = libucxx.UCXContext({}, feature_flags=(libucxx.Feature.TAG,))
        self._worker = libucxx.UCXWorker(context)
        address = libucxx.UCXAddress.create_from_buffer(_swap(bytes(self._worker.address.tobytes())))
        self._endpoint = libucxx.UCXEndpoint.create_from_worker_address(
            self._worker, address, endpoint_error_handling=True
        )
        self._sent, self._received = Array(np.zeros(8, dtype=np.uint8)), Array(np.zeros(8, dtype=np.uint8))
        self._tag = libucxx.UCXXTag(7)
        self._mask = libucxx.UCXXTagMaskFull

    def send(self) -> None:
        self._complete(self._endpoint.tag_send(self._sent, self._tag))

    def receive(self) -> None:
        self._complete(self._endpoint.tag_recv(self._received, self._tag, self._mask))

    def close(self) -> None:
        dist.barrier()  # so that neither side closes while the other still waits for a message
        self._endpoint.close_blocking(period=1_000_000, max_attempts=1000)

    def _complete(self, request: Any) -> None:
        while not request.completed:
            self._worker.progress()
        request.check_error()


def _ping(count: int) -> list[int]:
    """Rank 0's half: nanoseconds of each of ``count`` round trips. Both sides spin, which is UCXX's fastest way."""
    tags = _Tags()
    nanoseconds: list[int] = []
    for _ in range(count + WARM_UP):
        began = time.monotonic_ns()
        tags.send()
        tags.receive()
        nanoseconds.append(time.monotonic_ns() - began)
    tags.close()
    return nanoseconds[WARM_UP:]


def _pong(count: int) -> None:
    """Rank 1's half: answers ``count`` messages."""
    tags = _Tags()
    for _ in range(count + WARM_UP):
        tags.receive()
        tags.send()
    tags.close()


def _swap(address: bytes) -> bytes:
    """Exchanges worker addresses: gives the other process ``address`` and returns the other's."""
    if len(address) > MAX_ADDRESS:
        raise TransportUnavailable(
            f"the UCX worker address is {len(address)} bytes long, and this benchmark has room for {MAX_ADDRESS}"
        )
    mine = torch.zeros(8 + MAX_ADDRESS, dtype=torch.uint8)
    framed = len(address).to_bytes(8, "little") + address
    mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    theirs = both[1 - dist.get_rank()].numpy().tobytes()
    return theirs[8 : 8 + int.from_bytes(theirs[:8], "little")]
