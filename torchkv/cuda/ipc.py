"""Device memory that other processes on the host can reach: the counterpart of `hostmem` for CUDA.

The owner describes a tensor's storage in a few bytes (`share`); a peer maps it with `open_share`, in the context of
the device that *its own* kernels run on. Then a kernel there stores through a plain address into the owner's memory.
(PyTorch opens such handles in the owner's device's context instead, where no kernel of the peer's device runs.)

This is legacy CUDA IPC: it can export what ``cudaMalloc`` or ``cuMemAlloc`` gave, so PyTorch's default allocator, but
neither expandable segments nor ``cudaMallocAsync``. `allocate` gives such memory whatever PyTorch's settings are.

The bytes of a share are hostile until proven otherwise. They hold a handle and an offset, never an address, and
what the driver opened must contain the span that they claim.
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

from torchkv import hostmem
from torchkv.cudadriver import check, context, device_index, driver, failed_with, make_current, primary_context
from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = [
    "MAX_SHARE",
    "GpuFacts",
    "Mapping",
    "allocate",
    "check_shareable",
    "free_at_once",
    "free_later",
    "free_left",
    "gpu_facts",
    "make_current",
    "open_share",
    "share",
]

MAX_SHARE = 512  # bytes
MAX_NBYTES = 1 << 46
# The driver carves smaller blocks out of one of this size, and IPC then exports all of it: neighbours too.
GRANULE = 2 << 20
HANDLE_NBYTES = 64

_log = logging.getLogger(__name__)

_REMEDY = "allocate it with torchkv.KVCache.empty, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


class _Block:
    """One allocation, as PyTorch adopts it; the tensor's storage keeps this object alive."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """An uninitialised uint8 tensor ``[nbytes]`` over a ``cuMemAlloc`` block of its own, which IPC can share.

    The block is freed with the last tensor over the storage, which waits for the device to finish; free it only
    after all peers have closed their mappings. Raises ``ProtocolError`` if ``nbytes`` is not in 1 .. 2**46 or the
    device is no CUDA device, ``TransportUnavailable`` where there is no such GPU or too little memory.
    """
    if not 0 < nbytes <= MAX_NBYTES:
        raise ProtocolError(f"device memory of {nbytes} bytes asked for; must be 1 to {MAX_NBYTES}")
    index = device_index(device)
    reserved = -(-nbytes // GRANULE) * GRANULE
    with context(index) as cuda:
        result = cuda.cuMemAlloc(reserved)
        if failed_with(result, "CUDA_ERROR_OUT_OF_MEMORY"):
            free_left(index)
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
    weakref.finalize(block, _let_go, index, partial(_free, ptr, index)).atexit = False
    tensor = torch.as_tensor(block, device=torch.device("cuda", index))
    assert tensor.data_ptr() == ptr, "PyTorch copied the block instead of adopting it"
    return tensor


# By GPU: who frees, when no stream waits, what finalizers have left; and that.
_keepers: dict[int, weakref.WeakSet[Any]] = {}
_left: dict[int, deque[Callable[[], None]]] = {}


def free_later(keeper: object, index: int) -> None:
    """Until `free_at_once`, or as long as ``keeper`` lives, what is let go on ``cuda:index`` is left to `free_left`.

    Freeing and unmapping wait for all streams. Finalizers do so on whichever thread drops the last reference, or
    happens to collect garbage, with whatever lock it has: one that the thread needs which is to let a stream go.
    """
    _keepers.setdefault(index, weakref.WeakSet()).add(keeper)


def free_at_once(keeper: object, index: int) -> None:
    """Ends `free_later`. Idempotent."""
    _keepers[index].discard(keeper)


def free_left(index: int) -> None:
    """Frees and unmaps what was left on ``cuda:index``. Waits for all of its streams."""
    left = _left.get(index, deque())
    while left:
        with suppress(IndexError):  # another thread was faster
            left.popleft()()


def _let_go(index: int, free: Callable[[], None]) -> None:
    """free: does not raise."""
    _left.setdefault(index, deque()).append(free)
    if not _keepers.get(index):
        free_left(index)


def _free(ptr: int, index: int) -> None:
    try:
        with context(index) as cuda:
            check(cuda.cuMemFree(ptr), "cuMemFree")
    except TransportUnavailable as error:
        # Runs where nobody can catch it, for instance after a kernel's fault has made every call fail.
        _log.warning("device memory at %#x on cuda:%d was not freed: %s", ptr, index, error)


def check_shareable(tensor: torch.Tensor) -> None:
    """Returns if `share` can describe the storage of ``tensor``.

    Raises ``TransportUnavailable`` with the reason and the remedy where CUDA IPC cannot export that memory,
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


