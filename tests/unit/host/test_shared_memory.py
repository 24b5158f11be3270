"""Shared host memory: seen by real peers, freed with its last user, and never opened by an untrue descriptor."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torchkv.errors import KVError, ProtocolError, TransportUnavailable
from torchkv.host import shared_memory

NBYTES = 3 * 4096 + 77
FIELDS = struct.Struct("<4sBiiQQ16s32s")
MAGIC, VERSION, PID, FD, INODE, SIZE, TOKEN, HOST = range(8)

# Opens the descriptor on its command line, prints the bytes in hex, adds one to each, and waits to be told.
PEER = """
import ctypes, sys
from torchkv.host import shared_memory
segment = shared_memory.open_segment(bytes.fromhex(sys.argv[1]))
memory = (ctypes.c_uint8 * segment.nbytes).from_address(segment.ptr)
print(bytes(memory).hex(), flush=True)
for k in range(segment.nbytes):
    memory[k] = (memory[k] + 1) % 256
print("changed", flush=True)
sys.stdin.readline()
print(bytes(memory).hex(), flush=True)
"""

# Owns a segment of random bytes, prints its descriptor and bytes, and waits.
OWNER = """
import sys
from torchkv.host import shared_memory
tensor = shared_memory.allocate(int(sys.argv[1])).random_(256)
print(shared_memory.share(tensor).hex(), bytes(tensor.numpy()).hex(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(code: str, argument: str) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(shared_memory.__file__).parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    child = subprocess.Popen(
        [sys.executable, "-c", code, argument], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def shared(tensor: torch.Tensor) -> bytes:
    descriptor = shared_memory.share(tensor)
    assert descriptor is not None
    return descriptor


def with_field(descriptor: bytes, field: int, value: object) -> bytes:
    fields = list(FIELDS.unpack(descriptor))
    assert fields[field] != value
    fields[field] = value
    return FIELDS.pack(*fields)


def contents(segment: shared_memory.Segment) -> bytes:
    return ctypes.string_at(segment.ptr, segment.nbytes)


def named_shared_files(pid: int) -> list[str]:
    """The files of /dev/shm that a process maps. A listing of the folder would include other programs' files."""
    return [row for row in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in row]


def random_segment(nbytes: int = NBYTES) -> torch.Tensor:
    return shared_memory.allocate(nbytes).copy_(torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8))


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:torchkv-")


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 5_000_001])
def test_allocate_gives_zeroed_aligned_bytes(nbytes: int) -> None:
    tensor = shared_memory.allocate(nbytes)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (nbytes,)
    assert tensor.untyped_storage().nbytes() == nbytes
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * nbytes


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 47])
def test_allocate_refuses_sizes_out_of_range(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=str(nbytes)):
        shared_memory.allocate(nbytes)


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_NOFILE])
def test_allocate_reports_what_the_kernel_refuses_and_leaks_nothing(limit: int) -> None:
    before = open_files(), mappings()
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (3 if limit == resource.RLIMIT_NOFILE else address_space + (256 << 20), hard))
    try:
        with pytest.raises(TransportUnavailable, match="ulimit"):
            shared_memory.allocate(1 << 40)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert (open_files(), mappings()) == before


def test_memory_lives_as_long_as_the_last_view_and_no_longer() -> None:
    before = open_files(), mappings()
    tensor = random_segment()
    expected = tensor[5:15].clone()
    view = tensor[5:15].view(2, 5)
    del tensor
    assert mappings() == before[1] + 1
    assert torch.equal(view.flatten(), expected)
    del view
    assert (open_files(), mappings()) == before


def test_share_knows_its_own_storages_only() -> None:
    tensor = shared_memory.allocate(NBYTES)
    assert shared_memory.share(tensor[100:].view(-1)[3:50]) == shared(tensor)
    assert shared_memory.share(torch.zeros(NBYTES, dtype=torch.uint8)) is None
    assert shared_memory.share(tensor.clone()) is None
    assert len(shared(tensor)) == shared_memory.DESCRIPTOR_NBYTES


def test_a_reused_address_is_not_taken_for_a_freed_segment() -> None:
    first = shared_memory.allocate(NBYTES)
    stale = shared(first)
    del first
    second = shared_memory.allocate(NBYTES)  # usually at the same address and with the same fd
    assert shared(second) != stale
    with pytest.raises(TransportUnavailable):
        shared_memory.open_segment(stale)


def test_same_process_opens_its_own() -> None:
    before = open_files(), mappings()
    tensor = random_segment()
    segment = shared_memory.open_segment(shared(tensor))
    assert segment.nbytes == NBYTES
    assert segment.ptr != tensor.data_ptr()
    assert contents(segment) == bytes(tensor.numpy())
    tensor[1234] ^= 0xFF
    assert contents(segment) == bytes(tensor.numpy())
    segment.close()
    segment.close()
    del tensor
    assert (open_files(), mappings()) == before


def test_a_dropped_segment_is_unmapped_and_an_open_one_costs_no_file() -> None:
    tensor = shared_memory.allocate(NBYTES)
    before = open_files(), mappings()
    segment = shared_memory.open_segment(shared(tensor))
    assert (open_files(), mappings()) == (before[0], before[1] + 1)
    del segment
    assert (open_files(), mappings()) == before


