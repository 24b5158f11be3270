"""Small control frames between processes of one host, as Unix datagrams from socket to socket.

ZeroMQ hands every message to a thread of its own, on both sides; in a small request that costs more than all the rest.
So frames to processes of this host travel as datagrams between two Unix sockets, as long as they are small and the
receiving socket has room. They may be lost, and may overtake frames that went over ZeroMQ; sessions put that right.
Whether a peer is alive is not decided here.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchkv.arrays import Int64Array
from torchkv.host.jit import at_register, c_function, compiled_with_gil, libc_functions
from torchkv.protocol.messages import MIN_FRAME

__all__ = ["UnixDatagramChannel", "warm_up"]

MAX_DATAGRAM = 32 << 10  # bytes; longer frames, such as grants of many pages, go over ZeroMQ
BURST = 64  # datagrams read by one call, if they have no more than 4 KiB on average

_RECV = int(libc_functions("recv")[0])
_call_recv = c_function(4, 64)
_SIZE = struct.Struct("<I")  # before each frame


class UnixDatagramChannel:
    """One socket, to receive and to send. Belongs to one thread, except that any thread may `send`.

    name: what peers pass to `open` in order to send here. fd: readable when datagrams have arrived.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.name = f"torchkv-{secrets.token_hex(16)}"
        # In the abstract namespace, so there is no file that could outlive the process.
        self._socket.bind(b"\0" + self.name.encode())
        self._buffer = np.zeros(BURST * 4096, dtype=np.uint8)
        self._view = self._buffer.data
        self._sizes = np.zeros(BURST, dtype=np.int64)
        self._peers: dict[int, bytes] = {}

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def open(self, rank: int, name: str) -> None:
        """Makes ``rank``, a process of this host, reachable: its `UnixDatagramChannel` has this ``name``."""
        self._peers[rank] = b"\0" + name.encode()

    def forget(self, rank: int) -> None:
        """Undoes `open`."""
        self._peers.pop(rank, None)

    def fits(self, rank: int, frames: Sequence[bytes]) -> bool:
        """Whether `send` can send ``frames``, unless the receiving socket is full."""
        return rank in self._peers and sum(_SIZE.size + len(frame) for frame in frames) <= MAX_DATAGRAM

    def send(self, rank: int, frames: Sequence[bytes]) -> bool:
        """Sends ``frames`` in one datagram. False, with nothing sent, if that is not possible now. Never blocks.

        Not possible: ``rank`` was not opened, the frames are longer than `MAX_DATAGRAM` together, or the receiving
        socket is full. A datagram that was sent may still be lost.
        """
        address = self._peers.get(rank)
        if address is None:
            return False
        data = b"".join([part for frame in frames for part in (_SIZE.pack(len(frame)), frame)])
        if len(data) > MAX_DATAGRAM:
            return False
        try:
            self._socket.sendto(data, address)
        except BlockingIOError:
            return False  # the peer has not read the earlier ones yet
        except OSError:
            # No socket has this name: the process has ended, or is in another network namespace.
            self._peers.pop(rank, None)
            return False
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Frames that have arrived, and whether more of them may be waiting."""
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
    """The frames in a datagram; none if ``data`` is not a whole sequence of frames, each behind its size.

    Anybody on this host can send here, so a datagram must not become more frames than honest ones: each is checked.
    """
    frames: list[bytes] = []
    at = 0
    while at + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size + size
        if size < MIN_FRAME or at > len(data):
            return []
        frames.append(bytes(data[at - size : at]))
    return frames if at == len(data) else []


@compiled_with_gil
def _receive(recv: int, fd: int, buffer: npt.NDArray[np.uint8], sizes: Int64Array) -> int:
    """Reads datagrams into ``buffer``, one behind the other, until none is left or no room is; returns how many.

    sizes: gets the bytes of each. Compiled, because in Python an empty socket raises an exception, and each call
    releases the GIL, which another thread then takes.
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


@at_register
def warm_up() -> None:
    """Compiles `_receive`, or loads it from disk, so that the first message does not wait for it."""
    _receive(_RECV, -1, np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int64))