def _check_exportable(cuda: Any, ptr: int, nbytes: int, what: str) -> tuple[int, int]:
    """Base and size of the one allocation around [ptr, ptr + nbytes)."""
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if not check(cuda.cuPointerGetAttribute(kind, ptr), f"asking the driver about {what}"):
        raise TransportUnavailable(
            f"{what} cannot be shared with other processes: it is virtual or pooled memory (expandable segments, "
            f"cudaMallocAsync), which CUDA IPC does not export; {_REMEDY}"
        )
    base, size = (int(n) for n in check(cuda.cuMemGetAddressRange(ptr), f"looking up {what}"))
    if ptr + nbytes > base + size:
        raise TransportUnavailable(f"{what} spans more than one allocation, of which CUDA IPC exports one; {_REMEDY}")
    return base, size


_Host = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_Uuid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]


class _Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    host: _Host
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    gpu: _Uuid  # that holds the memory
    handle: _Handle  # of the whole allocation
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]  # of the storage in it
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_NBYTES)]  # of the storage


def _decode(share: bytes) -> _Share:
    if len(share) > MAX_SHARE:
        raise ProtocolError(f"device memory descriptor of {len(share)} bytes, the limit is {MAX_SHARE}")
    try:
        return msgspec.msgpack.decode(share, type=_Share)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"device memory descriptor does not decode: {error}; run the same torchkv version on all ranks"
        ) from error


_lock = threading.RLock()  # garbage collection may close a mapping inside any of the sections below
# Handle -> where this process has that allocation, and the driver's unique number for it: the same address may
# later belong to another.
_shared: dict[bytes, tuple[int, int]] = {}


