"""A prefill whose pages are sent once, at its end, and one whose pages `torchkv.pipeline` sends; taking turns.

Two processes. One prefills a prompt, the other decodes the second token, layer by layer as their keys and values come.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.bench.cores import pin, two_cores, waited
from torchkv.bench.decoder import VOCABULARY, Decoder, ModelSize
from torchkv.bench.gates import PipelineResult, Way
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.env import Options
from torchkv.pipeline import pipeline
from torchkv.process_group import KVProcessGroup
from torchkv.transport import Int64Array
from torchkv.work import KVWork

__all__ = ["MODELS", "Setup", "pipelined_prefill"]

WAYS = ("once", "pipelined")
# Passes of each way before those that count: the policy's first sends once, its second knows what that took, and the
# third what beside computation is slower than alone.
WARM_UPS = 3
# Prompts are long from so many tokens on. Passes of shorter ones are made up to so many times more often.
LONG, MORE = 2048, 4
ROUND_TRIPS = 20
ALONE = 3  # times that single groups are sent with nothing else to do
CANARIES = 8  # pages granted to nobody
POISON = 0xDD
DEADLINE = 900.0

MODELS = {
    # Many wide kv heads on a narrow model: as much to transfer, for what there is to compute, as prompts of 2k get.
    "cpu": ModelSize(layers=8, hidden=256, ffn=512, heads=8, kv_heads=8, head_dim=128, dtype=torch.float32),
    # As wide and as deep as models of 8e9 parameters are.
    "cuda": ModelSize(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both processes know.

    repeats: measured passes of each way, where prompts are long. cores: the one that computes on a CPU, and the one
    for everything else.
    """

    device: str
    model: ModelSize
    repeats: int
    page_size: int = 16
    cores: tuple[int, int] | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(48))

    def prompt(self, num_tokens: int, turn: int) -> torch.Tensor:
        """Fresh tokens for each turn of each run: int64 [num_tokens]."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * num_tokens + turn)
        return torch.randint(VOCABULARY, (num_tokens,), generator=generator)

    def turns(self, num_tokens: int) -> Iterator[tuple[int, str]]:
        """Every pass: a number of its own, and its way. Each way goes first as often as the other."""
        more = max(1, min(MORE, LONG // num_tokens))
        for turn in range(WARM_UPS + more * self.repeats):
            for second, way in enumerate(WAYS if turn % 2 else reversed(WAYS)):
                yield 2 * turn + second, way

    @property
    def first_measured(self) -> int:
        """The turn with which the passes begin that count."""
        return 2 * WARM_UPS


def pipelined_prefill(setup: Setup, tokens: Sequence[int]) -> list[PipelineResult]:
    """One result for each number of ``tokens``, all from the same two fresh processes.

    On a CPU they reach each other over TCP only, and share ``setup.cores``. Raises ``KVError``.
    """
    environment = {"UCX_TLS": "tcp"} if setup.device == "cpu" else {}
    with two_cores(setup.cores):
        sent, received = run_two(_prefill, _decode, setup, tuple(tokens), environment=environment, deadline=DEADLINE)
    return [_result(setup, *each) for each in zip(tokens, sent, received, strict=True)]


def _result(setup: Setup, tokens: int, sent: dict[str, Any], received: dict[str, Any]) -> PipelineResult:
    ways = {}
    for way in WAYS:
        # One clock for all processes of a host, so the two sides' stamps can be subtracted.
        began, computed = (np.array(sent[way][stamp]) for stamp in ("began", "computed"))
        visible, decoded = (np.array(received[way][stamp]) for stamp in ("visible", "decoded"))
        ways[way] = Way(
            prefill=tuple((computed - began).tolist()),
            exposed=tuple((visible - computed).tolist()),
            ttft=tuple((decoded - began).tolist()),
            waited=tuple(sent[way]["waited"]),
        )
    return PipelineResult(
        device=setup.device,
        tokens=tokens,
        layers=setup.model.layers,
        nbytes=sent["nbytes"],
        path="/".join(sorted(sent["paths"])),
        lane=sent["lane"],
        group_sizes=tuple(sent["group_sizes"]),
        transfer=statistics.median(sent["transfer"]),
        group_transfer=sent["group_transfer"],
        round_trip=sent["round_trip"],
        wrong=received["wrong"],
        **ways,
    )


# ---------------------------------------------------------------------- both processes


class _Paged:
    """Keys and values of the prompt, written to the pages of a cache."""

    num_tokens = 0

    def __init__(self, cache: KVCache, slots: torch.Tensor) -> None:
        self._cache, self._slots = cache, slots

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for name, new in (("k", k), ("v", v)):
            _rows(self._cache, name, layer)[self._slots] = new
        return k, v


class _Received:
    """The same, read from the pages that they come to, layer by layer. Those of later tokens are kept nowhere."""

    def __init__(self, cache: KVCache, slots: torch.Tensor) -> None:
        self.num_tokens = len(slots)
        self.request: KVWork | None = None
        self._cache, self._slots = cache, slots
        # Made once: to fault it in takes longer than all else that is done here.
        self._all = {
            name: _rows(cache, name, 0).new_empty((len(slots) + 1, *_rows(cache, name, 0).shape[1:]))
            for name in ("k", "v")
        }

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.request is not None
        self.request.wait_layer(layer)
        for name, new in (("k", k), ("v", v)):
            torch.index_select(_rows(self._cache, name, layer), 0, self._slots, out=self._all[name][:-1])
            self._all[name][-1:] = new
        return self._all["k"], self._all["v"]


class _Plain:
    """The same in tensors of its own, which nothing but the model writes to."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.num_tokens:
            self.layers.append((k, v))
            return k, v
        old_k, old_v = self.layers[layer]
        return torch.cat((old_k, k)), torch.cat((old_v, v))


