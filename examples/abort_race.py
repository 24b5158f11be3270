"""The race that an aborted request loses: late writes into pages that have a new owner.

python examples/abort_race.py

A client hangs up while prefill A still writes the KV pages of its request. The decode side gives the pages to request
B, and A's last layers land in them. An allocator that frees pages at the abort shows it; with torchkv, which leases
pages until no write can land, it cannot happen.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchkv

ROUNDS, LAYERS, POOL, PAGES = 40, 16, 64, 8
A, B, DECODE = range(3)


def make_cache() -> torchkv.KVCache:
    layout = torchkv.KVLayout.gqa(num_layers=LAYERS, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
    return torchkv.KVCache.empty(layout, num_pages=POOL, device="cpu")


def join(rank: int, store: str, cache: torchkv.KVCache) -> torchkv.KVProcessGroup:
    dist.init_process_group("torchkv", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    kv = dist.group.WORLD
    kv.register(cache)
    return kv


def prefill(rank: int, store: str, pool: torch.Tensor, jobs: mp.Queue, done: mp.Queue) -> None:
    """Computes and writes request after request: straight into the shared ``pool`` if told pages, else with torchkv."""
    cache = make_cache()
    kv = join(rank, store, cache)
    while (job := jobs.get()) is not None:
        request, value, pages = job
        try:
            for layer in range(LAYERS):
                if rank == A:
                    time.sleep(random.uniform(0.0, 0.002))  # the layer is computed
                if pages is not None:
                    pool[layer, pages] = value
                    continue
                cache.k[layer][:PAGES] = cache.v[layer][:PAGES] = value
                kv.send_pages(request, range(PAGES), DECODE, layers=layer)
            if pages is None:
                kv.finish(request, DECODE).wait()
        except torchkv.TransferCancelled:
            kv.cancel(request).wait()
        done.put(request)
    dist.barrier()
    dist.destroy_process_group()


class Naive:
    """Frees pages when their request is aborted."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.free = list(range(POOL))

    def begin(self, request: str, writer: int) -> list[int]:
        del request, writer
        return [self.free.pop() for _ in range(PAGES)]

    def job(self, request: str, value: float, pages: list[int]) -> tuple[str, float, list[int] | None]:
        return request, value, pages

    def abort(self, request: str, pages: list[int]) -> None:
        del request
        self.free += pages

    def await_arrival(self, request: str) -> None:
        del request  # `done` has said it

    def holds(self, pages: list[int], value: float) -> bool:
        return bool((self.pool[:, pages] == value).all())

    def end(self, pages: list[int]) -> None:
        self.free += pages


class Leased(Naive):
    """Frees them when torchkv says that nothing can land in them any more."""

    def __init__(self, kv: torchkv.KVProcessGroup, cache: torchkv.KVCache) -> None:
        super().__init__(torch.empty(0))
        self.kv, self.cache = kv, cache
        self.works: dict[str, torchkv.KVWork] = {}
        self.leased: list[tuple[torchkv.KVWork, list[int]]] = []

    def begin(self, request: str, writer: int) -> list[int]:
        for work, pages in list(self.leased):
            if work.is_completed():
                self.leased.remove((work, pages))
                self.free += pages
        pages = super().begin(request, writer)
        self.works[request] = self.kv.recv_pages(request, pages, writer)
        return pages

    def job(self, request: str, value: float, pages: list[int]) -> tuple[str, float, list[int] | None]:
        del pages  # the grant has told
        return request, value, None

    def abort(self, request: str, pages: list[int]) -> None:
        self.leased.append((self.kv.cancel(request), pages))

    def await_arrival(self, request: str) -> None:
        self.works.pop(request).wait()

    def holds(self, pages: list[int], value: float) -> bool:
        return all(bool((layer[pages] == value).all()) for layer in (*self.cache.k, *self.cache.v))


def race(allocator: Naive, jobs: list[mp.Queue], done: list[mp.Queue]) -> int:
    """How many requests B were corrupted."""
    corrupted = 0
    for number in range(ROUNDS):
        a, b, value = f"a{number}", f"b{number}", float(number + 1)
        pages = allocator.begin(a, A)
        jobs[A].put(allocator.job(a, -value, pages))
        time.sleep(random.uniform(0.0, 0.01))  # the client hangs up
        allocator.abort(a, pages)
        pages = allocator.begin(b, B)
        jobs[B].put(allocator.job(b, value, pages))
        for queue in (done[B], done[A]):
            queue.get(timeout=60)
        allocator.await_arrival(b)
        corrupted += not allocator.holds(pages, value)
        allocator.end(pages)
    return corrupted


def main() -> None:
    context = mp.get_context("spawn")
    pool = torch.zeros(LAYERS, POOL, 2 * 16 * 2 * 64).share_memory_()
    jobs, done = [context.Queue() for _ in (A, B)], [context.Queue() for _ in (A, B)]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        writers = [context.Process(target=prefill, args=(w, store, pool, jobs[w], done[w])) for w in (A, B)]
        for writer in writers:
            writer.start()
        cache = make_cache()
        kv = join(DECODE, store, cache)
        naive, leased = race(Naive(pool), jobs, done), race(Leased(kv, cache), jobs, done)
        for queue in jobs:
            queue.put(None)
        dist.barrier()
        dist.destroy_process_group()
        for writer in writers:
            writer.join()
    print(f"pages freed at the abort: {naive} of {ROUNDS} requests corrupted by the one before")
    print(f"pages leased until no write can land: {leased} of {ROUNDS}")
    if leased or not naive:
        sys.exit("FAIL: torchkv has lost the race" if leased else "FAIL: the race was not shown")
    print(f"PASS with torchkv {leased} of {ROUNDS} requests were corrupted, without {naive}")


if __name__ == "__main__":
    main()
