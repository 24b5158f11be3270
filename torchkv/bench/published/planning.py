"""Result a: how the descriptors of head slices are listed, and what that does to the time to the first token.

The planning of one request is timed by itself. Then a decoder prefills, and its pages go to a rank that holds one of
four kv heads, slice by slice, with each planner in turn in torchkv's put path; all else is the same. Every byte is
checked.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.arrays import Int64Array
from torchkv.bench.prefill.decoder import VOCABULARY, Decoder, ModelSize
from torchkv.bench.prefill.memories import Paged, Plain, rows
from torchkv.bench.processes import run_two
from torchkv.bench.published.planners import PLANNERS, Descriptors, SliceList
from torchkv.cache import KVCache
from torchkv.errors import KVError
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.pair_plan import compile_plan
from torchkv.layout.plan_segment import PlanSegment
from torchkv.transfer.offsets import PairOffsets

__all__ = ["Planning", "measure"]

PAGE_SIZE = 16
POISON = 0xDD
# Many layers of short rows: planning then weighs about as much beside the prefill as it did where it was published.
MODEL = ModelSize(layers=32, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What is measured. The reader holds one kv head of the model's."""

    model: ModelSize = MODEL
    tokens: tuple[int, ...] = (512, 2048, 8192)
    end_to_end: tuple[int, ...] = (512, 2048)
    repeats: int = 5
    seed: int = 7

    def prompt(self, turn: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * turn + self.seed)
        return torch.randint(VOCABULARY, (tokens,), generator=generator)


def measure(settings: Planning) -> list[dict[str, Any]]:
    """A row for each number of tokens and planner. Fields about requests are None where only planning is timed.

    Raises ``KVError`` if a process fails or two planners disagree.
    """
    measured: dict[tuple[int, str], dict[str, Any]] = {}
    written, wrong = run_two(_write, _read, settings, path="slices")
    for row, bad in zip(written, wrong, strict=True):
        measured[row.pop("tokens"), row.pop("planner")] = {**row, "wrong": bad}
    nothing = {"prefill_ms": None, "send_ms": None, "ttft_ms": None, "lane": None, "wrong": 0}
    return [
        {"tokens": tokens, "planner": name, **planned, **measured.get((tokens, name), nothing)}
        for tokens in settings.tokens
        for name, planned in _plan(settings, tokens).items()
    ]


# ---------------------------------------------------------------------- planning alone


def _plan(settings: Planning, tokens: int) -> dict[str, dict[str, Any]]:
    """By planner: milliseconds to plan all layers of one request, and its descriptors."""
    layers = settings.model.layers
    of = _slices(settings, tokens)
    want = PLANNERS["loops"](of)
    found = {}
    for name, planner in PLANNERS.items():
        # torchkv plans once for all layers and for keys and values, which lie alike in their tensors.
        times = 1 if name == "torchkv" else 2 * layers
        seconds = []
        for _ in range(settings.repeats + 1):
            began = time.perf_counter()
            for _ in range(times):
                got = planner(of)
            seconds.append(time.perf_counter() - began)
        if any((one != other).any() for one, other in zip(got, want, strict=True)):
            raise KVError(f"{name} lists other descriptors than the loops do")
        found[name] = {"plan_ms": 1e3 * statistics.median(seconds[1:]), "descriptors": 2 * layers * len(got[0])}
    return found


def _slices(settings: Planning, tokens: int) -> SliceList:
    heads, count = settings.model.kv_heads, tokens // PAGE_SIZE
    writer = settings.model.layout(PAGE_SIZE)
    reader = settings.model.layout(PAGE_SIZE, tp_rank=1, tp_size=heads)
    random = np.random.default_rng()
    return SliceList(
        segment=compile_plan(0, {0: writer}, reader).segments[0],
        src_pages=random.permutation(count),
        dst_pages=random.permutation(count),
        src_stride=writer.page_nbytes("k"),
        dst_stride=reader.page_nbytes("k"),
        page_size=PAGE_SIZE,
    )


# ---------------------------------------------------------------------- with prefill and transfer


@contextmanager
def _planned_by(name: str) -> Iterator[None]:
    """In this process, torchkv's put path lists descriptors with this planner."""
    planner, ours = PLANNERS[name], PairOffsets.spans

    def spans(self: PairOffsets, segment: PlanSegment, layer: int) -> Descriptors:
        _, src_stride, dst_stride = self._key(segment, layer)
        return planner(
            SliceList(
                segment=segment,
                src_pages=self._pages,
                dst_pages=self._grant.pages,
                src_stride=src_stride,
                dst_stride=dst_stride,
                page_size=PAGE_SIZE,
            )
        )

    if name != "torchkv":
        PairOffsets.spans = spans  # type: ignore[method-assign]
    try:
        yield
    finally:
        PairOffsets.spans = ours  # type: ignore[method-assign]


