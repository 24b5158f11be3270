"""What a request takes in the loop of a serving engine, from its first verb to its verdict; every byte is checked.

Two processes, a writer and a reader. The reader has granted a request before the writer begins it, as a decode engine
does while the prompt is still computed. Both run the same loop; with ``busy`` a second thread computes in Python.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.engine_loop import Loop, Pending, busy_thread
from torchkv.bench.machine import one_link
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.engine.work import KVWork
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.component import State
from torchkv.layout.conversion import convert
from torchkv.layout.layout import KVLayout

__all__ = ["CASES", "EngineCase", "EngineResult", "Pages", "Setup", "Written", "run_engine"]

LAYERS = 32
HEADS, SLICE = 8, 2  # kv heads of a page, and those that a reader of slices holds
STATE_LAYERS = tuple(range(24))
STATE = State("ssm", (32, 64, 128), torch.float32, shard_dim=0, layers=STATE_LAYERS)  # of hybrid models
STATE_NBYTES = len(STATE_LAYERS) * math.prod(STATE.shape) * STATE.dtype.itemsize  # of a request
PAGE_NBYTES = 16 * HEADS * 128 * 2  # of one component: 16 tokens, all kv heads, bf16
MEMORY = 5 << 29  # bytes of pages on each side, at most
WARM = 4  # requests before the first that counts
ONES = 0x3FFF3FFF3FFF3FFF
ROUNDS = 4  # at least; the first one warms up
DEADLINE = 60.0
GATE_SECONDS = 300e-6  # on top of the loop's own steps and the copy

# What a writer reports, in seconds: each request that counts; a step of its loop at rest; lost a request; the copy; a
# request's part of a round, the median of all rounds but the first.
Written = tuple[list[float], float, float, float, float]


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Requests of ``pages`` pages in each of 32 layers, by one ``send_pages`` or by 32 ``send_layer``.

    slices: the reader holds two of eight kv heads, in runs of 512 bytes: four times as many pages for as many bytes.
    converts: the reader's pages are fp8, the writer's bf16. hybrid: with a state in 24 of the layers, 1 MiB each, sent
    behind the pages of its layer, or by ``finish``.
    """

    pages: int
    by_layer: bool
    slices: bool = False
    converts: bool = False
    hybrid: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the reader's pages and state."""
        stored = self.stored // 2 if self.converts else self.stored
        return stored * SLICE // HEADS if self.slices else stored

    @property
    def stored(self) -> int:
        """Bytes of the writer's pages and state."""
        return 2 * LAYERS * self.pages * PAGE_NBYTES + (STATE_NBYTES if self.hybrid else 0)

    @property
    def is_plain(self) -> bool:
        """Whether it is pages alone, of one layout on both sides."""
        return not (self.slices or self.converts or self.hybrid)

    @property
    def name(self) -> str:
        verb = f"{LAYERS} x send_layer" if self.by_layer else "send_pages"
        kind = " slices" if self.slices else " to fp8" if self.converts else " hybrid" if self.hybrid else ""
        return f"{self.nbytes / 1e6:.1f} MB{kind}, {verb}"


