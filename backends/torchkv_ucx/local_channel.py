"""`LocalChannel`: puts to a process of this host without UCX, by ``process_vm_writev``; and when that is enough.

UCX with peer-failure detection always listens on TCP, and authenticates nobody: whoever reaches the port may write into
registered memory. A job that stays on one host needs none of that. What UCX's own lane there (cma) does is one system
call by the writer, for which the kernel asks whether writer and peer belong to one user. So the port is not opened.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from torchkv.errors import PeerLost, TransportUnavailable
from torchkv.host.jit import libc_functions
from torchkv.host.network import job_interface
from torchkv.transport import Batch, NativeChannel
from torchkv_ucx import environment
from torchkv_ucx.libucp import FUNCTIONS
from torchkv_ucx.local_native import native_channel
from torchkv_ucx.operation import Link, Operation, PutOperation, Spans, VectoredPut
from torchkv_ucx.process import LocalProcess, holds, read_memory
from torchkv_ucx.queue_channel import QueueChannel
from torchkv_ucx.spans import LocalRegions, resolve
from torchkv_ucx.wire import AddressBlob, RegionBlob

__all__ = ["TOKEN_NBYTES", "LocalChannel", "Token", "needs_ucx"]

TOKEN_NBYTES = 16
_PIECE = 1 << 20  # bytes of one span, at most: a system call cannot be interrupted
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_GET_DUMPABLE = 3


def needs_ucx() -> str:
    """Why the peers of this process must be reached through UCX; "" if system calls and mappings reach them all."""
    if chosen := environment.chosen_by_user():
        return f"{chosen} is set"
    device, _ = job_interface()
    if device != "lo":
        return f"the job listens on {device}, so it may have peers on other hosts"
    if torch.cuda.is_available():
        return "there are GPUs"
    try:
        if _YAMA.exists() and _YAMA.read_text(encoding="ascii").strip() != "0":
            return f"{_YAMA} keeps processes from writing to each other"
        own = ctypes.create_string_buffer(b"own")
        read_memory(os.getpid(), ctypes.addressof(own), 3)
    except OSError as error:
        return f"the kernel refuses: {error}"
    return "" if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1 else "this process is not dumpable"


class Token:
    """Random bytes at a known place of this process: who reads them there knows that it reaches this very process.

    A pid alone would not do: a process of another PID namespace has another number here, or another's.
    """

    def __init__(self) -> None:
        self.value = os.urandom(TOKEN_NBYTES)
        self._buffer = ctypes.create_string_buffer(self.value, TOKEN_NBYTES)
        self.address = ctypes.addressof(self._buffer)


class LocalChannel(QueueChannel):
    """See `torchkv.transport.Channel`. Made by ``UCXTransport.connect``, where one of both sides has no UCX worker.

    functions: addresses, see `local_functions`. Raises ``TransportUnavailable`` if the kernel does not let this process
    write to the peer's.
    """

    link = "cma/memory"  # what UCX calls this lane

    def __init__(
        self,
        peer: AddressBlob,
        regions: Sequence[RegionBlob],
        local: LocalRegions,
        device: Callable[[], torch.device],
    ) -> None:
        super().__init__(f"peer process {peer.pid}", regions, local, device)
        self._process = _open(peer, self._peer)
        self._link = Link(_functions(), 0, 0, lambda status, what: PeerLost(f"{what} failed: {status}"))
        self._ended = False
        self._closing: Callable[[], None] | None = None
        for index, blob in enumerate(regions):
            if blob.device != "cpu":
                self._remote.no_put[index] = "system calls reach no device memory"

    @property
    def fd(self) -> int:
        """A pidfd of the peer."""
        return self._process.fd

    def end(self) -> None:
        """The peer's process has ended: all that it wrote here is here, because it wrote itself."""
        self._ended = True

    def put(self, batch: Batch) -> PutOperation:
        self._require_usable()
        spans = resolve(batch, self._local, self._remote, self._peer)
        operation = VectoredPut(
            self._link, f"put of {len(spans.length)} spans to {self._peer}", _in_pieces(spans), self._process
        )
        self._enqueue(operation)
        return operation

    def flush(self) -> LocalFlush:
        self._require_usable()
        operation = LocalFlush(self._link, f"flush to {self._peer}", 1)
        self._enqueue(operation)
        return operation

    def native(self, closing: Callable[[], None]) -> NativeChannel | None:
        if self._ended or self._closed:
            return None
        self._closing = closing
        return native_channel(
            self._process.pid,
            self._process.fd,
            local_keys=_keys(len(self._local.base), self._local.no_put),
            remote_keys=_keys(len(self._remote.base), self._remote.no_put),
            remote_at=self._remote.base,
        )

    @property
    def drained(self) -> bool:
        return self._ended and self.idle

    @property
    def _alive(self) -> bool:
        return not self._ended and not self._closed

    @property
    def wants_progress(self) -> bool:
        return not self.idle

    def note_round(self) -> None:
        """Nothing of a dead peer is under way, so there are no rounds to count."""

    def close(self) -> None:
        if self._closed:
            return
        if self._closing is not None:
            self._closing()
        self._closed = True
        self._fail(PeerLost(f"the channel to {self._peer} was closed"))
        self.step(0)  # what is stopped ends at once: no request is outstanding between two steps
        assert self.idle
        self._process.close()
        self._views.close()


class LocalFlush(Operation):
    """Puts before it are done when it is stepped, and what a system call has written is visible."""

    @property
    def posted(self) -> bool:
        return True

    def _step(self, budget_ns: int) -> bool:
        return True


def _open(peer: AddressBlob, name: str) -> LocalProcess:
    """The peer's process. Raises ``TransportUnavailable``."""
    remedy = "on both sides set UCX_TLS=all, which lets UCX listen on TCP"
    try:
        process = LocalProcess(peer.pid)
    except OSError as error:
        raise TransportUnavailable(f"{name} is no process of this host that can be seen: {error}; {remedy}") from error
    try:
        same = holds(peer.pid, peer.token_at, peer.token)
    except OSError as error:
        process.close()
        raise TransportUnavailable(f"the kernel lets nobody here write to {name}: {error}; {remedy}") from error
    if not same:
        process.close()
        raise TransportUnavailable(f"{name} has another number in this PID namespace; {remedy}")
    return process


@cache
def _functions() -> np.ndarray:
    """The table for `pump`, of which compiled code for this lane calls two functions."""
    table = np.zeros(len(FUNCTIONS), dtype=np.int64)
    table[-2:] = libc_functions(*FUNCTIONS[-2:])
    return table


def _keys(count: int, no_put: Mapping[int, str]) -> np.ndarray:
    """1 for each region, as the kernel asks for none; 0 for those that system calls do not reach."""
    return np.array([int(index not in no_put) for index in range(count)], dtype=np.int64)


def _in_pieces(spans: Spans) -> Spans:
    """The same bytes in spans of `_PIECE` bytes at most."""
    count = np.maximum(1, -(-spans.length // _PIECE))
    if int(count.sum()) == len(count):
        return spans
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)  # within its span
    begin = place * _PIECE
    return Spans(
        source=np.repeat(spans.source, count) + begin,
        target=np.repeat(spans.target, count) + begin,
        length=np.minimum(np.repeat(spans.length, count) - begin, _PIECE),
        local_region=np.repeat(spans.local_region, count),
        remote_region=np.repeat(spans.remote_region, count),
        memhs=spans.memhs,
        rkeys=spans.rkeys,
        memory_type=spans.memory_type,
    )