def _turns(settings: Planning) -> Iterator[tuple[int, int, str]]:
    """(tokens, number of the turn, planner); which planner goes first changes."""
    names = list(PLANNERS)
    for tokens in settings.end_to_end:
        for turn in range(settings.repeats + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                yield tokens, turn, name


def _join(settings: Planning, tp_size: int) -> tuple[KVProcessGroup, KVCache, Decoder]:
    torch.set_grad_enabled(False)
    kv = current_group(None)
    layout = settings.model.layout(PAGE_SIZE, tp_size=tp_size)
    cache = KVCache.empty(layout, max(settings.end_to_end) // PAGE_SIZE, device="cpu")
    kv.register(cache, instance=f"rank {kv.rank()}")
    model = Decoder(settings.model, device=torch.device("cpu"), seed=settings.seed)
    gc.collect()
    gc.freeze()
    return kv, cache, model


def _slots(cache: KVCache, tokens: int) -> tuple[Int64Array, torch.Tensor]:
    """Shuffled pages for so many tokens, and the row of each token in the cache."""
    pages = np.random.default_rng().permutation(cache.num_pages)[: tokens // PAGE_SIZE]
    return pages, torch.from_numpy((pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel())


def _write(settings: Planning) -> list[dict[str, Any]]:
    kv, cache, model = _join(settings, 1)
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for tokens, turn, name in _turns(settings):
        pages, slots = _slots(cache, tokens)
        request, prompt = f"{tokens} {turn} {name}", settings.prompt(turn, tokens)
        kv.prefix_tokens(request, 1)
        dist.barrier()
        began = time.perf_counter()
        model(prompt, Paged(cache, slots)).argmax().item()
        computed = time.perf_counter()
        with _planned_by(name):
            kv.send_pages(request, pages, 1)
            kv.finish(request, 1).wait()  # done when the receiver has everything in its pages
        ended = time.perf_counter()
        if turn:
            times.setdefault((tokens, name), []).append((computed - began, ended - computed))
        dist.barrier()
    lanes = kv.explain(1).lanes
    found = []
    for (tokens, name), passes in times.items():
        prefill, send = (statistics.median(column) for column in zip(*passes, strict=True))
        found.append(
            {
                "tokens": tokens,
                "planner": name,
                "prefill_ms": 1e3 * prefill,
                "send_ms": 1e3 * send,
                # Of the medians: prefills of one kind differ by more than all that planning takes.
                "ttft_ms": 1e3 * (_prefill_of(times, tokens) + send),
                "lane": max(lanes, key=lambda lane: lanes[lane].nbytes),
            }
        )
    return found


def _prefill_of(times: dict[tuple[int, str], list[tuple[float, float]]], tokens: int) -> float:
    """The median prefill of so many tokens, whichever planner came after it: none had begun."""
    return statistics.median(prefill for (of, _), passes in times.items() if of == tokens for prefill, _ in passes)


def _read(settings: Planning) -> list[int]:
    kv, cache, model = _join(settings, settings.model.kv_heads)
    wrong: dict[tuple[int, str], int] = {}
    for tokens, turn, name in _turns(settings):
        for storage in cache.storages:
            storage.fill_(POISON)
        pages, slots = _slots(cache, tokens)
        received = kv.recv_pages(f"{tokens} {turn} {name}", pages, 0)
        dist.barrier()
        received.wait()
        dist.barrier()
        plain = Plain()
        model(settings.prompt(turn, tokens), plain)
        key = (tokens, name)
        wrong[key] = wrong.get(key, 0) + _count_wrong(cache, slots, plain)
    return list(wrong.values())


def _count_wrong(cache: KVCache, slots: torch.Tensor, plain: Plain) -> int:
    """Bytes of the received head, and of the memory around it, that are not what a second computation gives."""
    around = torch.ones(cache.num_pages * PAGE_SIZE, dtype=torch.bool)
    around[slots] = False
    wrong = 0
    for (layer, _), tensors in plain.layers.items():
        for name, want in zip(("k", "v"), tensors, strict=True):
            found = rows(cache, name, layer).contiguous().view(torch.uint8)
            wrong += int((found[slots] != want[:, :1].contiguous().view(torch.uint8)).sum())
            wrong += int((found[around] != POISON).sum())
    return wrong
