"""One request in many chunks, between real ranks: any boundaries, any order, overlaps, pages of unlike size."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, kv_group
from tests.helpers.ranks.lane_transfer import views
from tests.helpers.ranks.small_cache import meet, random_cache
from torchkv import KVCache, KVProcessGroup, KVWork


def token_rows(cache: KVCache, pages: list[int]) -> np.ndarray:
    """A copy of the bytes of each token in ``pages``, in order: [tokens, bytes of a token over all layers]."""
    rows = [array[pages].reshape(len(pages) * array.shape[1], -1) for array in views(cache).values()]
    return np.concatenate(rows, axis=1)


def chunks(sizes: tuple[int, int], prompt: int, prefix: int, path: str | None, overlap: bool, seed: int) -> None:
    """Rank 0 sends a prompt behind a prefix in random chunks, layers and verbs, in any order, some of them twice."""
    src_size, dst_size = sizes
    rng = np.random.default_rng(seed)
    lacking = prompt - prefix
    counts = [-(-lacking // size) for size in sizes]
    source, target = ([int(page) for page in rng.permutation(count + 3)[:count]] for count in counts)
    arrived = min(counts[0] * src_size, counts[1] * dst_size)
    with kv_group(path=path) as kv:
        rank = kv.rank()
        cache = random_cache(counts[min(rank, 1)] + 3, page_size=sizes[min(rank, 1)])
        kv.register(cache)
        if rank == 0:
            assert kv.prefix_tokens("r", 1) == prefix
            jobs = [(lo, hi, layer) for lo, hi in cuts(rng, len(source)) for layer in (0, 1)]
            if overlap:
                jobs += [(lo, hi, layer) for lo, hi in cuts(rng, len(source)) for layer in ([0, 1], None)]
            verbs = [kv.send_pages] if path else [kv.send_pages, send_slice(kv), staged_put(kv)]
            works = []
            for at in rng.permutation(len(jobs)):
                lo, hi, layer = jobs[at]
                verb = verbs[int(rng.integers(len(verbs)))]
                works.append(verb("r", source[lo:hi], 1, layers=layer, start=lo))
            kv.finish("r", 1).wait(30)
            token = token_rows(cache, source).shape[1]
            sent = sum(work.bytes for work in works)
            assert sent == arrived * token * (3 if overlap else 1)  # twice more: [0, 1] and None
            dist.send(torch.from_numpy(token_rows(cache, source)), 1, group=kv)
        elif rank == 1:
            others = [page for page in range(cache.num_pages) if page not in target]
            canaries, expected = token_rows(cache, others), token_rows(cache, target)
            poison = expected.copy()
            rx = kv.recv_pages("r", target, 0, prefix_tokens=prefix)
            rx.wait(30)
            rows = torch.empty((counts[0] * src_size, expected.shape[1]), dtype=torch.uint8)
            dist.recv(rows, 0, group=kv)
            expected[:arrived] = rows.numpy()[:arrived]
            assert np.array_equal(token_rows(cache, target), expected)
            assert np.array_equal(token_rows(cache, others), canaries)
            assert not np.array_equal(poison, expected)  # negative control
        meet(kv)


def cuts(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    edges = sorted({0, count, *(int(at) for at in rng.integers(0, count + 1, 3))})
    return list(itertools.pairwise(edges))


def send_slice(kv: KVProcessGroup) -> Callable[..., KVWork]:
    return lambda name, pages, dst, *, layers, start: kv.send_slice(name, layers, pages, dst, start=start)


def staged_put(kv: KVProcessGroup) -> Callable[..., KVWork]:
    return lambda name, pages, dst, *, layers, start: kv.staged_put(name, layers, pages, dst, start=start)


@pytest.mark.parametrize("overlap", [False, True], ids=["once", "overlapping"])
@pytest.mark.parametrize("path", [None, "slices", "staged"])
@pytest.mark.parametrize(
    ("sizes", "prompt", "prefix"),
    [((16, 16), 165, 48), ((64, 16), 300, 64), ((16, 64), 300, 64), ((1, 16), 61, 16), ((16, 1), 61, 16)],
    ids=lambda value: "to".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_chunks_in_any_order_behind_a_prefix(
    sizes: tuple[int, int], prompt: int, prefix: int, path: str | None, overlap: bool, four: Ranks
) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown when the test fails
    four.run(chunks, sizes, prompt, prefix, path, overlap, seed)
