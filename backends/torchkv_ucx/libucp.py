"""The parts of libucp's C API that UCXX does not wrap: memory handles, remote keys, and the lanes of an endpoint.

UCXX makes context, worker and endpoint; the functions here take their raw handles. Nothing in this module is on the hot
path (see `pump`). Structures follow ``ucp.h``; each has a field mask, and spare words for later UCX releases.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PeerLost, TransportUnavailable

__all__ = ["FUNCTIONS", "HOST", "KEY_WORD", "MEMORY_TYPES", "NATIVE", "LibUCP", "lanes_for", "load", "request_params"]

# ucs_memory_type_t by torch's device type.
MEMORY_TYPES = {"cpu": 0, "cuda": 1}
HOST = MEMORY_TYPES["cpu"]

# The C functions that compiled code calls, in the order in which `pump` indexes their addresses.
FUNCTIONS = (
    "ucp_put_nbx",
    "ucp_ep_flush_nbx",
    "ucp_request_check_status",
    "ucp_request_free",
    "ucp_worker_progress",
    "clock_gettime",
    "process_vm_writev",
)

# Those of `torchkv.transport.NativeChannel`, in its order.
NATIVE = (*FUNCTIONS[:5], "ucp_tag_send_nbx", "ucp_tag_probe_nb", "ucp_tag_msg_recv_nbx")

KEY_WORD = 8  # of `request_params`: the memory handle

_OK, _BUSY = 0, -15
_FIELD_MEMORY_TYPE, _FIELD_MEMH = 1 << 6, 1 << 8
_FIELD_THREAD_MODE, _MULTI = 1, 2  # of ucp_worker_attr_t
_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(?P<transport>[^/\s]+)/(?P<device>\S+?)(?:\.\d+)?\s(?P<roles>.*)")
# Transports that carry one kind of memory only; all others (RDMA) carry both.
_ONLY_DEVICE = ("cuda_", "gdr_copy")
_ONLY_HOST = ("self", "tcp", "posix", "sysv", "cma", "xpmem", "knem", "cuda_copy", "gdr_copy")

# UCS_ERR_*: IO_ERROR, UNREACHABLE, CANCELED, TIMED_OUT, REJECTED, NOT_CONNECTED, CONNECTION_RESET
_PEER_LOST = frozenset({-3, -6, -16, -20, -23, -24, -25})
_FIRST_LINK_ERROR, _LAST_ENDPOINT_ERROR = -40, -89


class _MemMapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", ctypes.c_void_p),
        ("spare", ctypes.c_uint64 * 8),
    )


class LibUCP:
    """libucp as loaded by UCXX into this process. path: of its file."""

    def __init__(self, path: str) -> None:
        self._ucp = ctypes.CDLL(path)
        self._ucs = ctypes.CDLL(path.replace("libucp", "libucs"))
        self._c = ctypes.CDLL(None)
        pointer, status = ctypes.c_void_p, ctypes.c_int8  # ucs_status_t is a packed, signed enum
        self._mem_map = self._bind("ucp_mem_map", status, pointer, pointer, pointer)
        self._mem_unmap = self._bind("ucp_mem_unmap", status, pointer, pointer)
        self._rkey_pack = self._bind("ucp_rkey_pack", status, pointer, pointer, pointer, pointer)
        self._rkey_buffer_release = self._bind("ucp_rkey_buffer_release", None, pointer)
        self._rkey_unpack = self._bind("ucp_ep_rkey_unpack", status, pointer, pointer, pointer)
        self._rkey_destroy = self._bind("ucp_rkey_destroy", None, pointer)
        self._get_efd = self._bind("ucp_worker_get_efd", status, pointer, pointer)
        self._arm = self._bind("ucp_worker_arm", status, pointer)
        self._query = self._bind("ucp_worker_query", status, pointer, pointer)
        self._print_info = self._bind("ucp_ep_print_info", None, pointer, pointer)
        self._get_version = self._bind("ucp_get_version", None, pointer, pointer, pointer)
        self._status_string: Callable[[int], bytes] = self._ucs.ucs_status_string
        self._ucs.ucs_status_string.restype = ctypes.c_char_p
        self._ucs.ucs_status_string.argtypes = (status,)
        self._c.fdopen.restype = pointer
        self._c.fclose.argtypes = (pointer,)
        self.functions: Int64Array = np.array([self._address(name) for name in FUNCTIONS], dtype=np.int64)
        self.native: Int64Array = np.array([self._address(name) for name in NATIVE], dtype=np.int64)

    @property
    def version(self) -> tuple[int, int, int]:
        """Of the UCX that runs, which need not be the one that UCXX was built with."""
        words = (ctypes.c_uint * 3)()
        size = ctypes.sizeof(ctypes.c_uint)
        self._get_version(*(ctypes.byref(words, place * size) for place in range(3)))
        return words[0], words[1], words[2]

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._ucp, name)
        function.restype, function.argtypes = result, arguments
        bound: Callable[..., Any] = function
        return bound

    def _address(self, name: str) -> int:
        library = self._ucp if name.startswith("ucp_") else self._c
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def map_memory(self, context: int, address: int, nbytes: int, device_type: str = "cpu") -> int:
        """Registers memory with UCX; returns its ``ucp_mem_h``. Raises ``TransportUnavailable``."""
        memory_type = MEMORY_TYPES[device_type]
        params = _MemMapParams(field_mask=1 | 2 | 16, address=address, length=nbytes, memory_type=memory_type)
        memh = ctypes.c_void_p()
        status = self._mem_map(context, ctypes.byref(params), ctypes.byref(memh))
        if status != _OK or memh.value is None:
            remedy = "check `ulimit -l`" if memory_type == HOST else "this libucx needs its CUDA modules (libuct_cuda)"
            raise TransportUnavailable(
                f"UCX cannot register {nbytes} bytes of {device_type} memory: {self.describe(status)}; {remedy}"
            )
        return memh.value

    def unmap_memory(self, context: int, memh: int) -> None:
        self._mem_unmap(context, memh)

    def pack_rkey(self, context: int, memh: int) -> bytes:
        """The remote key of registered memory, as bytes for a peer."""
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self._rkey_pack(context, memh, ctypes.byref(buffer), ctypes.byref(size))
        if status != _OK or buffer.value is None:
            raise TransportUnavailable(f"UCX cannot export registered memory: {self.describe(status)}")
        packed = ctypes.string_at(buffer.value, size.value)
        self._rkey_buffer_release(buffer)
        return packed

    def unpack_rkey(self, endpoint: int, packed: bytes) -> int:
        """The ``ucp_rkey_h`` of a peer's memory on ``endpoint``. Raises ``TransportUnavailable``."""
        # UCX parses the key without knowing its length. The padding keeps it from reading past the end of a truncated
        # key: zeros parse as keys of no bytes, 0xff ends the list of devices that comes last.
        padding = bytes(1 << 14) + b"\xff" * (1 << 15)
        buffer = ctypes.create_string_buffer(packed + padding, len(packed) + len(padding))
        rkey = ctypes.c_void_p()
        status = self._rkey_unpack(endpoint, ctypes.addressof(buffer), ctypes.byref(rkey))
        if status != _OK or rkey.value is None:
            raise TransportUnavailable(f"no UCX lane reaches the peer's memory: {self.describe(status)}")
        return rkey.value

    def destroy_rkey(self, rkey: int) -> None:
        self._rkey_destroy(rkey)

    def event_fd(self, worker: int) -> int:
        """The worker's event file descriptor, which UCX owns and closes."""
        fd = ctypes.c_int()
        status = self._get_efd(worker, ctypes.byref(fd))
        if status != _OK:
            raise TransportUnavailable(f"UCX gives no event descriptor: {self.describe(status)}")
        return fd.value

    def arm(self, worker: int) -> bool:
        """True if the event file descriptor will report the next event; False if there is work already."""
        status: int = self._arm(worker)
        if status not in (_OK, _BUSY):
            raise TransportUnavailable(f"UCX cannot arm its event descriptor: {self.describe(status)}")
        return status == _OK

    def is_thread_safe(self, worker: int) -> bool:
        """Whether several threads may use the worker at a time: libucp is built so, and UCXX asks for it."""
        attributes = (ctypes.c_uint64 * 16)(_FIELD_THREAD_MODE)
        status = self._query(worker, ctypes.byref(attributes))
        return status == _OK and attributes[1] & 0xFFFFFFFF == _MULTI

    def put_lanes(self, endpoint: int, device_type: str = "cpu") -> str:
        """The lanes that carry puts of one kind of memory on ``endpoint``; see `lanes_for`."""
        fd = os.memfd_create("ucp-ep-info", os.MFD_CLOEXEC)
        try:
            stream = self._c.fdopen(os.dup(fd), b"w")
            self._print_info(endpoint, stream)
            self._c.fclose(stream)
            text = os.pread(fd, 1 << 16, 0).decode("ascii", "replace")
        finally:
            os.close(fd)
        return lanes_for(text, device_type)

    def describe(self, status: int) -> str:
        return f"{self._status_string(status).decode('ascii', 'replace')} (ucs_status {status})"

    def error(self, status: int, operation: str, *, peer_alive: bool) -> KVError:
        """The typed error for a failed operation. operation: text that names the operation and the peer."""
        cancelled_alive = status == -16 and peer_alive  # UCX's status for a put that no lane supports
        lost = status in _PEER_LOST or _LAST_ENDPOINT_ERROR <= status <= _FIRST_LINK_ERROR
        if lost and not cancelled_alive:
            return PeerLost(f"{operation} failed: {self.describe(status)}; the peer's process has probably ended")
        return TransportUnavailable(
            f"{operation} failed: {self.describe(status)}; UCX_LOG_LEVEL=info UCX_PROTO_INFO=used show why"
        )


