"""Device memory shared with real processes: the right bytes and no others, and nothing left behind."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.helpers.ranks import memory_peer  # noqa: E402
from torchkv.cuda import driver, ipc  # noqa: E402
from torchkv.errors import TransportUnavailable  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.free_memory]

NBYTES = (64 << 20) + 12345
SLACK = 16 << 20  # what the driver may keep for itself


def pairs() -> list[object]:
    two = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")
    return [pytest.param(0, 0, id="same-gpu"), pytest.param(0, 1, id="two-gpus", marks=two)]


@contextmanager
def process(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-m", memory_peer.__name__, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def free(device: int) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def warm(*devices: int) -> None:
    """Contexts and kernels take memory too, once."""
    for device in {*devices}:
        here = torch.zeros(4096, dtype=torch.uint8, device=f"cuda:{device}")
        memory_peer.store(here.data_ptr(), here.clone())
        torch.randint(0, 256, (4096,), dtype=torch.uint8, device=here.device)
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def check_written(tensor: torch.Tensor, device: int) -> None:
    """A peer on ``cuda:device`` writes a window; every byte in it and around it is what it should be."""
    before = torch.randint(0, 256, (tensor.numel(),), dtype=torch.uint8)
    tensor.copy_(before)
    torch.cuda.synchronize()
    seed, (lo, mid, hi) = secrets.randbits(40), (tensor.numel() // 3 + 1, tensor.numel() // 2 + 3, tensor.numel() - 77)
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    assert offset == 0, "share describes storages"
    with process("writer", ipc.share(tensor).hex(), device, seed, lo, mid, hi) as child:
        read, _, seen_on = line(child).partition(" ")
        assert read == memory_peer.digest(before), f"the peer read other bytes (through {seen_on})"
        assert line(child) == "written"
        expected = before.clone()
        expected[lo:hi] = memory_peer.pattern(seed, hi - lo)
        assert not torch.equal(expected, before)
        assert torch.equal(tensor.cpu(), expected)
        tell(child)
        assert line(child) == "closed"
        tell(child)
        assert child.wait(60) == 0


@pytest.mark.parametrize(("owner", "writer"), pairs())
def test_a_peer_writes_what_it_should_and_nothing_else(owner: int, writer: int) -> None:
    warm(owner, writer)
    baseline = free(owner)
    tensor = ipc.allocate(NBYTES, torch.device("cuda", owner))
    assert (tensor.device.index, tensor.untyped_storage().nbytes()) == (owner, NBYTES)
    assert baseline - free(owner) >= NBYTES
    check_written(tensor, writer)
    view = tensor[5:]
    del tensor
    assert baseline - free(owner) >= NBYTES, "freed while a view was alive"
    del view
    assert baseline - free(owner) < SLACK


@pytest.mark.parametrize(("owner", "writer"), pairs())
def test_ordinary_pytorch_memory_in_the_middle_of_a_segment(owner: int, writer: int) -> None:
    device = torch.device("cuda", owner)
    neighbours = [torch.randint(0, 256, (300_000,), dtype=torch.uint8, device=device) for _ in range(5)]
    kept = [t.clone().cpu() for t in neighbours]
    check_written(neighbours[2], writer)
    for index in (0, 1, 3, 4):
        assert torch.equal(neighbours[index].cpu(), kept[index])


@pytest.mark.parametrize(("owner", "writer"), pairs())
def test_the_memory_of_a_killed_owner_lives_until_the_mapping_is_closed(owner: int, writer: int) -> None:
    warm(owner, writer)
    baseline = free(owner)
    seed = secrets.randbits(40)
    with process("owner", owner, NBYTES, seed) as child:
        mapping = ipc.open_share(bytes.fromhex(line(child)), torch.device("cuda", writer))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    assert memory_peer.digest(memory_peer.as_tensor(mapping.ptr, mapping.nbytes)) == memory_peer.digest(
        memory_peer.pattern(seed, NBYTES)
    )
    assert baseline - free(owner) >= NBYTES
    mapping.close()
    torch.cuda.empty_cache()
    assert baseline - free(owner) < SLACK


def test_a_freed_or_ended_owner_is_an_error_not_a_hang() -> None:
    with process("owner", 0, 1 << 20, 1) as child:
        share = bytes.fromhex(line(child))
        tell(child)
        assert child.wait(60) == 0
    with pytest.raises(TransportUnavailable, match="owner must be alive"):
        ipc.open_share(share, torch.device("cuda", 0))


def test_expandable_segments_are_refused_and_own_blocks_are_not() -> None:
    with process("expandable", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as child:
        refused = line(child)
        assert refused.startswith("refused:")
        assert "expandable_segments:False" in refused
        assert 0 < int(line(child)) <= ipc.MAX_SHARE
        assert child.wait(60) == 0


@pytest.mark.parametrize(("owner", "writer"), pairs())
def test_own_memory_is_reached_from_every_gpu(owner: int, writer: int) -> None:
    tensor = ipc.allocate(100_000, torch.device("cuda", owner)).fill_(7)
    torch.cuda.synchronize(owner)
    mapping = ipc.open_share(ipc.share(tensor), torch.device("cuda", writer))
    assert mapping.ptr == tensor.data_ptr()
    fresh = torch.randint(0, 256, (50_000,), dtype=torch.uint8, device=f"cuda:{writer}")
    memory_peer.store(mapping.ptr + 1000, fresh)
    torch.cuda.synchronize(writer)
    found = tensor.cpu()
    assert torch.equal(found[1000:51_000], fresh.cpu())
    assert bool((found[:1000] == 7).all())
    assert bool((found[51_000:] == 7).all())


def test_own_memory_that_was_freed_is_refused() -> None:
    tensor = ipc.allocate(100_000, torch.device("cuda", 0))
    share = ipc.share(tensor)
    ipc.open_share(share, torch.device("cuda", 0)).close()
    del tensor
    gc.collect()
    second = ipc.allocate(100_000, torch.device("cuda", 0))  # usually at the same address
    with pytest.raises(TransportUnavailable, match="freed"):
        ipc.open_share(share, torch.device("cuda", 0))
    assert second.numel() == 100_000


def test_too_much_is_refused_with_numbers_and_the_gpu_still_works() -> None:
    with pytest.raises(TransportUnavailable, match=f"{1 << 45} bytes"):
        ipc.allocate(1 << 45, torch.device("cuda", 0))
    assert int(torch.ones(1000, device="cuda:0").sum()) == 1000


def test_facts() -> None:
    facts = ipc.gpu_facts()
    assert len(facts) == GPUS
    for fact in facts:
        properties = torch.cuda.get_device_properties(fact.index)
        assert (fact.name, fact.total_nbytes) == (properties.name, properties.total_memory)
        assert fact.uuid == f"GPU-{properties.uuid}"
        assert fact.peers[fact.index]
        for other in range(GPUS):
            if other != fact.index:
                assert fact.peers[other] == torch.cuda.can_device_access_peer(fact.index, other)


def test_a_context_switch_leaves_the_thread_as_it_was() -> None:
    torch.cuda.set_device(0)
    with driver.context(GPUS - 1) as cuda:
        assert int(driver.check(cuda.cuCtxGetDevice(), "asking for the device")) == GPUS - 1
    assert int(driver.check(cuda.cuCtxGetDevice(), "asking for the device")) == 0
    assert torch.cuda.current_device() == 0
