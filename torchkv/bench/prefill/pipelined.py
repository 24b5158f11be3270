"""Measures prefills that send all pages at their end, and prefills whose pages `torchkv.pipeline` sends, in turns.

One rank, or two that share the heads, prefills a prompt. One or two other ranks decode the second token, layer by layer
as keys and values are received. Each rank is a process.
"""

from __future__ import annotations

import functools
import gc
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

from torchkv.arrays import Int64Array
from torchkv.bench.check import differing
from torchkv.bench.prefill.cores import pin, two_cores, waited
from torchkv.bench.prefill.decoder import VOCABULARY, Decoder, ModelSize, Reduce
from torchkv.bench.prefill.gates import PipelineResult, Way
from torchkv.bench.prefill.memories import Paged, Plain, Received, rows, shard_of
from torchkv.bench.processes import run_ranks
from torchkv.cache import KVCache
from torchkv.group.process_group import KVProcessGroup
from torchkv.pipelining.context import pipeline

__all__ = ["MODELS", "Setup", "pipelined_prefill"]

WAYS = ("once", "pipelined")
# Passes of each way before the measured ones. `torchkv.pipeline` sends once in its first pass; in the second it knows
# how long that took, and in the third how much slower a transfer is beside computation.
WARM_UPS = 3
# Prompts of fewer tokens than LONG get more passes, up to MORE times as many. LONG is twice as large on GPUs, because a
# gate applies to short prompts there.
LONG, MORE = {"cpu": 2048, "cuda": 4096}, 16
ROUND_TRIPS = 20
ALONE = 3
CANARIES = 8  # pages that no request is granted
POISON = 0xDD
DEADLINE = 900.0

