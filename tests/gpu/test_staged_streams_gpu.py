"""Large staged verbs between GPUs: streamed through a small stage by two kernels that wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.harness import Ranks
from tests.helpers.ranks.gpu_pair import gpu_group, needs_gpus, until
from tests.helpers.ranks.small_cache import meet, small_layout
from torchkv import KVCache, KVProcessGroup, KVWork
from torchkv.staging import cuda_pack, cuda_packer
from torchkv.staging import transfer as staged_transfer

TOKENS = 4096
# Of rank 0 and of rank 1: 64 MiB of 2,048 bytes a token and layer, differently arranged.
LAYOUTS = ({"page_size": 16}, {"page_size": 32, "order": "HND"})
MODEL = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 64}

pytestmark = needs_gpus(2)


@contextmanager
def patience(polls: int, *, starving: bool = False) -> Iterator[list[int]]:
    """Kernels of this rank give up after so many looks. Yields how many streams were begun, again and again counted.

    starving: not all of a verb fits into the slots, so that they have to wait.
    """
    real, begun = cuda_pack.CudaPackLauncher.gather, [0]
    usual = cuda_packer.PATIENCE, staged_transfer.LARGEST_CHUNK

    def gather(*args: Any, fifo_args: Any = None, **settings: Any) -> None:
        begun[0] += fifo_args is not None
        real(*args, fifo_args=fifo_args, **settings)

    cuda_pack.CudaPackLauncher.gather = gather
    cuda_packer.PATIENCE = polls
    if starving:
        staged_transfer.LARGEST_CHUNK = 64 << 10
    try:
        yield begun
    finally:
        cuda_pack.CudaPackLauncher.gather = real
        cuda_packer.PATIENCE, staged_transfer.LARGEST_CHUNK = usual


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


def stream(blocks: int, polls: int, writers: tuple[int, ...], fifos: bool = True) -> None:
    """Staged and direct, the same bytes arrive, and beside them nothing changes.

    fifos: whether there are queues enough for FIFOs.
    """
    with patience(polls, starving=polls == 1) as begun, gpu_group(sm_budget=blocks) as kv:
        me, other = kv.rank(), 1 - kv.rank()
        side = Side(kv)
        assert kv._verbs.engine.gpu.fifos is fifos
        verbs = 3 if polls > 1 else 10
        for turn in range(verbs):
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
        if not fifos:
            assert begun[0] == 0
        elif me in writers:
            assert begun[0] >= verbs, "not every verb was streamed"
            assert polls > 1 or begun[0] > verbs, "no kernel has lost its patience"


@pytest.mark.parametrize("blocks", [1, 16, 132])
@pytest.mark.parametrize("polls", [cuda_packer.PATIENCE, 1], ids=["patient", "impatient"])
def test_every_byte(blocks: int, polls: int, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(stream, blocks, polls, (0,))


@pytest.mark.parametrize("polls", [cuda_packer.PATIENCE, 1], ids=["patient", "impatient"])
def test_both_ways_at_once(polls: int, gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(2).run(stream, 132, polls, (0, 1))


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


def hung_receiver() -> None:
    """Rank 1 does not unpack what rank 0 streams to it, for a while; rank 2 gets its own."""
    with patience(cuda_packer.PATIENCE, starving=True) as begun, gpu_group() as kv:
        side, me = Side(kv), kv.rank()
        for dst in (1, 2):  # loads all kernels, which must not happen while a stream is held
            exchange(side, "first", 0, dst)
        poison(side.cache, side.staged, 1)
        torch.cuda.synchronize()
        meet(kv)
        device = kv._verbs.engine.gpu
        hold = device.sync_words.hold(device.incoming) if me == 1 else None
        receives = side.receive("hung", 0) if me == 1 else []
        if me == 0:
            side.send("hung", 1)
            until(lambda: begun[0] >= 6, "a stream that waits in vain is begun again")
        for turn in range(5):
            exchange(side, f"beside {turn}", 0, 2)
        if me == 0:
            before, pauses = begun[0], 30
            time.sleep(pauses * cuda_packer.LONGEST_PAUSE)
            assert 5 < begun[0] - before <= pauses + 8, "in each pause once, but for the first ones"
        meet(kv)
        if hold is not None:
            assert not receives[0].is_completed()
            hold.open()
            side.check(receives)
        if me == 0:
            side.finish("hung", 1)
        meet(kv)
        side.check_beside()


def test_a_receiver_that_hangs_is_left_alone_more_and_more(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(3).run(hung_receiver)


def hung_sender() -> None:
    """Rank 2 gets nothing of a piece that rank 0's GPU has been given, and does not come to; rank 1's arrive."""
    with pytest.MonkeyPatch.context() as patch, gpu_group() as kv:
        patch.setattr(staged_transfer, "LEAST_FIFO_VERB", 1 << 40)  # pieces only
        side, me = Side(kv), kv.rank()
        for src in (0, 1):  # loads all kernels, which must not happen while a stream is held
            exchange(side, "first", src, 2)
        poison(side.cache, side.staged, 1)
        torch.cuda.synchronize()
        meet(kv)
        device = kv._verbs.engine.gpu
        hold = device.sync_words.hold(device.outgoing) if me == 0 else None
        late = [kv.recv_pages("staged late", side.staged, 0)] if me == 2 else []
        if hold is not None:
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
        if hold is not None:
            hold.open()
            kv.send_slice("direct late", None, side.source, 2)
            side.finish("late", 2)
        if late:
            side.check(late)
        exchange(side, "last", 0, 2)
        side.check_beside()
        meet(kv)


def test_a_sender_that_hangs_holds_up_no_other(gpu_ranks: Callable[[int], Ranks]) -> None:
    gpu_ranks(3).run(hung_sender)


def test_where_streams_hold_each_other_up_no_gpu_waits_for_another() -> None:
    ranks = Ranks(2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    try:
        ranks.run(stream, 16, cuda_packer.PATIENCE, (0, 1), False)
    finally:
        ranks.close()
