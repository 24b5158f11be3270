"""CUDA IPC: device memory that other processes on the host can map, and when device memory is freed.

The owner describes a tensor's storage in a few bytes (`share`). A peer maps the storage with `open_share`, in the
context of the device that the *peer's* kernels run on. Such a kernel can then store to the owner's memory through a
plain address. (PyTorch opens IPC handles in the context of the owner's device, where kernels of the peer's device
cannot use them.)

This is legacy CUDA IPC. It exports memory of ``cudaMalloc`` and ``cuMemAlloc``, which PyTorch's default allocator uses,
but neither expandable segments nor memory of ``cudaMallocAsync``. `allocate` returns memory that can be exported,
whatever PyTorch's settings are.

The bytes of a share come from another process and are not trusted. They hold a handle and an offset, never an address,
and the span that they claim must lie within what the driver opened.

Freeing device memory and unmapping a peer's memory wait for all streams of the GPU. Finalizers that run on any thread
must not wait so; with `defer_frees` they only queue the call for `run_deferred_frees`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch

from torchkv.cuda.driver import check, context, device_index, driver, failed_with, make_current, primary_context
from torchkv.errors import ProtocolError, TransportUnavailable
from torchkv.host import shared_memory

__all__ = [
    "MAX_SHARE",
    "GpuFacts",
    "Mapping",
    "adopt",
    "allocate",
    "check_shareable",
    "stop_deferring",
    "defer_frees",
    "run_deferred_frees",
    "gpu_facts",
    "make_current",
    "open_share",
    "share",
]

MAX_SHARE = 512  # bytes
MAX_NBYTES = 1 << 46
# Sizes are rounded up to this. The driver carves smaller allocations out of a block of this size, and IPC would export
# the whole block, neighbours included.
GRANULE = 2 << 20
HANDLE_NBYTES = 64

_log = logging.getLogger(__name__)

_REMEDY = "allocate it with torchkv.KVCache.empty, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


class _Block:
    """One allocation, in the form in which PyTorch adopts foreign memory. The tensor's storage keeps it alive."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """An uninitialised uint8 tensor ``[nbytes]`` over a ``cuMemAlloc`` allocation of its own, which IPC can share.

    The allocation is freed with the last tensor over the storage, which waits for all streams of the device. Peers must
    have closed their mappings before. Raises ``ProtocolError`` if ``nbytes`` is not in 1 .. 2**46 or the
    device is no CUDA device, ``TransportUnavailable`` where there is no such GPU or too little memory.
    """
    if not 0 < nbytes <= MAX_NBYTES:
        raise ProtocolError(f"cannot allocate {nbytes} bytes of device memory; the size must be 1 to {MAX_NBYTES}")
    index = device_index(device)
    reserved = -(-nbytes // GRANULE) * GRANULE
    with context(index) as cuda:
        result = cuda.cuMemAlloc(reserved)
        if failed_with(result, "CUDA_ERROR_OUT_OF_MEMORY"):
            run_deferred_frees(index)
            torch.cuda.empty_cache()
            result = cuda.cuMemAlloc(reserved)
        if failed_with(result, "CUDA_ERROR_OUT_OF_MEMORY"):
            free, total = check(cuda.cuMemGetInfo(), f"asking cuda:{index} for its free memory")
            raise TransportUnavailable(
                f"cuda:{index} cannot give {reserved} bytes of device memory: {free} of {total} are free; "
                "use fewer pages, or leave more room (engines often reserve a share of the GPU for themselves)"
            )
        ptr = int(check(result, f"allocating {reserved} bytes on cuda:{index}"))
    block = _Block(ptr, nbytes)
    # Not at exit: tensors may live longer than the interpreter's exit hooks, and the driver cleans up anyway.
    weakref.finalize(block, _free_or_defer, index, partial(_free, ptr, index)).atexit = False
    tensor = torch.as_tensor(block, device=torch.device("cuda", index))
    assert tensor.data_ptr() == ptr, "PyTorch copied the block instead of adopting it"
    return tensor


def adopt(ptr: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor ``[nbytes]`` over device memory that somebody else has allocated, and keeps.

    Raises ``TransportUnavailable`` if PyTorch finds that it is no memory of this GPU. Where GPUs can address host
    memory it does not; `check_shareable` does, when the memory is registered.
    """
    try:
        tensor = torch.as_tensor(_Block(ptr, nbytes), device=device)
    except (RuntimeError, ValueError) as error:
        raise TransportUnavailable(f"address {ptr:#x} is no memory of {device}: {error}") from error
    if tensor.data_ptr() != ptr:  # PyTorch has copied it from another GPU
        raise TransportUnavailable(f"address {ptr:#x} is memory of another GPU than {device}")
    return tensor


