"""Large staged verbs between GPUs: every byte, also while the streams of one rank do not go on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import gpu_group, needs_gpus
from tests.helpers.ranks.small_cache import meet, small_layout
from torchkv import KVCache, KVProcessGroup, KVWork
from torchkv.cuda.sync_words import HostReleasedWait

TOKENS = 4096
# Of rank 0 and of rank 1: 64 MiB of 2,048 bytes a token and layer, differently arranged.
LAYOUTS = ({"page_size": 16}, {"page_size": 32, "order": "HND"})
MODEL = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 64}

pytestmark = needs_gpus(2)


def poison(cache: KVCache, pages: list[int], value: int) -> None:
    for name in ("k", "v"):
        for tensor in cache[name]:
            if tensor is not None:
                tensor[pages] = value


def bits(cache: KVCache, pages: list[int]) -> list[torch.Tensor]:
    return [tensor[pages].view(torch.uint8) for name in ("k", "v") for tensor in cache[name] if tensor is not None]


class Side:
    """One rank's cache, and random places in it for what it sends, what it gets, and what it shall get."""

    def __init__(self, kv: KVProcessGroup) -> None:
        layout = LAYOUTS[min(kv.rank(), 1)]
        count = TOKENS // layout["page_size"]
        self.kv = kv
        self.cache = KVCache.empty(small_layout(**MODEL, **layout), 4 * count, device="cuda", group=kv)
        for storage in self.cache.storages:
            storage.random_(0, 256)
        kv.register(self.cache)
        shuffled = np.random.default_rng().permutation(4 * count).tolist()
        self.source, self.staged, self.direct, canaries = (
            shuffled[at : at + count] for at in range(0, 4 * count, count)
        )
        self._unchanged = [*self.source, *canaries]
        self._before = [part.clone() for part in bits(self.cache, self._unchanged)]

    def send(self, name: str, dst: int) -> None:
        self.kv.staged_put(f"staged {name}", None, self.source, dst)
        self.kv.send_slice(f"direct {name}", None, self.source, dst)

    def finish(self, name: str, dst: int) -> None:
        for way in ("staged", "direct"):
            self.kv.finish(f"{way} {name}", dst).wait(60)

    def receive(self, name: str, src: int) -> list[KVWork]:
        return [
            self.kv.recv_pages(*one, src) for one in ((f"staged {name}", self.staged), (f"direct {name}", self.direct))
        ]

    def check(self, receives: list[KVWork]) -> None:
        """Staged and direct, the same bytes have arrived."""
        for receive in receives:
            receive.wait(60)
        pairs = zip(bits(self.cache, self.staged), bits(self.cache, self.direct), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)

    def check_beside(self) -> None:
        assert all(torch.equal(*pair) for pair in zip(bits(self.cache, self._unchanged), self._before, strict=True))


def every_byte(blocks: int, writers: tuple[int, ...]) -> None:
    """Staged and direct, the same bytes arrive, and beside them nothing changes."""
    with gpu_group(sm_budget=blocks) as kv:
        me, other = kv.rank(), 1 - kv.rank()
        side = Side(kv)
        for turn in range(3):
            name = str(turn)
            receives = side.receive(name, other) if other in writers else []
            if me in writers:
                side.send(name, other)
                side.finish(name, other)
            if receives:
                side.check(receives)
            poison(side.cache, side.staged, turn)
            meet(kv)
        side.check_beside()


@pytest.mark.parametrize("blocks", [1, 16, 132])
def test_every_byte(blocks: int, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(every_byte, blocks, (0,))


def test_both_ways_at_once(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(every_byte, 132, (0, 1))


def exchange(side: Side, name: str, src: int, dst: int) -> None:
    """Fresh pages of ``src`` are where they should be on ``dst``."""
    me = side.kv.rank()
    receives = []
    if me == dst:
        poison(side.cache, side.staged, 0)
        receives = side.receive(name, src)
    if me == src:
        side.send(name, dst)
        side.finish(name, dst)
    if receives:
        side.check(receives)


def hold(kv: KVProcessGroup) -> list[HostReleasedWait]:
    """Stops both streams that pack and unpack on this rank, until each of these is opened."""
    device = kv._verbs.engine.gpu
    return [device.sync_words.hold(stream) for stream in (device.outgoing, device.incoming)]


def hung_receiver() -> None:
    """Rank 1 does not unpack what rank 0 stages for it, for a while; rank 2 gets its own."""
    with gpu_group() as kv:
        side, me = Side(kv), kv.rank()
        for dst in (1, 2):  # loads all kernels, which must not happen while a stream is held
            exchange(side, "first", 0, dst)
        poison(side.cache, side.staged, 1)
        torch.cuda.synchronize()
        meet(kv)
        holds = hold(kv) if me == 1 else []
        receives = side.receive("hung", 0) if me == 1 else []
        if me == 0:
            side.send("hung", 1)
        for turn in range(5):
            exchange(side, f"beside {turn}", 0, 2)
        meet(kv)
        if me == 1:
            assert not receives[0].is_completed()
            for each in holds:
                each.open()
            side.check(receives)
        if me == 0:
            side.finish("hung", 1)
        meet(kv)
        side.check_beside()


def test_a_receiver_that_hangs_holds_up_no_other(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(3).run(hung_receiver)


def hung_sender() -> None:
    """Rank 2 gets nothing of a piece that rank 0's GPU has been given, and does not come to; rank 1's arrive."""
    with gpu_group() as kv:
        side, me = Side(kv), kv.rank()
        for src in (0, 1):  # loads all kernels, which must not happen while a stream is held
            exchange(side, "first", src, 2)
        poison(side.cache, side.staged, 1)
        torch.cuda.synchronize()
        meet(kv)
        holds = hold(kv) if me == 0 else []
        late = [kv.recv_pages("staged late", side.staged, 0)] if me == 2 else []
        if me == 0:
            kv.staged_put("staged late", None, side.source, 2)
        meet(kv)
        for turn in range(5):
            if me == 1:
                kv.staged_put(f"beside {turn}", None, side.source, 2)
                kv.finish(f"beside {turn}", 2).wait(20)
            elif me == 2:
                kv.recv_pages(f"beside {turn}", side.direct, 1).wait(20)
        meet(kv)
        if late:
            assert not late[0].is_completed()
            late.append(kv.recv_pages("direct late", side.direct, 0))
        if me == 0:
            for each in holds:
                each.open()
            kv.send_slice("direct late", None, side.source, 2)
            side.finish("late", 2)
        if late:
            side.check(late)
        exchange(side, "last", 0, 2)
        side.check_beside()
        meet(kv)


def test_a_sender_that_hangs_holds_up_no_other(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(3).run(hung_sender)


def test_with_a_single_hardware_queue_every_byte_arrives() -> None:
    ranks = Ranks(2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    try:
        ranks.run(every_byte, 16, (0, 1))
    finally:
        ranks.close()
