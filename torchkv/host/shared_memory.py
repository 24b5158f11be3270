"""Shared host memory that dies with its holders.

A segment is an anonymous memory file (``memfd``), mapped by its owner and, through ``/proc/<pid>/fd/<fd>``, by
peers on the same host. It has no name in any file system, so nothing stays behind however its holders end: the
kernel frees it with the last mapping and the last file descriptor.

The owner publishes a few bytes (`share`), the peer opens them (`open_segment`). Those bytes are hostile until
proven otherwise, and the numbers in them may since have been given to another process or file. So what is opened
must show the segment's random name, its inode and its size, and must be sealed against shrinking: otherwise its
owner could kill a peer (SIGBUS) by truncating it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchkv.errors import ProtocolError, TransportUnavailable

__all__ = ["DESCRIPTOR_NBYTES", "Segment", "allocate", "host_identity", "open_segment", "share"]

_MAGIC = b"tkhm"
_VERSION = 1
_FORMAT = struct.Struct("<4sBiiQQ16s32s")  # magic, version, pid, fd, inode, nbytes, token, host
DESCRIPTOR_NBYTES = _FORMAT.size

_MAX_NBYTES = 1 << 46  # half of what a 47-bit user address space can map
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FAILED = ctypes.c_void_p(-1).value

# The mmap module would do, but its objects each hold a file descriptor for life: with a segment per layer and
# peer that runs into the usual limit of 1024.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_Bytes = ctypes.Array[ctypes.c_uint8]


@dataclass(frozen=True, slots=True)
class _Owned:
    """What `share` tells about a segment of this process."""

    fd: int
    inode: int
    nbytes: int
    token: bytes


# Base address -> the mapping, kept alive by the tensor's storage. Weak, because an entry must not outlive its
# mapping: the same address may next belong to a tensor that is not ours.
_mappings: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()


def allocate(nbytes: int) -> torch.Tensor:
    """A zero-filled uint8 tensor ``[nbytes]`` over a new segment, aligned to at least 4096 bytes.

    Memory is committed at first touch and freed with the last tensor over the storage and the last peer's mapping.
    Raises ``ProtocolError`` if ``nbytes`` is not in 1 .. 2**46, ``TransportUnavailable`` if the kernel refuses.
    """
    if not 0 < nbytes <= _MAX_NBYTES:
        raise ProtocolError(f"host memory of {nbytes} bytes asked for; must be 1 to {_MAX_NBYTES}")
    token = secrets.token_bytes(16)
    try:
        fd = os.memfd_create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            inode = os.fstat(fd).st_ino
            ptr = _map(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise TransportUnavailable(
            f"cannot allocate {nbytes} bytes of shared host memory: {error}; "
            "check the limits on open files (ulimit -n), address space and memory"
        ) from error
    mapping = (ctypes.c_uint8 * nbytes).from_address(ptr)
    # Not at exit: tensors may live longer than the interpreter's exit hooks, and the kernel cleans up anyway.
    weakref.finalize(mapping, _release, ptr, nbytes, fd).atexit = False
    mapping.owned = _Owned(fd, inode, nbytes, token)  # type: ignore[attr-defined]
    _mappings[ptr] = mapping
    return torch.frombuffer(mapping, dtype=torch.uint8)


def share(tensor: torch.Tensor) -> bytes | None:
    """The descriptor (``DESCRIPTOR_NBYTES`` bytes) of the segment under ``tensor``'s whole storage.

    None if the storage was not made by `allocate` in this process. It is valid while this process holds the
    segment.
    """
    if tensor.device.type != "cpu":
        return None
    mapping = _mappings.get(tensor.untyped_storage().data_ptr())
    if mapping is None:
        return None
    owned: _Owned = mapping.owned  # type: ignore[attr-defined]
    return _FORMAT.pack(
        _MAGIC, _VERSION, os.getpid(), owned.fd, owned.inode, owned.nbytes, owned.token, host_identity()
    )


class Segment:
    """A peer's segment mapped into this process: loads and stores at ``[ptr, ptr + nbytes)`` reach its memory.

    It stays mapped, and its memory alive, until ``close()`` or garbage collection, whatever becomes of the owner.
    """

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._unmap = weakref.finalize(self, _release, ptr, nbytes, None)
        self._unmap.atexit = False

    def close(self) -> None:
        """Unmaps the segment; no load or store may touch it afterwards. Idempotent."""
        self._unmap()


def open_segment(descriptor: bytes) -> Segment:
    """Maps the segment that a process on this host described with `share`.

    Raises ``ProtocolError`` for bytes that are no descriptor, ``TransportUnavailable`` with the reason where the
    segment cannot be reached: another host or container, another user, an owner that ended or freed it.
    """
    if len(descriptor) != DESCRIPTOR_NBYTES:
        raise ProtocolError(
            f"host memory descriptor of {len(descriptor)} bytes; this version reads {DESCRIPTOR_NBYTES}"
        )
    magic, version, pid, fd, inode, nbytes, token, host = _FORMAT.unpack(descriptor)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            f"not a host memory descriptor of version {_VERSION}: it begins with {descriptor[:5]!r}; "
            "run the same torchkv version on all ranks"
        )
    if pid <= 0 or fd < 0 or not 0 < nbytes <= _MAX_NBYTES:
        raise ProtocolError(f"host memory descriptor names pid {pid}, fd {fd} and {nbytes} bytes: out of range")
    if host != host_identity():
        raise TransportUnavailable("the peer's host memory is on another host, or in another PID namespace")
    where = f"host memory of process {pid} (fd {fd}, {nbytes} bytes)"
    try:
        with _opened(f"/proc/{pid}/fd/{fd}", os.O_PATH) as path_fd:
            _verify(path_fd, where, token=token, inode=inode, nbytes=nbytes)
            with _opened(f"/proc/self/fd/{path_fd}", os.O_RDWR) as file_fd:
                if ~fcntl.fcntl(file_fd, fcntl.F_GET_SEALS) & _SEALS:
                    raise TransportUnavailable(f"{where} is not sealed: its owner could take it away under us")
                ptr = _map(file_fd, nbytes)
    except OSError as error:
        raise TransportUnavailable(
            f"{where} cannot be opened: {error}; its owner must be alive, of the same user, and dumpable"
        ) from error
    return Segment(ptr, nbytes)


def _verify(path_fd: int, where: str, *, token: bytes, inode: int, nbytes: int) -> None:
    # On the O_PATH descriptor: nothing can be swapped between this check and the use, and merely looking at what
    # a reused number now stands for has no side effect (opening a FIFO or a device has).
    link = os.readlink(f"/proc/self/fd/{path_fd}")
    if link != f"/memfd:{_name(token)} (deleted)":
        raise TransportUnavailable(f"{where} was freed: the number now stands for another file")
    found = os.fstat(path_fd)
    if (found.st_ino, found.st_size) != (inode, nbytes):
        raise TransportUnavailable(
            f"{where} is not what its descriptor says: inode {found.st_ino}, {found.st_size} bytes found"
        )


def _name(token: bytes) -> str:
    return f"torchkv-{token.hex()}"


@functools.cache
def host_identity() -> bytes:
    """32 bytes, equal for two processes iff a pid means the same to both: one boot of one kernel, one PID namespace."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read()
    namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(boot + namespace.encode()).digest()


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> int:
    ptr = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if ptr == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap: {os.strerror(code)}")
    # Advice only: scattered pages run out of TLB entries without huge pages, but a kernel built without them is
    # free to refuse.
    _libc.madvise(ptr, nbytes, mmap.MADV_HUGEPAGE)
    return int(ptr)


def _release(ptr: int, nbytes: int, fd: int | None) -> None:
    _libc.munmap(ptr, nbytes)
    if fd is not None:
        os.close(fd)