# By GPU: the objects for whose sake frees are deferred, and the deferred calls.
_deferring: dict[int, weakref.WeakSet[Any]] = {}
_deferred: dict[int, deque[Callable[[], None]]] = {}


def defer_frees(owner: object, index: int) -> None:
    """From now on memory dropped on ``cuda:index`` is freed and unmapped only by `run_deferred_frees`.

    This lasts until `stop_deferring`, or until ``owner`` is collected; with several owners, until the last of them.

    Freeing and unmapping wait for all streams. A finalizer runs on the thread that drops the last reference, or on one
    that happens to collect garbage, with the locks that this thread holds. The wait is a deadlock if a stream is
    blocked until another thread releases it, and that thread needs one of these locks.
    """
    _deferring.setdefault(index, weakref.WeakSet()).add(owner)


def stop_deferring(owner: object, index: int) -> None:
    """Ends `defer_frees` for ``owner``. Idempotent."""
    _deferring[index].discard(owner)


def run_deferred_frees(index: int) -> None:
    """Makes the calls that were deferred on ``cuda:index``. Waits for all of its streams."""
    deferred = _deferred.get(index, deque())
    while deferred:
        with suppress(IndexError):  # another thread took the last one
            deferred.popleft()()


def _free_or_defer(index: int, free: Callable[[], None]) -> None:
    """What finalizers call. free: frees or unmaps, and does not raise."""
    _deferred.setdefault(index, deque()).append(free)
    if not _deferring.get(index):
        run_deferred_frees(index)


def _free(ptr: int, index: int) -> None:
    try:
        with context(index) as cuda:
            check(cuda.cuMemFree(ptr), "cuMemFree")
    except TransportUnavailable as error:
        # Logged, not raised: this runs in finalizers. After a kernel's fault, for instance, every driver call fails.
        _log.warning("device memory at %#x on cuda:%d was not freed: %s", ptr, index, error)


def check_shareable(tensor: torch.Tensor) -> None:
    """Checks that `share` can export the storage of ``tensor``.

    Raises ``TransportUnavailable`` with the reason and the remedy where CUDA IPC cannot export that memory, and
    ``ProtocolError`` for a tensor that is not on a GPU or has no bytes.
    """
    index, ptr, nbytes = _storage(tensor)
    with context(index) as cuda:
        _check_exportable(cuda, ptr, nbytes, f"the storage of {nbytes} bytes on cuda:{index}")


def _storage(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    index = device_index(tensor.device)
    if storage.nbytes() == 0:
        raise ProtocolError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no memory to share")
    return index, storage.data_ptr(), storage.nbytes()


def _check_exportable(cuda: Any, ptr: int, nbytes: int, operation: str) -> tuple[int, int]:
    """Base address and size of the allocation that contains [ptr, ptr + nbytes)."""
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if not check(cuda.cuPointerGetAttribute(kind, ptr), f"asking the driver about {operation}"):
        raise TransportUnavailable(
            f"{operation} cannot be shared with other processes: it is virtual or pooled memory (expandable segments, "
            f"cudaMallocAsync), which CUDA IPC does not export; {_REMEDY}"
        )
    base, size = (int(n) for n in check(cuda.cuMemGetAddressRange(ptr), f"looking up {operation}"))
    if ptr + nbytes > base + size:
        raise TransportUnavailable(
            f"{operation} spans more than one allocation, of which CUDA IPC exports one; {_REMEDY}"
        )
    return base, size


_Host = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_Uuid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]


class _Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    host: _Host
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    gpu: _Uuid  # of the GPU that holds the memory
    handle: _Handle  # of the whole allocation
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]  # of the storage in the allocation
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_NBYTES)]  # of the storage


# Made on import, not by the first call: msgspec's own preparation for a type is not safe among threads.
_share_decoder = msgspec.msgpack.Decoder(_Share)


def _decode(share: bytes) -> _Share:
    if len(share) > MAX_SHARE:
        raise ProtocolError(f"device memory descriptor of {len(share)} bytes, the limit is {MAX_SHARE}")
    try:
        return _share_decoder.decode(share)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"device memory descriptor does not decode: {error}; run the same torchkv version on all ranks"
        ) from error


