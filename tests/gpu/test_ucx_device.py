"""UCX on device memory, beyond the conformance suite (which `test_ucx_conformance` runs)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from torchkv.testing import Lane
from torchkv.testing.ends import Ends
from torchkv.testing.pair import MIB, Pair, connected, slices

GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("ucxx", reason="needs ucxx")


def device_lanes(**environment: str) -> list[Lane]:
    """UCX on the memory of one GPU, and of two where there are two."""
    places = [("cuda:0",), ("cuda:0", "cuda:1")]
    return [
        Lane("ucx", environment=environment, link="cuda_ipc", devices=devices)
        for devices in places
        if len(devices) <= GPUS
    ]


@pytest.fixture(params=device_lanes(), ids=str)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close_transports()
    ends.stop()


def run_python(code: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "PYTORCH_", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_memory_comes_back(ends: Ends, lose: Callable[[Pair, str, int], None]) -> None:
    """A mapping keeps a dead owner's memory allocated: nothing may hold one after close().

    lose: given a pair, the name of its far end, and the bytes of a region on both: kills that end, sees it lost.
    """
    size, slack = 256 * MIB, 32 * MIB  # slack: what UCX maps to learn that it reaches a GPU, and drivers' own
    a = ends.end("a")
    place = int(ends.lane.devices[-1].removeprefix("cuda:"))
    own = size if len(ends.lane.devices) == 1 else 0  # of a's own region on the GPU that is watched

    def free_nbytes(wanted: int, seconds: float) -> int:
        """The driver takes a dead process's memory back in its own time."""
        deadline = time.monotonic() + seconds
        while (free := int(a.call("free_device_nbytes", place))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return free

    def lose_one(name: str, nbytes: int) -> None:
        """The channel stays open."""
        pair = connected(ends, (nbytes,), "allocate", names=("a", name))
        assert a.call("view", pair.channel, 0)
        lose(pair, name, nbytes)

    def start_again() -> None:
        a.call("close")
        a.call("open")  # drops this end's own regions

    everything = 1 << 62
    lose_one("first", 64 * MIB)
    start_again()
    baseline = free_nbytes(everything, 3.0)
    lose_one("second", size)
    held = free_nbytes(everything, 3.0)
    assert held < baseline - own - size + slack, "nothing held the dead peer's memory: the test shows nothing"
    start_again()
    assert free_nbytes(baseline - slack, 20.0) >= baseline - slack


@pytest.mark.free_memory
def test_memory_of_a_killed_peer_comes_back_from_views(ends: Ends) -> None:
    def lose(pair: Pair, name: str, nbytes: int) -> None:
        ends.process(name).kill()
        pair.a.call("wait_drained", pair.channel)

    check_memory_comes_back(ends, lose)


@pytest.mark.free_memory
@pytest.mark.parametrize("ends", device_lanes(UCX_CUDA_IPC_CACHE="n"), indirect=True, ids=str)
def test_memory_of_a_killed_peer_comes_back_from_puts_where_ucx_keeps_no_mappings(ends: Ends) -> None:
    """By default UCX keeps them until the process ends (see `torchkv_ucx.environment`)."""

    def lose(pair: Pair, name: str, nbytes: int) -> None:
        pair.put(slices(8 * MIB))
        operations = pair.a.call("put", pair.channel, *slices(nbytes)), pair.a.call("flush", pair.channel)
        ends.process(name).kill()
        assert [error and error[0] for error in pair.a.call("wait", *operations)] == ["PeerLost"] * 2

    check_memory_comes_back(ends, lose)


_CONTEXTS = """
import torch
from torchkv_ucx import UCXTransport
from torchkv.cuda.driver import check, driver

def active():
    cuda = driver()
    devices = [check(cuda.cuDeviceGet(i), "") for i in range(torch.cuda.device_count())]
    return [bool(check(cuda.cuDevicePrimaryCtxGetState(device), "")[1]) for device in devices]

a, b = UCXTransport(), UCXTransport()
last = torch.device("cuda", torch.cuda.device_count() - 1)
a.register(a.allocate(4096, torch.device("cpu")))
region = b.register(b.allocate(4096, torch.device("cpu")))
there, back = a.connect(b.address(), [region.descriptor()]), b.connect(a.address(), [])
flush = there.flush()
while not flush.done:
    a.progress(), b.progress()
print(active())
a.register(a.allocate(4096, last))
print(active())
a.close(), b.close()
"""


def test_host_memory_opens_no_gpu_and_device_memory_only_its_own() -> None:
    """A context on GPU 0 of every rank, by accident, costs half a gigabyte each."""
    before, after = run_python(_CONTEXTS).splitlines()[-2:]
    assert before == str([False] * GPUS)
    assert after == str([False] * (GPUS - 1) + [True])


_EXPANDABLE = """
import torch
from torchkv_ucx import UCXTransport
from torchkv.errors import TransportUnavailable
transport = UCXTransport()
gpu = torch.device("cuda", 0)
try:
    transport.register(torch.zeros(1 << 20, dtype=torch.uint8, device=gpu))
    print("registered")
except TransportUnavailable as error:
    print("refused:", error)
print(repr(transport.register(transport.allocate(1 << 20, gpu)).no_put))
transport.close()
"""


def test_expandable_segments_are_refused_and_our_own_memory_is_not() -> None:
    refused, own = run_python(_EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True").splitlines()[-2:]
    assert refused.startswith("refused:")
    assert "KVCache.empty" in refused
    assert own == "''"
    control, _ = run_python(_EXPANDABLE).splitlines()[-2:]
    assert control == "registered"


def test_without_cuda_ipc_device_memory_is_for_views_only() -> None:
    stdout = run_python(_EXPANDABLE, UCX_TLS="tcp,cma,self")
    assert "cuda_ipc" in stdout.splitlines()[-1]
