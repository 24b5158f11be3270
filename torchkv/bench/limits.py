"""The limits that host rates are compared with: memcpy by one thread, and UCX puts posted one by one from Python."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchkv.errors import TransportUnavailable

__all__ = ["Memcpy", "serve_python_puts", "time_python_puts"]

REPEATS = 5
PUTS = 8192


class Memcpy:
    """One C memcpy between two private buffers that are already faulted in.

    It is timed beside every run, because a machine's memory bandwidth varies.
    """

    def __init__(self, nbytes: int) -> None:
        self._source = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
        self._target = np.zeros_like(self._source)

    def seconds(self) -> float:
        began = time.perf_counter()
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, len(self._source))
        return time.perf_counter() - began


class _PutParams(ctypes.Structure):
    """``ucp_request_param_t``, with spare bytes for fields of later UCX versions. mask 1 << 8: ``memh`` is set."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("unused", ctypes.c_void_p * 5),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
        ("spare", ctypes.c_uint64 * 8),
    )


class _MapParams(ctypes.Structure):
    """``ucp_mem_map_params_t``. mask 3: address and length are set."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("spare", ctypes.c_uint64 * 8),
    )


class _Worker:
    """A UCX worker with one registered buffer, made with UCXX and ctypes as a Python program without torchkv would."""

    def __init__(self, nbytes: int) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # of a variable that the import itself sets
        from ucxx._lib import libucxx

        self._ucxx = libucxx
        self.context = libucxx.UCXContext({}, feature_flags=(libucxx.Feature.RMA, libucxx.Feature.WAKEUP))
        self.worker = libucxx.UCXWorker(self.context)
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if "/libucp.so" in line)
        self.ucp = ctypes.CDLL(path)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.ucp.ucp_put_nbx.restype = self.ucp.ucp_ep_flush_nbx.restype = ctypes.c_ssize_t
        self.ucp.ucp_put_nbx.argtypes = (pointer, pointer, size, ctypes.c_uint64, pointer, pointer)
        self.ucp.ucp_ep_flush_nbx.argtypes = (pointer, pointer)
        self.ucp.ucp_request_check_status.argtypes = self.ucp.ucp_request_free.argtypes = (pointer,)
        self.ucp.ucp_request_check_status.restype = ctypes.c_int8
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.memh = ctypes.c_void_p()
        params = _MapParams(3, self.buffer.ctypes.data, nbytes)
        self._check(self.ucp.ucp_mem_map(pointer(self.context.handle), ctypes.byref(params), ctypes.byref(self.memh)))

    def metadata(self) -> list[bytes]:
        """Worker address, packed rkey, buffer address."""
        rkey, size = ctypes.c_void_p(), ctypes.c_size_t()
        context = ctypes.c_void_p(self.context.handle)
        self._check(self.ucp.ucp_rkey_pack(context, self.memh, ctypes.byref(rkey), ctypes.byref(size)))
        address = bytes(self.worker.address.tobytes())
        return [address, ctypes.string_at(rkey.value or 0, size.value), self.buffer.ctypes.data.to_bytes(8, "little")]

    def connect(self, metadata: list[bytes]) -> tuple[Any, ctypes.c_void_p, int]:
        address = self._ucxx.UCXAddress.create_from_buffer(metadata[0])
        endpoint = self._ucxx.UCXEndpoint.create_from_worker_address(self.worker, address, endpoint_error_handling=True)
        rkey = ctypes.c_void_p()
        handle = ctypes.c_void_p(endpoint.handle)
        self._check(self.ucp.ucp_ep_rkey_unpack(handle, metadata[1], ctypes.byref(rkey)))
        return endpoint, rkey, int.from_bytes(metadata[2], "little")

    def finish(self, request: int) -> None:
        """Waits for the result of a non-blocking call. request: what it returned, a status or a request pointer."""
        if request == 0:
            return
        if -100 < request < 0:
            raise TransportUnavailable(f"a plain UCX put failed with UCX status {request}")
        while (status := self.ucp.ucp_request_check_status(request)) == 1:
            self.worker.progress()
        self.ucp.ucp_request_free(request)
        self._check(status)

    def close(self) -> None:
        """Unmaps the buffer, which UCXX knows nothing of. UCXX frees the rest with the last reference."""
        self._check(self.ucp.ucp_mem_unmap(ctypes.c_void_p(self.context.handle), self.memh))

    def _check(self, status: int) -> None:
        if status:
            raise TransportUnavailable(f"a plain UCX call failed with status {status}")


def time_python_puts(run: int, count: int = PUTS) -> float:
    """Rank 0's half: the rate of ``count`` scattered puts of ``run`` bytes each, posted one by one from a Python loop.

    In 1e9 bytes/s, median of `REPEATS`.
    """
    ucx = _Worker(2 * count * run)
    endpoint, rkey, remote = ucx.connect(_receive_metadata())
    params, flush = _PutParams(mask=1 << 8, memh=ucx.memh.value), _PutParams()
    handle, local = int(endpoint.handle), ucx.buffer.ctypes.data
    put, reference = ucx.ucp.ucp_put_nbx, ctypes.byref(params)
    offsets = [2 * run * int(i) for i in np.random.default_rng().permutation(count)]
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        requests = [put(handle, local + offset, run, remote + offset, rkey, reference) for offset in offsets]
        for request in requests:
            ucx.finish(request)
        ucx.finish(ucx.ucp.ucp_ep_flush_nbx(handle, ctypes.byref(flush)))
        seconds.append(time.perf_counter() - began)
    ucx.ucp.ucp_rkey_destroy(rkey)
    endpoint.close_blocking(period=1_000_000, max_attempts=1000)
    ucx.close()
    dist.barrier()
    return count * run / statistics.median(seconds[1:]) / 1e9


def serve_python_puts(run: int, count: int = PUTS) -> None:
    """Rank 1's half: registers a buffer that rank 0 writes to, and progresses UCX until rank 0 is done."""
    ucx = _Worker(2 * count * run)
    for part in ucx.metadata():
        dist.broadcast(torch.tensor([len(part)]), 1)
        dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 1)
    done = dist.barrier(async_op=True)
    assert done is not None
    while not done.is_completed():
        ucx.worker.progress()
    ucx.close()


def _receive_metadata() -> list[bytes]:
    metadata: list[bytes] = []
    for _ in range(3):
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 1)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 1)
        metadata.append(data.numpy().tobytes())
    return metadata
