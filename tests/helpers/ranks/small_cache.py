"""A small cache, and a transfer of it that is checked byte by byte: what shows that a group still works."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.ranks.lane_transfer import random_fill, views
from torchkv import KVCache, KVLayout, KVProcessGroup

__all__ = ["NUM_PAGES", "Gate", "Never", "check_transfer", "meet", "page_bytes", "random_cache", "small_layout"]

NUM_PAGES = 16


class Never:
    """An event that never becomes ready."""

    def query(self) -> bool:
        return False


class Gate:
    """An event that becomes ready when the test says so."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def query(self) -> bool:
        return self.open.is_set()


def meet(kv: KVProcessGroup) -> None:
    """A barrier of all ranks of ``kv``."""
    dist.barrier(kv)


def small_layout(**changes: Any) -> KVLayout:
    settings = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "page_size": 16, "dtype": torch.bfloat16}
    return KVLayout.gqa(**{**settings, **changes})


def random_cache(num_pages: int = NUM_PAGES, *, unmapped: bool = False, **changes: Any) -> KVCache:
    """unmapped: in ordinary memory, which no peer can map."""
    layout = small_layout(**changes)
    if unmapped:
        shape = (num_pages, *layout.page_shape("k"))
        tensors = {
            name: [torch.empty(shape, dtype=layout.component(name).dtype) for _ in layout.layers] for name in "kv"
        }
        cache = KVCache(layout, tensors)
    else:
        cache = KVCache.empty(layout, num_pages, device="cpu")
    random_fill(cache, np.random.default_rng())
    return cache


def page_bytes(cache: KVCache, pages: list[int]) -> torch.Tensor:
    """A copy of the bytes of ``pages``, of all components and layers, as one uint8 vector."""
    return torch.from_numpy(np.concatenate([array[pages].ravel() for array in views(cache).values()]))


def check_transfer(
    kv: KVProcessGroup, writer: int, reader: int, *, request: str | None = None, avoid: Sequence[int] = ()
) -> None:
    """A transfer of fresh bytes between ranks of equal layouts, into poisoned pages other than ``avoid``.

    Both ranks call it; on others it does nothing.
    """
    request = f"check {writer}-{reader}" if request is None else request  # a name may be used again
    rank, cache = kv.rank(), kv._verbs.cache
    if rank not in (writer, reader):
        return
    assert cache is not None
    pages = [int(page) for page in np.random.default_rng().permutation(cache.num_pages) if page not in avoid][:5]
    if rank == writer:
        random_fill(cache, np.random.default_rng())
        kv.send_pages(request, pages, reader)
        kv.finish(request, reader, aux=request.encode()).wait(30)
        dist.send(page_bytes(cache, pages), reader, group=kv)
    else:
        others = [page for page in range(cache.num_pages) if page not in pages]
        random_fill(cache, np.random.default_rng())
        poison, canaries = page_bytes(cache, pages), page_bytes(cache, others)
        rx = kv.recv_pages(request, pages, writer)
        rx.wait(30)
        assert rx.aux == request.encode()
        expected = torch.empty_like(poison)
        dist.recv(expected, writer, group=kv)
        assert torch.equal(page_bytes(cache, pages), expected)
        assert torch.equal(page_bytes(cache, others), canaries)
        assert not torch.equal(poison, expected)