def lanes_for(text: str, device_type: str) -> str:
    """The lanes that carry puts between memory of ``device_type``, from the text of ``ucp_ep_print_info``.

    For example ``"cma/memory"`` or ``"cuda_ipc/cuda"``; several are joined by ``+``; ``""`` before there are lanes.
    """
    others = _ONLY_DEVICE if device_type == "cpu" else _ONLY_HOST
    every = [match for match in map(_LANE.search, text.splitlines()) if match]
    lanes = [lane for lane in every if not lane["transport"].startswith(others)]
    puts = [f"{lane['transport']}/{lane['device']}" for lane in lanes if re.search(r"\brma(_bw)?\b", lane["roles"])]
    if puts:
        return "+".join(dict.fromkeys(puts))
    if device_type != "cpu":
        return f"none for {device_type} memory" if every else ""
    return "+".join(f"{lane['transport']}/{lane['device']} (emulated put)" for lane in lanes[:1])


@cache
def load() -> LibUCP:
    """The libucp that UCXX uses. Call after ``import ucxx``: its file is found among this process's mappings."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libucp.so" in path or "/libucp-" in path:
            return LibUCP(path)
    raise TransportUnavailable("UCXX is imported but has not loaded libucp; reinstall ucxx-cu13 and libucx-cu13")


def request_params(memory_type: int | None = None) -> Int64Array:
    """A ``ucp_request_param_t`` as int64 words.

    memory_type: a ``ucs_memory_type_t``, for puts; word `KEY_WORD` is then the memory handle, set for each put.
    """
    words = np.zeros(24, dtype=np.int64)
    if memory_type is not None:
        words[0] = _FIELD_MEMORY_TYPE | _FIELD_MEMH
        words[6] = memory_type
    return words