_lock = threading.RLock()  # garbage collection may close a mapping inside any of the sections below
# Handle -> address of the allocation in this process, and the driver's unique number for it: after it is freed, the
# address may belong to another allocation.
_shared: dict[bytes, tuple[int, int]] = {}


def share(tensor: torch.Tensor) -> bytes:
    """At most ``MAX_SHARE`` bytes with which a process on this host can map ``tensor``'s whole storage.

    They are valid as long as this process holds the memory. Raises what `check_shareable` raises.
    """
    index, ptr, nbytes = _storage(tensor)
    with context(index) as cuda:
        operation = f"the storage of {nbytes} bytes on cuda:{index}"
        base, _ = _check_exportable(cuda, ptr, nbytes, operation)
        raw = check(cuda.cuIpcGetMemHandle(base), f"exporting {operation}")
        handle = ctypes.string_at(raw.getPtr(), HANDLE_NBYTES)
        kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        number = int(check(cuda.cuPointerGetAttribute(kind, base), f"looking up {operation}"))
        owner = _uuid(cuda, index)
    with _lock:
        _shared[handle] = (base, number)
    return msgspec.msgpack.encode(
        _Share(
            version=1,
            host=shared_memory.host_identity(),
            pid=os.getpid(),
            gpu=owner,
            handle=handle,
            offset=ptr - base,
            nbytes=nbytes,
        )
    )


def _uuid(cuda: Any, index: int) -> bytes:
    device = check(cuda.cuDeviceGet(index), f"looking for cuda:{index}")
    return bytes(check(cuda.cuDeviceGetUuid(device), f"asking for the UUID of cuda:{index}").bytes)