MODELS = {
    # Many wide kv heads on a narrow model: as much to transfer, for what there is to compute, as prompts of 2k get.
    "cpu": ModelSize(layers=8, hidden=256, ffn=512, heads=8, kv_heads=8, head_dim=128, dtype=torch.float32),
    # As wide and as deep as models of 8e9 parameters.
    "cuda": ModelSize(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16),
    # As wide as models of 70e9 parameters: with a smaller one, two ranks would spend short prefills launching kernels.
    "cuda, tp 2": ModelSize(
        layers=32, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, dtype=torch.bfloat16
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parameters of a run, which every process gets.

    tp: how many ranks prefill and how many decode, 1 or 2 each: sums of two terms are the same in any order, and only
    then can bytes be compared. repeats: measured passes of each way, where prompts are long. cores: on a CPU, the core
    of the prefill and the core of everything else; None: no pinning. crossed: the ranks that decode share two GPUs with
    the ranks that prefill, each on the other GPU than the rank whose heads it has, and begin when the prefill ends.
    group_size: layers that `torchkv.pipeline` sends at a time; None: as many as it finds best. warm_ups: passes of each
    way before the measured ones. alone: times that layers are sent with nothing else going on, for comparison.
    """

    device: str
    model: ModelSize
    repeats: int
    tp: tuple[int, int] = (1, 1)
    page_size: int = 16
    cores: tuple[int, int] | None = None
    crossed: bool = False
    group_size: int | None = None
    warm_ups: int = WARM_UPS
    alone: int = ALONE
    seed: int = field(default_factory=lambda: secrets.randbits(48))

    @property
    def instances(self) -> dict[str, range]:
        """Name of each instance -> its ranks."""
        return {"prefill": range(self.tp[0]), "decode": range(self.tp[0], sum(self.tp))}

    def gpu(self, number: int) -> int:
        """The index of the GPU of rank ``number``."""
        if not self.crossed or number < self.tp[0]:
            return number
        return (number - self.tp[0] + 1) % 2

    def prompt(self, num_tokens: int, turn: int) -> torch.Tensor:
        """Fresh tokens for each turn of each run: int64 [num_tokens]."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * num_tokens + turn)
        return torch.randint(VOCABULARY, (num_tokens,), generator=generator)

    def turns(self, num_tokens: int) -> Iterator[tuple[int, str]]:
        """Every pass as (number, way), the number being unique. The way that goes first alternates."""
        more = max(1, min(MORE, LONG[self.device] // num_tokens))
        for turn in range(self.warm_ups + more * self.repeats):
            for second, way in enumerate(WAYS if turn % 2 else reversed(WAYS)):
                yield 2 * turn + second, way

    @property
    def first_measured(self) -> int:
        """The number of the first measured pass."""
        return 2 * self.warm_ups


def pipelined_prefill(setup: Setup, tokens: Sequence[int]) -> list[PipelineResult]:
    """One result for each number of ``tokens``, all measured in the same fresh processes.

    On a CPU the processes reach each other over TCP only, and share ``setup.cores``. Raises ``KVError`` if one fails.
    """
    environment = {"UCX_TLS": "tcp"} if setup.device == "cpu" else {}
    with two_cores(setup.cores):
        functions = [_prefill] * setup.tp[0] + [_decode] * setup.tp[1]
        # On a CPU the processes take themselves for separate hosts, or bytes would go through memory that both map.
        arguments = (setup, tuple(tokens))
        apart = setup.device == "cpu"
        found = run_ranks(functions, *arguments, environment=environment, apart=apart, deadline=DEADLINE)
    # Transposed: run_ranks returns by rank first, results are by length of prompts.
    return [_result(setup, length, ranks) for length, *ranks in zip(tokens, *found, strict=True)]


def _result(setup: Setup, tokens: int, found: Sequence[dict[str, Any]]) -> PipelineResult:
    """found: what each rank measured. An instance begins when its first rank does, and ends when its last rank does."""
    sent, received = ([found[rank] for rank in ranks] for ranks in setup.instances.values())
    ways = {}
    for way in WAYS:
        # All processes of a host read one monotonic clock, so times of the two sides can be subtracted.
        began = np.min([each[way]["began"] for each in sent], axis=0)
        computed = np.max([each[way]["computed"] for each in sent], axis=0)
        visible, decoded = (np.max([each[way][stamp] for each in received], axis=0) for stamp in ("visible", "decoded"))
        ways[way] = Way(
            prefill=tuple((computed - began).tolist()),
            exposed=tuple((visible - computed).tolist()),
            ttft=tuple((decoded - began).tolist()),
            waited=tuple(sent[0][way]["waited"]),
        )
    group_sizes = [each["group_sizes"] for each in sent]
    return PipelineResult(
        device=setup.device,
        tp=f"{setup.tp[0]}:{setup.tp[1]}",
        tokens=tokens,
        layers=setup.model.layers,
        nbytes=sum(each["nbytes"] for each in sent),
        path="/".join(sorted(set().union(*(each["paths"] for each in sent)))),
        lane="/".join(sorted({each["lane"] for each in sent})),
        group_sizes=tuple(group_sizes[0]),
        unlike_groups=sum(len(set(sizes)) > 1 for sizes in zip(*group_sizes, strict=True)),
        transfer=max(each["transfer"] for each in sent),
        group_transfer=max(each["group_transfer"] for each in sent),
        round_trip=max(each["round_trip"] for each in sent),
        wrong=sum(each["wrong"] for each in received),
        **ways,
    )


# ---------------------------------------------------------------------- all processes


class _Rank:
    """The state of one process: its model, and for one length of prompts its group, pages and slots."""

    def __init__(self, setup: Setup, number: int, reduce: Reduce | None = None) -> None:
        """reduce: sums a tensor, in place, over the ranks of this rank's instance."""
        self.setup, self.number = setup, number
        self.device = torch.device("cuda", setup.gpu(number)) if setup.device == "cuda" else torch.device("cpu")
        self.instance = "prefill" if number in setup.instances["prefill"] else "decode"
        ranks = setup.instances[self.instance]
        self._tp_rank, self._tp_size = ranks.index(number), len(ranks)
        num_shards = max(setup.tp)
        self.num_held = held = num_shards // self._tp_size
        torch.set_grad_enabled(False)
        self.model = Decoder(
            setup.model,
            device=self.device,
            seed=setup.seed,
            num_shards=num_shards,
            held=range(self._tp_rank * held, (self._tp_rank + 1) * held),
            reduce=reduce,
        )

    @contextmanager
    def group(self, num_tokens: int) -> Iterator[tuple[KVProcessGroup, KVCache, Int64Array]]:
        """A new group, which has measured nothing yet, its cache, and the shuffled pages that every prompt uses."""
        kv = dist.new_group(backend="torchkv")
        assert isinstance(kv, KVProcessGroup)
        needed = -(-num_tokens // self.setup.page_size)
        layout = self.setup.model.layout(self.setup.page_size, tp_rank=self._tp_rank, tp_size=self._tp_size)
        cache = KVCache.empty(layout, needed + CANARIES, device=self.device, group=kv)
        kv.register(cache, instance=self.instance)
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
        """Poisons the cache, so that no byte of the previous pass is left in it, and pins the threads."""
        for storage in cache.storages:
            storage.fill_(POISON)
        self.synchronize()
        if self.setup.cores is not None:
            # Before every pass, because libraries start their threads when they first need them.
            pin(self.setup.cores, is_computing=self.number == 0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _this_rank(setup: Setup) -> _Rank:
    """This process's state, with a `reduce` over its instance if that has two ranks. Collective."""
    number = dist.get_rank()
    if setup.device == "cuda":
        torch.cuda.set_device(setup.gpu(number))
    reduce: Reduce | None = None
    for ranks in setup.instances.values():
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), backend="nccl" if setup.device == "cuda" else "gloo")
            if number in ranks:
                reduce = functools.partial(dist.all_reduce, group=group)
    rank = _Rank(setup, number, reduce)
    # As serving engines do: a garbage collection that visits all modules adds 2 ms to a pass, of either way, by chance.
    gc.collect()
    gc.freeze()
    return rank


# ---------------------------------------------------------------------- the processes that prefill


def _prefill(setup: Setup, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    rank = _this_rank(setup)
    return [_prefill_length(rank, num_tokens) for num_tokens in tokens]


def _prefill_length(rank: _Rank, num_tokens: int) -> dict[str, Any]:
    out: dict[str, Any] = {way: {"began": [], "computed": [], "waited": []} for way in WAYS}
    out.update(group_sizes=[], paths=set())
    with rank.group(num_tokens) as (kv, cache, pages):
        for turn, way in rank.setup.turns(num_tokens):
            rank.ready(cache)
            prompt, request = rank.prompt(num_tokens, turn), f"{way} {turn}"
            dist.barrier()
            kv.prefix_tokens(request, "decode")
            rank.synchronize()
            before, began = waited(), time.monotonic()
            if way == "pipelined":
                size = rank.setup.group_size
                with pipeline(rank.model, kv, request, pages, "decode", group_size=size) as sending:
                    logits, computed, after = _forward(rank, prompt, cache)
                works, group_size = sending.works, len(sending.groups[0])
            else:
                logits, computed, after = _forward(rank, prompt, cache)
                works = [kv.send_pages(request, pages, "decode")]
            finish = kv.finish(request, "decode")
            first = int(logits.argmax())
            if rank.device.type == "cuda":  # the forward pass above only launched kernels; argmax has waited for them
                computed, after = time.monotonic(), waited()
            for other in rank.setup.instances["decode"] if rank.number == 0 else ():
                dist.send(torch.tensor([first]), other)
            finish.wait()
            out["nbytes"] = sum(work.bytes for work in works)
            if turn >= rank.setup.first_measured:
                out[way]["began"].append(began)
                out[way]["computed"].append(computed)
                out[way]["waited"].append(after - before)
                out["paths"].update(work.path for work in works)
                if way == "pipelined":
                    out["group_sizes"].append(group_size)
        out["round_trip"] = _round_trip(kv)
        num_layers = rank.setup.model.layers
        size = statistics.median_low(out["group_sizes"])
        last = num_layers % size or size
        out["transfer"] = _alone(kv, "all", pages, num_layers, num_layers, rank.setup.alone)
        out["group_transfer"] = _alone(kv, "last", pages, num_layers, last, rank.setup.alone)
        counters = [c for other in rank.setup.instances["decode"] for c in kv.explain(other).lanes.items()]
        out["lane"], _ = max(counters, key=lambda counter: counter[1].nbytes)
    return out


def _forward(rank: _Rank, prompt: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, float, float]:
    """Logits of the token after the prompt, the time when the pass ended, and what this thread had `waited` by then."""
    return rank.model(prompt, Paged(cache, rank.slots)), time.monotonic(), waited()


def _round_trip(kv: KVProcessGroup) -> float:
    """Seconds of a control round trip, from a seal to its verdict, measured with requests that have no pages."""
    seconds = []
    for number in range(ROUND_TRIPS):
        kv.prefix_tokens(f"empty {number}", "decode")
        began = time.monotonic()
        kv.finish(f"empty {number}", "decode").wait()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def _alone(kv: KVProcessGroup, name: str, pages: Int64Array, num_layers: int, number: int, times: int) -> float:
    """Seconds to send the last ``number`` of ``num_layers`` layers in one verb, with nothing else going on."""
    seconds = []
    for turn in range(times):
        request = f"{name} {turn}"
        kv.prefix_tokens(request, "decode")
        if number < num_layers:
            kv.send_pages(request, pages, "decode", layers=range(num_layers - number)).wait()
        work = kv.send_pages(request, pages, "decode", layers=range(num_layers - number, num_layers))
        work.wait()
        seconds.append(work.seconds)
        kv.finish(request, "decode").wait()
    return statistics.median(seconds)


# ---------------------------------------------------------------------- the processes that decode


def _decode(setup: Setup, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    rank = _this_rank(setup)
    return [_decode_length(rank, num_tokens) for num_tokens in tokens]


def _decode_length(rank: _Rank, num_tokens: int) -> dict[str, Any]:
    out: dict[str, Any] = {way: {"visible": [], "decoded": []} for way in WAYS}
    out["wrong"] = 0
    first = torch.zeros(1, dtype=torch.int64)
    with rank.group(num_tokens) as (kv, cache, pages):
        memory = Received(cache, rank.slots, num_shards=rank.num_held)
        for turn, way in rank.setup.turns(num_tokens):
            rank.ready(cache)
            received = kv.recv_pages(f"{way} {turn}", pages, "prefill")
            granted = time.monotonic()  # behind the verb, so that what is measured errs to the slow side
            dist.barrier()
            if not rank.setup.crossed:  # if crossed, gathering now would compete with the prefill for the GPU
                memory.gather(received)
            dist.recv(first, 0)
            if rank.setup.crossed:
                memory.gather(received)
            logits = rank.model(first.to(rank.device), memory)
            int(logits.argmax())
            decoded = time.monotonic()
            received.wait()
            if turn >= rank.setup.first_measured:
                out[way]["visible"].append(granted + received.seconds)
                out[way]["decoded"].append(decoded)
            out["wrong"] += _count_wrong(rank, cache, rank.prompt(num_tokens, turn), first, logits)
        for number in range(ROUND_TRIPS):
            kv.recv_pages(f"empty {number}", [], "prefill").wait()
        for name in ("all", "last"):
            for turn in range(rank.setup.alone):
                kv.recv_pages(f"{name} {turn}", pages, "prefill").wait()
    return out


def _count_wrong(rank: _Rank, cache: KVCache, prompt: torch.Tensor, first: torch.Tensor, logits: torch.Tensor) -> int:
    """How many bytes differ from a computation without torchkv: in the pages, around them, and of the logits."""
    plain = Plain()
    expected = rank.model(prompt, plain)
    wrong = 8 * int(int(expected.argmax()) != int(first))
    plain.num_tokens = len(prompt)
    wrong += differing(rank.model(first.to(rank.device), plain), logits)
    # Slots after the prompt in its last page are sent too, but hold the sender's poison, which is this rank's as well.
    untouched = torch.ones(len(rows(cache, "k", 0)), dtype=torch.bool, device=rank.device)
    untouched[rank.slots] = False
    for (layer, shard), tensors in plain.layers.items():
        for name, want in zip(("k", "v"), tensors, strict=True):
            found = shard_of(rows(cache, name, layer), shard, want)
            wrong += differing(want, found[rank.slots])
            wrong += int((found[untouched].view(torch.uint8) != POISON).sum())
    return wrong
