"""Device memory against a driver in Python: who may share what, refcounts, bounds, and hostile descriptors."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.fakes.cuda_driver import Code, FakeDriver, FakeTensor, install
from torchkv.cuda import driver, ipc
from torchkv.errors import KVError, ProtocolError, TransportUnavailable

GPU0, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch, FakeDriver())


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `open_share` take this process for another one."""
    return lambda: monkeypatch.setattr(os, "getpid", lambda: 1 << 20)


def with_fields(share: bytes, **changes: object) -> bytes:
    fields = msgspec.msgpack.decode(share)
    assert set(changes) <= set(fields)
    assert all(fields[name] != value for name, value in changes.items())
    return msgspec.msgpack.encode({**fields, **changes})


def test_without_the_bindings_or_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    def no_libcuda(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 not found")

    driver.driver.cache_clear()
    try:
        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(TransportUnavailable, match="pip install cuda-bindings"):
            ipc.gpu_facts()
        monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(cuInit=no_libcuda))
        with pytest.raises(TransportUnavailable, match="no CUDA driver"):
            ipc.allocate(5, GPU0)
        none = SimpleNamespace(cuInit=lambda flags: (Code.CUDA_ERROR_INVALID_DEVICE,))
        monkeypatch.setattr(importlib, "import_module", lambda name: none)
        with pytest.raises(TransportUnavailable, match=r"initialising CUDA.*INVALID_DEVICE"):
            ipc.make_current(torch.device("cuda"))
    finally:
        driver.driver.cache_clear()


@pytest.mark.parametrize("nbytes", [0, -1, (1 << 46) + 1])
def test_allocate_refuses_sizes_out_of_range(nbytes: int, fake: FakeDriver) -> None:
    with pytest.raises(ProtocolError, match=str(nbytes)):
        ipc.allocate(nbytes, GPU0)
    assert not fake.allocations


def test_other_devices_are_refused(fake: FakeDriver) -> None:
    with pytest.raises(ProtocolError, match="cpu"):
        ipc.allocate(5, torch.device("cpu"))
    with pytest.raises(ProtocolError, match="cpu"):
        ipc.check_shareable(torch.zeros(3))
    with pytest.raises(TransportUnavailable, match="cuda:2"):
        ipc.allocate(5, torch.device("cuda", 2))


def test_out_of_memory_empties_torchs_cache_first_and_says_what_is_free(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(fake.free))
    fake.free = 3 << 20
    with pytest.raises(TransportUnavailable, match=f"{4 << 20} bytes.*{3 << 20} of"):
        ipc.allocate((2 << 20) + 1, GPU0)
    assert emptied == [3 << 20]
    assert not fake.allocations
    assert fake.contexts == []
    assert fake.mode == "global"


def test_a_block_is_adopted_whole_and_freed_with_its_storage(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    adopted: list[Any] = []

    def adopt(block: Any, device: torch.device) -> Any:
        assert device == GPU1
        adopted.append(block)
        return SimpleNamespace(data_ptr=lambda: block.__cuda_array_interface__["data"][0])

    monkeypatch.setattr(torch, "as_tensor", adopt)
    ipc.allocate(100, GPU1)
    (block,) = fake.allocations.values()
    # Whole granules: the driver would put a smaller allocation next to others, and IPC would export those as well.
    assert (block.size, block.device) == (2 << 20, 1)
    assert adopted[0].__cuda_array_interface__["shape"] == (100,)
    gc.collect()
    assert fake.allocations
    adopted.clear()
    gc.collect()
    assert not fake.allocations


class Owner:
    pass


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], list[Any]]:
    """Makes an allocation that is freed with the returned list: a reference cycle, so by the garbage collector."""

    def adopt(block: Any, device: torch.device) -> Any:
        return SimpleNamespace(data_ptr=lambda: block.__cuda_array_interface__["data"][0])

    def make(device: torch.device) -> list[Any]:
        cycle: list[Any] = [ipc.allocate(100, device)]
        cycle.append(cycle)
        return cycle

    monkeypatch.setattr(torch, "as_tensor", adopt)
    monkeypatch.setattr(ipc, "_deferring", {})
    monkeypatch.setattr(ipc, "_deferred", {})
    return make


