"""What the UCX transport decides about device memory, as far as that can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torchkv_ucx import UCXTransport, gpu, libucp, views, wire
from torchkv_ucx.channel import UCXChannel
from torchkv_ucx.libucp import HOST, MEMORY_TYPES, lanes_for, request_params
from torchkv_ucx.operation import PutOperation, VectoredPut
from torchkv_ucx.spans import LocalRegions, RemoteRegions, resolve

from torchkv.cuda import ipc
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.testing.pair import columns
from torchkv.transport import Batch

CUDA = MEMORY_TYPES["cuda"]
GPU = torch.device("cuda", 0)

# -- lanes --------------------------------------------------------------------------------------------------------

_LANES = """
#                 lane[0]:  1:tcp/lo.0 md[1]            -> addr[0].md[1]/tcp/sysdev[255] seg 8192 rma_bw#1 am wireup
#                 lane[1]:  4:cma/memory.0 md[4]        -> addr[1].md[4]/cma/sysdev[255] seg 0 rma_bw#0
"""
_DEVICE_LANE = """
#                 lane[2]:  6:cuda_ipc/cuda.0 md[6]     -> addr[2].md[6]/cuda_ipc/sysdev[3] seg 0 rma_bw#2
"""


def test_the_link_is_the_one_that_carries_this_kind_of_memory() -> None:
    assert lanes_for(_LANES + _DEVICE_LANE, "cuda") == "cuda_ipc/cuda"
    assert lanes_for(_LANES + _DEVICE_LANE, "cpu") == "tcp/lo+cma/memory"
    assert lanes_for(_LANES, "cuda") == "none for cuda memory"
    assert lanes_for("", "cuda") == lanes_for("", "cpu") == ""
    assert lanes_for(_DEVICE_LANE.replace("cuda_ipc/cuda.0", "rc_mlx5/mlx5_0:1.0"), "cuda") == "rc_mlx5/mlx5_0:1"


def test_contexts_without_a_lane_for_device_memory_are_known() -> None:
    resources = (
        "#\n#      resource 0  :  md 0  dev 0  flags -- self/memory\n#      resource 4  :  md 4  -- cma/memory\n"
    )
    device = resources + "#      resource 5  :  md 5  dev 3  flags -- cuda_ipc/cuda\n"
    assert "cma, self" in gpu.why_no_lane(resources, (1, 21, 0))
    assert gpu.why_no_lane(device, (1, 21, 0)) == ""
    assert "1.22.0 hangs" in gpu.why_no_lane(device, (1, 22, 0))
    assert gpu.why_no_lane(device, (1, 22, 1)) == ""


def test_the_version_is_that_of_the_ucx_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    UCXTransport().close()  # loads it
    assert libucp.load().version >= (1, 19, 0)


# -- batches -------------------------------------------------------------------------------------------------------


def _tables() -> tuple[LocalRegions, RemoteRegions]:
    """Region 0 on the host and region 1 on the device, on both sides; local region 2 cannot be put."""
    local = LocalRegions()
    for memory_type, reason in ((HOST, ""), (CUDA, ""), (CUDA, "no lane for it")):
        local.add(1 << 20, 4096, 7, memory_type, reason)
    kinds = np.array([HOST, CUDA], dtype=np.int64)
    remote = RemoteRegions(np.array([1 << 30] * 2), np.array([4096] * 2), np.array([8, 9]), kinds)
    return local, remote


@pytest.mark.parametrize(("region", "memory_type"), [(0, HOST), (1, CUDA)])
def test_puts_name_the_kind_of_their_memory(region: int, memory_type: int) -> None:
    spans = resolve(Batch(*columns((region, 0, region, 0, 8), (region, 8, region, 8, 8))), *_tables(), "peer")
    assert spans.memory_type == memory_type
    put = PutOperation(SimpleNamespace(), "put", spans)  # never stepped
    assert put._params[6] == request_params(memory_type)[6] == memory_type


@pytest.mark.parametrize("second", [(0, 0, 1, 0, 8), (1, 0, 0, 0, 8), (1, 0, 1, 0, 8)])
def test_batches_that_mix_kinds_of_memory_are_refused(second: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ProtocolError, match=r"span 1 .*cuda"):
        resolve(Batch(*columns((0, 0, 0, 0, 8), second)), *_tables(), "peer")


def test_regions_that_cannot_be_put_say_why() -> None:
    local, remote = _tables()
    with pytest.raises(TransportUnavailable, match="local region 2: no lane for it"):
        resolve(Batch(*columns((1, 0, 1, 0, 8), (2, 0, 1, 8, 8))), local, remote, "peer")
    assert len(resolve(Batch(*columns((2, 0, 1, 8, 0))), local, remote, "peer").length) == 1  # nothing to put
    remote.no_put[1] = "its owner cannot"
    with pytest.raises(TransportUnavailable, match="remote region 1: its owner cannot"):
        resolve(Batch(*columns((1, 0, 1, 0, 8))), local, remote, "peer")


# -- bytes from the network ------------------------------------------------------------------------------------------

_DEVICE = wire.RegionBlob(0x7F00_0000_0000, 8192, b"", b"share", "cuda")
_HOST = wire.RegionBlob(0x7F00_0000_0000, 8192, b"key", b"")


def test_device_regions_survive_the_trip_with_and_without_a_key() -> None:
    for rkey in (b"", b"key"):
        blob = msgspec.structs.replace(_DEVICE, rkey=rkey, base=1 << 50)
        assert wire.unpack_region(wire.pack(blob)) == blob


@pytest.mark.parametrize("change", [{"share": b""}, {"device": "meta"}, {"device": "CUDA"}, {"base": 1 << 57}])
def test_device_regions_are_bounded(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_region(wire.pack(msgspec.structs.replace(_DEVICE, **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 0},
        {"token": b"short"},
        {"token_at": 1 << 48},
        {"worker": b"x" * 8193},
        {"probes": (b"",)},
        {"probes": (b"x" * 1025,)},
        {"probes": (b"x",) * 17},
    ],
)
def test_addresses_are_bounded(change: dict[str, Any]) -> None:
    good = wire.AddressBlob(b"worker", 1, 4096, bytes(16), (b"key",) * 16)
    assert wire.unpack_address(wire.pack(good)) == good
    with pytest.raises(ProtocolError):
        wire.unpack_address(wire.pack(msgspec.structs.replace(good, **change)))


# -- views ---------------------------------------------------------------------------------------------------------


class _Mapping:
    def __init__(self, nbytes: int) -> None:
        self.ptr, self.nbytes, self.closed = 0x1000, nbytes, False

    def close(self) -> None:
        self.closed = True


def test_views_of_device_memory_are_for_the_writers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[bytes, torch.device, _Mapping]] = []

    def open_share(share: bytes, device: torch.device) -> _Mapping:
        if share == b"far":
            raise TransportUnavailable("no peer access")
        opened.append((share, device, _Mapping(4096 if share == b"short" else 8192)))
        return opened[-1][2]

    monkeypatch.setattr(ipc, "open_share", open_share)
    blobs = [msgspec.structs.replace(_DEVICE, share=share) for share in (b"near", b"far", b"short")]
    peer = views.PeerViews([*blobs, _HOST], lambda: torch.device("cuda", 3), "peer")
    found = peer.view(0)
    assert found is not None
    assert (found.ptr, found.nbytes, found.device) == (0x1000, 8192, torch.device("cuda", 3))
    assert peer.view(0) == found
    assert peer.view(1) is peer.view(3) is None
    assert peer.why_not(1) == "no peer access"
    assert "KVCache.empty" in peer.why_not(3)
    with pytest.raises(ProtocolError, match="8192 bytes over memory of 4096"):
        peer.view(2)
    peer.close()
    assert [(share, device.index, mapping.closed) for share, device, mapping in opened] == [
        (b"near", 3, True), (b"short", 3, True),
    ]  # fmt: skip


# -- the transport ---------------------------------------------------------------------------------------------------


def test_gpus_are_among_the_devices_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        assert UCXTransport.capabilities.devices == ({"cpu", "cuda"} if here else {"cpu"})


def test_memory_of_a_gpu_that_is_not_here_is_refused() -> None:
    transport = UCXTransport()
    try:
        with pytest.raises(TransportUnavailable):
            transport.allocate(4096, torch.device("cuda", 63))
        with pytest.raises(TransportUnavailable, match="meta"):
            transport.allocate(4096, torch.device("meta"))
    finally:
        transport.close()


def _run(*transports: UCXTransport, until: Any) -> None:
    for _ in range(1_000_000):
        if until():
            return
        for transport in transports:
            transport.progress()
    pytest.fail("nothing more happens")


@pytest.mark.skipif(torch.cuda.is_available(), reason="UCX has lanes for device memory where there is a GPU")
def test_device_memory_that_ucx_does_not_know_is_registered_for_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's part is faked; UCX, which finds no GPU here, is real."""
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setattr(ipc, "check_shareable", lambda tensor: None)
    monkeypatch.setattr(ipc, "share", lambda tensor: b"share")
    monkeypatch.setattr(ipc, "make_current", lambda device: None)
    monkeypatch.setattr(ipc, "open_share", lambda share, device: _Mapping(4096))
    memory = torch.zeros(4096, dtype=torch.uint8)
    tensor: Any = SimpleNamespace(device=GPU, untyped_storage=memory.untyped_storage)
    a, b = UCXTransport(), UCXTransport()
    try:
        regions = [transport.register(tensor) for transport in (a, b)]
        assert "cuda_ipc" in regions[0].no_put
        assert regions[0].device == GPU
        channel = a.connect(b.address(), [regions[1].descriptor()])
        b.connect(a.address(), [regions[0].descriptor()])
        assert a.arm() is None  # copies on a GPU raise no event: the channel is polled while it is busy
        flush = channel.flush()
        _run(a, b, until=lambda: flush.done and channel.idle)
        assert flush.error is None
        assert not channel.wants_progress
        assert channel.link == "none for cuda memory"
        with pytest.raises(TransportUnavailable, match="cuda_ipc"):
            channel.put(Batch(*columns((0, 0, 0, 0, 8))))
        assert channel.view(0) is not None
        assert channel.why_no_view(0)
        a.deregister(regions[0])
    finally:
        a.close()
        b.close()


def test_the_kernel_never_copies_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small spans over cma are written by system calls: for host memory only."""
    monkeypatch.setenv("UCX_TLS", "all")
    a, b = UCXTransport(), UCXTransport()
    try:
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        a.register(memory)
        channel: UCXChannel = a.connect(b.address(), [b.register(memory).descriptor()])
        b.connect(a.address(), [])
        flush = channel.flush()
        _run(a, b, until=lambda: flush.done)
        assert channel.link == "cma/memory"
        batch = Batch(*columns((0, 0, 0, 0, 512), (0, 512, 0, 512, 512)))
        control = channel.put(batch)
        assert isinstance(control, VectoredPut)
        for table in (a._tables, channel._remote):
            table.memory_type = np.full(1, CUDA, dtype=np.int64)
        put = channel.put(batch)
        assert type(put) is PutOperation
        put.cancel()
        _run(a, b, until=lambda: put.done and control.done)
    finally:
        a.close()
        b.close()
