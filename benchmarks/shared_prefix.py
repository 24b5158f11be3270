"""Prompts that begin alike, eight at a time: what a prefix cache on the receiver saves, in bytes and in time."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.layout import KVLayout
from torchkv.prefixcache import PrefixCache
from torchkv.process_group import KVProcessGroup, current_group
from torchkv.transport import Int64Array

__all__ = ["SharedPrefixResult", "shared_prefix"]

ALL_GROUPS = 80  # of the workload in full
SCALE = 10  # so many times fewer groups here; the prompts keep their lengths
GROUP = 8
PREFIX, QUESTION = 7000, 1000
PAGE_SIZE = 16
PROMPT_PAGES = -(-(PREFIX + QUESTION) // PAGE_SIZE)
LAYERS, HEADS, HEAD_DIM = 4, 2, 64
TOKEN_NBYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2  # of K and V, all layers, bf16
VOCABULARY = 128_000
CANARIES = 32  # pages granted to nobody
POISON = 0xDD
GATE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixResult:
    """All prompts of a run, each sent twice: what the receiver's prefix cache lacks, and everything.

    lacking: bytes of the tokens that the receiver had not seen, counted token by token without the cache. moved, full:
    bytes sent with and without it. seconds, full_seconds: from the sender's call until it knows that the receiver has
    everything; with the cache, its own time is included.
    """

    groups: int
    prompts: int
    lacking: int
    moved: int
    full: int
    seconds: float
    full_seconds: float
    cache_seconds: float
    wrong: int

    @property
    def excess(self) -> float:
        """Bytes moved to bytes lacking."""
        return self.moved / self.lacking

    @property
    def bytes_saved(self) -> float:
        """How many times more bytes move without the cache."""
        return self.full / self.moved

    @property
    def time_saved(self) -> float:
        """How many times longer the transfers take without the cache."""
        return self.full_seconds / self.seconds

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.excess <= GATE


def shared_prefix(*, scale: int = SCALE) -> SharedPrefixResult:
    """In two fresh processes over shared memory, with ``80 / scale`` groups of prompts in random order."""
    groups, seed = max(1, ALL_GROUPS // scale), secrets.randbits(62)
    written, read = run_two(_write, _read, groups, seed)
    workload = _Workload(groups, seed)
    return SharedPrefixResult(
        groups=groups,
        prompts=len(workload.order),
        lacking=workload.lacking() * TOKEN_NBYTES,
        moved=written["moved"]["kept"],
        full=written["moved"]["full"],
        seconds=written["seconds"]["kept"] + read["cache_seconds"],
        full_seconds=written["seconds"]["full"],
        cache_seconds=read["cache_seconds"],
        wrong=read["wrong"],
    )


class _Workload:
    """The same prompts, and the same keys and values for them, in both processes."""

    def __init__(self, groups: int, seed: int) -> None:
        self.seed = seed
        self.groups = groups
        generator = np.random.default_rng(seed)
        self.order = generator.permutation(groups * GROUP)
        self._prefixes = generator.integers(0, VOCABULARY, (groups, PREFIX))
        self._questions = generator.integers(0, VOCABULARY, (groups * GROUP, QUESTION))

    @property
    def num_pages(self) -> int:
        """Of the receiver's prefix cache, so that nothing must be evicted."""
        alone = PROMPT_PAGES - PREFIX // PAGE_SIZE
        return self.groups * (PREFIX // PAGE_SIZE + GROUP * alone)

    def tokens(self, prompt: int) -> Int64Array:
        return np.concatenate([self._prefixes[prompt // GROUP], self._questions[prompt]])

    def lacking(self) -> int:
        """Tokens behind the longest beginning that an earlier prompt had too, over all prompts."""
        total = 0
        for turn, prompt in enumerate(self.order):
            tokens = self.tokens(prompt)
            shared = 0
            for earlier in self.order[:turn]:
                alike = tokens == self.tokens(earlier)
                shared = max(shared, len(tokens) if alike.all() else int(alike.argmin()))
            total += len(tokens) - shared
        return total

    def values(self, prompt: int, tensor: int) -> torch.Tensor:
        """What K or V of one layer holds for a prompt, as bits: int16 [pages, page_size, heads, head_dim]."""
        parts = [
            self._random((self.seed, tensor, 0, prompt // GROUP), PREFIX),
            self._random((self.seed, tensor, 1, prompt), QUESTION),
        ]
        return torch.from_numpy(np.concatenate(parts)).view(PROMPT_PAGES, PAGE_SIZE, HEADS, HEAD_DIM)

    @staticmethod
    def _random(seed: tuple[int, ...], num_tokens: int) -> npt.NDArray[np.int16]:
        words = np.random.default_rng(seed).integers(0, 1 << 64, num_tokens * HEADS * HEAD_DIM // 4, dtype=np.uint64)
        return words.view(np.int16)


def _write(groups: int, seed: int) -> dict[str, Any]:
    workload = _Workload(groups, seed)
    kv, cache = _join(PROMPT_PAGES, "writer")
    _warm_up_writer(kv, workload)
    generator = np.random.default_rng()
    moved, seconds = {"kept": 0, "full": 0}, {"kept": 0.0, "full": 0.0}
    for turn, prompt in enumerate(workload.order):
        pages = generator.permutation(PROMPT_PAGES)
        for number, tensor in enumerate(_bits(cache)):
            tensor[pages] = workload.values(prompt, number)
        for way in _ways(turn):
            request = f"{way}{turn}"
            known = kv.prefix_tokens(request, 1)
            began = time.perf_counter()
            work = kv.send_pages(request, pages[known // PAGE_SIZE :], 1)
            kv.finish(request, 1).wait()  # which says that the receiver has everything in its pages
            seconds[way] += time.perf_counter() - began
            moved[way] += work.bytes
    return {"moved": moved, "seconds": seconds}


def _read(groups: int, seed: int) -> dict[str, Any]:
    workload = _Workload(groups, seed)
    num_pages = workload.num_pages
    kv, cache = _join(num_pages + PROMPT_PAGES + CANARIES, "reader")
    spare = np.arange(num_pages, num_pages + PROMPT_PAGES)  # for what is sent without the prefix cache
    _warm_up_reader(kv, workload)
    for storage in cache.storages:
        storage.fill_(POISON)
    prefixes = PrefixCache(num_pages, PAGE_SIZE)
    used = np.zeros(cache.num_pages, dtype=np.bool_)
    used[spare] = True
    wrong, cache_seconds = 0, 0.0
    for turn, prompt in enumerate(workload.order):
        tokens = workload.tokens(prompt)
        for way in _ways(turn):
            if way == "full":
                _poison(cache, spare)
                kv.recv_pages(f"{way}{turn}", spare, 0).wait()
                wrong += _count_wrong(workload, prompt, cache, spare)
                continue
            began = time.perf_counter()
            held = prefixes.match(tokens)
            fresh = prefixes.allocate(held, PROMPT_PAGES - len(held.pages))
            cache_seconds += time.perf_counter() - began
            kv.recv_pages(f"{way}{turn}", fresh, 0, prefix_tokens=held.num_tokens).wait()
            began = time.perf_counter()
            prefixes.insert(held, tokens)
            cache_seconds += time.perf_counter() - began
            wrong += _count_wrong(workload, prompt, cache, held.pages)
            used[held.pages] = True
            prefixes.release(held)
    unused = torch.from_numpy(~used)
    wrong += sum(int((tensor.view(torch.uint8)[unused] != POISON).sum()) for tensor in _bits(cache))
    return {"wrong": wrong, "cache_seconds": cache_seconds}


def _ways(turn: int) -> tuple[str, str]:
    """Each goes first as often as the other."""
    return ("kept", "full") if turn % 2 else ("full", "kept")


def _join(num_pages: int, instance: str) -> tuple[KVProcessGroup, KVCache]:
    kv = current_group(None)
    layout = KVLayout.gqa(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=torch.bfloat16
    )
    cache = KVCache.empty(layout, num_pages, device="cpu")
    kv.register(cache, instance=instance)
    return kv, cache


def _warm_up_writer(kv: KVProcessGroup, workload: _Workload) -> None:
    """Writes to every page once: the first write to memory of another process maps it, which takes its time."""
    for chunk in range(workload.num_pages // PROMPT_PAGES + 1):
        kv.send_pages(f"warm-up{chunk}", np.arange(PROMPT_PAGES), 1)
        kv.finish(f"warm-up{chunk}", 1).wait()


def _warm_up_reader(kv: KVProcessGroup, workload: _Workload) -> None:
    for chunk in range(workload.num_pages // PROMPT_PAGES + 1):
        kv.recv_pages(f"warm-up{chunk}", chunk * PROMPT_PAGES + np.arange(PROMPT_PAGES), 0).wait()


def _bits(cache: KVCache) -> list[torch.Tensor]:
    """K of each layer, then V of each, as int16 [num_pages, page_size, heads, head_dim]."""
    return [tensor.view(torch.int16) for name in ("k", "v") for tensor in cache[name] if tensor is not None]


def _poison(cache: KVCache, pages: Int64Array) -> None:
    for tensor in _bits(cache):
        tensor.view(torch.uint8)[torch.from_numpy(pages)] = POISON


def _count_wrong(workload: _Workload, prompt: int, cache: KVCache, pages: Int64Array) -> int:
    """Bytes of a whole prompt in ``pages`` that are not what they should be, prefix included."""
    at = torch.from_numpy(pages)
    return sum(
        2 * int((tensor[at] != workload.values(prompt, number)).sum()) for number, tensor in enumerate(_bits(cache))
    )