def test_finalizers_defer_frees_as_long_as_an_owner_lives(
    fake: FakeDriver, blocks: Callable[[torch.device], list[Any]]
) -> None:
    """Freeing waits for all streams; the thread may hold a lock that is needed to release one of them."""
    owners = [Owner(), Owner()]
    ipc.defer_frees(owners[0], 0)
    ipc.defer_frees(owners[1], 0)
    for device in (GPU0, GPU1):
        blocks(device)
        gc.collect()
    assert [block.device for block in fake.allocations.values()] == [0], "the other GPU has no owner"
    ipc.run_deferred_frees(1)
    assert fake.allocations
    ipc.run_deferred_frees(0)
    assert not fake.allocations
    ipc.stop_deferring(owners[0], 0)
    ipc.stop_deferring(owners[0], 0)
    blocks(GPU0)
    gc.collect()
    assert fake.allocations
    owners.clear()
    blocks(GPU0)
    gc.collect()
    assert not fake.allocations, "with its owner gone, the next finalizer also frees what was deferred"


def test_what_was_deferred_is_freed_before_memory_runs_out(
    fake: FakeDriver, blocks: Callable[[torch.device], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    owner = Owner()
    ipc.defer_frees(owner, 0)
    blocks(GPU0)
    gc.collect()
    assert len(fake.allocations) == 1
    fake.free = 0
    kept = blocks(GPU0)
    assert len(fake.allocations) == 1
    del owner, kept
    gc.collect()
    assert not fake.allocations


def test_memory_that_ipc_cannot_export_is_refused_with_the_remedy(fake: FakeDriver) -> None:
    virtual = fake.add(4096, ipc=False)
    for call in (ipc.check_shareable, ipc.share):
        with pytest.raises(TransportUnavailable, match=r"expandable_segments:False"):
            call(FakeTensor(virtual.base, 4096))
    plain = fake.add(4096)
    with pytest.raises(TransportUnavailable, match="more than one allocation"):
        ipc.share(FakeTensor(plain.base + 1, 4096))
    ipc.check_shareable(FakeTensor(plain.base, 4096))
    with pytest.raises(ProtocolError, match="no memory"):
        ipc.check_shareable(FakeTensor(plain.base, 0))


def share(base: int, nbytes: int, device: int = 0) -> bytes:
    return ipc.share(FakeTensor(base, nbytes, device))


def test_storages_of_one_allocation_share_one_mapping(fake: FakeDriver, asynchronous: Any) -> None:
    block = fake.add(1 << 20)
    shares = [share(block.base + offset, nbytes) for offset, nbytes in ((0, 100), (512, 1000), (1 << 19, 1 << 19))]
    assert all(len(s) <= ipc.MAX_SHARE for s in shares)
    asynchronous()
    first, second, third = (ipc.open_share(s, GPU0) for s in shares)
    assert len(fake.opened) == 1
    assert (second.ptr - first.ptr, third.ptr - first.ptr) == (512, 1 << 19)
    assert (second.nbytes, second.device) == (1000, GPU0)
    other = ipc.open_share(shares[0], GPU1)
    assert sorted(device for _, device in fake.opened.values()) == [0, 1]
    other.close()
    first.close()
    first.close()
    second.close()
    assert len(fake.opened) == 1
    del third
    gc.collect()
    assert not fake.opened
    again = ipc.open_share(shares[1], GPU0)
    assert len(fake.opened) == 1
    again.close()
    assert not fake.opened
    assert fake.contexts == []
    assert fake.mode == "global"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1 << 20), (1, 4096), (4096, 1), (1 << 46, 1), (0, 1 << 46)])
@pytest.mark.parametrize("own", [False, True])
def test_claims_beyond_the_allocation_are_refused(
    offset: int, nbytes: int, own: bool, fake: FakeDriver, asynchronous: Any
) -> None:
    block = fake.add(4096)
    fake.add(4096)  # a neighbour
    good = share(block.base + 5, 4000)
    bad = with_fields(good, offset=offset, nbytes=nbytes)
    if not own:
        asynchronous()
        good = with_fields(good, pid=77)
    with pytest.raises(ProtocolError, match="claimed of an allocation of 4096"):
        ipc.open_share(bad, GPU0)
    assert not fake.opened
    mapping = ipc.open_share(good, GPU0)  # negative control
    mapping.close()
    assert not fake.opened