def _rows(cache: KVCache, name: str, layer: int) -> torch.Tensor:
    """One layer as [slots, kv heads, head_dim], in place."""
    tensor = cache[name][layer]
    assert tensor is not None
    return tensor.flatten(0, 1)


class _Rank:
    """One process: its model, and for one length of prompts its group, pages and slots."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = torch.device("cpu")
        if setup.device == "cuda":
            self.device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.set_grad_enabled(False)
        self.model = Decoder(setup.model, device=self.device, seed=setup.seed)

    @contextmanager
    def group(self, num_tokens: int) -> Iterator[tuple[KVProcessGroup, KVCache, Int64Array]]:
        """A group that has learned nothing yet, its cache, and the shuffled pages that every prompt uses."""
        # On a CPU not by way of memory that both processes map.
        kv = dist.new_group(backend="torchkv", pg_options=Options(path=None if self.device.type == "cuda" else "runs"))
        assert isinstance(kv, KVProcessGroup)
        needed = -(-num_tokens // self.setup.page_size)
        layout = self.setup.model.layout(self.setup.page_size)
        cache = KVCache.empty(layout, needed + CANARIES, device=self.device, group=kv)
        kv.register(cache, instance=f"rank {kv.rank()}")
        pages = np.random.default_rng().permutation(needed + CANARIES)[:needed]
        offsets = np.arange(self.setup.page_size)
        self.slots = torch.from_numpy((pages[:, None] * self.setup.page_size + offsets).ravel()[:num_tokens])
        self.slots = self.slots.to(self.device)
        yield kv, cache, pages
        dist.barrier()
        dist.destroy_process_group(kv)

    def prompt(self, num_tokens: int, turn: int) -> torch.Tensor:
        return self.setup.prompt(num_tokens, turn).to(self.device)

    def ready(self, cache: KVCache) -> None:
        """Poisons the cache, so that nothing in it is left from the pass before."""
        for storage in cache.storages:
            storage.fill_(POISON)
        self.synchronize()
        if self.setup.cores is not None:
            # Each time: libraries start their threads when they first need them.
            pin(self.setup.cores, is_computing=dist.get_rank() == 0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---------------------------------------------------------------------- the process that prefills


def _prefill(setup: Setup, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    rank = _Rank(setup)
    return [_prefill_length(rank, num_tokens) for num_tokens in tokens]


def _prefill_length(rank: _Rank, num_tokens: int) -> dict[str, Any]:
    out: dict[str, Any] = {way: {"began": [], "computed": [], "waited": []} for way in WAYS}
    out.update(group_sizes=[], transfer=[], paths=set())
    with rank.group(num_tokens) as (kv, cache, pages):
        for turn, way in rank.setup.turns(num_tokens):
            rank.ready(cache)
            prompt, request = rank.prompt(num_tokens, turn), f"{way} {turn}"
            dist.barrier()
            kv.prefix_tokens(request, 1)
            rank.synchronize()
            before, began = waited(), time.monotonic()
            if way == "pipelined":
                with pipeline(rank.model, kv, request, pages, 1) as sending:
                    first, computed, after = _first_token(rank, prompt, cache)
                works, group_size = sending.works, len(sending.groups[0])
            else:
                first, computed, after = _first_token(rank, prompt, cache)
                works = [kv.send_pages(request, pages, 1)]
            finish = kv.finish(request, 1)
            dist.send(torch.tensor([first]), 1)
            finish.wait()
            out["nbytes"] = sum(work.bytes for work in works)
            if turn >= rank.setup.first_measured:
                out[way]["began"].append(began)
                out[way]["computed"].append(computed)
                out[way]["waited"].append(after - before)
                out["paths"].update(work.path for work in works)
                if way == "pipelined":
                    out["group_sizes"].append(group_size)
                else:
                    out["transfer"].append(works[0].seconds)
        out["round_trip"] = _round_trip(kv)
        out["group_transfer"] = _group_transfer(kv, pages, rank.setup.model.layers, out["group_sizes"])
        lanes = kv.explain(1).lanes
        out["lane"] = max(lanes, key=lambda lane: lanes[lane].nbytes)
    return out


def _first_token(rank: _Rank, prompt: torch.Tensor, cache: KVCache) -> tuple[int, float, float]:
    """The token that follows the prompt, when it was known, and what this thread had `waited` by then."""
    token = int(rank.model(prompt, _Paged(cache, rank.slots)).argmax())
    return token, time.monotonic(), waited()


def _round_trip(kv: KVProcessGroup) -> float:
    """Seconds of a control round trip, from a seal to its verdict: requests without pages are nothing else."""
    seconds = []
    for number in range(ROUND_TRIPS):
        kv.prefix_tokens(f"empty {number}", 1)
        began = time.monotonic()
        kv.finish(f"empty {number}", 1).wait()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def _group_transfer(kv: KVProcessGroup, pages: Int64Array, num_layers: int, group_sizes: Sequence[int]) -> float:
    """Seconds that one group of layers takes with nothing else to do."""
    size = statistics.median_low(group_sizes)
    seconds = []
    for number in range(ALONE):
        request = f"alone {number}"
        kv.prefix_tokens(request, 1)
        for first in range(0, num_layers, size):
            work = kv.send_pages(request, pages, 1, layers=range(first, min(first + size, num_layers)))
            work.wait()
            if first + size <= num_layers:
                seconds.append(work.seconds)
        kv.finish(request, 1).wait()
    return statistics.median(seconds)


# ---------------------------------------------------------------------- the process that decodes


def _decode(setup: Setup, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    rank = _Rank(setup)
    return [_decode_length(rank, num_tokens) for num_tokens in tokens]


def _decode_length(rank: _Rank, num_tokens: int) -> dict[str, Any]:
    out: dict[str, Any] = {way: {"visible": [], "decoded": []} for way in WAYS}
    out["wrong"] = 0
    first = torch.zeros(1, dtype=torch.int64)
    with rank.group(num_tokens) as (kv, cache, pages):
        memory = _Received(cache, rank.slots)
        for turn, way in rank.setup.turns(num_tokens):
            rank.ready(cache)
            granted = time.monotonic()
            received = kv.recv_pages(f"{way} {turn}", pages, 0)
            dist.barrier()
            dist.recv(first, 0)
            memory.request = received
            logits = rank.model(first.to(rank.device), memory)
            int(logits.argmax())
            decoded = time.monotonic()
            received.wait()
            if turn >= rank.setup.first_measured:
                out[way]["visible"].append(granted + received.seconds)
                out[way]["decoded"].append(decoded)
            out["wrong"] += _count_wrong(rank, cache, rank.prompt(num_tokens, turn), first, logits)
        for number in range(ROUND_TRIPS):
            kv.recv_pages(f"empty {number}", [], 0).wait()
        for number in range(ALONE):
            kv.recv_pages(f"alone {number}", pages, 0).wait()
    return out


def _count_wrong(rank: _Rank, cache: KVCache, prompt: torch.Tensor, first: torch.Tensor, logits: torch.Tensor) -> int:
    """Bytes that differ from a second computation without torchkv: in the pages, around them, and of the logits."""
    plain = _Plain()
    expected = rank.model(prompt, plain)
    wrong = 8 * int(int(expected.argmax()) != int(first))
    plain.num_tokens = len(prompt)
    wrong += _differing(rank.model(first.to(rank.device), plain), logits)
    # Slots behind the prompt in its last page are sent with it, but as the sender's poison, which is the same.
    untouched = torch.ones(len(_rows(cache, "k", 0)), dtype=torch.bool, device=rank.device)
    untouched[rank.slots] = False
    for layer, tensors in enumerate(plain.layers):
        for name, want in zip(("k", "v"), tensors, strict=True):
            rows = _rows(cache, name, layer)
            wrong += _differing(want, rows[rank.slots])
            wrong += int((rows[untouched].view(torch.uint8) != POISON).sum())
    return wrong


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Bytes."""
    return int((one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum())
