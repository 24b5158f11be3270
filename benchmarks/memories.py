"""Where the pipelining benchmark's model keeps keys and values: pages that are sent, pages that come, plain tensors."""

from __future__ import annotations

import torch

from torchkv.cache import KVCache
from torchkv.work import KVWork

__all__ = ["Paged", "Plain", "Received", "rows", "shard_of"]


class Paged:
    """Keys and values of the prompt, written to the pages of a cache."""

    num_tokens = 0

    def __init__(self, cache: KVCache, slots: torch.Tensor) -> None:
        self._cache, self._slots = cache, slots

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for name, new in (("k", k), ("v", v)):
            shard_of(rows(self._cache, name, layer), shard, new)[self._slots] = new
        return k, v


class Received:
    """The same, read from the pages that they come to, layer by layer. Those of later tokens are kept nowhere."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, *, num_shards: int) -> None:
        """num_shards: of this rank."""
        self.num_tokens = len(slots)
        self._cache, self._slots = cache, slots
        # Each shard's lie together, as if it were the only one: strides may decide how a product is computed.
        self._all: dict[tuple[str, int, int], torch.Tensor] = {}
        for name in ("k", "v"):
            for layer in cache.layout.layers:
                for shard, heads in enumerate(rows(cache, name, layer)[0].chunk(num_shards)):
                    # Written to, because to fault it in takes longer than all else that is done here.
                    self._all[name, layer, shard] = heads.new_zeros((len(slots) + 1, *heads.shape))

    def gather(self, request: KVWork) -> None:
        """Takes each layer out of its pages as soon as it is there, so that no decoding step has to."""
        for layer in self._cache.layout.layers:
            request.wait_layer(layer)
            for (name, of, shard), together in self._all.items():
                if of == layer:
                    found = shard_of(rows(self._cache, name, layer), shard, together)
                    torch.index_select(found, 0, self._slots, out=together[:-1])

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._all["k", layer, shard], self._all["v", layer, shard]
        for together, new in zip(held, (k, v), strict=True):
            together[-1:] = new
        return held


class Plain:
    """The same in tensors of its own, which nothing but the model writes to. layers: by layer and shard."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.layers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.num_tokens:
            self.layers[layer, shard] = k, v
            return k, v
        old_k, old_v = self.layers[layer, shard]
        return torch.cat((old_k, k)), torch.cat((old_v, v))


def rows(cache: KVCache, name: str, layer: int) -> torch.Tensor:
    """One layer as [slots, kv heads, head_dim], in place."""
    tensor = cache[name][layer]
    assert tensor is not None
    return tensor.flatten(0, 1)


def shard_of(rows: torch.Tensor, shard: int, like: torch.Tensor) -> torch.Tensor:
    """The heads of one of a rank's shards, in place. like: holds as many heads."""
    heads = like.shape[1]
    return rows[:, shard * heads : (shard + 1) * heads]
