"""A Hugging Face cache that keeps keys and values in the pages of a ``torchkv.KVCache``.

Token t of the request lives, on every layer, in slot ``t % page_size`` of page ``pages[t // page_size]``. These
are the very pages that torchkv sends from and writes into: there is no copy in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import torchkv


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, for one request (batch size 1).

    ``stores``: token-major views of the layer's pages, [num_pages, page_size, heads, dim]: two of them (keys and
    values), or one whose rows are the two side by side (the MLA latent and its rotary part).
    """

    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        stores: Sequence[torch.Tensor],
        pages: torch.Tensor,
        *,
        length: int,
        before_update: Callable[[], object] | None = None,
        on_update: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.is_initialized = True
        self._stores = stores
        self._pages = pages
        self._length = length
        self._before_update = before_update
        self._on_update = on_update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, new tokens, dim]; return all that the new tokens may see, [1, heads, tokens, dim]."""
        if self._before_update is not None:
            self._before_update()
        first, self._length = self._length, self._length + key_states.shape[2]
        page, slot = locate(self._pages, first, self._length, self._page_size)
        rows = [key_states, value_states]
        if len(self._stores) == 1:
            rows = [torch.cat(rows, dim=-1)]
        for store, new in zip(self._stores, rows, strict=True):
            store[page, slot] = new[0].transpose(0, 1)
        if self._on_update is not None:
            self._on_update()
        return self._gather(self._oldest_seen(first), key_states.shape[-1])

    def _oldest_seen(self, cached: int) -> int:
        """The oldest token that anything behind ``cached`` tokens attends to."""
        return 0

    def _gather(self, first: int, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        page, slot = locate(self._pages, first, self._length, self._page_size)
        # Contiguous, as a cache without pages would be: attention then runs the same arithmetic in the same order.
        cached = [store[page, slot].transpose(0, 1).contiguous()[None] for store in self._stores]
        if len(cached) == 1:
            return cached[0][..., :key_dim], cached[0][..., key_dim:]
        return cached[0], cached[1]

    @property
    def _page_size(self) -> int:
        return self._stores[0].shape[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist from the start."""

    def get_seq_length(self) -> int:
        """Tokens cached so far."""
        return self._length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return len(self._pages) * self._page_size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens attended to by a forward of ``query_length`` tokens, offset of the first)."""
        first = self._oldest_seen(self._length)
        return self._length - first + query_length, first


def locate(pages: torch.Tensor, first: int, last: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens first..last-1 lie: page ids and slots, int64 [last - first] each."""
    token = torch.arange(first, last, device=pages.device)
    return pages[token // page_size], token % page_size


def token_major(kv_cache: torchkv.KVCache, component: str, i: int) -> torch.Tensor | None:
    """A view of ``component`` in layer ``layout.layers[i]``, [num_pages, page_size, heads, dim]; None if not there."""
    pages = kv_cache[component][i]
    return pages if pages is None or kv_cache.layout.order == "NHD" else pages.transpose(1, 2)


def paged_cache(
    kv_cache: torchkv.KVCache,
    pages: torch.Tensor,
    *,
    length: int = 0,
    before_layer: Callable[[int], object] | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> Cache:
    """A cache for one request that owns ``pages`` (int64 ids, [n], on the cache's device).

    The first ``length`` tokens in them are already filled, or will be when ``before_layer(layer)`` returns, which is
    called before a layer's pages are touched. ``on_layer(layer)`` is called whenever a layer's new keys and values are
    in its pages.
    """
    layout = kv_cache.layout
    layers = []
    for i, layer in enumerate(layout.layers):
        stores = [token_major(kv_cache, component.name, i) for component in layout.components]
        before_update = None if before_layer is None else functools.partial(before_layer, layer)
        on_update = None if on_layer is None else functools.partial(on_layer, layer)
        layers.append(PagedLayer(stores, pages, length=length, before_update=before_update, on_update=on_update))
    return Cache(layers=layers)
