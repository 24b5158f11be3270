"""The NVSHMEM transport over fakes of its library and its device: everything but what CUDA and NVSHMEM do."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchkv_nvshmem import NVSHMEMTransport, environment, wire
from torchkv_nvshmem.exchange import through_store
from torchkv_nvshmem.heap import ALIGNMENT, Heap, Place
from torchkv_nvshmem.wire import AddressBlob, RegionBlob

from tests.helpers.fakes.nvshmem import CPU, World
from torchkv.errors import KVError, PeerLost, ProtocolError, TransferCancelled, TransportUnavailable
from torchkv.host import shared_memory
from torchkv.host.processes import ProcessId, process_started
from torchkv.transport import Batch, Channel, Completion, Region

POISON = 0xDD
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what `environment.prepare` writes into the environment, and what a test sets there."""
    for name in ("SYMMETRIC_SIZE", "MAX_MEMORY_PER_GPU", "DISABLE_NVLS", "BOOTSTRAP_UID_SOCK_IFNAME"):
        monkeypatch.setenv(f"NVSHMEM_{name}", "")
        monkeypatch.delenv(f"NVSHMEM_{name}")


def batch(*rows: tuple[int, int, int, int, int]) -> Batch:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    return Batch(*(np.ascontiguousarray(table[:, i]) for i in range(5)))


