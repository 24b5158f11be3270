"""What a prefix cache on the receiver saves, in bytes and in time, when groups of eight prompts share a prefix."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.bench.processes import run_two
from torchkv.cache import KVCache
from torchkv.group.process_group import KVProcessGroup, current_group
from torchkv.layout.layout import KVLayout
from torchkv.prefix.cache import PrefixCache

__all__ = ["SharedPrefixResult", "run", "shared_prefix"]

ALL_GROUPS = 80  # groups of prompts in the full workload
SCALE = 10  # the workload is reduced to ALL_GROUPS / SCALE groups; the prompts keep their lengths
GROUP = 8
PREFIX, QUESTION = 7000, 1000
PAGE_SIZE = 16
PROMPT_PAGES = -(-(PREFIX + QUESTION) // PAGE_SIZE)
LAYERS, HEADS, HEAD_DIM = 4, 2, 64
TOKEN_NBYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2  # of one token: K and V, all layers, bf16
VOCABULARY = 128_000
CANARIES = 32  # pages that no request is granted
POISON = 0xDD
GATE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixResult:
    """Sums over all prompts. Each is sent twice: the tokens that the receiver's prefix cache lacks, and all its tokens.

    lacking: bytes of the tokens that the receiver had not seen, counted token by token without the cache. moved, full:
    bytes sent with and without the cache. seconds, full_seconds: from the sender's call until it knows that the
    receiver has everything, with and without the cache; ``seconds`` includes ``cache_seconds``, the time spent in it.
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
        """Bytes moved, over bytes lacking."""
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


def run(repeats: int) -> Iterator[Outcome]:
    """repeats: not used."""
    r = shared_prefix()
    line = (
        f"shared prefix: {r.prompts} prompts in {r.groups} groups, {r.moved} bytes moved, {r.excess:.4f} of those "
        f"lacking (gate 1.02); without the cache {r.bytes_saved:.2f}x the bytes and {r.time_saved:.2f}x the time "
        f"({r.full_seconds:.3f} s to {r.seconds:.3f} s, {r.cache_seconds:.3f} s of it in the cache); #wrong {r.wrong}"
    )
    ratios = {"excess": r.excess, "bytes_saved": r.bytes_saved, "time_saved": r.time_saved}
    row = {"shared prefix": asdict(r), **ratios, "wrong": r.wrong, "passed": r.passed}
    yield Outcome(line=line, row=row, passed=r.passed, wrong=r.wrong)


def shared_prefix(*, scale: int = SCALE) -> SharedPrefixResult:
    """Measures in two fresh processes, over shared memory: ``80 / scale`` groups of prompts, in random order."""
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
    """Prompts and their keys and values, which follow from ``seed``: both processes compute the same ones."""

    def __init__(self, groups: int, seed: int) -> None:
        self.seed = seed
        self.groups = groups
        generator = np.random.default_rng(seed)
        self.order = generator.permutation(groups * GROUP)
        self._prefixes = generator.integers(0, VOCABULARY, (groups, PREFIX))
        self._questions = generator.integers(0, VOCABULARY, (groups * GROUP, QUESTION))

    @property
    def num_pages(self) -> int:
        """Pages that the receiver's prefix cache needs to hold all prompts, so that nothing is evicted."""
        alone = PROMPT_PAGES - PREFIX // PAGE_SIZE
        return self.groups * (PREFIX // PAGE_SIZE + GROUP * alone)

    def tokens(self, prompt: int) -> Int64Array:
        return np.concatenate([self._prefixes[prompt // GROUP], self._questions[prompt]])

    def lacking(self) -> int:
        """Sum over all prompts of the tokens after the longest prefix that is shared with an earlier prompt."""
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
        """The bits of K or V of one layer for a prompt: int16 [pages, page_size, heads, head_dim]."""
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
            kv.finish(request, 1).wait()  # done when the receiver has everything in its pages
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
    """Alternates the order, so that neither way always goes first."""
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
    """Writes to every page once, because the first write to another process's memory maps it, which takes time."""
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
    """How many bytes of a whole prompt in ``pages``, its prefix included, are wrong."""
    at = torch.from_numpy(pages)
    return sum(
        2 * int((tensor[at] != workload.values(prompt, number)).sum()) for number, tensor in enumerate(_bits(cache))
    )
