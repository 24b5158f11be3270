"""`LocalProcess`: a peer's process on this host, to write into its memory and to see whether it has ended."""

from __future__ import annotations

import ctypes
import errno
import os
import select

from torchkv.arrays import Int64Array
from torchkv.errors import KVError, PeerLost, TransportUnavailable
from torchkv.host.processes import open_pidfd, unwatch

__all__ = ["LocalProcess", "holds", "read_memory"]

_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(pid: int, address: int, nbytes: int) -> bytes:
    """Bytes of process ``pid``. Raises ``OSError`` where the kernel refuses, or there is no such memory."""
    buffer = ctypes.create_string_buffer(nbytes)
    local, remote = _Vector(ctypes.addressof(buffer), nbytes), _Vector(address, nbytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if _libc.process_vm_readv(pid, ctypes.byref(local), one, ctypes.byref(remote), one, none) != nbytes:
        code = ctypes.get_errno() or errno.EFAULT
        raise OSError(code, os.strerror(code))
    return buffer.raw


def holds(pid: int, address: int, data: bytes) -> bool:
    """Whether process ``pid`` has these bytes there. Raises ``OSError`` as `read_memory` does."""
    return read_memory(pid, address, len(data)) == data


class LocalProcess:
    """A process, held by a pidfd: a later process with the same pid is not taken for it."""

    def __init__(self, pid: int) -> None:
        """Raises ``OSError`` if there is no such process, or the kernel has no pidfds."""
        self.pid = pid
        self._fd: int | None = open_pidfd(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def fd(self) -> int:
        """Its pidfd."""
        assert self._fd is not None
        return self._fd

    @property
    def ended(self) -> bool:
        return self._fd is None or bool(self._poll.poll(0))

    def why_not_written(self, operation: str, source: Int64Array, target: Int64Array, length: Int64Array) -> KVError:
        """The error for a vectored write that the kernel refused: writes the spans one by one to find the reason."""
        for src, dst, nbytes in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
            local, remote = _Vector(src, nbytes), _Vector(dst, nbytes)
            done = _libc.process_vm_writev(
                self.pid,
                ctypes.byref(local),
                ctypes.c_ulong(1),
                ctypes.byref(remote),
                ctypes.c_ulong(1),
                ctypes.c_ulong(0),
            )
            if done != nbytes:
                code = ctypes.get_errno() if done < 0 else errno.EFAULT
                text = f"{operation}: process_vm_writev into process {self.pid} failed: {os.strerror(code)}"
                return TransportUnavailable(text) if code in {errno.EPERM, errno.ENOSYS} else PeerLost(text)
        return PeerLost(
            f"{operation}: process_vm_writev into process {self.pid} failed once and then worked: not trusted"
        )

    def close(self) -> None:
        if self._fd is not None:
            unwatch(self._fd)
            self._fd = None