# -- the heap ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), max_size=60), st.randoms())
def test_places_never_overlap_and_come_back(steps: list[tuple[bool, int]], random: Any) -> None:
    heap = Heap()
    heap.add(1 << 20, 40_960)
    heap.add(1 << 30, 8192)
    taken: list[Place] = []
    for take, nbytes in steps:
        if take or not taken:
            place = heap.take(nbytes)
            owned = [0] * 2
            for other in taken:
                owned[other.block] += -(-other.nbytes // ALIGNMENT) * ALIGNMENT
            if place is None:
                assert nbytes > heap.largest_free
                continue
            assert place.offset % ALIGNMENT == 0
            assert place.offset + nbytes <= heap.blocks[place.block].nbytes
            for other in taken:
                apart = place.offset + nbytes <= other.offset or other.offset + other.nbytes <= place.offset
                assert other.block != place.block or apart
            taken.append(place)
        else:
            heap.give(taken.pop(random.randrange(len(taken))))
    for place in taken:
        heap.give(place)
    assert [block.free for block in heap.blocks] == [[(0, 40_960)], [(0, 8192)]]


def test_giving_twice_is_noticed() -> None:
    heap = Heap()
    heap.add(0, 4096)
    place = heap.take(100)
    assert place is not None
    heap.give(place)
    with pytest.raises(AssertionError, match="twice"):
        heap.give(place)


@pytest.mark.parametrize(
    "place",
    [Place(-1, 0, 1), Place(1, 0, 1), Place(0, -1, 1), Place(0, 0, -1), Place(0, 4096, 1), Place(0, 4000, 97)],
)
def test_claims_outside_a_block_have_no_address(place: Place) -> None:
    heap = Heap()
    heap.add(1 << 20, 4096)
    with pytest.raises(ProtocolError, match="rank 7"):
        heap.address(place, "rank 7")
    assert heap.address(Place(0, 4095, 1), "rank 7") == (1 << 20) + 4095


def test_find_knows_only_what_lies_in_one_block() -> None:
    heap = Heap()
    heap.add(1000, 100)
    heap.add(1100, 100)
    assert heap.find(1100, 100) == Place(1, 0, 100)
    assert heap.find(1050, 100) is None
    assert heap.find(999, 1) is None


# -- joining ----------------------------------------------------------------------------------------------------


def test_join_starts_once_and_all_agree() -> None:
    world = World(3)
    assert world.join() == [None] * 3
    assert world.join() == [None] * 3, "a second group of the same ranks"
    assert world.join([2, 0]) == [None] * 2, "a smaller one, in another order"
    assert len(world.started) == 3
    assert len(set(world.started)) == 1
    runtimes = [info.runtime for info in world.info]
    assert [runtime.pe for runtime in runtimes] == [0, 1, 2]
    assert len({runtime.heap_id for runtime in runtimes}) == 1


def test_before_joining_there_is_no_transport() -> None:
    with pytest.raises(TransportUnavailable, match="join"):
        World(1).transport(0)
    with pytest.raises(TransportUnavailable, match="join"):
        World(1).info[0].allocate(1, CPU)


def test_one_rank_that_cannot_stops_all_before_anything_starts() -> None:
    world = World(3)
    world.obstacles[1] = "the Python package nvshmem is missing: pip install it"
    for error in world.join():
        assert isinstance(error, TransportUnavailable)
        assert "rank 1: the Python package nvshmem is missing: pip install it" in str(error)
    assert not world.started
    world.obstacles.clear()
    assert world.join() == [None] * 3, "nothing was spoilt"


def test_a_rank_that_comes_later_is_refused_everywhere() -> None:
    world = World(3)
    assert world.join([0, 1]) == [None] * 2
    for error in world.join():
        assert isinstance(error, TransportUnavailable)
        assert "no new members" in str(error)
        assert "[2]" in str(error)
    assert world.join([0, 1]) == [None] * 2


def test_ranks_of_two_jobs_are_refused() -> None:
    worlds = World(1), World(1)
    assert [world.join() for world in worlds] == [[None], [None]]
    mixed = World(2)
    mixed.info = [world.info[0] for world in worlds]
    for error in mixed.join():
        assert isinstance(error, TransportUnavailable)
        assert "different NVSHMEM jobs" in str(error)


def test_no_peer_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkv_nvshmem.runtime._rdma_devices", list)
    world = World(2)
    world.unreachable.add("gpu1")
    for error in world.join():
        assert isinstance(error, TransportUnavailable)
        assert "no peer access" in str(error)
        assert "rank 1" in str(error)
    assert not world.started
    # The control: where NVSHMEM may go over InfiniBand, it is its own business.
    monkeypatch.setattr("torchkv_nvshmem.runtime._rdma_devices", lambda: ["mlx5_0"])
    assert world.join() == [None] * 2


def test_a_start_that_fails_on_one_rank_fails_on_all_and_for_good() -> None:
    world = World(2)
    world.start_fails = True
    for error in world.join():
        assert isinstance(error, TransportUnavailable)
        assert "rank 1: the driver of PE 1 is too old" in str(error)
    world.start_fails = False
    for error in world.join():
        assert isinstance(error, TransportUnavailable)
        assert "earlier" in str(error)
    with pytest.raises(TransportUnavailable, match="earlier"):
        world.transport(0)


@pytest.mark.parametrize("reserve", [-1, (1 << 46) + 1])
def test_reserves_are_bounded(reserve: int) -> None:
    for error in World(2).join(reserve=reserve):
        assert isinstance(error, TransportUnavailable)
        assert str(reserve) in str(error)


def test_an_exchange_names_the_rank_that_did_not_come() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    store.set("torchkv-nvshmem/0/0", "x")
    with pytest.raises(TransportUnavailable, match="rank 2 of 3"):
        through_store(store, rank=1, size=3)(b"hello")


def test_exchanges_leave_little_in_the_store() -> None:
    store = dist.HashStore()
    exchange = through_store(store, rank=0, size=1)
    for i in range(20):
        assert exchange(b"%d" % i) == [b"%d" % i]
    assert store.num_keys() <= 3


def test_exchanges_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rounds, each rank at its own speed: no rank sees bytes of another round."""
    world = World(3)

    def call(rank: int, party: Any) -> list[list[bytes]]:
        return [list(party.exchange(b"%d %d" % (i, rank))) for i in range(200)]

    want = [[b"%d %d" % (i, rank) for rank in range(3)] for i in range(200)]
    assert world.together(call) == [want] * 3


# -- settings and what is installed -----------------------------------------------------------------------------


def test_settings_are_written_and_the_users_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKV_INTERFACE", "lo")
    environment.prepare(3 << 30, 80 << 30)
    assert int(os.environ["NVSHMEM_SYMMETRIC_SIZE"]) >= (3 << 30) + environment.OWN_NEEDS
    assert int(os.environ["NVSHMEM_MAX_MEMORY_PER_GPU"]) >= 80 << 30
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"
    assert os.environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "=lo"
    users = {"SYMMETRIC_SIZE": "5G", "MAX_MEMORY_PER_GPU": "7G", "DISABLE_NVLS": "0", "BOOTSTRAP_UID_SOCK_IFNAME": "x"}
    for name, value in users.items():
        monkeypatch.setenv(f"NVSHMEM_{name}", value)
    environment.prepare(3 << 30, 80 << 30)
    assert {name: os.environ[f"NVSHMEM_{name}"] for name in users} == users


@pytest.mark.parametrize(
    ("text", "limit"), [("1024", 1024), ("3K", 3072), ("2g", 2 << 30), ("1T", 1 << 40), ("1.5G", None), ("", None)]
)
def test_the_heaps_limit(monkeypatch: pytest.MonkeyPatch, text: str, limit: int | None) -> None:
    monkeypatch.setenv("NVSHMEM_MAX_MEMORY_PER_GPU", text)
    assert environment.heap_limit() == limit


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Pretends that PyTorch was built for CUDA 13 with its pins; returns the installed versions, which tests change."""
    installed = {"nvidia-nvshmem-cu13": "3.4.5"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    pins = ["numpy", 'nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"']
    monkeypatch.setattr(metadata, "requires", lambda name: pins)

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


def test_versions_up_to_pytorchs_pin_are_taken(cuda: dict[str, str]) -> None:
    assert NVSHMEMTransport.available() is None
    cuda["nvidia-nvshmem-cu13"] = "3.3.20"
    assert NVSHMEMTransport.available() is None
    cuda.clear()
    assert NVSHMEMTransport.available() is None, "from a distribution that keeps no records"


@pytest.mark.parametrize("version", ["3.4.6", "3.10.0", "4.0"])
def test_a_library_newer_than_pytorchs_is_refused(cuda: dict[str, str], version: str) -> None:
    cuda["nvidia-nvshmem-cu13"] = version
    reason = NVSHMEMTransport.available()
    assert reason is not None
    assert version in reason
    assert 'pip install nvshmem4py-cu13 "nvidia-nvshmem-cu13==3.4.5"' in reason


def test_a_missing_package_is_named_with_the_line_that_mends_it(
    cuda: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = NVSHMEMTransport.available()
    assert reason is not None
    assert 'pip install nvshmem4py-cu13 "nvidia-nvshmem-cu13==3.4.5"' in reason


def test_no_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in str(NVSHMEMTransport.available())


def test_importing_the_backend_does_not_load_nvshmem() -> None:
    code = (
        "import sys, torchkv_nvshmem; torchkv_nvshmem.NVSHMEMTransport.available(); "
        "print([m for m in ('nvshmem', 'cuda.core') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# -- allocation --------------------------------------------------------------------------------------------------


def test_every_rank_sets_the_largest_aside() -> None:
    world = World(2)
    world.join()
    tensors = world.allocate({0: 5 * MIB, 1: 1000})
    assert [len(tensors[pe]) for pe in (0, 1)] == [5 * MIB, 1000]
    assert {heap[-1][2] for heap in world.heaps} == {6 * MIB}
    assert [info.runtime.find(tensors[pe]) for pe, info in enumerate(world.info)] == [
        Place(1, 0, 5 * MIB),
        Place(0, 0, 1000),  # there was room for it in the first block
    ]


def test_freed_memory_is_used_again_without_growing() -> None:
    world = World(2)
    world.join()
    first = world.allocate({0: 8 * MIB, 1: 8 * MIB})
    blocks = len(world.heaps[0])
    pages = first[0][100:200].view(10, 10)  # a view keeps the storage
    address = first[0].data_ptr()
    first.clear()
    gc.collect()
    assert world.info[0].runtime.heap.largest_free < 8 * MIB, "a view is still there"
    del pages
    gc.collect()
    second = world.allocate({0: 7 * MIB, 1: 8 * MIB})
    assert second[0].data_ptr() == address
    assert len(world.heaps[0]) == blocks
    world.allocate({0: 8 * MIB, 1: 8 * MIB})  # the control: with nothing free it grows
    assert len(world.heaps[0]) == blocks + 1


def test_memory_is_used_again_only_when_the_device_is_done_with_it() -> None:
    world = World(1)
    world.join(reserve=4 * MIB)
    runtime = world.info[0].runtime
    ran = []
    stream = runtime.gpu.stream()
    first = runtime.take(3 * MIB)
    cast(Any, stream).add(lambda: ran.append("a kernel that reads it"))
    del first
    gc.collect()
    assert not ran
    assert runtime.take(3 * MIB) is not None
    assert ran


def test_a_failed_join_leaves_no_group_to_allocate_in() -> None:
    world = World(2)
    world.join()
    world.obstacles[0] = "broken since"
    assert all(isinstance(error, TransportUnavailable) for error in world.join())
    with pytest.raises(TransportUnavailable, match="join"):
        world.info[1].allocate(1, CPU)


def test_nothing_is_a_fine_amount() -> None:
    world = World(2)
    world.join()
    tensors = world.allocate({0: 0, 1: 4 * MIB})
    assert [len(tensors[pe]) for pe in (0, 1)] == [0, 4 * MIB]


@pytest.mark.parametrize("nbytes", [-1, (1 << 46) + 1])
def test_impossible_amounts_are_refused_everywhere(nbytes: int) -> None:
    world = World(2)
    world.join()
    for error in world.allocate({0: 10, 1: nbytes}).values():
        assert isinstance(error, TransportUnavailable)
        assert f"rank 1: {nbytes}" in str(error)


def test_too_little_gpu_memory_is_refused_before_nvshmem_wrecks_its_heap() -> None:
    world = World(2)
    world.join()
    world.free[1] = 100 * MIB
    before = len(world.heaps[0])
    for error in world.allocate({0: 200 * MIB, 1: 1}).values():
        assert isinstance(error, TransportUnavailable)
        assert "rank 1" in str(error)
        assert str(100 * MIB) in str(error)
    assert len(world.heaps[0]) == before
    world.free[1] = 1 << 30
    assert isinstance(world.allocate({0: 20 * MIB, 1: 1})[0], torch.Tensor)


def test_the_users_limit_of_the_heap_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_MAX_MEMORY_PER_GPU", "1G")
    world = World(2)
    world.join()
    for error in world.allocate({0: 600 * MIB, 1: 1}).values():
        assert isinstance(error, TransportUnavailable)
        assert "NVSHMEM_MAX_MEMORY_PER_GPU" in str(error)


def test_a_full_heap_is_reported_with_its_variables() -> None:
    world = World(2)
    world.join()
    world.heap_full = True
    for error in world.allocate({0: 20 * MIB, 1: 1}).values():
        assert isinstance(error, TransportUnavailable)
        assert "NVSHMEM_SYMMETRIC_SIZE" in str(error)


def test_a_part_of_the_ranks_gets_what_is_there_but_cannot_grow() -> None:
    world = World(3)
    world.join(reserve=4 * MIB)
    assert all(isinstance(tensor, torch.Tensor) for tensor in world.allocate({0: MIB, 2: 2 * MIB}).values())
    for error in world.allocate({0: 20 * MIB, 2: 1}).values():
        assert isinstance(error, TransportUnavailable)
        assert "all 3 ranks" in str(error)


def test_other_devices_are_refused() -> None:
    world = World(1)
    world.join()
    with pytest.raises(TransportUnavailable, match="meta"):
        world.info[0].allocate(1, torch.device("meta"))
    transport = world.transport(0)
    with pytest.raises(TransportUnavailable, match="meta"):
        transport.allocate(1, torch.device("meta"))
    with pytest.raises(TransportUnavailable, match="meta"):
        transport.register(torch.empty(1, device="meta"))


def test_local_allocation_ends_with_the_reserve() -> None:
    world = World(1)
    world.join(reserve=4 * MIB)
    transport = world.transport(0)
    kept = transport.allocate(4 * MIB, CPU)
    assert world.info[0].runtime.find(kept) is not None
    with pytest.raises(TransportUnavailable, match="reserve="):
        transport.allocate(4 * MIB, CPU)


# -- two connected transports -----------------------------------------------------------------------------------


@dataclass
class Pair:
    """``a`` holds fresh random bytes, ``b`` poisoned ones, in regions of equal sizes."""

    world: World
    a: NVSHMEMTransport
    b: NVSHMEMTransport
    channel: Any
    source: list[np.ndarray]
    target: list[np.ndarray]
    before: list[np.ndarray]
    regions: list[Region]
    keep: list[Any] = field(default_factory=list)

    def finish(self, *operations: Completion, rounds: int = 10_000) -> list[KVError | None]:
        for _ in range(rounds):
            if all(operation.done for operation in operations):
                return [operation.error for operation in operations]
            self.a.progress()
        raise AssertionError("the operations do not end")

    def expect(self, given: Batch) -> None:
        """b holds what ``given`` says, every other byte is as it was, and so are a's."""
        want = [data.copy() for data in self.before]
        columns = (given.local_region, given.local_offset, given.remote_region, given.remote_offset, given.length)
        for local, local_offset, remote, remote_offset, length in zip(*(c.tolist() for c in columns), strict=True):
            for i in range(length):
                want[remote][remote_offset + i] = self.source[local][local_offset + i]
        for index, (have, wanted) in enumerate(zip(self.target, want, strict=True)):
            wrong = np.flatnonzero(have != wanted)
            assert not len(wrong), f"region {index}: {len(wrong)} wrong bytes, the first at {wrong[0]}"
        assert self.world.margins_intact()


def make_pair(*sizes: int) -> Pair:
    world = World(2)
    assert world.join() == [None, None]
    found = [world.allocate({0: size, 1: size}) for size in sizes]
    a, b = world.transport(0), world.transport(1)
    ours = [a.register(tensors[0]) for tensors in found]
    theirs = [b.register(tensors[1]) for tensors in found]
    source, target = ([tensors[pe].numpy() for tensors in found] for pe in (0, 1))
    for data, poisoned in zip(source, target, strict=True):
        data[:] = np.random.default_rng().integers(0, 256, len(data), dtype=np.uint8)
        poisoned[:] = POISON
    channel = a.connect(b.address(), [region.descriptor() for region in theirs])
    before = [data.copy() for data in target]
    return Pair(world, a, b, channel, source, target, before, ours, [found])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make_pair(64 * KIB, 10_000)
    yield made
    made.a.close()
    made.b.close()
    assert all(stream.closed for stream in made.world.streams)


def test_scattered_puts_are_exact(pair: Pair) -> None:
    rng = np.random.default_rng()
    places = rng.permutation(64)[:50]
    rows = [
        (0, int(rng.integers(0, 64 * KIB - 1024)), 0, int(p) * 1024 + 3, int(rng.integers(0, 1021))) for p in places
    ]
    rows += [(1, 17, 1, 4000, 5000), (0, 0, 1, 0, 1), (1, 9999, 1, 9999, 1)]
    given = batch(*rows)
    assert pair.finish(pair.channel.put(given), pair.channel.flush()) == [None, None]
    pair.expect(given)


def test_empty_spans_reach_nobody(pair: Pair) -> None:
    given = batch((0, 64 * KIB, 1, 0, 0), (0, 0, 1, 10_000, 0))
    assert pair.finish(pair.channel.put(given), pair.channel.put(batch()), pair.channel.flush()) == [None] * 3
    assert pair.world.puts == 0
    pair.expect(batch())


def test_the_comparison_notices_one_byte(pair: Pair) -> None:
    given = batch((0, 0, 0, 100, 1000))
    assert pair.finish(pair.channel.put(given), pair.channel.flush()) == [None, None]
    pair.target[0][600] ^= 1
    with pytest.raises(AssertionError, match="1 wrong bytes"):
        pair.expect(given)


def test_regions_at_unlike_places_reach_each_other() -> None:
    """Descriptors name block and offset, so a region may lie at different places of the heap on the two PEs."""
    made = make_pair(8 * KIB)
    extra = made.b.allocate(3000, CPU)
    extra.fill_(POISON)
    for data in (made.a.allocate(5 * KIB, CPU),):  # so that the next places differ
        made.keep.append(data)
    mine = made.a.allocate(3000, CPU)
    mine.copy_(torch.randint(0, 256, (3000,), dtype=torch.uint8))
    index = made.a.register(mine).index
    assert made.world.info[0].runtime.find(mine) != made.world.info[1].runtime.find(extra)
    channel = made.a.connect(made.b.address(), [made.b.register(extra).descriptor()])
    assert made.finish(channel.put(batch((index, 1, 0, 2, 2998))), channel.flush()) == [None, None]
    assert torch.equal(extra[2:], mine[1:2999])
    assert extra[:2].tolist() == [POISON] * 2
    made.expect(batch())


@pytest.mark.parametrize(
    "row",
    [
        (0, 64 * KIB, 0, 0, 1), (0, 64 * KIB - 1, 0, 0, 2), (0, -1, 0, 0, 1), (2, 0, 0, 0, 1), (-1, 0, 0, 0, 1),
        (0, 0, 1, 10_000, 1), (0, 0, 1, 9_999, 2), (0, 0, 0, -1, 1), (0, 0, 2, 0, 1), (0, 0, -1, 0, 1),
        (0, 8, 0, 8, -1), (0, 1, 0, 0, (1 << 63) - 1), (0, 0, 0, (1 << 63) - 1, 2), (0, -(1 << 63), 0, 0, 1),
    ],
)  # fmt: skip
def test_spans_outside_a_region_write_nothing(pair: Pair, row: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="span 1"):
        pair.channel.put(batch((0, 0, 0, 0, 4096), row))
    assert pair.finish(pair.channel.flush()) == [None]
    pair.expect(batch())
    assert pair.world.puts == 0


def test_malformed_batches_are_refused(pair: Pair) -> None:
    good = batch((0, 0, 0, 0, 1), (0, 1, 0, 1, 1))
    for broken in (good.remote_offset[:1], good.remote_offset.astype(np.float64), good.remote_offset.reshape(1, 2)):
        with pytest.raises(ProtocolError):
            pair.channel.put(Batch(good.local_region, good.local_offset, good.remote_region, broken, good.length))


def test_the_batch_may_change_after_put(pair: Pair) -> None:
    given = batch((0, 0, 0, 4096, 100), (0, 200, 0, 8192, 100))
    kept = Batch(*(getattr(given, name).copy() for name in Batch.__slots__))
    put = pair.channel.put(given)
    for name in Batch.__slots__:
        getattr(given, name)[:] = -1
    assert pair.finish(put, pair.channel.flush()) == [None, None]
    pair.expect(kept)


def test_a_put_is_done_only_when_the_stream_is_past_it(pair: Pair) -> None:
    pair.world.running = False
    put, flush = pair.channel.put(batch((0, 0, 0, 0, 64))), pair.channel.flush()
    for _ in range(5):
        pair.a.progress()
    assert (put.done, flush.done) == (False, False)
    assert pair.a.arm() is None, "there is work: no sleeping"
    with pytest.raises(ProtocolError, match="pending"):
        pair.a.deregister(pair.regions[0])
    pair.world.streams[pair.channel._stream.handle - 1].run(2)  # the copy, and the mark behind it
    pair.a.progress()
    assert (put.done, flush.done) == (True, False)
    pair.world.running = True
    assert pair.finish(flush) == [None]
    assert pair.world.quiets == 1
    assert pair.a.arm() is not None
    pair.a.deregister(pair.regions[0])
    with pytest.raises(ProtocolError, match="deregistered"):
        pair.channel.put(batch((0, 0, 0, 0, 1)))
    with pytest.raises(ProtocolError, match="not registered"):
        pair.a.deregister(pair.regions[0])


def test_cancel_stops_what_is_not_posted() -> None:
    made = make_pair(512 * KIB)
    made.world.running = False
    count = 16_384  # more than one window
    at = np.arange(count, dtype=np.int64) * 32
    zero = np.zeros(count, dtype=np.int64)
    put = made.channel.put(Batch(zero, at, zero, at, np.full(count, 32, dtype=np.int64)))
    flush = made.channel.flush()
    for _ in range(20):
        made.a.progress()
    posted = made.world.puts
    assert 0 < posted <= 4096, "what is on the stream cannot be cancelled, so it must be bounded"
    put.cancel()
    made.a.progress()
    assert not put.done, "what is on the stream can still land"
    made.world.running = True
    errors = made.finish(put, flush)
    assert isinstance(errors[0], TransferCancelled)
    assert errors[1] is None
    assert made.world.puts == posted
    made.expect(batch(*((0, 32 * i, 0, 32 * i, 32) for i in range(posted))))
    put.cancel()
    assert isinstance(put.error, TransferCancelled)
    after = batch((0, 0, 0, 100_000, 4096))  # the channel lives on
    made.before = [data.copy() for data in made.target]
    assert made.finish(made.channel.put(after), made.channel.flush()) == [None, None]
    made.expect(after)


def test_views_are_the_peers_memory(pair: Pair) -> None:
    view = pair.channel.view(1)
    assert view is not None
    assert (view.nbytes, view.device) == (10_000, CPU)
    assert pair.channel.why_no_view(1) == ""
    data = np.random.default_rng().integers(0, 256, 100, dtype=np.uint8)
    ctypes.memmove(view.ptr + 77, data.ctypes.data, 100)
    assert (pair.target[1][77:177] == data).all()
    pair.target[1][77:177] = POISON
    pair.expect(batch())
    for region in (-1, 2):
        with pytest.raises(ProtocolError):
            pair.channel.view(region)


def test_where_there_is_no_peer_access_puts_go_and_views_do_not() -> None:
    made = make_pair(8 * KIB)
    made.world.unmapped.add((0, 1))
    channel = made.a.connect(made.b.address(), [made.b._regions[0].descriptor()])
    assert channel.view(0) is None
    assert "network only" in channel.why_no_view(0)
    assert (channel.link, made.channel.link) == ("nvshmem/remote", "nvshmem/p2p")
    given = batch((0, 5, 0, 50, 1000))
    assert made.finish(channel.put(given), channel.flush()) == [None, None]
    made.expect(given)


def test_an_engines_own_memory_has_views_but_no_puts(pair: Pair) -> None:
    own = shared_memory.allocate(4096)
    own.fill_(POISON)
    region = pair.b.register(own)
    channel = pair.a.connect(pair.b.address(), [region.descriptor(), pair.b._regions[0].descriptor()])
    view = channel.view(0)
    assert view is not None
    ctypes.memset(view.ptr + 10, 1, 5)
    assert own[8:17].tolist() == [POISON] * 2 + [1] * 5 + [POISON] * 2
    with pytest.raises(TransportUnavailable, match="remote region 0 of span 1 lies outside symmetric memory"):
        channel.put(batch((0, 0, 1, 0, 8), (0, 0, 0, 0, 8)))
    mine = pair.a.register(shared_memory.allocate(4096))
    with pytest.raises(TransportUnavailable, match="local region"):
        channel.put(batch((mine.index, 0, 1, 0, 8)))
    assert pair.finish(channel.flush()) == [None]
    pair.expect(batch())
    with pytest.raises(TransportUnavailable, match="cannot be shared"):
        pair.b.register(torch.empty(100, dtype=torch.uint8))


def test_a_device_that_fails_ends_operations_with_the_reason(pair: Pair) -> None:
    pair.world.mark_errors.append(TransportUnavailable("an illegal address was used"))
    put, flush = pair.channel.put(batch((0, 0, 0, 0, 8))), pair.channel.flush()
    errors = pair.finish(put, flush)
    assert all("illegal address" in str(error) for error in errors)
    with pytest.raises(TransportUnavailable, match="illegal address"):
        pair.channel.put(batch((0, 0, 0, 0, 8)))


def test_marks_that_are_all_taken_are_waited_for(pair: Pair) -> None:
    pair.world.mark_errors += [ProtocolError("too many under way", retryable=True)] * 3
    given = batch((0, 0, 0, 0, 8))
    put = pair.channel.put(given)
    pair.a.progress()
    assert not put.done
    assert pair.finish(put, pair.channel.flush()) == [None, None]
    assert pair.world.puts == 1
    pair.expect(given)


# -- endings ----------------------------------------------------------------------------------------------------


def test_close_ends_what_is_pending_and_is_idempotent(pair: Pair) -> None:
    pending = pair.channel.put(batch((0, 0, 0, 0, 4096)))
    pair.channel.close()
    pair.channel.close()
    assert pending.done
    assert isinstance(pending.error, PeerLost)
    for call in (lambda: pair.channel.put(batch()), pair.channel.flush):
        with pytest.raises(ProtocolError, match="closed"):
            call()
    with pytest.raises(ProtocolError, match="closed"):
        pair.channel.view(0)
    pair.a.close()
    pair.a.close()
    with pytest.raises(ProtocolError, match="closed"):
        pair.a.progress()


def test_a_closed_transport_leaves_nothing(pair: Pair) -> None:
    free = pair.world.info[0].runtime.heap.largest_free
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        again = pair.world.transport(0)
        again.connect(pair.b.address(), []).flush()
        again.progress()
        again.close()
        del again
        gc.collect()
    assert pair.world.info[0].runtime.heap.largest_free == free
    assert len(os.listdir("/proc/self/fd")) == fds


class Doomed:
    """A process that can be killed; the peer's address is changed to name it."""

    def __enter__(self) -> Doomed:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        return self

    def address_of(self, transport: NVSHMEMTransport) -> bytes:
        pid = self.process.pid
        whole = wire.unpack(transport.address(), AddressBlob)
        return wire.pack(
            msgspec.structs.replace(whole, process=ProcessId(whole.process.host, pid, process_started(pid)))
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_dead_peer_is_lost_and_drained(pair: Pair) -> None:
    with Doomed() as doomed:
        channel = pair.a.connect(doomed.address_of(pair.b), [pair.b._regions[0].descriptor()])
        assert pair.finish(channel.flush()) == [None]
        assert not channel.drained
        pair.world.running = False
        put, flush = channel.put(batch((0, 0, 0, 0, 64))), channel.flush()
        pair.a.progress()
        doomed.kill()
        pair.a.progress()
        assert not put.done, "the copy is on the stream still"
        pair.world.running = True
        assert [type(error) for error in pair.finish(put, flush)] == [PeerLost, PeerLost]
        assert channel.drained
        for call in (lambda: channel.put(batch()), channel.flush):
            with pytest.raises(PeerLost):
                call()
    assert pair.finish(pair.channel.flush()) == [None], "the other channel lives"


def test_an_idle_channel_notices_too(pair: Pair) -> None:
    with Doomed() as doomed:
        channel = pair.a.connect(doomed.address_of(pair.b), [])
        doomed.kill()
        with pytest.raises(PeerLost):
            channel.put(batch())


def test_of_a_peer_on_another_host_nothing_is_known(pair: Pair) -> None:
    whole = wire.unpack(pair.b.address(), AddressBlob)
    gone = msgspec.structs.replace(whole, process=ProcessId("another", (1 << 31) - 1, 0))
    channel = pair.a.connect(wire.pack(gone), [])
    assert not channel.drained
    assert pair.finish(channel.flush()) == [None]


def test_a_dead_peer_that_is_reached_over_the_network_only_is_never_drained() -> None:
    made = make_pair(4096)
    made.world.unmapped.add((0, 1))
    with Doomed() as doomed:
        channel = made.a.connect(doomed.address_of(made.b), [])
        doomed.kill()
        with pytest.raises(PeerLost):
            channel.flush()
        assert not channel.drained


# -- bytes from the network --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["address", "region"])
def test_damaged_bytes_do_not_connect(pair: Pair, what: str) -> None:
    address, region = pair.b.address(), pair.b._regions[0].descriptor()

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        whole = address if what == "address" else region
        kind = data.draw(st.sampled_from(["garbage", "cut", "flipped", "extended"]))
        if kind == "garbage":
            bad = data.draw(st.binary(max_size=600))
        elif kind == "cut":
            bad = whole[: data.draw(st.integers(0, len(whole) - 1))]
        elif kind == "flipped":
            bit = data.draw(st.integers(0, 8 * len(whole) - 1))
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << (bit % 8)
            bad = bytes(flipped)
        else:
            bad = whole + data.draw(st.binary(min_size=1, max_size=64))
        with pytest.raises(ProtocolError):
            pair.a.connect(bad if what == "address" else address, [bad if what == "region" else region])

    attempt()
    pair.a.connect(address, [region])


def test_an_address_is_no_region(pair: Pair) -> None:
    with pytest.raises(ProtocolError):
        pair.a.connect(pair.b._regions[0].descriptor(), [])
    with pytest.raises(ProtocolError):
        pair.a.connect(pair.b.address(), [pair.b.address()])


@pytest.mark.parametrize(
    "change",
    [
        {"pe": -1}, {"pe": 0}, {"pe": 1 << 20}, {"block": -2}, {"block": 9}, {"block": 1 << 20}, {"offset": -1},
        {"offset": 2 * MIB - 100}, {"offset": (1 << 46) + 1}, {"nbytes": 64 * MIB}, {"nbytes": -1},
        {"heap": b"x" * 17}, {"share": b"x" * 1025},
    ],
)  # fmt: skip
def test_every_field_of_a_region_is_bounded_even_under_a_right_digest(pair: Pair, change: dict[str, Any]) -> None:
    good = wire.unpack(pair.b._regions[0].descriptor(), RegionBlob)
    with pytest.raises(ProtocolError):
        pair.a.connect(pair.b.address(), [wire.pack(msgspec.structs.replace(good, **change))])


@pytest.mark.parametrize(
    "change",
    [
        {"pe": 2}, {"pe": -1}, {"process": ProcessId("x", 0, 0)}, {"process": ProcessId("x", 1 << 31, 0)},
        {"process": ProcessId("x", 1, -1)}, {"process": ProcessId("x" * 65, 1, 0)},
    ],
)  # fmt: skip
def test_every_field_of_an_address_is_bounded_too(pair: Pair, change: dict[str, Any]) -> None:
    good = wire.unpack(pair.b.address(), AddressBlob)
    with pytest.raises(ProtocolError):
        pair.a.connect(wire.pack(msgspec.structs.replace(good, **change)), [])


def test_another_jobs_members_are_out_of_reach(pair: Pair) -> None:
    stranger = make_pair(4096)
    with pytest.raises(TransportUnavailable, match="another NVSHMEM job"):
        pair.a.connect(stranger.b.address(), [])
    with pytest.raises(TransportUnavailable, match="another NVSHMEM job"):
        pair.a.connect(pair.b.address(), [stranger.b._regions[0].descriptor()])


def test_a_view_of_less_memory_than_published_is_refused(pair: Pair) -> None:
    good = wire.unpack(pair.b.register(shared_memory.allocate(4096)).descriptor(), RegionBlob)
    channel: Channel = pair.a.connect(pair.b.address(), [wire.pack(msgspec.structs.replace(good, nbytes=8192))])
    with pytest.raises(ProtocolError, match="8192"):
        channel.view(0)


def test_published_bytes_keep_their_limits(pair: Pair) -> None:
    assert len(pair.b.address()) <= 16 * KIB
    assert all(len(region.descriptor()) <= 4 * KIB for region in pair.b._regions.values())
