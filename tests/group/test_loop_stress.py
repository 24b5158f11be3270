"""The resident loop with its thread, between real processes: what only threads without the GIL can break."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import random_fill
from tests.helpers.ranks.small_cache import meet, page_bytes, random_cache
from torchkv import KVCache, KVProcessGroup, KVWork, TransferCancelled

WRITER, READER = range(2)
THREADS = 4
REQUESTS = 60  # of each thread
PAGES = 4  # of each request


def stress(seed: int) -> None:
    """Threads of both ranks send and receive, cancel and post again, each with pages and names of its own.

    A page belongs to one thread of each side, so whatever lands in another's pages is found.
    """
    with kv_group(timeout=20, grant_timeout=20) as kv:
        cache = random_cache(num_pages=THREADS * PAGES)
        kv.register(cache)
        model = random_cache(num_pages=THREADS * PAGES)
        for filled in (model, cache) if kv.rank() == WRITER else (model,):
            random_fill(filled, np.random.default_rng(seed))
        meet(kv)
        with ThreadPoolExecutor(THREADS) as threads:
            act = write if kv.rank() == WRITER else read
            done = [threads.submit(act, kv, cache, model, number, seed) for number in range(THREADS)]
            outcomes = [future.result(300) for future in done]
        assert kv.quarantined() == {}
        assert sum(outcomes) > THREADS * REQUESTS / 4
        flows = kv._verbs.engine.flows
        assert flows is not None
        assert (len(flows._sends), len(flows._receives), len(flows._ops)) == (0, 0, 0)
        meet(kv)


def pages_of(number: int, dice: random.Random) -> list[int]:
    ids = list(range(number * PAGES, (number + 1) * PAGES))
    dice.shuffle(ids)
    return ids[: dice.randint(1, PAGES)]


def plan(number: int, seed: int, turn: int) -> tuple[str, list[int], list[int], bool, bool]:
    """What both sides know of a request: its name, both sides' pages, and which side cancels it."""
    dice = random.Random(f"{seed} {number} {turn}")
    ours = pages_of(number, dice)
    theirs = pages_of(number, dice)
    count = min(len(ours), len(theirs))
    return f"t{number} {turn}", ours[:count], theirs[:count], dice.random() < 0.15, dice.random() < 0.15


def write(kv: KVProcessGroup, _cache: KVCache, _model: KVCache, number: int, seed: int) -> int:
    succeeded = 0
    for turn in range(REQUESTS):
        name, pages, _, cancels, _ = plan(number, seed, turn)
        try:
            for layer in (0, 1):
                kv.send_layer(name, layer, pages, READER)
            done = kv.finish(name, READER, aux=name.encode())
        except TransferCancelled:
            kv.cancel(name).wait(30)
            continue
        if cancels:
            kv.cancel(name)
        if outcome(done) is None:
            succeeded += 1
        else:
            kv.cancel(name).wait(30)
    return succeeded


def read(kv: KVProcessGroup, cache: KVCache, model: KVCache, number: int, seed: int) -> int:
    succeeded = 0
    for turn in range(REQUESTS):
        name, sources, pages, _, cancels = plan(number, seed, turn)
        mine = list(range(number * PAGES, (number + 1) * PAGES))
        scribble(cache, mine)
        others = [page for page in mine if page not in pages]
        canaries = page_bytes(cache, others)
        rx = kv.recv_pages(name, pages, WRITER)
        if cancels:
            kv.cancel(name).wait(30)
        error = outcome(rx)
        if error is None:
            assert rx.aux == name.encode()
            assert torch.equal(page_bytes(cache, pages), page_bytes(model, sources))
            succeeded += 1
        else:
            kv.cancel(name).wait(30)
            assert error.pages_safe
            scribble(cache, pages)
            poison = page_bytes(cache, pages)
            time.sleep(0.002)
            assert torch.equal(page_bytes(cache, pages), poison), "a late write"
        assert torch.equal(page_bytes(cache, others), canaries)
    return succeeded


def outcome(work: KVWork) -> TransferCancelled | None:
    """Waits for the work; the error if it was cancelled. Raises any other."""
    try:
        work.wait(30)
    except TransferCancelled as error:
        return error
    return None


def scribble(cache: KVCache, pages: list[int]) -> None:
    for name in ("k", "v"):
        for tensor in cache[name]:
            assert tensor is not None
            tensor[pages] = torch.randn(tensor[pages].shape).to(tensor.dtype)


def test_threads_of_both_sides(shared_ranks: Callable[..., Ranks]) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    shared_ranks("two", 2).run(stress, seed)
