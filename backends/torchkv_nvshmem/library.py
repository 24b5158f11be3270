"""The parts of libnvshmem_host that torchkv uses: NVSHMEM4Py starts it, the rest is called through its C API.

NVSHMEM4Py's put takes whole tensors only. Many functions of the C API end the process when they fail, so callers check
the conditions before: see `runtime`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import torch

from torchkv.arrays import Int64Array
from torchkv.errors import TransportUnavailable

__all__ = ["FUNCTIONS", "UID_NBYTES", "Library", "LibNVSHMEM", "why_not"]

UID_NBYTES = 128  # of nvshmemx_uniqueid_v1

# The C functions that compiled code calls, in the order in which `pump` indexes their addresses.
FUNCTIONS = ("nvshmemx_putmem_on_stream", "clock_gettime")

_INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; greater values say how PEs share GPUs


class Library(Protocol):
    """What the rest of the package calls: by one thread at a time, with the device's context current."""

    functions: Int64Array  # addresses of `FUNCTIONS`

    def unique_id(self) -> bytes:
        """``UID_NBYTES`` bytes that name a new job. NVSHMEM then listens in this process until all PEs have come."""

    def start(self, uid: bytes, *, rank: int, size: int, device: int) -> None:
        """Joins the job as PE ``rank`` of ``size``. Collective. Raises ``TransportUnavailable``."""

    def malloc(self, nbytes: int) -> int:
        """Collective, with the same ``nbytes`` on all PEs: the local address of new symmetric memory, or 0."""

    def pointer(self, address: int, pe: int) -> int:
        """The address at which this device's loads and stores reach a symmetric address of ``pe``, or 0."""

    def quiet(self, stream: int) -> None:
        """Enqueues: wait until all earlier puts are complete at their PEs."""


def why_not() -> str | None:
    """None if NVSHMEM may work on this machine, else the reason and what would help. Loads nothing."""
    if sys.platform != "linux":
        return f"NVSHMEM needs Linux, not {sys.platform}"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU here; `python -m torchkv.doctor` says more"
    major = (torch.version.cuda or "").partition(".")[0]
    host, binding = f"nvidia-nvshmem-cu{major}", f"nvshmem4py-cu{major}"
    pin = _torch_pin(host)
    line = f'pip install {binding} "{host}=={pin}"' if pin else f"pip install {binding}"
    if importlib.util.find_spec("nvshmem") is None:
        return f"the Python package nvshmem is missing: {line}"
    installed = _installed(host)
    if pin and installed and _numbers(installed) > _numbers(pin):
        return (
            f"{host} {installed} is newer than {pin}, which this PyTorch was built with and shares with every other "
            f"user in the process; newer releases lack files that PyTorch's own kernels look for: {line}"
        )
    return None


def _torch_pin(package: str) -> str:
    """The version of ``package`` that PyTorch requires, or ""."""
    for requirement in metadata.requires("torch") or []:
        found = re.match(rf"{re.escape(package)}\s*\(?==\s*([0-9][0-9.]*)", requirement)
        if found:
            return found[1]
    return ""


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # some distributions install the library without pip's records
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


class LibNVSHMEM:
    """The `Library` itself. Raises ``TransportUnavailable`` if it does not load, or has been started by other code."""

    def __init__(self) -> None:
        try:
            self._core: Any = importlib.import_module("nvshmem.core")
            self._core.get_version()  # loads the host library
            self._c = ctypes.CDLL("libnvshmem_host.so.3")  # the same one, by its soname
        except (ImportError, OSError, RuntimeError) as error:
            raise TransportUnavailable(f"NVSHMEM does not load: {error}; {why_not() or 'reinstall it'}") from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._status = self._bind("nvshmemx_init_status", number)
        self._malloc = self._bind("nvshmem_malloc", pointer, ctypes.c_size_t)
        self._ptr = self._bind("nvshmem_ptr", pointer, pointer, number)
        self._quiet = self._bind("nvshmemx_quiet_on_stream", None, pointer)
        self.functions: Int64Array = np.array([self._address(name) for name in FUNCTIONS], dtype=np.int64)
        if self._status() != 0:
            raise TransportUnavailable(
                "NVSHMEM was started in this process by other code, with PEs that torchkv does not know; make the "
                "torchkv group first, or use another transport"
            )

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._c, name)
        function.restype, function.argtypes = result, arguments
        bound: Callable[..., Any] = function
        return bound

    def _address(self, name: str) -> int:
        library = self._c if name.startswith("nvshmem") else ctypes.CDLL(None)
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def unique_id(self) -> bytes:
        return ctypes.string_at(self._core.get_unique_id().ptr, UID_NBYTES)

    def start(self, uid: bytes, *, rank: int, size: int, device: int) -> None:
        assert len(uid) == UID_NBYTES
        try:
            here = importlib.import_module("cuda.core").Device(device)
            here.set_current()
            whole = self._core.get_unique_id(empty=True)
            ctypes.memmove(whole.ptr, uid, UID_NBYTES)
            self._core.init(device=here, uid=whole, rank=rank, nranks=size, initializer_method="uid")
        except Exception as error:  # the exceptions of these packages have no common base
            raise TransportUnavailable(
                f"NVSHMEM did not start on cuda:{device}: {error}; NVSHMEM_DEBUG=INFO says more"
            ) from error
        if self._status() < _INITIALIZED:  # init returns normally after some failures
            raise TransportUnavailable(
                f"NVSHMEM did not start on cuda:{device}: most often a GPU of the group cannot be reached (neither "
                "peer access nor InfiniBand); `nvidia-smi topo -p2p w` and NVSHMEM_DEBUG=INFO say more"
            )

    def malloc(self, nbytes: int) -> int:
        return int(self._malloc(nbytes) or 0)

    def pointer(self, address: int, pe: int) -> int:
        return int(self._ptr(address, pe) or 0)

    def quiet(self, stream: int) -> None:
        self._quiet(stream)
