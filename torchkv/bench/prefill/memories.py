"""Where the pipelining benchmark's model keeps keys and values: pages to send, received pages, or plain tensors.

Each class implements `decoder.Memory`.
"""

from __future__ import annotations

import torch

from torchkv.cache import KVCache
from torchkv.engine.work import KVWork

__all__ = ["Behind", "Held", "Paged", "Plain", "Received", "rows", "shard_of"]


class Paged:
    """Writes keys and values of a prompt to the pages of a cache, from which they are sent."""

    num_tokens = 0

    def __init__(self, cache: KVCache, slots: torch.Tensor) -> None:
        """slots: of the prompt's tokens in the cache's rows (see `rows`), int64 [tokens]."""
        self._cache, self._slots = cache, slots

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for name, new in (("k", k), ("v", v)):
            shard_of(rows(self._cache, name, layer), shard, new)[self._slots] = new
        return k, v


class Received:
    """Reads keys and values of a prompt from the pages in which they are received, layer by layer.

    Holds one further token: each call of `extend` overwrites it.
    """

    def __init__(self, cache: KVCache, slots: torch.Tensor, *, num_shards: int) -> None:
        """slots: of the prompt's tokens in the cache's rows. num_shards: shards that this rank computes."""
        self.num_tokens = len(slots)
        self._cache, self._slots = cache, slots
        # Each shard has a contiguous tensor of its own, because strides may decide how a product is computed.
        self._all: dict[tuple[str, int, int], torch.Tensor] = {}
        for name in ("k", "v"):
            for layer in cache.layout.layers:
                for shard, heads in enumerate(rows(cache, name, layer)[0].chunk(num_shards)):
                    # Zeroed, which faults the memory in now: in a measured pass that would take longest of all.
                    self._all[name, layer, shard] = heads.new_zeros((len(slots) + 1, *heads.shape))

    def gather(self, request: KVWork) -> None:
        """Copies each layer out of its pages as soon as it has been received, before the decoding step needs it."""
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
    """Keeps keys and values in plain tensors, for the reference computation. layers: (layer, shard) -> keys, values."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.layers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.num_tokens:
            self.layers[layer, shard] = k, v
            return k, v
        old_k, old_v = self.layers[layer, shard]
        return torch.cat((old_k, k)), torch.cat((old_v, v))


class Behind:
    """Keeps keys and values of tokens behind a prefix that was computed before. layers: as those of `Plain`."""

    def __init__(self, prefix: Plain) -> None:
        """prefix: with ``num_tokens`` set. It is only read, so that several prompts may share it."""
        self.num_tokens = prefix.num_tokens
        self.layers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._prefix = prefix

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers[layer, shard] = k, v
        old_k, old_v = self._prefix.layers[layer, shard]
        return torch.cat((old_k, k)), torch.cat((old_v, v))


class Held:
    """Reads a sequence out of the pages of a cache, and keeps no further tokens: for one decoding step. One shard."""

    def __init__(self, cache: KVCache, slots: torch.Tensor) -> None:
        """slots: of the sequence's tokens in the cache's rows, int64 [tokens]."""
        self.num_tokens = len(slots)
        self._cache, self._slots = cache, slots

    def extend(self, layer: int, shard: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old_k, old_v = (rows(self._cache, name, layer)[self._slots] for name in ("k", "v"))
        return torch.cat((old_k, k)), torch.cat((old_v, v))


def rows(cache: KVCache, name: str, layer: int) -> torch.Tensor:
    """A view of one layer as [slots, kv heads, head_dim]. name: "k" or "v"."""
    tensor = cache[name][layer]
    assert tensor is not None
    return tensor.flatten(0, 1)


def shard_of(rows: torch.Tensor, shard: int, like: torch.Tensor) -> torch.Tensor:
    """A view of the heads of one of a rank's shards. like: any tensor with a shard's number of heads as its dim 1."""
    heads = like.shape[1]
    return rows[:, shard * heads : (shard + 1) * heads]
