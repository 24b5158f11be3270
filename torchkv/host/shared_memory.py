"""Shared host memory that the kernel frees with the last process that uses it.

A shared segment is an anonymous memory file (``memfd``). Its owner maps it, and so do peers on the same host, through
``/proc/<pid>/fd/<fd>``. It has no name in any file system, so nothing is left behind even if its users are killed: the
kernel frees it with the last mapping and the last file descriptor.

The owner describes a segment in a few bytes (`share`), with which a peer maps it (`open_segment`). The bytes come from
another process and are not trusted; and the pid and the file descriptor in them may have been reused. So the opened
file must have the segment's random name, its inode and its size, and must be sealed against shrinking: otherwise its
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

# Not Python's mmap module: its objects each keep a file descriptor open, and with a segment per layer and peer that
# reaches the usual limit of 1024.
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
    """A segment of this process, as `share` describes it."""

    fd: int
    inode: int
    nbytes: int
    token: bytes


# Base address -> the mapping, which the tensor's storage keeps alive. Weak, because an entry must not outlive its
# mapping: afterwards the address may belong to other memory.
_mappings: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()


def allocate(nbytes: int) -> torch.Tensor:
    """A zero-filled uint8 tensor ``[nbytes]`` over a new segment, aligned to at least 4096 bytes.

    The kernel commits memory at first touch, and frees it with the last tensor over the storage and the last peer's
    mapping. Raises ``ProtocolError`` if ``nbytes`` is not in 1 .. 2**46, and ``TransportUnavailable`` if the kernel
    refuses.
    """
    if not 0 < nbytes <= _MAX_NBYTES:
        raise ProtocolError(f"cannot allocate {nbytes} bytes of host memory; the size must be 1 to {_MAX_NBYTES}")
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
    # Not at exit: tensors may outlive the interpreter's exit hooks, and the kernel frees the memory anyway.
    weakref.finalize(mapping, _release, ptr, nbytes, fd).atexit = False
    mapping.owned = _Owned(fd, inode, nbytes, token)  # type: ignore[attr-defined]
    _mappings[ptr] = mapping
    return torch.frombuffer(mapping, dtype=torch.uint8)


def share(tensor: torch.Tensor) -> bytes | None:
    """The descriptor (``DESCRIPTOR_NBYTES`` bytes) of the segment under ``tensor``'s whole storage.

    None if the storage was not made by `allocate` in this process. The descriptor is valid as long as this process
    holds the segment.
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
    """A peer's segment, mapped into this process at ``[ptr, ptr + nbytes)``.

    It stays mapped and allocated until ``close()`` or garbage collection, even if its owner frees it or ends.
    """

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._unmap = weakref.finalize(self, _release, ptr, nbytes, None)
        self._unmap.atexit = False

    def close(self) -> None:
        """Unmaps the segment, which must not be accessed any more. Idempotent."""
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
    # Checked on an O_PATH descriptor: the file cannot be exchanged between this check and its use, and opening a reused
    # number this way has no side effect (opening a named pipe or a device would have).
    link = os.readlink(f"/proc/self/fd/{path_fd}")
    if link != f"/memfd:{_name(token)} (deleted)":
        raise TransportUnavailable(f"{where} was freed: the file descriptor now refers to another file")
    found = os.fstat(path_fd)
    if (found.st_ino, found.st_size) != (inode, nbytes):
        raise TransportUnavailable(
            f"{where} is not what its descriptor says: inode {found.st_ino}, {found.st_size} bytes found"
        )


def _name(token: bytes) -> str:
    return f"torchkv-{token.hex()}"


@functools.cache
def host_identity() -> bytes:
    """32 bytes that are equal for two processes iff they share a PID namespace, in the same boot of the same kernel."""
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
    # Without huge pages, scattered KV pages need more TLB entries than there are. Failure is ignored: a kernel may be
    # built without huge pages, and everything works all the same.
    _libc.madvise(ptr, nbytes, mmap.MADV_HUGEPAGE)
    return int(ptr)


def _release(ptr: int, nbytes: int, fd: int | None) -> None:
    _libc.munmap(ptr, nbytes)
    if fd is not None:
        os.close(fd)
