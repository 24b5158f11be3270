"""Layouts with layer groups, caches that engines of hybrid models would make, and what a receive must leave in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.helpers.references.page_transfer import GAP, Pool, reference
from torchkv.cache import KVCache, allocate
from torchkv.layout.layout import KVLayout

__all__ = ["Lists", "check_received", "hybrid", "pools_of", "shared_cache", "views"]

Bytes = npt.NDArray[np.uint8]
Views = dict[tuple[str, int], Bytes]  # (component or state, layer) -> [pages or slots, bytes of one]
Lists = Mapping[str, Sequence[int]]  # page ids by layer group, -1 for absent ones

GROUPS: dict[str, Sequence[int]] = {"full": (2, 5), "near": (0, 3), "far": (1, 4)}
WINDOWS = {0: 5, 3: 5, 1: 9, 4: 9}


def hybrid(**changes: Any) -> KVLayout:
    """Six layers in three groups of two: one that attends to all tokens, two with sliding windows."""
    settings = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 2, "page_size": 4, "dtype": torch.int16}
    return KVLayout.gqa(**{**settings, "groups": GROUPS, "windows": WINDOWS, **changes})


def shared_cache(
    layout: KVLayout, num_pages: int, _num_slots: int = 0, *, device: str | torch.device = "cpu"
) -> KVCache:
    """As engines lay out hybrid models: one block of memory a page, with the n-th layer of every group on one place.

    So all groups share their memory, page for page, and a page id may be in use by one group at a time. Between blocks
    lie bytes that belong to nobody.
    """
    rows: dict[str | None, list[tuple[str, int, int]]] = {
        group: [] for group in layout.groups
    }  # group -> (component, layer), bytes of a page
    for component in layout.components:
        for layer in layout.component_layers(component.name):
            rows[component.group].append((component, layer, layout.page_nbytes(component.name)))
    block = max(sum(nbytes for *_, nbytes in row) for row in rows.values()) + 16
    memory = allocate(block * num_pages, torch.device(device)).view(num_pages, block)
    found: dict[tuple[str, int], torch.Tensor] = {}
    for row in rows.values():
        at = 0
        for component, layer, nbytes in row:
            shape = (num_pages, *layout.page_shape(component.name))
            size = component.dtype.itemsize
            flat = memory.view(component.dtype)
            strides = torch.empty(shape[1:], device="meta").stride()
            place = flat.as_strided(shape, (block // size, *strides), flat.storage_offset() + at // size)
            found[component.name, layer] = place
            at += nbytes
    return KVCache(layout, {c.name: [found.get((c.name, i)) for i in layout.layers] for c in layout.components})


def views(cache: KVCache) -> Views:
    """Each (component or state, layer) as [pages or slots, bytes of one]: the cache's memory, a copy if on a GPU."""
    layout, found = cache.layout, {}
    named = [(c.name, cache[c.name]) for c in layout.components] + [
        (s.name, cache.state(s.name)) for s in layout.states
    ]
    for name, tensors in named:
        for layer, tensor in zip(layout.layers, tensors, strict=True):
            if tensor is not None:
                found[name, layer] = tensor.flatten(1).view(torch.uint8).cpu().numpy()
    return found


def pools_of(cache: KVCache) -> dict[int, Views]:
    """The views of each pool."""
    layout = cache.layout
    pool = {c.name: cache.pools[c.group, False] for c in layout.components}
    pool |= {s.name: cache.pools[s.group, True] for s in layout.states}
    found: dict[int, Views] = {}
    for (name, layer), array in views(cache).items():
        found.setdefault(pool[name], {})[name, layer] = array
    return found


def _pool(layout: KVLayout, bytes_of: Views, group: str) -> Pool:
    part = layout.of_group(group)
    names = {component.name for component in part.components}
    padded = {key: np.pad(array, ((0, 0), (0, GAP))) for key, array in bytes_of.items() if key[0] in names}
    return Pool(part, padded)


def check_received(
    cache: KVCache,
    before: Views,
    pages: Lists,
    sources: Mapping[int, tuple[KVLayout, Views, Lists]],
) -> list[str]:
    """What is wrong in the pages that a receive got; ``before``: what they held. sources: by writer, and its lists."""
    problems = []
    now = views(cache)
    for group in cache.layout.groups:
        absent = sum(page == -1 for page in pages[group])
        ids = list(pages[group][absent:])
        pools = {rank: _pool(layout, held, group) for rank, (layout, held, _) in sources.items()}
        # Pages of writers that are absent are not read: those that the receiver is owed are not absent.
        sent = {rank: [max(page, 0) for page in lists[group][absent:]] for rank, (*_, lists) in sources.items()}
        want = reference(pools, sent, _pool(cache.layout, before, group), ids)
        for key, expected in want.tensors.items():
            if wrong := int((now[key][ids] != expected[ids, :-GAP]).sum()):
                problems.append(f"layer group {group}: {wrong} wrong bytes in {key}")
    return problems