def share(tensor: torch.Tensor) -> bytes:
    """At most ``MAX_SHARE`` bytes from which a process on this host reaches ``tensor``'s whole storage.

    Valid while this process holds the memory. Raises what `check_shareable` raises.
    """
    index, ptr, nbytes = _storage(tensor)
    with context(index) as cuda:
        what = f"the storage of {nbytes} bytes on cuda:{index}"
        base, _ = _check_exportable(cuda, ptr, nbytes, what)
        raw = check(cuda.cuIpcGetMemHandle(base), f"exporting {what}")
        handle = ctypes.string_at(raw.getPtr(), HANDLE_NBYTES)
        kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        number = int(check(cuda.cuPointerGetAttribute(kind, base), f"looking up {what}"))
        owner = _uuid(cuda, index)
    with _lock:
        _shared[handle] = (base, number)
    return msgspec.msgpack.encode(
        _Share(
            version=1,
            host=hostmem.host_identity(),
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
    """A peer's storage: loads and stores of ``device`` at ``[ptr, ptr + nbytes)`` reach its memory.

    Memory of another process stays mapped, and alive, until ``close()`` or garbage collection, whatever becomes of
    its owner. Memory of this process is only an address: its tensor must be kept.
    """

    def __init__(self, ptr: int, nbytes: int, device: torch.device, unmap: Callable[[], None] | None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.device = device
        self._unmap = None if unmap is None else weakref.finalize(self, _let_go, device.index, unmap)
        if self._unmap is not None:
            self._unmap.atexit = False

    def close(self) -> None:
        """Unmaps it; nothing on the device may still touch it. Idempotent. `free_later` puts it off."""
        if self._unmap is not None:
            self._unmap()


@dataclass(slots=True)
class _Opened:
    """An allocation of another process, mapped once for all the storages in it."""

    ptr: int
    room: int  # bytes from ptr to its end
    users: int = 0


_opened: dict[tuple[int, bytes], _Opened] = {}


def open_share(share: bytes, device: torch.device) -> Mapping:
    """Maps the storage that a process on this host described with `share`, for kernels that run on ``device``.

    Raises ``ProtocolError`` for bytes that are no share or claim more than the allocation has,
    ``TransportUnavailable`` with the reason where the memory cannot be reached: another host or container, no
    peer access between the two GPUs, an owner that ended or freed it.
    """
    what = _decode(share)
    index = device_index(device)
    if what.host != hostmem.host_identity():
        raise TransportUnavailable("the peer's device memory is on another host, or in another PID namespace")
    with context(index) as cuda:
        _check_peer_access(cuda, index, what.gpu)
        if what.pid == os.getpid():
            return Mapping(_own_address(cuda, what, index), what.nbytes, torch.device("cuda", index), None)
        with _lock:
            opened = _open(cuda, what, index)
            opened.users += 1
            try:
                _check_bounds(what, opened.room)
            except ProtocolError:
                _close((index, what.handle))
                raise
    return Mapping(
        opened.ptr + what.offset, what.nbytes, torch.device("cuda", index), lambda: _close((index, what.handle))
    )


def _check_bounds(what: _Share, room: int) -> None:
    if what.offset + what.nbytes > room:
        raise ProtocolError(
            f"device memory of process {what.pid}: bytes {what.offset} to {what.offset + what.nbytes} claimed of an "
            f"allocation of {room}"
        )


def _check_peer_access(cuda: Any, index: int, gpu: bytes) -> None:
    # A GPU that this process does not see (CUDA_VISIBLE_DEVICES) may be reached all the same: the driver will tell.
    for owner in range(int(check(cuda.cuDeviceGetCount(), "counting GPUs"))):
        if owner != index and _uuid(cuda, owner) == gpu and not _can_access(cuda, index, owner):
            raise TransportUnavailable(
                f"cuda:{index} has no peer access to the peer's memory on cuda:{owner} (no NVLink, or PCIe peer to "
                "peer switched off); `nvidia-smi topo -p2p w` shows which pairs of GPUs have it"
            )


def _can_access(cuda: Any, index: int, owner: int) -> bool:
    here, there = (check(cuda.cuDeviceGet(i), f"looking for cuda:{i}") for i in (index, owner))
    return bool(check(cuda.cuDeviceCanAccessPeer(here, there), f"asking for access of cuda:{index} to cuda:{owner}"))


def _open(cuda: Any, what: _Share, index: int) -> _Opened:
    key = (index, what.handle)
    if key not in _opened:
        where = f"device memory of process {what.pid} ({what.nbytes} bytes)"
        raw = cuda.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), what.handle, HANDLE_NBYTES)
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


def _own_address(cuda: Any, what: _Share, index: int) -> int:
    """CUDA opens no handle in the process that made it, and need not: the address is valid here as it is."""
    with _lock:
        known = _shared.get(what.handle)
    if known is None or not _still_there(cuda, *known):
        raise TransportUnavailable(f"device memory of this process ({what.nbytes} bytes) was freed, or never shared")
    base = known[0]
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    owner = int(check(cuda.cuPointerGetAttribute(kind, base), "asking the driver about an allocation"))
    with context(owner):  # in any other context the driver does not find it
        found, size = (int(n) for n in check(cuda.cuMemGetAddressRange(base), "looking up an allocation"))
    _check_bounds(what, found + size - base)
    if owner != index:
        # Nothing has opened a handle here, which would have done it: a kernel's first access would be its last.
        enabled = cuda.cuCtxEnablePeerAccess(primary_context(owner), 0)
        if not failed_with(enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"):
            check(enabled, f"enabling access of cuda:{index} to cuda:{owner}")
    return base + what.offset


def _still_there(cuda: Any, base: int, number: int) -> bool:
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    code, found = cuda.cuPointerGetAttribute(kind, base)
    return int(code) == 0 and int(found) == number


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What doctor says about one GPU. ``peers[i]``: whether it can load from and store to the memory of cuda:i."""

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