def test_own_memory_is_its_plain_address(fake: FakeDriver) -> None:
    block = fake.add(4096)
    described = share(block.base + 64, 1000)
    mapping = ipc.open_share(described, GPU0)
    assert (mapping.ptr, mapping.nbytes) == (block.base + 64, 1000)
    assert not fake.enabled
    for _ in range(2):  # the second time it is enabled already
        across = ipc.open_share(described, GPU1)
        assert (across.ptr, across.device) == (block.base + 64, GPU1)
    assert fake.enabled == {(1, 0)}
    mapping.close()
    assert not fake.opened


def test_own_memory_that_was_freed_is_refused_even_if_its_address_is_used_again(fake: FakeDriver) -> None:
    block = fake.add(4096)
    stale = share(block.base, 4096)
    fake.cuMemFree(block.base)
    with pytest.raises(TransportUnavailable, match="freed"):
        ipc.open_share(stale, GPU0)
    fake.add(4096, at=block.base)
    with pytest.raises(TransportUnavailable, match="freed"):
        ipc.open_share(stale, GPU0)
    fresh = share(block.base, 4096)
    assert ipc.open_share(fresh, GPU0).ptr == block.base
    with pytest.raises(TransportUnavailable, match="never shared"):
        ipc.open_share(with_fields(fresh, handle=os.urandom(64)), GPU0)


def test_reasons_why_memory_cannot_be_reached(fake: FakeDriver, asynchronous: Any) -> None:
    block = fake.add(4096)
    described = share(block.base, 4096)
    asynchronous()
    with pytest.raises(TransportUnavailable, match="another host"):
        ipc.open_share(with_fields(described, host=os.urandom(32)), GPU0)
    fake.peers = False
    with pytest.raises(TransportUnavailable, match=r"cuda:1 has no peer access.*cuda:0.*nvidia-smi"):
        ipc.open_share(described, GPU1)
    ipc.open_share(described, GPU0).close()
    # Whether a GPU that only the owner sees can be reached is left to the driver.
    ipc.open_share(with_fields(described, gpu=b"x" * 16), GPU1).close()
    with pytest.raises(TransportUnavailable, match=r"INVALID_HANDLE.*owner must be alive"):
        ipc.open_share(with_fields(described, handle=os.urandom(64)), GPU0)
    assert not fake.opened


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 31},
        {"host": b""},
        {"host": b"h" * 65},
        {"gpu": b"g" * 15},
        {"handle": b"h" * 63},
        {"handle": b"h" * 65},
        {"handle": 7},
        {"offset": -1},
        {"offset": (1 << 46) + 1},
        {"offset": 1.5},
        {"nbytes": 0},
        {"nbytes": (1 << 46) + 1},
    ],
)
def test_fields_out_of_range_are_refused(changes: dict[str, Any], fake: FakeDriver) -> None:
    described = share(fake.add(4096).base, 4096)
    with pytest.raises(ProtocolError):
        ipc.open_share(with_fields(described, **changes), GPU0)
    fields = msgspec.msgpack.decode(described)
    with pytest.raises(ProtocolError):
        ipc.open_share(msgspec.msgpack.encode({**fields, "more": 1}), GPU0)
    with pytest.raises(ProtocolError):
        ipc.open_share(msgspec.msgpack.encode({k: v for k, v in fields.items() if k not in changes}), GPU0)
    with pytest.raises(ProtocolError, match="limit"):
        ipc.open_share(described + b"\0" * 512, GPU0)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=600))
def test_garbage_is_refused(garbage: bytes, fake: FakeDriver) -> None:
    with pytest.raises(ProtocolError):
        ipc.open_share(garbage, GPU0)
    assert not fake.opened


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_wrong_byte_never_maps_more_than_the_allocation(data: st.DataObject, fake: FakeDriver) -> None:
    block = fake.add(4096)
    described = bytearray(share(block.base, 4096))
    position = data.draw(st.integers(0, len(described) - 1))
    described[position] ^= data.draw(st.integers(1, 255))
    try:
        mapping = ipc.open_share(bytes(described), GPU0)
    except KVError:
        assert not fake.opened
        return
    inside = fake._around(mapping.ptr)
    assert inside is not None
    assert mapping.ptr + mapping.nbytes <= inside.base + inside.size
    mapping.close()
    assert not fake.opened


def test_facts_about_gpus(fake: FakeDriver) -> None:
    fake.peers = False
    first, second = ipc.gpu_facts()
    assert (first.index, first.name, first.total_nbytes) == (0, "Fake 0", 1 << 37)
    assert first.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert (first.peers, second.peers) == ((True, False), (False, True))
