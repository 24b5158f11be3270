"""The CUDA driver API: loaded on first use, every result checked.

Importing this module needs no GPU. On a machine without one, the first function that needs the driver raises a
``TransportUnavailable`` that says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = [
    "address",
    "check",
    "check_code",
    "context",
    "device_index",
    "driver",
    "failed_with",
    "ignore_captures",
    "is_capturing",
    "launch",
    "library",
    "library_with_gil",
    "make_current",
    "num_queues",
    "primary_context",
]


@functools.cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``, initialised. Raises ``TransportUnavailable`` without it or without a GPU."""
    try:
        module: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise TransportUnavailable(
            f"device memory needs the package cuda-bindings ({error}); pip install cuda-bindings, of the same CUDA "
            "major version as torch.version.cuda"
        ) from error
    try:
        result = module.cuInit(0)
    except RuntimeError as error:  # raised where libcuda is missing
        raise TransportUnavailable(f"no CUDA driver on this machine ({error}); use device='cpu' here") from error
    check(result, "initialising CUDA")
    return module


def check(result: tuple[Any, ...], operation: str) -> Any:
    """The values of a driver call's result ``(code, value, ...)``: None, the one value, or a tuple of several.

    Raises ``TransportUnavailable``, with ``operation`` and the code's name, unless the call succeeded.
    """
    code, *values = result
    if int(code) != 0:
        raise TransportUnavailable(f"{operation} failed: {code.name}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


_POINTER, _UINT32, _UINT64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuEventQuery": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),  # event, stream
    # function, blocks (x, y, z), threads of a block (x, y, z), shared memory, stream, parameters, extra
    "cuLaunchKernel": (_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_UINT64, _POINTER, ctypes.c_size_t, _POINTER),  # to, from, bytes, stream
    "cuStreamIsCapturing": (_POINTER, ctypes.POINTER(ctypes.c_int)),
    "cuStreamQuery": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_POINTER, _UINT64, _UINT32, ctypes.c_uint),  # stream, address, value, flags
    "cuStreamWriteValue32_v2": (_POINTER, _UINT64, _UINT32, ctypes.c_uint),
}


@functools.cache
def library() -> Any:
    """The driver's C functions of ``_SIGNATURES``, for frequent calls: the wrappers of `driver` cost 1 to 2 us each.

    They return a code, for `check_code`, and release the GIL during the call.
    """
    return _load(ctypes.CDLL)


@functools.cache
def library_with_gil() -> Any:
    """The functions of `library`, which keep the GIL here: for callers' threads, which would wait to get it back."""
    return _load(ctypes.PyDLL)


def address(name: str) -> int:
    """The address of one of the driver's C functions, for compiled code. Raises ``TransportUnavailable``."""
    try:
        return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise TransportUnavailable(f"the CUDA driver lacks what torchkv needs ({error}); use 525 or newer") from error


def _load(kind: Callable[[str], Any]) -> Any:
    driver()  # first, because its errors are clearer
    try:
        loaded = kind("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            getattr(loaded, name).argtypes = types
    except (OSError, AttributeError) as error:
        raise TransportUnavailable(f"the CUDA driver lacks what torchkv needs ({error}); use 525 or newer") from error
    return loaded


def check_code(code: int, operation: str) -> None:
    """Raises ``TransportUnavailable``, with ``operation`` and the code's name, unless ``code`` is success."""
    if code != 0:
        check((driver().CUresult(code),), operation)


def launch(function: int, blocks: int, threads: int, *, shared: int, stream: int, params: bytes) -> None:
    """Enqueues a kernel on ``stream``. Raises ``TransportUnavailable`` if the driver refuses.

    function: a ``CUfunction``. threads: of a block. shared: bytes of dynamic shared memory of a block. params: the
    kernel's parameters as they lie in memory; nothing checks them.
    """
    size = ctypes.c_size_t(len(params))
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
    pointer = ctypes.cast(ctypes.c_char_p(params), _POINTER)
    extra = (_POINTER * 5)(1, pointer, 2, ctypes.addressof(size), 0)
    code = library().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, None, extra)
    check_code(code, "launching a kernel")


def num_queues() -> int:
    """Hardware queues of a GPU for this process's streams: ``CUDA_DEVICE_MAX_CONNECTIONS``, or CUDA's default, 8."""
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(value) if value.isdecimal() else 8


def is_capturing(stream: int) -> bool:
    """Whether the stream with this handle is being captured into a CUDA graph. Keeps the GIL."""
    if stream == 0:
        return False  # CUDA never captures the default stream
    status = ctypes.c_int()
    code = library_with_gil().cuStreamIsCapturing(stream, ctypes.byref(status))
    check_code(code, "asking whether a stream is captured")
    return status.value != 0


def failed_with(result: tuple[Any, ...], name: str) -> bool:
    """Whether a driver call's result has the error ``name``, e.g. ``"CUDA_ERROR_OUT_OF_MEMORY"``."""
    return bool(result[0].name == name)


def device_index(device: torch.device) -> int:
    """The ordinal of a CUDA device; without an index, PyTorch's current one. Raises ``ProtocolError`` for others."""
    if device.type != "cuda":
        raise ProtocolError(f"a CUDA device is needed here, not {device}")
    if device.index is not None:
        return int(device.index)
    driver()  # first, because its errors are clearer than PyTorch's
    return int(torch.cuda.current_device())


@functools.cache
def primary_context(index: int) -> Any:
    """The primary context of ``cuda:index``, which PyTorch uses too.

    Raises ``TransportUnavailable`` if there is no such GPU.
    """
    # Never released: PyTorch holds the context too, as long as the process lives.
    cuda = driver()
    device = check(cuda.cuDeviceGet(index), f"looking for cuda:{index}")
    return check(cuda.cuDevicePrimaryCtxRetain(device), f"opening cuda:{index}")


def make_current(device: torch.device) -> None:
    """Makes the device's primary context, which PyTorch uses too, current on the calling thread.

    A new thread has no current context: driver calls then fail, or make a second context on device 0. Raises
    ``TransportUnavailable``.
    """
    index = device_index(device)
    check(driver().cuCtxSetCurrent(primary_context(index)), f"making cuda:{index} current")


def ignore_captures() -> None:
    """Allows the calling thread to query events and to allocate while *another* thread captures a CUDA graph.

    For torchkv's own threads. Without it, a capture in the default mode makes these calls fail on all threads, and the
    calls invalidate the capture.
    """
    cuda = driver()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "setting the capture mode")


@contextlib.contextmanager
def context(index: int) -> Iterator[Any]:
    """Yields the driver with the primary context of ``cuda:index`` current and captures ignored; undone at the end."""
    cuda = driver()
    where = f"switching to cuda:{index}"
    check(cuda.cuCtxPushCurrent(primary_context(index)), where)
    try:
        mode = check(
            cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), where
        )
        try:
            yield cuda
        finally:
            check(cuda.cuThreadExchangeStreamCaptureMode(mode), where)
    finally:
        check(cuda.cuCtxPopCurrent(), where)
