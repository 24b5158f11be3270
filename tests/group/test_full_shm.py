"""A full /dev/shm: torchkv's own memory is not in it, so requests succeed; what needs it says so."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.harness import Ranks, kv_group, kv_world
from tests.helpers.ranks.small_cache import check_transfer, random_cache
from torchkv import TransportUnavailable

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
SHM = b"/dev/shm"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="a mount namespace with a small /dev/shm needs root on Linux"
)


def fill_shm() -> None:
    """This process gets a /dev/shm of its own, which is full."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", SHM, b"tmpfs", 0, b"size=16k"),
    ):
        assert done == 0, os.strerror(ctypes.get_errno())
    with Path(os.fsdecode(SHM), "full").open("wb", buffering=0) as file:
        while file.tell() < 16 << 10:
            file.write(bytes(4096))
        with pytest.raises(OSError, match="No space"):
            file.write(bytes(4096))


def transfer(path: str | None) -> str:
    fill_shm()
    with kv_group(path=path) as kv:
        kv.register(random_cache(num_pages=64, num_layers=4))
        for _ in range(3):
            check_transfer(kv, 0, 1)
            check_transfer(kv, 1, 0)
        return str(kv.explain(1 - kv.rank()))


@pytest.mark.parametrize("path", [None, "slices", "staged"])
def test_requests_succeed(path: str | None) -> None:
    ranks = Ranks(2)
    assert all((path or "direct") in text for text in ranks.run(transfer, path))
    ranks.close()


def register() -> str:
    fill_shm()
    with pytest.raises(TransportUnavailable) as caught:
        kv_world().register(random_cache())
    return str(caught.value)


def test_a_transport_that_needs_it_says_so() -> None:
    """UCX is told to use shared memory in files of /dev/shm and nothing else."""
    ranks = Ranks(2, env={"UCX_TLS": "posix"})
    for text in ranks.run(register):
        assert "/dev/shm" in text
        assert "UCX_TLS" in text
    ranks.close()
