"""A torchkv group is a c10d citizen: names, sub-groups, collectives, point-to-point, Work, end of life."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchkv
from tests.helpers.harness import Ranks, kv_group, kv_world
from tests.helpers.ranks.small_cache import random_cache, small_layout
from torchkv import KVProcessGroup, Options

ROUNDS = 200


# ---------------------------------------------------------------------- names and sub-groups


def names_and_subgroups() -> None:
    world = dist.group.WORLD
    assert isinstance(world, KVProcessGroup)
    assert isinstance(world, dist.ProcessGroup)
    assert dist.get_backend() == "torchkv"
    assert (world.rank(), world.size()) == (dist.get_rank(), dist.get_world_size())
    with kv_group([1, 3]) as pair:
        if dist.get_rank() in (1, 3):
            assert isinstance(pair, KVProcessGroup)
            assert dist.get_backend(pair) == "torchkv"
            assert (dist.get_rank(pair), dist.get_world_size(pair)) == ((dist.get_rank() - 1) // 2, 2)
            value = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(value, group=pair)
            assert value.item() == 4.0
        else:
            assert pair is dist.GroupMember.NON_GROUP_MEMBER
    plain = dist.new_group(backend="gloo")
    with pytest.raises(torchkv.ProtocolError, match="torchkv group"):
        torchkv.quarantined(group=plain)
    dist.barrier()  # gloo fails to connect to a rank that has already left
    dist.destroy_process_group(plain)


def mesh_subgroups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("prefill", "tp"))
    for name in ("prefill", "tp"):
        group = mesh.get_group(name)
        assert isinstance(group, KVProcessGroup)
        members = dist.get_process_group_ranks(group)
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members)
    tp = mesh.get_group("tp")
    with transfers_in_background(tp, sender=tp.rank() == 0):
        dist.barrier(tp)
    dist.barrier()
    for name in ("prefill", "tp"):
        dist.destroy_process_group(mesh.get_group(name))


def test_names_and_subgroups(four: Ranks) -> None:
    four.run(names_and_subgroups)


def test_device_mesh_hands_out_torchkv_groups_that_transfer(four: Ranks) -> None:
    four.run(mesh_subgroups)


# ---------------------------------------------------------------------- collectives


@contextmanager
def transfers_in_background(kv: KVProcessGroup, *, sender: bool) -> Iterator[None]:
    """Requests from even ranks of ``kv`` to their odd neighbours, one after another, as long as the block runs."""
    cache = random_cache()
    kv.register(cache)
    peer = kv.rank() + (1 if sender else -1)
    stop = threading.Event()
    failures: list[BaseException] = []
    done = 0

    def work() -> None:
        nonlocal done
        try:
            while True:
                name, last = f"background {done}", stop.is_set()
                pages = [int(p) for p in np.random.default_rng().permutation(16)[:4]]
                if sender:
                    kv.send_pages(name, pages, peer)
                    kv.finish(name, peer, aux=b"last" if last else b"more").wait(30)
                else:
                    rx = kv.recv_pages(name, pages, peer)
                    rx.wait(30)
                    last = rx.aux == b"last"
                done += 1
                if last:
                    return
        except BaseException as error:  # noqa: BLE001 - reported by the block that waits for this thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not failures, failures
    assert done > 0


def every_collective(rank: int, size: int, group: dist.ProcessGroup) -> None:
    mine = torch.full((3,), float(rank))
    ranks = torch.arange(size, dtype=torch.float32)
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    assert torch.equal(torch.stack(gathered), ranks[:, None].expand(size, 3))
    flat = torch.empty(size * 3)
    dist.all_gather_into_tensor(flat, mine, group=group)
    assert torch.equal(flat.view(size, 3), ranks[:, None].expand(size, 3))
    total = mine.clone()
    dist.all_reduce(total, group=group)
    assert torch.equal(total, torch.full((3,), float(ranks.sum())))
    word = mine.clone()
    dist.broadcast(word, 1, group=group)
    assert torch.equal(word, torch.ones(3))
    summed = mine.clone()
    dist.reduce(summed, 2, op=dist.ReduceOp.MAX, group=group)
    assert rank != 2 or torch.equal(summed, torch.full((3,), float(size - 1)))
    dist.gather(mine, gathered if rank == 0 else None, 0, group=group)
    part = torch.empty(3)
    dist.scatter(part, [torch.full((3,), float(10 + r)) for r in range(size)] if rank == 0 else None, 0, group=group)
    assert torch.equal(part, torch.full((3,), float(10 + rank)))
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, ranks + 100 * rank, group=group)
    assert torch.equal(exchanged, 100 * ranks + rank)
    reduced = torch.empty(2)
    dist.reduce_scatter(reduced, list(torch.arange(2.0 * size).view(size, 2)), group=group)
    assert torch.equal(reduced, size * torch.tensor([2.0 * rank, 2.0 * rank + 1]))
    dist.barrier(group)


def object_collectives(rank: int, size: int, group: dist.ProcessGroup) -> None:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    assert everyone == [{"rank": r} for r in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object((rank, "x" * rank), gathered, dst=1, group=group)
    assert gathered is None or gathered == [(r, "x" * r) for r in range(size)]
    words: list[Any] = ["hello", 7] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, src=0, group=group)
    assert words == ["hello", 7]
    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0, group=group)
    assert out == [f"for {rank}"]


def collectives() -> None:
    group = kv_world()
    every_collective(group.rank(), group.size(), group)
    object_collectives(group.rank(), group.size(), group)


def rounds(count: int) -> None:
    """Point-to-point, objects and barriers, round after round, beside KV transfers on the same group."""
    with kv_group() as kv:
        rank, size = kv.rank(), kv.size()
        after, before = (rank + 1) % size, (rank - 1) % size
        with transfers_in_background(kv, sender=rank % 2 == 0):
            for number in range(count):
                word, heard = torch.tensor([100 * number + rank]), torch.empty(1, dtype=torch.int64)
                if rank % 2 == 0:
                    dist.send(word, after, group=kv)
                    dist.recv(heard, before, group=kv)
                else:
                    dist.recv(heard, before, group=kv)
                    dist.send(word, after, group=kv)
                assert heard.item() == 100 * number + before
                heard.zero_()
                works = [dist.isend(word, after, group=kv), dist.irecv(heard, before, group=kv)]
                for work in works:
                    work.wait()
                assert heard.item() == 100 * number + before
                heard.zero_()
                operations = [
                    dist.P2POp(dist.isend, word, after, group=kv),
                    dist.P2POp(dist.irecv, heard, before, group=kv),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                assert heard.item() == 100 * number + before
                everyone: list[Any] = [None] * size
                dist.all_gather_object(everyone, (rank, number), group=kv)
                assert everyone == [(r, number) for r in range(size)]
                dist.barrier(kv)


def test_every_collective(four: Ranks) -> None:
    four.run(collectives)


def test_hundreds_of_rounds_beside_transfers(four: Ranks) -> None:
    four.run(rounds, ROUNDS, deadline=110)


# ---------------------------------------------------------------------- Work


def work_protocol() -> None:
    with kv_group() as kv:
        kv.register(random_cache() if kv.rank() < 2 else None)
        if kv.rank() == 0:
            sender_work(kv)
        elif kv.rank() == 1:
            receiver_work(kv)


def sender_work(kv: KVProcessGroup) -> None:
    dist.recv(torch.empty(1), 1, group=kv)  # the receiver has looked at its pending work
    work = kv.send_pages("good", [1, 2], 1)
    assert isinstance(work, torchkv.KVWork)
    assert isinstance(work, dist.Work)
    assert work.wait() is True
    assert work.wait(timedelta(0)) is True
    assert work.wait_source() is True
    assert work.path == "direct"
    kv.finish("good", 1).wait(timedelta(seconds=30))
    kv.send_pages("bad", [1, 2], 1).wait(30)
    kv.cancel("bad").wait(30)


def receiver_work(kv: KVProcessGroup) -> None:
    rx = kv.recv_pages("good", [3, 4], 0)
    future = rx.get_future()
    assert not rx.is_completed()
    assert not future.done()
    assert rx.exception() is None
    with pytest.raises(torchkv.TransferTimeout, match="good") as caught:
        rx.wait(0.05)
    assert caught.value.retryable
    assert isinstance(caught.value, TimeoutError)
    assert rx.exception() is None  # the request lives on
    with pytest.raises(torchkv.TransferTimeout):
        rx.wait(timedelta(milliseconds=20))
    dist.send(torch.ones(1), 0, group=kv)
    assert rx.wait(timedelta(0)) is True
    assert rx.is_completed()
    future.wait()
    assert rx.exception() is None
    assert rx.seconds > 0
    assert rx.bytes == 2 * 2 * 2 * small_layout().page_nbytes("k")
    bad = kv.recv_pages("bad", [5, 6], 0)
    future = bad.get_future()
    with pytest.raises(torchkv.TransferCancelled):
        bad.wait()
    with pytest.raises(torchkv.TransferCancelled):
        future.wait()
    with pytest.raises(torchkv.TransferCancelled):
        bad.get_future().wait()
    assert isinstance(bad.exception(), torchkv.TransferCancelled)
    assert isinstance(bad.exception(), dist.DistBackendError)
    bad.wait_stream()  # releases, without raising, though the request failed


def test_work_behaves_like_c10d_work(four: Ranks) -> None:
    four.run(work_protocol)


# ---------------------------------------------------------------------- functions, options, lives of a group


def functions_without_group() -> None:
    """The default group, made anew so that it can be registered."""
    torchkv.register(random_cache(), f"i{dist.get_rank()}")
    rank = dist.get_rank()
    if rank == 0:
        torchkv.send_layer("a", 0, [1, 2], 1)
        torchkv.send_slice("a", [1], [1, 2], "i1")
        torchkv.finish("a", 1, aux=b"x").wait(30)
        assert torchkv.prefix_tokens("b", 1) == 16
        torchkv.send_pages("b", [1, 2], 1).wait(30)
        assert torchkv.explain(1).path == "direct"
    elif rank == 1:
        rx = torchkv.recv_pages("a", [3, 4], 0)
        rx.wait(30)
        assert rx.aux == b"x"
        other = torchkv.recv_pages("b", [5, 6], "i0", prefix_tokens=16)
        other.wait_layer(1, 30)
        torchkv.cancel("b").wait(30)
        assert torchkv.quarantined() == {}
    dist.barrier()


def options_seen(given: dict[str, Any]) -> tuple[float, str | None]:
    with kv_group(**given) as group:
        return group._options.timeout, group._options.path


def test_functions_work_on_the_default_group(shared_ranks: Callable[..., Ranks]) -> None:
    shared_ranks("two", 2, env={"TORCHKV_TIMEOUT": "7.5", "TORCHKV_PATH": ""}).run(functions_without_group)


def test_options_argument_beats_environment_beats_default(shared_ranks: Callable[..., Ranks]) -> None:
    two = shared_ranks("two", 2, env={"TORCHKV_TIMEOUT": "7.5", "TORCHKV_PATH": ""})
    assert two.run(options_seen, {"timeout": 3.0}) == [(3.0, None)] * 2
    assert two.run(options_seen, {"path": "slices"}) == [(7.5, "slices")] * 2
    assert two.run(options_seen, {}) == [(7.5, None)] * 2


def wrong_options() -> None:
    with pytest.raises(torchkv.ProtocolError, match=r"torchkv\.Options"):
        dist.new_group(backend="torchkv", pg_options={"timeout": 3})


def test_wrong_options_are_refused(shared_ranks: Callable[..., Ranks]) -> None:
    ranks = shared_ranks("one", 1)
    ranks.run(wrong_options)


def _own_resources() -> dict[str, Any]:
    """Threads, descriptors by what they are, shared-memory files and children of this process."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = file.read().split()
    with open("/proc/self/maps", encoding="ascii") as file:
        segments = sum("memfd:" in line or "/dev/shm/" in line for line in file)
    return {
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "threads": len(os.listdir("/proc/self/task")),
        "fds": sorted(links),
        "children": children,
        "segments": segments,
        "shm": sorted(name for name in os.listdir("/dev/shm") if "torchkv" in name),
    }