class Mapping:
    """A peer's storage: kernels on ``device`` can load from and store to ``[ptr, ptr + nbytes)``.

    Memory of another process stays mapped and allocated until ``close()`` or garbage collection, even if its owner
    frees it or ends. Memory of this process is not mapped again: the caller must keep its tensor alive.
    """

    def __init__(self, ptr: int, nbytes: int, device: torch.device, unmap: Callable[[], None] | None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.device = device
        self._unmap = None if unmap is None else weakref.finalize(self, _free_or_defer, device.index, unmap)
        if self._unmap is not None:
            self._unmap.atexit = False

    def close(self) -> None:
        """Unmaps the memory, or defers that (`defer_frees`). No kernel may use it any more. Idempotent."""
        if self._unmap is not None:
            self._unmap()


@dataclass(slots=True)
class _Opened:
    """An allocation of another process, mapped once for all the storages in it.

    nbytes: from ``ptr`` to the end of the allocation. users: mappings that are not closed.
    """

    ptr: int
    nbytes: int
    users: int = 0


_opened: dict[tuple[int, bytes], _Opened] = {}


def open_share(share: bytes, device: torch.device) -> Mapping:
    """Maps the storage that a process on this host described with `share`, for kernels that run on ``device``.

    Raises ``ProtocolError`` for bytes that are no share or claim more than the allocation has,
    ``TransportUnavailable`` with the reason where the memory cannot be reached: another host or container, no
    peer access between the two GPUs, an owner that ended or freed it.
    """
    record = _decode(share)
    index = device_index(device)
    if record.host != shared_memory.host_identity():
        raise TransportUnavailable("the peer's device memory is on another host, or in another PID namespace")
    with context(index) as cuda:
        _check_peer_access(cuda, index, record.gpu)
        if record.pid == os.getpid():
            return Mapping(_own_address(cuda, record, index), record.nbytes, torch.device("cuda", index), None)
        with _lock:
            opened = _open(cuda, record, index)
            opened.users += 1
            try:
                _check_bounds(record, opened.nbytes)
            except ProtocolError:
                _close((index, record.handle))
                raise
    return Mapping(
        opened.ptr + record.offset,
        record.nbytes,
        torch.device("cuda", index),
        lambda: _close((index, record.handle)),
    )


def _check_bounds(record: _Share, nbytes: int) -> None:
    if record.offset + record.nbytes > nbytes:
        raise ProtocolError(
            f"device memory of process {record.pid}: bytes {record.offset} to {record.offset + record.nbytes} claimed "
            f"of an allocation of {nbytes} bytes"
        )


def _check_peer_access(cuda: Any, index: int, gpu: bytes) -> None:
    # Not an error if the GPU is none that this process sees (CUDA_VISIBLE_DEVICES): it may be reachable all the same,
    # and the driver refuses the handle if it is not.
    for owner in range(int(check(cuda.cuDeviceGetCount(), "counting GPUs"))):
        if owner != index and _uuid(cuda, owner) == gpu and not _can_access(cuda, index, owner):
            raise TransportUnavailable(
                f"cuda:{index} has no peer access to the peer's memory on cuda:{owner} (no NVLink, or PCIe peer to "
                "peer switched off); `nvidia-smi topo -p2p w` shows which pairs of GPUs have it"
            )


def _can_access(cuda: Any, index: int, owner: int) -> bool:
    here, there = (check(cuda.cuDeviceGet(i), f"looking for cuda:{i}") for i in (index, owner))
    return bool(check(cuda.cuDeviceCanAccessPeer(here, there), f"asking for access of cuda:{index} to cuda:{owner}"))


def _open(cuda: Any, record: _Share, index: int) -> _Opened:
    key = (index, record.handle)
    if key not in _opened:
        where = f"device memory of process {record.pid} ({record.nbytes} bytes)"
        raw = cuda.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), record.handle, HANDLE_NBYTES)
        flags = int(cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        try:
            ptr = int(check(cuda.cuIpcOpenMemHandle(raw, flags), f"opening {where} on cuda:{index}"))
        except TransportUnavailable as error:
            raise TransportUnavailable(
                f"{error}; its owner must be alive and still hold it, and both processes must see the same GPUs' "
                "device files and IPC namespace (containers: --ipc=host)"
            ) from error
        try:
            base, size = (int(n) for n in check(cuda.cuMemGetAddressRange(ptr), f"looking up {where}"))
        except TransportUnavailable:
            cuda.cuIpcCloseMemHandle(ptr)
            raise
        _opened[key] = _Opened(ptr, base + size - ptr)
    return _opened[key]


def _close(key: tuple[int, bytes]) -> None:
    with _lock:
        opened = _opened[key]
        opened.users -= 1
        if opened.users > 0:
            return
        del _opened[key]
        try:
            with context(key[0]) as cuda:
                check(cuda.cuIpcCloseMemHandle(opened.ptr), "cuIpcCloseMemHandle")
        except TransportUnavailable as error:
            _log.warning("a peer's device memory at %#x on cuda:%d was not unmapped: %s", opened.ptr, key[0], error)


def _own_address(cuda: Any, record: _Share, index: int) -> int:
    """The address of a storage of this process: CUDA opens no IPC handle in the process that made it."""
    with _lock:
        known = _shared.get(record.handle)
    if known is None or not _still_there(cuda, *known):
        raise TransportUnavailable(f"device memory of this process ({record.nbytes} bytes) was freed, or never shared")
    base = known[0]
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    owner = int(check(cuda.cuPointerGetAttribute(kind, base), "asking the driver about an allocation"))
    with context(owner):  # in the context of another device the driver does not find the allocation
        found, size = (int(n) for n in check(cuda.cuMemGetAddressRange(base), "looking up an allocation"))
    _check_bounds(record, found + size - base)
    if owner != index:
        # Opening a handle would have enabled access between the two GPUs; without it a kernel's access is a fault.
        enabled = cuda.cuCtxEnablePeerAccess(primary_context(owner), 0)
        if not failed_with(enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"):
            check(enabled, f"enabling access of cuda:{index} to cuda:{owner}")
    return base + record.offset


def _still_there(cuda: Any, base: int, number: int) -> bool:
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    code, found = cuda.cuPointerGetAttribute(kind, base)
    return int(code) == 0 and int(found) == number


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the doctor reports about one GPU. ``peers[i]``: whether it can load from and store to cuda:i's memory."""

    index: int
    name: str
    uuid: str
    total_nbytes: int
    peers: tuple[bool, ...]


def gpu_facts() -> list[GpuFacts]:
    """One entry per visible GPU. Raises ``TransportUnavailable`` where there is no driver or no GPU."""
    cuda = driver()
    count = int(check(cuda.cuDeviceGetCount(), "counting GPUs"))
    facts = []
    for index in range(count):
        device = check(cuda.cuDeviceGet(index), f"looking for cuda:{index}")
        name = bytes(check(cuda.cuDeviceGetName(256, device), f"asking cuda:{index} for its name"))
        facts.append(
            GpuFacts(
                index=index,
                name=name.split(b"\0")[0].decode("ascii", "replace"),
                uuid=f"GPU-{uuid.UUID(bytes=_uuid(cuda, index))}",
                total_nbytes=int(check(cuda.cuDeviceTotalMem(device), f"asking cuda:{index} for its memory")),
                peers=tuple(i == index or _can_access(cuda, index, i) for i in range(count)),
            )
        )
    return facts