CASES = (
    *(EngineCase(pages, by_layer) for pages in (1, 16, 64) for by_layer in (False, True)),
    EngineCase(256, False),
    *(EngineCase(pages, False, slices=True) for pages in (64, 256)),
    *(EngineCase(32, by_layer, converts=True) for by_layer in (False, True)),
    *(EngineCase(4, by_layer, hybrid=True) for by_layer in (False, True)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One row of the table. flight: requests at once. nixl: NIXL in torchkv's place.

    apart: the processes map none of each other's memory and exchange bytes over TCP, as if on two hosts.
    """

    case: EngineCase
    device: str
    polled: bool
    flight: int = 1
    busy: bool = False
    nixl: bool = False
    requests: int = 40
    apart: bool = False

    @property
    def slots(self) -> int:
        """Requests with pages of their own: what is checked together. Of several in flight most begin as one ends."""
        turns = 8 if self.flight == 1 else 4
        return self.flight * max(1, min(turns, MEMORY // (self.case.stored * self.flight)))

    @property
    def fits(self) -> bool:
        return self.case.stored * self.slots <= MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """Seconds a request.

    step: of the writer's loop, while both loops run and nothing is sent; 0 if it is not polled. lost: by which the
    steps of its loop took longer than that. copy: one copy of as many bytes. each: of a round, a request's part of it,
    however many are in flight.
    """

    setup: Setup
    p50: float
    p99: float
    step: float
    lost: float
    copy: float
    each: float
    wrong: int

    @property
    def share(self) -> float:
        """The rate of all requests as a part of the copy's."""
        return self.copy / self.each

    @property
    def steps(self) -> float:
        """The loop's own steps."""
        return (LAYERS if self.setup.case.by_layer else 1) * self.step

    @property
    def floor(self) -> float:
        """What the loop's own steps, or the copy, take at least; with several in flight the copies of all of them."""
        return max(self.steps, self.copy * self.setup.flight)

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.p50 <= self.copy * self.setup.flight + self.steps + GATE_SECONDS


class Pages:
    """The pages of one side: slot s of the benchmark has ids ``ids[s]``, shuffled, and the state slot ``states[s]``."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._converted = setup.case.converts
        layout = KVLayout.gqa(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=128,
            page_size=16,
            dtype=torch.float8_e4m3fn if self._converted and rank else torch.bfloat16,
            accept=(torch.bfloat16,) if self._converted and rank else (),
            tp_size=HEADS // SLICE if setup.case.slices and rank else 1,
            states=(STATE,) if setup.case.hybrid else (),
        )
        if setup.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        count = setup.slots * setup.case.pages
        self.cache = KVCache.empty(layout, count, device=setup.device, num_slots=setup.slots)
        self.ids = np.random.default_rng().permutation(count).reshape(setup.slots, setup.case.pages)
        self.states = np.random.default_rng().permutation(setup.slots) if setup.case.hybrid else None

    def fill(self, seed: int) -> None:
        """Random bytes for this seed, in the order of slots; whichever pages those are."""
        for number, tensor in enumerate(self._tensors()):
            tensor[self._order()] = self._source(seed, number, tensor)
        for number, tensor in enumerate(self._slots()):
            tensor[torch.from_numpy(self.states)] = self._state(seed, number, tensor)
        self._synchronize()

    def poison(self) -> None:
        for tensor in (*self._tensors(), *self._slots()):
            tensor.view(torch.uint8).fill_(0xAB)
        self._synchronize()

    def wrong(self, seed: int) -> int:
        """Bytes that are not those of `fill` with this seed on the other side."""
        total = 0
        for number, tensor in enumerate(self._tensors()):
            expected = self._source(seed, number, tensor)
            if self._converted:
                expected = convert(expected.view(torch.bfloat16), torch.float8_e4m3fn).view(torch.uint8)
            total += tensor.itemsize * int((tensor[self._order()] != expected).sum())
        for number, tensor in enumerate(self._slots()):
            arrived = tensor[torch.from_numpy(self.states)]
            total += tensor.itemsize * int((arrived != self._state(seed, number, tensor)).sum())
        return total

    def _tensors(self) -> list[torch.Tensor]:
        """The pages as integers of their elements' size."""
        tensors = [t for name in ("k", "v") for t in self.cache[name] if t is not None]
        return [t.view(torch.int16 if t.itemsize == 2 else torch.uint8) for t in tensors]

    def slot(self, number: int) -> int | None:
        """The state slot of slot ``number`` of the benchmark, if there is state."""
        return None if self.states is None else int(self.states[number])

    def _slots(self) -> list[torch.Tensor]:
        """The state slots of each layer that has any."""
        if self.states is None:
            return []
        return [t.view(torch.int32) for t in self.cache.state(STATE.name) if t is not None]

    def _state(self, seed: int, number: int, like: torch.Tensor) -> torch.Tensor:
        generator = np.random.default_rng((seed, LAYERS * 2 + number))
        words = generator.integers(-(1 << 31), 1 << 31, like.numel(), dtype=np.int32)
        return torch.from_numpy(words).view(like.shape).to(like.device)

    def _order(self) -> torch.Tensor:
        return torch.from_numpy(self.ids.reshape(-1))

    def _source(self, seed: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """What the pages of ``like`` hold of all kv heads: the writer's pages, or the reader's slices of them."""
        pages, tokens, heads, dim = like.shape
        generator = np.random.default_rng((seed, number))
        words = generator.integers(0, 1 << 63, pages * tokens * HEADS * dim // 4, dtype=np.int64)
        if self._converted:
            words &= ONES  # numbers below 2
        return torch.from_numpy(words.view(np.int16)).view(pages, tokens, HEADS, dim)[:, :, :heads].to(like.device)

    def _synchronize(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)


class _Request(Pending):
    """A request at the reader, which has posted it before. work: None at a writer that has not finished it yet."""

    def __init__(self, work: KVWork | None) -> None:
        self._work = work

    def advance(self) -> bool:
        return False

    def done(self) -> bool:
        assert self._work is not None
        if not self._work.is_completed():
            return False
        if (error := self._work.exception()) is not None:
            raise error
        return True

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class _Send(_Request):
    """A request at the writer."""

    def __init__(
        self, kv: KVProcessGroup, name: str, ids: np.ndarray[Any, Any], slot: int | None, by_layer: bool
    ) -> None:
        super().__init__(None)
        self._kv, self._name, self._ids, self._slot = kv, name, ids, slot
        self._layers = iter(range(LAYERS))
        if not by_layer:
            kv.send_pages(name, ids, 1)
            self._layers = iter(())
        self.advance()

    def advance(self) -> bool:
        if self._work is not None:
            return False
        if (layer := next(self._layers, None)) is not None:
            self._kv.send_layer(self._name, layer, self._ids, 1)
            if self._slot is not None and layer in STATE_LAYERS:
                self._kv.send_state(self._name, layer, self._slot, 1)
        if layer is None or layer == LAYERS - 1:
            self._work = self._kv.finish(self._name, 1, state_slot=self._slot)
        return self._work is None


def run_engine(
    setup: Setup, write: Callable[..., Any] | None = None, read: Callable[..., Any] | None = None
) -> EngineResult:
    """Runs one row in two fresh processes. write, read: the two sides, if not torchkv's. Raises ``KVError``."""
    write, read = write or _write, read or _read
    seed, link = int(time.time_ns() & 0xFFFFFFFF), one_link() if setup.apart else {}
    written, wrong = run_two(write, read, setup, seed, environment=link, apart=setup.apart)
    requests, step, lost, copy, each = written
    return EngineResult(
        setup=setup,
        p50=float(np.percentile(requests, 50)),
        p99=float(np.percentile(requests, 99)),
        step=step,
        lost=lost,
        copy=copy,
        each=each,
        wrong=wrong,
    )


def rounds(setup: Setup, loop: Loop, before: Callable[[int], None], after: Callable[[int], None]) -> None:
    """Requests until enough have counted, a round of `Setup.slots` at a time; the first ones warm everything up."""
    count = WARM + setup.requests
    for number in range(max(ROUNDS, -(-count // setup.slots))):
        before(number)
        dist.barrier()
        loop.rest()
        dist.barrier()
        loop.run(number * setup.slots, setup.slots)
        dist.barrier()
        after(number)


def _write(setup: Setup, seed: int) -> Written:
    pages, kv = Pages(setup, 0), current_group(None)
    kv.register(pages.cache, instance="prefill")

    def begin(number: int) -> Pending:
        slot = number % setup.slots
        return _Send(kv, f"request {number}", pages.ids[slot], pages.slot(slot), setup.case.by_layer)

    loop = Loop(begin, flight=setup.flight, polled=setup.polled)
    with busy_thread(on=setup.busy):
        rounds(setup, loop, lambda number: pages.fill(seed + number), lambda number: None)
    return summary(setup, loop, copy_seconds(setup))


def _read(setup: Setup, seed: int) -> int:
    pages, kv = Pages(setup, 1), current_group(None)
    kv.register(pages.cache, instance="decode")
    posted: dict[int, KVWork] = {}
    wrong = 0

    def before(number: int) -> None:
        pages.poison()
        for slot in range(setup.slots):
            request = number * setup.slots + slot
            posted[request] = kv.recv_pages(f"request {request}", pages.ids[slot], 0, state_slot=pages.slot(slot))

    def after(number: int) -> None:
        nonlocal wrong
        wrong += pages.wrong(seed + number)

    loop = Loop(lambda number: _Request(posted.pop(number)), flight=setup.flight, polled=setup.polled)
    with busy_thread(on=setup.busy):
        rounds(setup, loop, before, after)
    return wrong


def summary(setup: Setup, loop: Loop, copy: float) -> Written:
    """What a writer reports. Raises ``KVError`` if requests are missing."""
    times = loop.times
    if len(times.requests) < WARM + setup.requests:
        raise KVError(f"{setup.case.name}: {len(times.requests)} requests ended, {WARM + setup.requests} were begun")
    each = float(np.median(times.rounds[1:])) / setup.slots
    step = float(np.median(times.resting)) if times.resting else 0.0
    return times.requests[WARM:], step, times.lost / len(times.requests), copy, each


def copy_seconds(setup: Setup) -> float:
    """One copy of a request's bytes between two buffers of this kind of memory: the limit of any path. Best of nine."""
    if setup.device == "cuda":
        return _copy_between_gpus(setup.case.nbytes)
    source = np.random.default_rng().integers(0, 256, setup.case.nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    best = math.inf
    for _ in range(9):
        began = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, len(source))
        best = min(best, time.perf_counter() - began)
    return best


def _copy_between_gpus(nbytes: int) -> float:
    other = torch.device("cuda", 1 % torch.cuda.device_count())
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(nbytes, dtype=torch.uint8, device=other)
    best = math.inf
    for _ in range(9):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1e3)
    return best
