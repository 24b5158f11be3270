"""Result e: groups of prompts that share a long prefix; the receiver asks only for what it does not hold yet.

Two processes. The first prefills: it keeps the prefixes, as an engine's own prefix cache does, and computes only the
questions behind them. The second decodes the first token. So many clients each wait for their first token before they
ask again. One way every prompt is sent whole; the other way a `PrefixCache` at the receiver says what is known there.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.arrays import Int64Array
from torchkv.bench.check import differing
from torchkv.bench.prefill.decoder import VOCABULARY, Decoder, ModelSize
from torchkv.bench.prefill.memories import Behind, Held, Plain, rows
from torchkv.bench.processes import run_two
from torchkv.bench.published.link import link, link_name
from torchkv.cache import KVCache
from torchkv.engine.work import KVWork
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.prefix import cache as prefix_cache

__all__ = ["Prefixes", "measure"]

PAGE_SIZE = 16
CANARIES = 8  # pages that no request is granted
POISON = 0xDD
MODEL = ModelSize(layers=4, hidden=128, ffn=256, heads=2, kv_heads=2, head_dim=64, dtype=torch.float32)
WAYS = ("whole", "incremental")


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """What is measured. prefix, question: tokens, whole pages. size: prompts of a group. link: 1e6 bytes/s or None."""

    model: ModelSize = MODEL
    groups: int = 3
    size: int = 8
    prefix: int = 7008
    question: int = 992
    clients: int = 2
    link: float | None = 25.0
    seed: int = 7

    @property
    def pages(self) -> int:
        """Of one prompt."""
        return (self.prefix + self.question) // PAGE_SIZE

    @property
    def prompts(self) -> int:
        return self.groups * self.size

    @cached_property
    def order(self) -> list[int]:
        """In which prompts are asked; prompt p belongs to group p // size."""
        return [int(prompt) for prompt in np.random.default_rng(self.seed).permutation(self.prompts)]

    def tokens(self, prompt: int) -> torch.Tensor:
        """int64 [prefix + question]"""
        return torch.cat((self._random(prompt // self.size, self.prefix), self._random(1000 + prompt, self.question)))

    def _random(self, number: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * self.seed + number)
        return torch.randint(VOCABULARY, (count,), generator=generator)


def measure(settings: Prefixes) -> list[dict[str, Any]]:
    """A row for each way, in two fresh processes over TCP. Raises ``KVError`` if one fails."""
    with link(settings.link):
        written, read = run_two(_write, _read, settings, environment={"UCX_TLS": "tcp"}, apart=True)
    found = []
    for way in WAYS:
        ttft, nbytes = read[way].pop("ttft"), written[way]["nbytes"]
        compute = written[way]["compute"]
        transfer = 0.0 if settings.link is None else nbytes / settings.prompts / settings.link / 1e6
        found.append(
            {
                "way": way,
                "link": link_name(settings.link),
                "prompts": settings.prompts,
                "clients": settings.clients,
                "nbytes": nbytes,
                "compute_ms": 1e3 * compute,
                "ttft_ms": 1e3 * statistics.mean(ttft),
                "median_ms": 1e3 * statistics.median(ttft),
                # Clients wait for one another: as long as the slower one of prefill and link takes for all of them.
                "limit_ms": 1e3 * settings.clients * max(compute, transfer),
                **read[way],
            }
        )
    return found


def _join(settings: Prefixes, num_pages: int) -> tuple[KVProcessGroup, KVCache, Decoder]:
    torch.set_grad_enabled(False)
    kv = current_group(None)
    cache = KVCache.empty(settings.model.layout(PAGE_SIZE), num_pages, device="cpu")
    kv.register(cache, instance=f"rank {kv.rank()}")
    model = Decoder(settings.model, device=torch.device("cpu"), seed=settings.seed)
    gc.collect()
    gc.freeze()
    return kv, cache, model


def _slots(pages: Int64Array) -> torch.Tensor:
    return torch.from_numpy((pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel())


def _prefixes(settings: Prefixes, model: Decoder) -> list[Plain]:
    """Keys and values of each group's prefix."""
    found = []
    for group in range(settings.groups):
        plain = Plain()
        model(settings.tokens(group * settings.size)[: settings.prefix], plain)
        plain.num_tokens = settings.prefix
        found.append(plain)
    return found


# ---------------------------------------------------------------------- the process that prefills


def _write(settings: Prefixes) -> dict[str, Any]:
    shared, own = settings.prefix // PAGE_SIZE, settings.question // PAGE_SIZE
    kv, cache, model = _join(settings, settings.groups * shared + settings.prompts * own)
    ids = np.random.default_rng().permutation(cache.num_pages)
    of_groups = ids[: settings.groups * shared].reshape(settings.groups, shared)
    of_prompts = ids[settings.groups * shared :].reshape(settings.prompts, own)
    prefixes = _prefixes(settings, model)
    for prefix, pages in zip(prefixes, of_groups, strict=True):
        _store(cache, pages, prefix)
    found = {}
    for way in WAYS:
        dist.barrier()
        nbytes, works, compute = 0, [], []
        for prompt in settings.order:
            group, request = prompt // settings.size, f"{way} {prompt}"
            known = kv.prefix_tokens(request, 1)  # blocks until a client has asked
            began = time.perf_counter()
            memory = Behind(prefixes[group])
            first = int(model(settings.tokens(prompt)[settings.prefix :], memory).argmax())
            _store(cache, of_prompts[prompt], memory)
            compute.append(time.perf_counter() - began)
            pages = np.concatenate((of_groups[group], of_prompts[prompt]))[known // PAGE_SIZE :]
            sent = kv.send_pages(request, pages, 1)
            works.append((sent, kv.finish(request, 1, aux=first.to_bytes(4, "little"))))
        for sent, finish in works:
            finish.wait()
            nbytes += sent.bytes
        dist.barrier()
        found[way] = {"nbytes": nbytes, "compute": statistics.median(compute)}
    return found


def _store(cache: KVCache, pages: Int64Array, memory: Plain | Behind) -> None:
    slots = _slots(pages)
    for (layer, _), (k, v) in memory.layers.items():
        rows(cache, "k", layer)[slots], rows(cache, "v", layer)[slots] = k, v


# ---------------------------------------------------------------------- the process that decodes


@dataclass(slots=True)
class _Asked:
    """A prompt that a client waits for. done: how many prompts had been answered when it asked."""

    prompt: int
    at: float
    done: int
    held: prefix_cache.Held
    work: KVWork


@dataclass(slots=True)
class _Answer:
    """seconds: from the question to the first token that this process decoded. logits: of that one."""

    asked: _Asked
    first: int
    logits: torch.Tensor
    seconds: float


def _read(settings: Prefixes) -> dict[str, dict[str, Any]]:
    num_pages = settings.prompts * settings.pages  # enough to keep all prompts until their bytes are checked
    kv, cache, model = _join(settings, num_pages + CANARIES)
    prefixes = _prefixes(settings, model)
    expected = [_expected(settings, model, prefixes, prompt) for prompt in range(settings.prompts)]
    found = {}
    for way in WAYS:
        for storage in cache.storages:
            storage.fill_(POISON)
        index = prefix_cache.PrefixCache(num_pages, PAGE_SIZE)
        dist.barrier()
        answers = list(_serve(settings, way, kv, cache, model, index))
        dist.barrier()
        wrong = sum(int((tensor.view(torch.uint8)[num_pages:] != POISON).sum()) for tensor in _tensors(cache))
        for answer in answers:
            question, first = expected[answer.asked.prompt]
            whole = _joined(prefixes[answer.asked.prompt // settings.size], question)
            wrong += 4 * int(first != answer.first) + _count_wrong(cache, answer, whole, model)
        found[way] = {
            "ttft": [answer.seconds for answer in answers],
            "lacking": _lacking(settings, way, answers) * _token_nbytes(settings.model),
            "wrong": wrong,
        }
    return found


def _serve(
    settings: Prefixes,
    way: str,
    kv: KVProcessGroup,
    cache: KVCache,
    model: Decoder,
    index: prefix_cache.PrefixCache,
) -> Iterator[_Answer]:
    """Asks and answers all prompts, so many at a time as there are clients. Pages stay held, to be checked later."""
    waiting: deque[_Asked] = deque()
    pending = iter(settings.order)
    done = 0
    while True:
        while len(waiting) < settings.clients and (prompt := next(pending, None)) is not None:
            began = time.perf_counter()
            held = index.match(settings.tokens(prompt) if way == "incremental" else [])
            fresh = index.allocate(held, settings.pages - len(held.pages))
            work = kv.recv_pages(f"{way} {prompt}", fresh, 0, prefix_tokens=held.num_tokens)
            waiting.append(_Asked(prompt, began, done, held, work))
        if not waiting:
            return
        asked = waiting.popleft()
        asked.work.wait()
        first = int.from_bytes(asked.work.aux, "little")
        logits = model(torch.tensor([first]), Held(cache, _slots(asked.held.pages)))
        int(logits.argmax())
        ended = time.perf_counter()
        done += 1
        index.insert(asked.held, settings.tokens(asked.prompt))
        yield _Answer(asked, first, logits, ended - asked.at)


def _expected(settings: Prefixes, model: Decoder, prefixes: list[Plain], prompt: int) -> tuple[Behind, int]:
    """Keys and values of a prompt's question, and the first token after it, computed without torchkv."""
    memory = Behind(prefixes[prompt // settings.size])
    return memory, int(model(settings.tokens(prompt)[settings.prefix :], memory).argmax())


def _joined(prefix: Plain, question: Behind) -> Plain:
    whole = Plain()
    for key, (k, v) in question.layers.items():
        old_k, old_v = prefix.layers[key]
        whole.layers[key] = torch.cat((old_k, k)), torch.cat((old_v, v))
        whole.num_tokens = len(whole.layers[key][0])
    return whole


def _count_wrong(cache: KVCache, answer: _Answer, whole: Plain, model: Decoder) -> int:
    """How many bytes of a prompt's pages and of the decoded logits differ from a computation without torchkv."""
    slots = _slots(answer.asked.held.pages)
    wrong = 0
    for (layer, _), tensors in whole.layers.items():
        for name, want in zip(("k", "v"), tensors, strict=True):
            wrong += differing(rows(cache, name, layer)[slots], want)
    return wrong + differing(model(torch.tensor([answer.first]), whole), answer.logits)


def _tensors(cache: KVCache) -> Iterator[torch.Tensor]:
    return (tensor for name in ("k", "v") for tensor in cache[name] if tensor is not None)


def _token_nbytes(model: ModelSize) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * model.dtype.itemsize


def _lacking(settings: Prefixes, way: str, answers: list[_Answer]) -> int:
    """Tokens that the receiver had not been sent when they were asked for, counted without the prefix cache."""
    total = 0
    for answer in answers:
        known = {earlier // settings.size for earlier in settings.order[: answer.asked.done]}
        shared = way == "incremental" and answer.asked.prompt // settings.size in known
        total += settings.question if shared else settings.prefix + settings.question
    return total
