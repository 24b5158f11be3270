"""What ranks do in the tests of state: requests made of one random truth, and a reference that splits it with numpy.

Every rank draws the same global bytes of a request from its seed, and cuts out its own share by the definition of
tensor parallelism. Caches may lie on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tests.helpers.harness import kv_group
from tests.helpers.ranks.lane_transfer import HOST, Later, own_device
from tests.helpers.ranks.small_cache import meet
from torchkv import Component, KVCache, KVLayout, KVProcessGroup, KVWork, State

__all__ = [
    "AUX",
    "NUM_PAGES",
    "NUM_SLOTS",
    "PAGE_SIZE",
    "PATIENCE",
    "STATES",
    "SUBSET",
    "WAYS",
    "Sending",
    "Setting",
    "Truth",
    "adopted",
    "check",
    "contents",
    "full",
    "hybrid",
    "own_cache",
    "randomise",
    "requests",
    "tp",
]

Bytes = npt.NDArray[np.uint8]

PATIENCE = 30
PAGE_SIZE = 4
NUM_PAGES, NUM_SLOTS = 8, 4
AUX = b"first token: 7"
# Layer 0 has keys only, layer 1 everything, layer 2 state only.
SSM = State("ssm", (12, 4, 2), torch.float32, shard_dim=0, layers=(1, 2))
CONV = State("conv", (3, 48), torch.bfloat16, shard_dim=1, shard_groups=(12, 12, 24), layers=(2,))  # [q|k|v]
FLAT = State("flat", (7,), torch.uint8, layers=(1, 2))  # whole on every rank
STATES = (SSM, CONV, FLAT)


def hybrid(tp_rank: int = 0, tp_size: int = 1, **changes: Any) -> KVLayout:
    keys = [Component(name, 4, 3, torch.bfloat16, layers=(0, 1)) for name in ("k", "v")]
    settings = {"num_layers": 3, "page_size": PAGE_SIZE, "states": STATES, **changes}
    return KVLayout(keys, tp_rank=tp_rank, tp_size=tp_size, **settings)


def tp(ranks: Sequence[int], **changes: Any) -> dict[int, KVLayout]:
    """One layout a rank, sharded over ``ranks``."""
    return {rank: hybrid(at, len(ranks), **changes) for at, rank in enumerate(ranks)}


@dataclass(frozen=True)
class Setting:
    """Who writes and who reads; other ranks hold nothing."""

    name: str
    writers: Mapping[int, KVLayout]
    readers: Mapping[int, KVLayout]

    @property
    def layouts(self) -> dict[int, KVLayout]:
        return {**self.writers, **self.readers}


# ---------------------------------------------------------------------- caches


def adopted(layout: KVLayout, device: torch.device = HOST) -> KVCache:
    """An engine's own tensors: gaps of an odd number of elements between pages and between slots, guards around."""

    def pools(shape: tuple[int, ...], dtype: torch.dtype, count: int, layers: Sequence[int]) -> list[Any]:
        size = int(np.prod(shape))
        strides = [size + 5, *(int(np.prod(shape[at + 1 :])) for at in range(len(shape)))]
        room = 8 + count * (size + 5) + 8
        pool = torch.empty(room * max(1, len(layers)), dtype=dtype, device=device)
        held = {layer: pool.as_strided((count, *shape), strides, at * room + 8) for at, layer in enumerate(layers)}
        return [held.get(layer) for layer in layout.layers]

    components, states = layout.components, layout.states
    return KVCache(
        layout,
        {
            c.name: pools(layout.page_shape(c.name), c.dtype, NUM_PAGES, layout.component_layers(c.name))
            for c in components
        },
        states={
            s.name: pools(layout.state_shape(s.name), s.dtype, NUM_SLOTS, layout.state_layers(s.name)) for s in states
        },
        num_pages=NUM_PAGES,
    )


def own_cache(layout: KVLayout, device: torch.device = HOST, group: KVProcessGroup | None = None) -> KVCache:
    return KVCache.empty(layout, NUM_PAGES, device=device, num_slots=NUM_SLOTS, group=group)


def settle(cache: KVCache) -> None:
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)  # a peer's write waits for none of this rank's streams


def randomise(cache: KVCache) -> list[torch.Tensor]:
    """Fresh random bytes everywhere: pages, slots, gaps and guards. Returns a copy of all."""
    rng = np.random.default_rng()
    for storage in cache.storages:
        storage.copy_(torch.from_numpy(rng.integers(0, 256, len(storage), dtype=np.uint8)))
    settle(cache)
    return contents(cache)