def test_a_child_sees_and_changes_the_parents_bytes() -> None:
    tensor = random_segment()
    original = tensor.clone()
    with process(PEER, shared(tensor).hex()) as child:
        assert line(child) == bytes(original.numpy()).hex()
        assert line(child) == "changed"
        assert torch.equal(tensor, original + 1)
        tensor.random_(256)
        tell(child)
        assert line(child) == bytes(tensor.numpy()).hex()
        assert child.wait(60) == 0


def test_a_killed_peer_leaves_nothing_and_takes_nothing() -> None:
    tensor = random_segment()
    original = tensor.clone()
    before = open_files(), mappings()
    with process(PEER, shared(tensor).hex()) as child:
        assert line(child) == bytes(original.numpy()).hex()
        assert line(child) == "changed"
        assert named_shared_files(child.pid) == []
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    assert torch.equal(tensor, original + 1)
    assert (open_files(), mappings()) == before


def test_a_killed_owner_leaves_the_bytes_to_its_peer_and_nothing_to_anybody_else() -> None:
    before = open_files(), mappings()
    with process(OWNER, str(NBYTES)) as child:
        descriptor, original = (bytes.fromhex(word) for word in line(child).split())
        segment = shared_memory.open_segment(descriptor)
        assert named_shared_files(child.pid) == []
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    assert contents(segment) == original
    with pytest.raises(TransportUnavailable, match="cannot be opened"):
        shared_memory.open_segment(descriptor)
    segment.close()
    assert (open_files(), mappings()) == before


def test_a_freed_segment_cannot_be_opened() -> None:
    tensor = shared_memory.allocate(NBYTES)
    descriptor = shared(tensor)
    del tensor
    gc.collect()
    with pytest.raises(TransportUnavailable):
        shared_memory.open_segment(descriptor)


def test_each_field_must_be_true() -> None:
    """With a negative control: the same fields, packed again unchanged, do open."""
    tensor = shared_memory.allocate(NBYTES)
    other = shared_memory.allocate(NBYTES)
    good = shared(tensor)
    shared_memory.open_segment(FIELDS.pack(*FIELDS.unpack(good))).close()
    other_fd = FIELDS.unpack(shared(other))[FD]
    lies = {
        "freed": [(TOKEN, os.urandom(16)), (FD, other_fd)],
        "is not what its descriptor says": [(INODE, 1), (SIZE, NBYTES - 1), (SIZE, NBYTES + 1)],
        "another host": [(HOST, os.urandom(32))],
        "cannot be opened": [(FD, 2**31 - 1), (PID, 2**31 - 1)],
    }
    before = open_files(), mappings()
    for reason, fields in lies.items():
        for field, value in fields:
            with pytest.raises(TransportUnavailable, match=reason):
                shared_memory.open_segment(with_field(good, field, value))
    for field, value in [(MAGIC, b"tkhx"), (VERSION, 2), (PID, 0), (PID, -1), (FD, -1), (SIZE, 0), (SIZE, 2**60)]:
        with pytest.raises(ProtocolError):
            shared_memory.open_segment(with_field(good, field, value))
    assert (open_files(), mappings()) == before


def test_a_pipe_under_a_reused_number_is_neither_opened_nor_waited_for() -> None:
    read_end, write_end = os.pipe()
    try:
        descriptor = with_field(shared(shared_memory.allocate(NBYTES)), FD, read_end)
        with pytest.raises(TransportUnavailable, match="another file"):
            shared_memory.open_segment(descriptor)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_an_owner_cannot_shrink_a_segment_under_its_peer() -> None:
    descriptor = shared(tensor := shared_memory.allocate(NBYTES))
    with pytest.raises(PermissionError):
        os.ftruncate(FIELDS.unpack(descriptor)[FD], 4096)
    assert tensor.numel() == NBYTES


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_file_that_could_shrink_is_refused(seals: int) -> None:
    template = shared(tensor := shared_memory.allocate(NBYTES))
    fields = list(FIELDS.unpack(template))
    fd = os.memfd_create(f"torchkv-{fields[TOKEN].hex()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        fields[FD], fields[INODE] = fd, os.fstat(fd).st_ino
        with pytest.raises(TransportUnavailable, match="not sealed"):
            shared_memory.open_segment(FIELDS.pack(*fields))
    finally:
        os.close(fd)
    assert tensor.numel() == NBYTES


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(garbage=st.one_of(st.binary(max_size=200), st.binary(min_size=77, max_size=77)))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        shared_memory.open_segment(garbage)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(position=st.integers(0, FIELDS.size - 1), flip=st.integers(1, 255), cut=st.integers(0, FIELDS.size))
def test_one_wrong_byte_or_a_cut_end_is_refused(position: int, flip: int, cut: int) -> None:
    tensor = shared_memory.allocate(4096)
    good = shared(tensor)
    bad = bytearray(good)
    bad[position] ^= flip
    # The id of another thread of this process is accepted: /proc shows the same files under it.
    pid = FIELDS.unpack(bad)[PID]
    assume(pid == os.getpid() or str(pid) not in os.listdir("/proc/self/task"))
    with pytest.raises(KVError):
        shared_memory.open_segment(bytes(bad))
    if cut < FIELDS.size:
        with pytest.raises(ProtocolError):
            shared_memory.open_segment(good[:cut])
    assert tensor.numel() == 4096
