"""A short way for small frames between processes of one host: one hop through the kernel, and nobody in between.

ZeroMQ hands every message to a thread of its own, on both sides; beside a small request that costs more than all the
rest. So frames to processes of this host travel as datagrams between two Unix sockets, as long as they are small and
there is room. They may be lost and overtake others, which sessions mend. Whether a peer is there is not asked here.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchkv.compiled import c_function, compiled_with_gil
from torchkv.transport import Int64Array

__all__ = ["HostLane", "warm_up"]

MAX_DATAGRAM = 32 << 10  # bytes; page lists that are longer go another way, which does not mind
BURST = 64  # datagrams read in a row, as long as they are no longer than 4 KiB on average

_RECV = ctypes.cast(ctypes.CDLL(None).recv, ctypes.c_void_p).value or 0
_call_recv = c_function(4, 64)
_SIZE = struct.Struct("<I")  # before each frame


class HostLane:
    """One socket, to receive and to send. ``name``: what others send to, for ``open``.

    Belongs to one thread, except that any thread may send.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.name = f"torchkv-{secrets.token_hex(16)}"
        # In the abstract namespace: no file that would outlive the process.
        self._socket.bind(b"\0" + self.name.encode())
        self._buffer = np.zeros(BURST * 4096, dtype=np.uint8)
        self._view = self._buffer.data
        self._sizes = np.zeros(BURST, dtype=np.int64)
        self._peers: dict[int, bytes] = {}

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def open(self, rank: int, name: str) -> None:
        """``rank`` is a process of this host, which receives under ``name``."""
        self._peers[rank] = b"\0" + name.encode()

    def send(self, rank: int, frames: Sequence[bytes]) -> bool:
        """Whether the frames have gone this way; they may still be lost. Never blocks."""
        address = self._peers.get(rank)
        if address is None:
            return False
        data = b"".join([part for frame in frames for part in (_SIZE.pack(len(frame)), frame)])
        if len(data) > MAX_DATAGRAM:
            return False
        try:
            self._socket.sendto(data, address)
        except BlockingIOError:
            return False  # it has not read the last ones yet
        except OSError:
            # Nobody has that name: the process has ended, or is in another network namespace.
            self._peers.pop(rank, None)
            return False
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Frames that have arrived, and whether there may be more of them."""
        count = _receive(_RECV, self._socket.fileno(), self._buffer, self._sizes)
        frames: list[bytes] = []
        at = 0
        for size in self._sizes[:count].tolist():
            frames += _frames(self._view[at : at + size])
            at += size
        return frames, count == BURST or at > len(self._buffer) - MAX_DATAGRAM

    def close(self) -> None:
        self._socket.close()


def _frames(data: memoryview) -> list[bytes]:
    """What a datagram holds; nothing of it if that is no sequence of frames."""
    frames: list[bytes] = []
    at = 0
    while at + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size + size
        if at > len(data):
            return []
        frames.append(bytes(data[at - size : at]))
    return frames if at == len(data) else []


@compiled_with_gil
def _receive(recv: int, fd: int, buffer: npt.NDArray[np.uint8], sizes: Int64Array) -> int:
    """Reads datagrams, one behind the other, until there are no more or there is no room; returns how many.

    In Python the end of them would be an exception, and each would let go of the GIL, which somebody else then takes.
    """
    count, at = 0, 0
    while count < len(sizes) and at + MAX_DATAGRAM <= len(buffer):
        size = _call_recv(recv, fd, buffer.ctypes.data + at, MAX_DATAGRAM, 0)
        if size < 0:
            break
        sizes[count] = size
        count += 1
        at += size
    return count


def warm_up() -> None:
    """Compiles, or loads from disk, what the first message would otherwise wait for."""
    _receive(_RECV, -1, np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int64))
