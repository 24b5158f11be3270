"""How long it takes to look up a prompt of 8,192 tokens among a million."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from torchkv.prefixcache import PrefixCache, Tokens
from torchkv.transport import Int64Array

__all__ = ["PrefixResult", "lookup_times"]

PROMPT = 8192
SHARED = 7168  # of the prompts that begin alike, eight at a time
GROUP = 8
TOKENS = 1 << 20
VOCABULARY = 128_000
ROUNDS = 400
GATE_US = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """Microseconds of ``match``, for a hit of the whole prompt, and of the ``release`` after it."""

    page_size: int
    kind: str  # how the caller keeps token ids
    cached: int  # tokens
    match_us: float
    match_p99_us: float
    release_us: float
    wrong: int

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.match_us <= GATE_US


def lookup_times() -> list[PrefixResult]:
    return [_measure(page_size, kind) for page_size in (1, 16, 64) for kind in ("array", "list")]


def _measure(page_size: int, kind: str) -> PrefixResult:
    generator = np.random.default_rng()
    cache = PrefixCache(-(-TOKENS * 11 // 10 // page_size), page_size)
    pages: list[Int64Array] = []
    prompts: list[Int64Array] = []
    while (known := (cache.num_pages - cache._num_free) * page_size) < TOKENS:
        prompt = generator.integers(0, VOCABULARY, PROMPT)
        if len(prompts) % GROUP:
            prompt[:SHARED] = prompts[-1][:SHARED]
        held = cache.match(prompt)
        cache.allocate(held, PROMPT // page_size - len(held.pages))
        cache.insert(held, prompt)
        cache.release(held)
        prompts.append(prompt)
        pages.append(held.pages)
    match_us, release_us, wrong = [], [], 0
    for _ in range(ROUNDS):
        number = int(generator.integers(len(prompts)))
        tokens: Tokens = prompts[number] if kind == "array" else prompts[number].tolist()
        began = time.perf_counter()
        held = cache.match(tokens)
        matched = time.perf_counter()
        cache.release(held)
        ended = time.perf_counter()
        match_us.append(1e6 * (matched - began))
        release_us.append(1e6 * (ended - matched))
        wrong += not np.array_equal(held.pages, pages[number])
    return PrefixResult(
        page_size=page_size,
        kind=kind,
        cached=known,
        match_us=float(np.median(match_us)),
        match_p99_us=float(np.percentile(match_us, 99)),
        release_us=float(np.median(release_us)),
        wrong=wrong,
    )