def one_life(store: str, rank: int, size: int) -> None:
    dist.init_process_group(
        "torchkv",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
        pg_options=Options(path="slices"),
    )
    torchkv.register(random_cache())
    if rank == 0:
        torchkv.send_pages("r", [1, 2, 3], 1)
        torchkv.finish("r", 1).wait(30)
    else:
        torchkv.recv_pages("r", [4, 5, 6], 0).wait(30)
    dist.barrier()
    dist.destroy_process_group()


def reqs(stores: list[str], rank: int) -> list[dict[str, Any]]:
    """Groups made and destroyed in one process; what it owns after each."""
    owned = []
    for store in stores:
        one_life(store, rank, 2)
        owned.append(_settled())
    return owned


def _settled() -> dict[str, Any]:
    """What the process owns once gloo's own threads, which end in their own time, have ended."""
    owned = _own_resources()
    until = time.monotonic() + 5
    while time.monotonic() < until:
        again = _own_resources()
        if again == owned:
            break
        owned = again
    return owned


def by_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Runs in ranks without a default group, which therefore do not know their number."""
    return function(*args, int(current_process().name.removeprefix("rank")))


def test_destroying_leaves_nothing_and_a_group_can_be_made_again(tmp_path: Path) -> None:
    ranks = Ranks(2, world=False)
    stores = [str(tmp_path / f"store{number}") for number in range(4)]
    for first, *rest in ranks.run(by_rank, reqs, stores):
        # The first life loads libraries, which keep what they keep. From then on nothing may be added.
        for later in rest:
            assert later == first
        assert first["python threads"] == ["MainThread"]
        assert first["children"] == []
        assert first["segments"] == 0
        assert first["shm"] == []
        assert not [fd for fd in first["fds"] if "pidfd" in fd or "memfd" in fd]
    ranks.close()


SCRIPT = """
import sys
import torch.distributed as dist
import torchkv
import torch

rank = int(sys.argv[2])
dist.init_process_group("torchkv", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
layout = torchkv.KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype=torch.float32)
torchkv.register(torchkv.KVCache.empty(layout, 8, device="cpu"))
if rank == 1:
    pending = torchkv.recv_pages("never served", [1], 0)
dist.barrier()
print("leaving")
"""


def test_a_program_may_exit_without_destroying_its_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    for output in outputs:
        assert "leaving" in output
        assert "Traceback" not in output
