"""Batched copies by the GPU's copy engines (``cuMemcpyBatchAsync``), which leave its multiprocessors to the model.

For copies between two GPUs, or within one, of spans so long that half a microsecond for posting each does not matter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = ["available", "copy_batch"]

_SRC_ACCESS_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_CUDA_SUCCESS = 0


class _Location(ctypes.Structure):
    """``CUmemLocation``: a hint for managed memory; all zero is no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_ATTRIBUTES = _Attributes(_SRC_ACCESS_IN_STREAM_ORDER, _Location(), _Location(), _PREFER_OVERLAP_WITH_COMPUTE)
_FIRST = ctypes.c_size_t(0)  # index of the first copy that the attributes apply to

# (addresses of the arrays of destinations, sources and lengths; number of copies; stream) -> CUresult
_Post = Callable[[int, int, int, int, int], int]


def available() -> str | None:
    """None if `copy_batch` works here, else the reason why not."""
    try:
        _post()
    except TransportUnavailable as reason:
        return str(reason)
    return None


def copy_batch(src: Int64Array, dst: Int64Array, length: Int64Array, stream: torch.cuda.Stream) -> None:
    """Enqueues copies on ``stream``: ``length[i]`` bytes from address ``src[i]`` to ``dst[i]``, for all i in any order.

    src, dst, length: int64 ``[n]``; they may change as soon as the call returns. Addresses are trusted; spans must not
    overlap. Releases the GIL during the call. Raises ``ProtocolError`` for arrays of the wrong kind and for the
    default stream, ``TransportUnavailable`` if the driver has no batched copy or refuses this one.
    """
    for array in (src, dst, length):
        if array.dtype != np.int64 or array.shape != src.shape or array.ndim != 1 or not array.flags.c_contiguous:
            raise ProtocolError(
                f"addresses and lengths must be contiguous int64 arrays of one length, not {array.dtype} of shape "
                f"{array.shape}"
            )
    if length.size and int(length.min()) <= 0:
        raise ProtocolError(f"a copy has length {int(length.min())}; leave empty copies out")
    if stream.cuda_stream == 0:
        raise ProtocolError("the driver takes no batched copies on the default stream; use another one")
    if not length.size:
        return
    result = _post()(dst.ctypes.data, src.ctypes.data, length.ctypes.data, len(src), stream.cuda_stream)
    if result != _CUDA_SUCCESS:
        raise TransportUnavailable(f"cuMemcpyBatchAsync of {len(src)} copies failed: CUDA error {result}")


@cache
def _post() -> _Post:
    """The driver's function. The version of CUDA 12.8 also returns the index of a bad copy, that of 13.0 does not."""
    driver = _driver()
    attributes, first = ctypes.byref(_ATTRIBUTES), ctypes.byref(_FIRST)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    if (second := getattr(driver, "cuMemcpyBatchAsync_v2", None)) is not None:
        second.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)

        def post(dst: int, src: int, length: int, count: int, stream: int) -> int:
            return int(second(dst, src, length, count, attributes, first, 1, stream))

        return post
    if (original := getattr(driver, "cuMemcpyBatchAsync", None)) is not None:
        original.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)

        def post_reporting(dst: int, src: int, length: int, count: int, stream: int) -> int:
            failed = ctypes.c_size_t(0)
            return int(original(dst, src, length, count, attributes, first, 1, ctypes.byref(failed), stream))

        return post_reporting
    raise TransportUnavailable("this CUDA driver has no cuMemcpyBatchAsync; it takes a driver of CUDA 12.8 or newer")


def _driver() -> Any:
    try:
        # CDLL, which releases the GIL: posting many copies takes long enough for other threads to run meanwhile.
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"no CUDA driver on this machine: {error}") from error
