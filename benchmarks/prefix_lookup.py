"""How long ``PrefixCache.match`` takes for a prompt of 8,192 tokens, with a million tokens in the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.outcome import Outcome
from torchkv.arrays import Int64Array
from torchkv.prefix.cache import PrefixCache, Tokens

__all__ = ["PrefixResult", "lookup_times", "run"]

PROMPT = 8192
SHARED = 7168  # tokens of the prefix that `GROUP` prompts share
GROUP = 8
TOKENS = 1 << 20
VOCABULARY = 128_000
ROUNDS = 400
GATE_US = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """Microseconds of a ``match`` that finds the whole prompt, and of the ``release`` after it.

    kind: what the caller holds token ids in, "array" or "list". cached: tokens in the cache. wrong: lookups that
    returned other pages than the prompt's.
    """

    page_size: int
    kind: str
    cached: int
    match_us: float
    match_p99_us: float
    release_us: float
    wrong: int

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.match_us <= GATE_US


def run() -> Iterator[Outcome]:
    for r in lookup_times():
        line = (
            f"prefix lookup: page size {r.page_size}, ids in {'an' if r.kind == 'array' else 'a'} {r.kind}, {r.cached} "
            f"tokens known: p50 {r.match_us:.0f} us (gate 500 us), p99 {r.match_p99_us:.0f} us; #wrong {r.wrong}"
        )
        row = {"prefix lookup": asdict(r), "wrong": r.wrong, "passed": r.passed}
        yield Outcome(line=line, row=row, passed=r.passed, wrong=r.wrong)


def lookup_times() -> Iterator[PrefixResult]:
    """One result for each page size and kind, in a fresh cache each."""
    return (_measure(page_size, kind) for page_size in (1, 16, 64) for kind in ("array", "list"))


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
