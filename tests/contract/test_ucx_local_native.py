"""Puts of the resident loop by ``process_vm_writev``: what is there when, and a peer that has ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torchkv_ucx.local_native import native_channel
from torchkv_ucx.pump import VECTOR

from torchkv.core.loop.codes import CHECK, FLUSH, PROBE, PROGRESS, PUT
from torchkv.host.processes import open_pidfd
from torchkv.transport import NativeChannel

RESET = -25
NBYTES = 96

KEYS = {"local_keys": np.ones(1, np.int64), "remote_keys": np.ones(1, np.int64), "remote_at": np.zeros(1, np.int64)}


class Native:
    """Calls the functions as the loop does."""

    def __init__(self, pid: int, fd: int) -> None:
        channel = native_channel(pid, fd, **KEYS)
        assert channel is not None
        self.channel: NativeChannel = channel

    def __call__(self, function: int, *arguments: int) -> int:
        prototype: Callable[..., Any] = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))
        return int(prototype(int(self.channel.functions[function]))(*arguments))

    def put(self, source: np.ndarray, target: np.ndarray) -> int:
        return self(PUT, self.channel.endpoint, source.ctypes.data, source.nbytes, target.ctypes.data, 1, 0)

    def flush(self) -> int:
        return self(FLUSH, self.channel.endpoint, 0)


@pytest.fixture
def own() -> Iterator[Native]:
    """To this very process."""
    fd = open_pidfd(os.getpid())
    yield Native(os.getpid(), fd)
    os.close(fd)


@pytest.mark.parametrize("count", [1, VECTOR - 1, VECTOR, VECTOR + 1, 5 * VECTOR + 3])
def test_a_flush_says_that_all_is_there(count: int, own: Native) -> None:
    source = np.random.default_rng().integers(0, 256, (count, NBYTES), dtype=np.uint8)
    target = np.full((count, 2 * NBYTES), 0xAB, dtype=np.uint8)
    assert [own.put(source[i], target[i, :NBYTES]) for i in range(count)] == [0] * count
    assert own.flush() == 0
    assert (target[:, :NBYTES] == source).all()
    assert (target[:, NBYTES:] == 0xAB).all()


def test_long_spans_do_not_wait(own: Native) -> None:
    source, target = np.ones(1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    assert own.put(source, target) == 0
    assert target.all()


def test_there_is_nothing_to_drive(own: Native) -> None:
    assert own.channel.worker == 0
    assert own(PROGRESS, 0) == own(CHECK, 0) == own(PROBE, 0, 0, 0, 1, 0) == 0
    assert own.flush() == 0


def test_memory_that_is_not_there_fails_all_that_follows(own: Native) -> None:
    source, target = np.ones(NBYTES, dtype=np.uint8), np.zeros(NBYTES, dtype=np.uint8)
    own(PUT, own.channel.endpoint, source.ctypes.data, NBYTES, 8, 1, 0)
    assert own.flush() == RESET
    assert [own.put(source, target) for _ in range(2 * VECTOR)] == [RESET] * 2 * VECTOR
    assert own.flush() == RESET
    assert not target.any()


def test_nothing_is_written_to_a_process_that_has_ended() -> None:
    """Not even if another one has its number by now, as this one has here."""
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    child.start()
    assert child.pid is not None
    fd = open_pidfd(child.pid)
    child.join()
    native = Native(os.getpid(), fd)
    source, target = np.ones(NBYTES, dtype=np.uint8), np.zeros(NBYTES, dtype=np.uint8)
    assert native.put(source, target) == 0
    assert native.flush() == RESET
    assert not target.any()
    os.close(fd)
