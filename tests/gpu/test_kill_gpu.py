"""SIGKILL of a peer whose GPU memory is mapped here, or into which kernels are writing: ``PeerLost``, never a hang,
and when the group has been destroyed the survivor keeps none of either rank's GPU memory, unless UCX has put into it.

Deadlines are minutes here, so that only the detection of the death itself can end a wait in time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.harness import Ranks, ask, kv_world
from tests.helpers.ranks.gpu_pair import needs_gpus
from tests.helpers.ranks.lane_transfer import own_device, random_fill
from tests.helpers.ranks.small_cache import NUM_PAGES, Never, page_bytes, small_layout
from tests.helpers.waiting import until
from torchkv import KVCache, KVWork, PeerLost

SURVIVOR, VICTIM, BYSTANDER = range(3)
PATIENCE = 30  # seconds; the deadlines of the group are ten times that
DEADLINES = {"TORCHKV_TIMEOUT": "300", "TORCHKV_GRANT_TIMEOUT": "300", "TORCHKV_HEARTBEAT": "60"}

# 1 GiB a rank, which one thread block is busy with for a while.
BIG = {"num_layers": 16, "num_kv_heads": 8, "head_dim": 128}
FEW = [5, 2, 9]
PAGES = list(range(1024))
POOL_NBYTES = 1 << 30
CACHES: list[KVCache] = []  # of a rank that looks into its own
# What stays of a process that has run: loaded kernels, the driver's own, 2 MiB of a dead peer that UCX never unmaps.
SLACK = 128 << 20

pytestmark = [needs_gpus(1), pytest.mark.free_memory]


def free_nbytes() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]


def start_gpus() -> list[int]:
    """A context of this rank on every GPU; the free memory of each, before the other rank has touched any."""
    own_device("cuda")
    torch.ones(1, device="cuda").add_(1).cpu()
    free_nbytes()
    return free_nbytes()


def join() -> None:
    kv, device = kv_world(), own_device("cuda")
    cache = KVCache.empty(small_layout(**BIG), len(PAGES), device=device, group=kv)
    assert cache.nbytes == POOL_NBYTES
    random_fill(cache, np.random.default_rng())
    kv.register(cache)


def join_small() -> None:
    kv, device = kv_world(), own_device("cuda")
    CACHES.append(KVCache.empty(small_layout(), NUM_PAGES, device=device, group=kv))
    random_fill(CACHES[0], np.random.default_rng())
    kv.register(CACHES[0])


def expect_lost(work: KVWork) -> None:
    with pytest.raises(PeerLost, match=f"rank {VICTIM}") as caught:
        work.wait(PATIENCE)
    assert caught.value.retryable


# ---------------------------------------------------------------------- victims


def write() -> None:
    """All layers but the last, which waits for an event that never comes."""
    kv = kv_world()
    layers = range(BIG["num_layers"])
    for layer in layers[:-1]:
        kv.send_layer("r", layer, PAGES, SURVIVOR)
    kv.send_layer("r", layers[-1], PAGES, SURVIVOR, event=Never())
    kv.finish("r", SURVIVOR)
    ask("ready")


def read() -> None:
    kv_world().recv_pages("r", PAGES, SURVIVOR)
    ask("ready")


# ---------------------------------------------------------------------- survivors


def receive() -> None:
    kv = kv_world()
    rx = kv.recv_pages("r", PAGES, VICTIM)
    rx.wait_layer(0, PATIENCE)
    ask("kill now")
    expect_lost(rx)
    kv.cancel("r").wait(PATIENCE)
    assert kv.quarantined() == {}, "the victim is dead, so nothing of it can land any more"
    assert rx.exception().pages_safe


def send() -> None:
    kv = kv_world()
    layers = range(BIG["num_layers"])
    moving = [kv.send_layer("r", layer, PAGES, VICTIM) for layer in layers[:-1]]
    gated = kv.send_layer("r", layers[-1], PAGES, VICTIM, event=Never())
    done = kv.finish("r", VICTIM)
    moving[0].wait(PATIENCE)
    ask("kill now")
    expect_lost(gated)
    expect_lost(done)
    for work in moving[1:]:
        with suppress(PeerLost):  # it may have been through before the kill
            work.wait(PATIENCE)
        assert work.is_completed()
    kv.cancel("r").wait(PATIENCE)


def wait_and_lose() -> None:
    """A peer dies while this rank's default stream waits for another one: that one's bytes come all the same."""
    kv, cache = kv_world(), CACHES[0]
    stale = page_bytes(cache, FEW)
    rx = kv.recv_pages("r", FEW, BYSTANDER)
    rx.wait_stream()
    ask("kill now")
    engine = kv._verbs.engine
    until(lambda: VICTIM in engine.lost, "the death is noticed")
    until(lambda: not engine.peers.undrained, "nothing of the dead peer is still on its way")
    assert engine.peers.closing == [engine.connections[VICTIM]], "unmapped while a stream waits"
    assert ask("send now") is None
    rx.wait(PATIENCE)
    torch.cuda.synchronize()
    assert not torch.equal(page_bytes(cache, FEW), stale)
    until(lambda: not engine.peers.closing, "the dead peer's memory is unmapped")


def send_late() -> None:
    kv = kv_world()
    ask("ready")
    kv.send_pages("r", FEW, SURVIVOR)
    kv.finish("r", SURVIVOR).wait(PATIENCE)


def leave(before: list[int], all_comes_back: bool) -> None:
    """Destroys the group; ``before``: free memory of each GPU before it was there."""

    def missing() -> list[int]:
        gc.collect()
        torch.cuda.empty_cache()
        return [then - now for then, now in zip(before, free_nbytes(), strict=True)]

    assert max(missing()) > SLACK, "this rank's own pool, at least, should have been noticed"
    dist.destroy_process_group()
    if not all_comes_back:
        return
    until(lambda: max(missing()) < SLACK, "GPU memory is back where it was before the group")


# ---------------------------------------------------------------------- the test


@pytest.fixture
def new_ranks() -> Iterator[Callable[[dict[str, str]], Ranks]]:
    """Ranks for one test: one of them will be dead at its end."""
    made: list[Ranks] = []

    def make(env: dict[str, str], size: int = 2) -> Ranks:
        made.append(Ranks(size, env={**DEADLINES, "TORCHKV_SM_BUDGET": "1", **env}))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


PUT = {"TORCHKV_PATH": "slices"}
STAGED = {"TORCHKV_PATH": "staged"}
# UCX keeps mapped what it has put into, until this process ends (see `torchkv_ucx.environment`): what a receiver that
# was killed leaves comes back here only without that cache. Nothing of a writer's is ever put into.
CASES = [
    pytest.param(write, receive, {}, True, id="a-writer-direct"),
    pytest.param(write, receive, PUT, True, id="a-writer-put"),
    pytest.param(write, receive, STAGED, True, id="a-writer-staged"),
    pytest.param(read, send, {}, True, id="a-receiver-direct"),
    pytest.param(read, send, STAGED, True, id="a-receiver-staged"),
    pytest.param(read, send, PUT, False, id="a-receiver-put"),
    pytest.param(read, send, {**PUT, "UCX_CUDA_IPC_CACHE": "n"}, True, id="a-receiver-put-without-cache"),
]


@pytest.mark.parametrize(("victim", "survivor", "env", "all_comes_back"), CASES)
def test_memory_of_a_killed_peer_comes_back(
    victim: Callable[[], Any],
    survivor: Callable[[], Any],
    env: dict[str, str],
    all_comes_back: bool,
    new_ranks: Callable[[dict[str, str]], Ranks],
) -> None:
    ranks = new_ranks(env)
    (before,) = ranks.run(start_gpus, ranks=[SURVIVOR])
    ranks.run(join)
    ranks.start(victim, ranks=[VICTIM])
    ranks.start(survivor, ranks=[SURVIVOR])
    assert ranks.hear(VICTIM) == "ready"
    assert ranks.hear(SURVIVOR) == "kill now"
    ranks.kill(VICTIM)
    ranks.tell(SURVIVOR)
    ranks.join([SURVIVOR])
    ranks.run(leave, before, all_comes_back, ranks=[SURVIVOR])


def test_a_peer_that_dies_while_a_stream_waits_holds_up_nobody(new_ranks: Callable[..., Ranks]) -> None:
    ranks = new_ranks({}, size=3)
    ranks.run(join_small)
    ranks.start(wait_and_lose, ranks=[SURVIVOR])
    ranks.start(send_late, ranks=[BYSTANDER])
    assert ranks.hear(BYSTANDER) == "ready"
    assert ranks.hear(SURVIVOR) == "kill now"
    ranks.kill(VICTIM)
    ranks.tell(SURVIVOR)
    assert ranks.hear(SURVIVOR) == "send now"
    ranks.tell(SURVIVOR)
    ranks.tell(BYSTANDER)
    ranks.join([SURVIVOR, BYSTANDER])
