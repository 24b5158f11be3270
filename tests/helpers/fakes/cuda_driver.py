"""A fake CUDA driver: allocations, IPC handles, contexts, and streams that run only when a test says so.

It refuses what the real one refuses, so that code which forgets a context, closes twice or frees twice fails with it.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchkv.cuda import driver, ipc

ALIGN = 2 << 20


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


OK = Code.CUDA_SUCCESS
INVALID = Code.CUDA_ERROR_INVALID_VALUE


class Pointer(enum.Enum):
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = "ipc"
    CU_POINTER_ATTRIBUTE_BUFFER_ID = "number"
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = "device"


class Device(enum.Enum):
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = "mem_ops"
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = "flush"


@dataclass
class Allocation:
    base: int
    size: int
    device: int
    number: int
    ipc: bool = True


class RawHandle:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.buffer)


class FakeDriver:
    CUresult = Code
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUpointer_attribute = Pointer
    CUdevice_attribute = Device
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0, CU_STREAM_WAIT_VALUE_FLUSH=1 << 30)
    CUipcMemHandle = RawHandle

    def __init__(self, *, devices: int = 2, free: int = 1 << 40) -> None:
        self.devices = devices
        self.free = free
        self.peers = True
        self.can = {"mem_ops": 1, "flush": 1}
        self.contexts: list[int] = []
        self.mode = "global"
        self.allocations: dict[int, Allocation] = {}
        self.exported: dict[bytes, Allocation] = {}
        self.opened: dict[int, tuple[bytes, int]] = {}  # base here -> handle, device
        self.enabled: set[tuple[int, int]] = set()
        self.streams: dict[int, deque[tuple[str, int, int]]] = {}
        self.capturing: set[int] = set()
        self.fail: set[str] = set()  # names of calls that fail
        self.words: Any = None
        self.current: int | None = 0  # the calling thread's device; None: no context
        self.events: list[FakeEvent] = []
        self.given: dict[Any, int] = {}  # (device, stream) -> operations enqueued
        self.ran: dict[Any, int] = {}  # ... and executed
        self.waits: list[tuple[int, Any, int]] = []  # waiting stream, awaited stream, how many of its operations
        self._next = 1 << 40
        self._number = 0

    # Contexts and devices.

    def cuDeviceGetCount(self) -> Any:
        return OK, self.devices

    def cuDeviceGet(self, index: int) -> Any:
        return (OK, index) if index < self.devices else (Code.CUDA_ERROR_INVALID_DEVICE, None)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        return OK, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> Any:
        self.mode, before = mode, self.mode
        return OK, before

    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, SimpleNamespace(bytes=bytes([device]) * 16)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, f"Fake {device}".encode().ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: int) -> Any:
        return OK, 1 << 37

    def cuDeviceGetAttribute(self, kind: Device, device: int) -> Any:
        return OK, self.can[kind.value]

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> Any:
        return OK, int(self.peers)

    def cuCtxEnablePeerAccess(self, peer: int, flags: int) -> Any:
        pair = (self.contexts[-1], peer)
        if pair in self.enabled:
            return (Code.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.enabled.add(pair)
        return (OK,)

    # Memory.

    def cuMemAlloc(self, nbytes: int) -> Any:
        if nbytes > self.free:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, None
        return OK, self.add(nbytes).base

    def add(self, nbytes: int, *, ipc: bool = True, at: int | None = None) -> Allocation:
        if at is None:
            at, self._next = self._next, self._next + -(-nbytes // ALIGN) * ALIGN + ALIGN
        self._number += 1
        device = self.contexts[-1] if self.contexts else 0
        self.allocations[at] = Allocation(at, nbytes, device, self._number, ipc)
        self.free -= nbytes
        return self.allocations[at]

    def cuMemFree(self, base: int) -> Any:
        self.free += self.allocations.pop(base).size
        return (OK,)

    def cuMemGetInfo(self) -> Any:
        return OK, self.free, 1 << 40

    def _around(self, ptr: int) -> Allocation | None:
        return next((a for a in self.allocations.values() if a.base <= ptr < a.base + a.size), None)

    def cuMemGetAddressRange(self, ptr: int) -> Any:
        found = self._around(ptr)
        if found is None or found.device != self.contexts[-1]:
            return Code.CUDA_ERROR_NOT_FOUND, None, None
        return OK, found.base, found.size

    def cuPointerGetAttribute(self, kind: Pointer, ptr: int) -> Any:
        found = self._around(ptr)
        return (INVALID, None) if found is None else (OK, getattr(found, kind.value))

    # IPC.

    def cuIpcGetMemHandle(self, base: int) -> Any:
        found = self.allocations[base]
        raw = RawHandle()
        handle = hashlib.sha512(str(found.number).encode()).digest()
        raw.buffer.raw = handle
        self.exported[handle] = found
        return OK, raw

    def cuIpcOpenMemHandle(self, raw: RawHandle, flags: int) -> Any:
        handle = raw.buffer.raw
        assert flags == 1
        if handle not in self.exported or "cuIpcOpenMemHandle" in self.fail:
            return Code.CUDA_ERROR_INVALID_HANDLE, None
        assert (handle, self.contexts[-1]) not in self.opened.values(), "opened twice on one device"
        mapped = self.add(self.exported[handle].size)
        self.opened[mapped.base] = (handle, self.contexts[-1])
        return OK, mapped.base

    def cuIpcCloseMemHandle(self, base: int) -> Any:
        assert self.opened.pop(base)[1] == self.contexts[-1]
        del self.allocations[base]
        return (OK,)

    # Streams: what is enqueued runs in `run`.

    def cuMemHostGetDevicePointer(self, ptr: int, flags: int) -> Any:
        self.host = ptr
        return OK, ptr + 4096  # other than the host's address, as on some systems

    def cuStreamIsCapturing(self, stream: int, status: Any) -> int:
        status._obj.value = int(stream in self.capturing)
        return OK

    def cuStreamWriteValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        assert flags == 0
        return self._enqueue("cuStreamWriteValue32", stream, "write", address, value)

    def cuStreamWaitValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        assert flags == (1 << 30 if self.can["flush"] else 0)
        return self._enqueue("cuStreamWaitValue32", stream, "wait", address, value)

    def _enqueue(self, call: str, stream: int, kind: str, address: int, value: int) -> int:
        if call in self.fail:
            return INVALID
        assert 0 <= value < 1 << 32
        self.streams.setdefault(stream, deque()).append((kind, (address - 4096 - self.host) // 4, value))
        return OK

    def run(self, stream: int, limit: int = 1 << 30) -> int:
        """Runs up to ``limit`` operations of a stream; returns how many ran before it had to wait."""
        queue = self.streams.get(stream, deque())
        done = 0
        while queue and done < limit:
            kind, word, value = queue[0]
            if kind == "wait" and int(np.int32(np.uint32((int(self.words[word]) - value) & 0xFFFFFFFF))) < 0:
                break
            if kind == "write":
                self.words[word] = value
            queue.popleft()
            done += 1
        return done

    # Events: the number of operations enqueued before them, compared with the number executed.

    def cuEventCreate(self, flags: int) -> Any:
        assert flags == 2
        self.events.append(FakeEvent(self.contexts[-1]))
        return OK, len(self.events)

    def cuEventRecord(self, handle: int, stream: int) -> int:
        event = self.events[handle - 1]
        if stream == 0 and (self.contexts[-1] if self.contexts else self.current) != event.device:
            return Code.CUDA_ERROR_INVALID_HANDLE if self.current is not None else Code.CUDA_ERROR_INVALID_CONTEXT
        event.place = (event.device, stream)
        event.count = self.given.get(event.place, 0)
        return OK

    def cuEventQuery(self, handle: int) -> int:
        event = self.events[handle - 1]
        if "cuEventQuery" in self.fail:
            return INVALID
        return OK if self.ran.get(event.place, 0) >= event.count else Code.CUDA_ERROR_NOT_READY

    def cuStreamWaitEvent(self, stream: int, handle: int, flags: int) -> int:
        event = self.events[handle - 1]
        assert flags == 0
        self.waits.append((stream, event.place, event.count))
        return OK


@dataclass
class FakeEvent:
    device: int
    place: tuple[int, int] | None = None
    count: int = 0


class FakeTensor:
    """What `ipc.share` uses of a CUDA tensor."""

    is_cuda = True
    shape = (1,)

    def __init__(self, ptr: int, nbytes: int, device: int = 0) -> None:
        self.device = torch.device("cuda", device)
        self._storage = SimpleNamespace(data_ptr=lambda: ptr, nbytes=lambda: nbytes)

    def untyped_storage(self) -> Any:
        return self._storage


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> FakeDriver:
    """Makes torchkv use ``fake`` until the test ends."""
    monkeypatch.setattr(driver, "driver", lambda: fake)
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "library_with_gil", lambda: fake)
    monkeypatch.setattr(ipc, "driver", lambda: fake)

    def primary_context(index: int) -> Any:
        return driver.check(fake.cuDeviceGet(index), f"looking for cuda:{index}")

    monkeypatch.setattr(driver, "primary_context", primary_context)
    monkeypatch.setattr(ipc, "primary_context", primary_context)
    return fake
