"""Which channels of UCX compiled code may use, by the memory at both ends and what carries puts between it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torchkv_ucx.channel import UCXChannel
from torchkv_ucx.libucp import KEY_WORD, MEMORY_TYPES
from torchkv_ucx.spans import LocalRegions, RemoteRegions

CPU, CUDA = MEMORY_TYPES["cpu"], MEMORY_TYPES["cuda"]
RDMA = "rc_mlx5/mlx5_0:1"


def channel(local: list[int], remote: list[int], lanes: str = RDMA, *, thread_safe: bool = True) -> Any:
    """One whose regions are of these kinds of memory; their keys are 11, 12, ... here and 21, 22, ... there."""
    made: Any = UCXChannel.__new__(UCXChannel)
    library = SimpleNamespace(
        is_thread_safe=lambda worker: thread_safe, native=np.zeros(8, dtype=np.int64), put_lanes=lambda *_: lanes
    )
    made._library, made._link, made._handle = library, SimpleNamespace(worker=5), 7
    made._failure, made._closed, made._closing, made._lane_texts = None, False, None, {}
    made._greeting = SimpleNamespace(done=True)
    made._on_device = CUDA in remote
    made._local = LocalRegions()
    for number, kind in enumerate(local):
        made._local.add(4096 * number, 4096, 11 + number, kind)
    kinds = np.array(remote, dtype=np.int64)
    there = 4096 * np.arange(len(remote), dtype=np.int64)
    made._remote = RemoteRegions(there, np.full(len(remote), 4096), 21 + np.arange(len(remote)), kinds)
    return made


def test_host_memory_at_both_ends() -> None:
    native = channel([CPU, CPU], [CPU]).native(lambda: None)
    assert native.local_keys.tolist() == [11, 12]
    assert native.remote_keys.tolist() == [21]
    assert native.put_params[6] == CPU


def test_device_memory_at_both_ends_over_a_network() -> None:
    """Regions of the other kind have no keys: a put names one kind of memory for both of its ends."""
    native = channel([CUDA, CPU], [CPU, CUDA, CUDA]).native(lambda: None)
    assert native.local_keys.tolist() == [11, 0]
    assert native.remote_keys.tolist() == [0, 22, 23]
    assert native.put_params[6] == CUDA
    assert native.key_word == KEY_WORD


@pytest.mark.parametrize(
    "refused",
    [
        channel([CUDA], [CUDA], "cuda_ipc/cuda"),
        channel([CUDA], [CUDA], "rc_mlx5/mlx5_0:1+cuda_ipc/cuda"),
        channel([CUDA], [CUDA], "none for cuda memory"),
        channel([CUDA], [CUDA], ""),  # not connected yet
        channel([CUDA], [CPU]),
        channel([CPU], [CUDA]),
        channel([CPU], [CPU], thread_safe=False),
    ],
)
def test_all_others_are_python_s(refused: Any) -> None:
    assert refused.native(lambda: None) is None
    assert refused._closing is None