def contents(cache: KVCache) -> list[torch.Tensor]:
    """A copy of every byte."""
    return [storage.to(HOST, copy=True) for storage in cache.storages]


# ---------------------------------------------------------------------- the truth of a request


def _cut(whole: Bytes, dim: int | None, groups: Sequence[int] | None, layout: KVLayout) -> Bytes:
    """The share of a rank: each group split evenly, its parts one behind the other."""
    if dim is None:
        return whole
    parts = np.split(whole, np.cumsum(groups)[:-1], axis=dim) if groups is not None else [whole]
    return np.concatenate([np.split(part, layout.tp_size, axis=dim)[layout.tp_rank] for part in parts], axis=dim)


class Truth:
    """The global bytes of one request of ``num_pages`` pages; equal on all ranks for equal seeds."""

    def __init__(self, layout: KVLayout, num_pages: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._pages = {  # [tokens, heads, bytes]
            (c.name, layer): rng.integers(0, 256, (num_pages * PAGE_SIZE, c.heads, c.head_nbytes), dtype=np.uint8)
            for c in layout.components
            for layer in range(layout.num_layers)
        }
        self._states = {
            (s.name, layer): rng.integers(0, 256, (*s.shape, s.dtype.itemsize), dtype=np.uint8)
            for s in layout.states
            for layer in range(layout.num_layers)
        }

    def put(self, cache: KVCache, pages: Sequence[int], slot: int | None) -> None:
        """Writes the rank's share into these pages and this slot."""
        layout = cache.layout
        for c in layout.components:
            for layer, tensor in zip(layout.layers, cache[c.name], strict=True):
                if tensor is None:
                    continue
                mine = _cut(self._pages[c.name, layer], 1 if c.sharded else None, None, layout)
                for number, page in enumerate(pages):
                    part = mine[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
                    _write(tensor[page], part if layout.order == "NHD" else part.swapaxes(0, 1))
        for s in layout.states if slot is not None else ():
            for layer, tensor in zip(layout.layers, cache.state(s.name), strict=True):
                if tensor is not None:
                    _write(tensor[slot], _cut(self._states[s.name, layer], s.shard_dim, s.shard_groups, layout))
        settle(cache)


def _write(tensor: torch.Tensor, data: Bytes) -> None:
    bytes_ = torch.from_numpy(np.ascontiguousarray(data)).reshape(-1)
    tensor.copy_(bytes_.view(tensor.dtype).view(tensor.shape))


def full(layout: KVLayout, num_pages: int) -> int:
    """Bytes that such a rank receives of a request."""
    pages = sum(
        num_pages * layout.page_nbytes(c.name) * len(layout.component_layers(c.name)) for c in layout.components
    )
    return pages + sum(layout.state_nbytes(s.name) * len(layout.state_layers(s.name)) for s in layout.states)


def check(cache: KVCache, before: list[torch.Tensor], truth: Truth, pages: Sequence[int], slot: int | None) -> None:
    """The cache holds what ``before`` says, but for the request's own pages and slot, which hold the truth."""
    now = contents(cache)
    for storage, old in zip(cache.storages, before, strict=True):
        storage.copy_(old)
    truth.put(cache, pages, slot)
    wanted = contents(cache)
    for got, want in zip(now, wanted, strict=True):
        wrong = torch.nonzero(got != want).ravel()
        assert not len(wrong), f"{len(wrong)} wrong bytes of {len(want)}, the first at {int(wrong[0])}"
    changed = any(not torch.equal(old, want) for old, want in zip(before, wanted, strict=True))
    assert changed == bool(full(cache.layout, len(pages))), "the poison was what was to arrive"


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Sending:
    """One writer's side of one request."""

    kv: KVProcessGroup
    name: str
    pages: list[int]
    slot: int
    rng: np.random.Generator

    @property
    def layers(self) -> list[int]:
        cache = self.kv._verbs.cache
        assert cache is not None
        return [int(layer) for layer in self.rng.permutation(cache.layout.layers)]

    def state(self, layers: Sequence[int]) -> list[KVWork]:
        works = []
        for number, layer in enumerate(layers):
            event = None if number else Later(3)
            works.append(self.kv.send_state(self.name, layer, self.slot, "decode", event=event))
        return works

    def all_pages(self) -> list[KVWork]:
        return [self.kv.send_pages(self.name, self.pages, "decode")]

    def finish(self, slot: int | None) -> list[KVWork]:
        return [self.kv.finish(self.name, "decode", aux=AUX, state_slot=slot)]


def _by_finish(one: Sending) -> list[KVWork]:
    return one.all_pages() + one.finish(one.slot)


def _by_layer(one: Sending) -> list[KVWork]:
    """All layers in any order, those without state too; some before the pages, some behind them."""
    layers, cut = one.layers, int(one.rng.integers(4))
    works = one.state(layers[:cut]) + one.all_pages() + one.state(layers[cut:])
    return works + one.finish(None)


def _some_by_layer(one: Sending) -> list[KVWork]:
    """The rest by `finish`, and one layer twice: the last word counts, and both are the same."""
    layers = one.layers[: int(one.rng.integers(1, 3))]
    return one.state([*layers, layers[0]]) + one.all_pages() + one.finish(one.slot)


def _granted_first(one: Sending) -> list[KVWork]:
    assert one.kv.prefix_tokens(one.name, "decode") == 0
    return _by_layer(one)


def _in_chunks(one: Sending) -> list[KVWork]:
    """A prompt that is prefilled in chunks has its state when the last of them is done."""
    works = []
    for first in range(len(one.pages)):
        works.append(one.kv.send_pages(one.name, one.pages[first : first + 1], "decode", start=first))
    return works + one.finish(one.slot)


def _full_hit(one: Sending) -> list[KVWork]:
    return one.state(one.layers[:1]) + one.finish(one.slot)


@dataclass(frozen=True)
class Way:
    """How a request of so many pages is sent.

    late: readers post only when all has been submitted. twice: some bytes come twice. prefix: pages that readers hold.
    """

    send: Callable[[Sending], list[KVWork]]
    pages: int
    late: bool = False
    twice: bool = False
    prefix: int = 0


WAYS = {
    "by finish": Way(_by_finish, 3),
    "layer by layer": Way(_by_layer, 2, late=True),
    "some by layer": Way(_some_by_layer, 2, twice=True),
    "granted first": Way(_granted_first, 3),
    "in chunks behind a prefix": Way(_in_chunks, 3, prefix=1),
    "full hit": Way(_full_hit, 0, late=True, prefix=2),
}
SUBSET = ("by finish", "some by layer", "full hit")


def requests(
    setting: Setting, seed: int, *, adopt: bool, ways: Sequence[str], device: str = "cpu", **options: Any
) -> list[str]:
    """One rank's part of a request in each of ``ways``. Returns the lanes it wrote over."""
    rank, place = dist.get_rank(), own_device(device)
    layout = setting.layouts.get(rank)
    rng = np.random.default_rng()
    lanes: set[str] = set()
    with kv_group(**options) as kv:
        cache = None
        if layout is not None:
            cache = adopted(layout, place) if adopt else own_cache(layout, place, kv)
            randomise(cache)
        kv.register(cache, instance=None if layout is None else "prefill" if rank in setting.writers else "decode")
        for number, name in enumerate(ways):
            way = WAYS[name]
            pages = [int(page) for page in rng.permutation(NUM_PAGES)[: way.pages]]
            slot = int(rng.integers(NUM_SLOTS))
            truth = None if layout is None else Truth(layout, way.pages, seed + number)
            if rank in setting.writers:
                assert cache is not None
                assert truth is not None
                randomise(cache)
                truth.put(cache, pages, slot)
                before = contents(cache)
                works = way.send(Sending(kv, name, pages, slot, rng))
                if way.late:
                    meet(kv)
                for work in works:
                    assert work.wait(PATIENCE)
                assert all(map(torch.equal, contents(cache), before)), "a transfer changed its source"
            elif rank in setting.readers:
                assert cache is not None
                assert truth is not None
                before = randomise(cache)
                if way.late:
                    meet(kv)
                known = way.prefix * PAGE_SIZE
                rx = kv.recv_pages(name, pages, "prefill", prefix_tokens=known, state_slot=slot)
                assert rx.wait(PATIENCE)
                assert rx.aux == AUX
                wanted = full(cache.layout, way.pages)
                assert rx.bytes == wanted or (way.twice and rx.bytes > wanted)
                check(cache, before, truth, pages, slot)
            elif way.late:
                meet(kv)
        if rank in setting.writers:
            for reader in setting.readers:
                lanes |= {lane for lane, counter in kv.explain(reader).lanes.items() if counter.nbytes}
    dist.barrier()  # a peer may still have this rank's cache mapped, which must outlive that
    return sorted(lanes)
