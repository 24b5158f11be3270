"""A rank of an instance that is launched apart: what tests of `torchkv.join` have it do."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchkv
from tests.helpers.harness import ask
from tests.helpers.resident import resident_kib
from tests.helpers.waiting import until
from torchkv import KVCache, KVLayout, PeerLost, ProtocolError

NUM_PAGES = 24
HEADS = 4


def layout(rank: int, size: int, page_size: int = 8, **changes: Any) -> KVLayout:
    settings = {"num_layers": 3, "num_kv_heads": HEADS, "head_dim": 8, "dtype": torch.int32}
    return KVLayout.gqa(**{**settings, **changes}, page_size=page_size, tp_rank=rank, tp_size=size)


def tokens_of(tag: int, layer: int, component: str) -> torch.Tensor:
    """What the instance with this tag has of all heads: [tokens, heads, dim], in the order of its pages."""
    generator = torch.Generator().manual_seed(1000 * (tag + 1) + 10 * layer + (component == "v"))
    return torch.randint(-(2**31), 2**31 - 1, (NUM_PAGES * 8, HEADS, 8), dtype=torch.int32, generator=generator)


def tensors(cache: KVCache) -> Iterator[tuple[int, str, torch.Tensor]]:
    for component in ("k", "v"):
        for layer, tensor in zip(cache.layout.layers, cache[component], strict=True):
            assert tensor is not None
            yield layer, component, tensor


def fill(cache: KVCache, tag: int) -> None:
    for layer, component, tensor in tensors(cache):
        mine = tokens_of(tag, layer, component)[:, list(cache.layout.heads)]
        tensor.copy_(mine.reshape(tensor.shape))


class Member:
    """What a rank of these tests has joined with."""

    kv: torchkv.KVMember
    cache: KVCache
    works: list[torchkv.KVWork]


def join(
    name: str, tag: int, rank: int, size: int, meeting: str, store: str | None, page_size: int, device: str
) -> str:
    """Joins as one rank of an instance; ``meeting`` is where its ranks find each other. The instance's address."""
    group = None
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=rank, world_size=size)
        group = dist.group.WORLD
    pages = NUM_PAGES * 8 // page_size
    Member.cache = KVCache.empty(layout(rank, size, page_size), pages, device=device)
    fill(Member.cache, tag)
    options = torchkv.Options(timeout=10.0, grant_timeout=20.0)
    found = None if store is None else dist.FileStore(store, -1)
    Member.kv = torchkv.join(Member.cache, name, group=group, options=options, store=found)
    assert (Member.kv.rank(), Member.kv.size()) == (rank, size)
    return Member.kv.address


def connect(address: str) -> str:
    return Member.kv.connect(address).result(20)


def here(name: str) -> bool:
    peer = Member.kv.peers().get(name)
    return peer is not None and peer.here


def await_peer(name: str, present: bool = True) -> None:
    until(lambda: here(name) == present, f"{name!r} is {'here' if present else 'away'}")


def receive(request: str, src: str, tag: int, count: int = 4) -> str:
    """Receives the first ``count`` pages' worth of tokens of the sender's last pages into pages 1 to ``count``."""
    cache, kv = Member.cache, Member.kv
    size = cache.layout.page_size
    pages = list(range(1, count + 1))
    fill(cache, -1)
    before = [(layer, name, tensor.cpu().clone()) for layer, name, tensor in tensors(cache)]
    rx = kv.recv_pages(request, pages, src)
    rx.wait(30)
    assert rx.aux == request.encode()
    for layer, component, old in before:
        new = next(t for found, name, t in tensors(cache) if (found, name) == (layer, component)).cpu()
        heads = list(cache.layout.heads)
        want = tokens_of(tag, layer, component)[8 * 3 : 8 * 3 + count * size, heads]
        assert torch.equal(new[pages].reshape(want.shape), want), f"wrong bytes in layer {layer} of {component}"
        others = [page for page in range(len(new)) if page not in pages]
        assert torch.equal(new[others], old[others]), "a page that was not granted has changed"
    return rx.path or ""


def send(request: str, dst: str | None, tag: int, count: int) -> None:
    """Sends ``count`` pages of 8 tokens from the fourth on."""
    cache, kv = Member.cache, Member.kv
    assert cache.layout.page_size == 8
    fill(cache, tag)
    work = kv.send_pages(request, list(range(3, 3 + count)), dst)
    kv.finish(request, dst, aux=request.encode()).wait(30)
    assert work.is_success()


def leave() -> None:
    Member.kv.close()
    Member.kv.close()
    with pytest.raises(ProtocolError):
        Member.kv.recv_pages("r", [1], "p")
    if dist.is_initialized():
        dist.destroy_process_group()


def footprint() -> tuple[int, int, int]:
    """File descriptors, threads, and mappings of shared memory: the least, as sockets of greetings linger a second."""
    gc.collect()
    seen = []
    for _ in range(15):
        maps = Path("/proc/self/maps").read_text().count("memfd:torchkv")
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), maps))
        time.sleep(0.1)
    return min(seen)


def footprint_within(limits: tuple[int, int, int]) -> tuple[int, int, int]:
    """`footprint`, once no part of it is above its limit: the kernel and ZeroMQ close in their own time."""
    end = time.monotonic() + 40
    found = footprint()
    while any(part > limit for part, limit in zip(found, limits, strict=True)):
        assert time.monotonic() < end, f"{found}, of at most {limits}"
        found = footprint()
    return found


def await_forgotten() -> None:
    until(lambda: not Member.kv.peers(), "nobody is known any more")


def owned(limits: tuple[int, int, int] | None = None) -> tuple[int, ...]:
    """The `footprint`, the transport's channels, and resident KiB. limits: see `footprint_within`."""
    verbs = Member.kv._verbs
    assert verbs is not None
    transport: Any = verbs.engine._transport
    found = footprint() if limits is None else footprint_within(limits)
    return (*found, len(transport._channels), resident_kib())


def lose(names: list[str]) -> None:
    """A request of each of these instances is awaited when they are killed."""
    works = [
        Member.kv.recv_pages(f"doomed by {name}", [1 + 2 * number, 2 + 2 * number], name)
        for number, name in enumerate(names)
    ]
    ask("kill now")
    for work in works:
        with pytest.raises(PeerLost):
            work.wait(20)
