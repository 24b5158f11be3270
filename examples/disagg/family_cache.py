"""Cache layers for models that keep more than keys and values: windows, indexer keys, and state of a fixed size.

As in `paged_cache`, what the model reads and writes is the memory that torchkv sends from and writes into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

import torchkv
from disagg.paged_cache import PagedLayer, locate, token_major

KEYS_AND_VALUES = ("k", "v", "latent")
INDEXER = "index_k"
CONVOLUTION, RECURRENT = "conv", "ssm"


class SlidingLayer(PagedLayer):
    """A layer whose tokens attend to the last ``window`` tokens, themselves included: older ones are never read."""

    is_sliding = True

    def __init__(self, stores: Sequence[torch.Tensor], pages: torch.Tensor, *, length: int, window: int) -> None:
        super().__init__(stores, pages, length=length)
        self._window = window

    def _oldest_seen(self, cached: int) -> int:
        return max(0, cached - self._window + 1)


class IndexedLayer(PagedLayer):
    """A layer that also keeps one small key per token, by which its indexer picks the tokens to attend to.

    ``index_store``: [num_pages, page_size, 1, index dim].
    """

    def __init__(
        self, stores: Sequence[torch.Tensor], index_store: torch.Tensor, pages: torch.Tensor, *, length: int
    ) -> None:
        super().__init__(stores, pages, length=length)
        self._index_store = index_store
        self._indexed = length

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [1, new tokens, dim]; return all, [1, tokens, dim]."""
        first, self._indexed = self._indexed, self._indexed + indexer_key_states.shape[1]
        page, slot = locate(self._pages, first, self._indexed, self._page_size)
        self._index_store[page, slot, 0] = indexer_key_states[0]
        page, slot = locate(self._pages, 0, self._indexed, self._page_size)
        return self._index_store[page, slot, 0][None]


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent state of one layer, in one slot of a ``torchkv.KVCache``, updated in place.

    ``convolution``: [channels, kernel], its last column the latest token. ``recurrent``: of the model's own shape.
    ``filled``: whether they hold the state of an earlier token already.
    """

    def __init__(self, convolution: torch.Tensor, recurrent: torch.Tensor, *, filled: bool) -> None:
        super().__init__()
        self.conv_states[0], self.recurrent_states[0] = convolution[None], recurrent[None]
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.conv_kernel_size[0] = convolution.shape[-1]
        self.has_previous_state[0] = filled
        self.dtype, self.device = convolution.dtype, convolution.device


class AttentionAndStateLayer(StateLayer, PagedLayer):
    """A layer in which attention and a state-space model work side by side."""

    is_compileable = False

    def __init__(self, attention: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """``attention``, ``state``: the arguments of the two."""
        PagedLayer.__init__(self, **attention)
        StateLayer.__init__(self, **state)


def family_cache(
    kv_cache: torchkv.KVCache,
    pages: torch.Tensor,
    *,
    slot: int,
    length: int = 0,
) -> Cache:
    """A cache for one request that owns ``pages`` (int64 ids) and, where layers have state, slot ``slot``.

    The first ``length`` tokens are already in them.
    """
    held = {component.name for component in kv_cache.layout.components}
    layers: list[CacheLayerMixin | LinearAttentionLayer] = []
    for i, layer in enumerate(kv_cache.layout.layers):
        found = [token_major(kv_cache, name, i) for name in KEYS_AND_VALUES if name in held]
        stores = [store for store in found if store is not None]
        attention = {"stores": stores, "pages": pages, "length": length}
        state = _state(kv_cache, i, slot, filled=length > 0)
        if stores and state:
            layers.append(AttentionAndStateLayer(attention, state))
        elif state:
            layers.append(StateLayer(**state))
        elif INDEXER in held:
            layers.append(IndexedLayer(**attention, index_store=token_major(kv_cache, INDEXER, i)))
        elif window := kv_cache.layout.window(layer):
            layers.append(SlidingLayer(**attention, window=window))
        else:
            layers.append(PagedLayer(**attention))
    return Cache(layers=layers)


def _state(kv_cache: torchkv.KVCache, i: int, slot: int, *, filled: bool) -> dict[str, Any]:
    """The arguments of a `StateLayer`; empty if layer ``layout.layers[i]`` keeps no state."""
    if not kv_cache.layout.states or kv_cache.state(RECURRENT)[i] is None:
        return {}
    convolution, recurrent = (kv_cache.state(name)[i][slot] for name in (CONVOLUTION, RECURRENT))
    return {"convolution": convolution, "recurrent": recurrent, "filled": filled}
