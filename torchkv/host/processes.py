"""Watching a peer's process: once the kernel reports its end, nothing of it can write to shared memory any more."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from torchkv.host.shared_memory import host_identity

__all__ = [
    "ProcessId",
    "has_ended",
    "is_ending",
    "open_pidfd",
    "process_ended",
    "process_started",
    "this_process",
    "unwatch",
    "watch_process",
    "watch_shared",
]

_PF_EXITING = 0x4  # of the flags in proc(5)'s stat: see include/linux/sched.h

_lock = threading.Lock()
_holders: dict[int, int] = {}  # of each shared pidfd
_shared: dict[int, int] = {}  # pid -> its pidfd


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies one process, also after its pid was reused.

    host: `host_identity` in hexadecimal. started: when the process started, in clock ticks.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    started: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def process_started(pid: int) -> int:
    """When process ``pid`` of this host started, in clock ticks. Raises ``OSError`` if there is none."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The fields of proc(5)'s stat that follow the command name. Raises ``OSError`` if there is no such process."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The name, in parentheses, may contain anything, so fields are counted from its closing parenthesis.
        return file.read().rpartition(")")[2].split()


def this_process() -> ProcessId:
    """The identity of the calling process."""
    return ProcessId(host_identity().hex(), os.getpid(), process_started(os.getpid()))


def open_pidfd(pid: int) -> int:
    """A pidfd of process ``pid``, one for all in this process who ask. End it with `unwatch`. Raises ``OSError``."""
    with _lock:
        fd = _shared.get(pid)
        if fd is None or process_ended(fd):  # that pid may be another process's by now
            fd = _shared[pid] = os.pidfd_open(pid)
        _holders[fd] = _holders.get(fd, 0) + 1
        return fd


def unwatch(fd: int) -> None:
    """Ends what `open_pidfd` or `watch_shared` has returned."""
    with _lock:
        left = _holders.pop(fd, 1) - 1
        if left:
            _holders[fd] = left
            return
        for pid in [pid for pid, shared in _shared.items() if shared == fd]:
            del _shared[pid]
        os.close(fd)


def watch_shared(process: ProcessId) -> int | None:
    """As `watch_process`, but with the file descriptor of `open_pidfd`: end it with `unwatch`."""
    return _watch(process, open_pidfd, unwatch)


def watch_process(process: ProcessId) -> int | None:
    """A pidfd that becomes readable when all threads of ``process`` have ended. The caller closes it.

    None if the process cannot be watched from here: it runs on another host or in another PID namespace, or the kernel
    refuses. Then nothing but the process's own messages can prove that it writes no more.
    """
    return _watch(process, os.pidfd_open, os.close)


def _watch(process: ProcessId, open_fd: Callable[[int], int], close: Callable[[int], None]) -> int | None:
    if process.host != host_identity().hex():
        return None
    try:
        fd = open_fd(process.pid)
    except ProcessLookupError:
        return _always_readable()
    except OSError:
        return None
    try:
        same = process_started(process.pid) == process.started
    except OSError:
        same = False
    if not same:
        close(fd)
        return _always_readable()
    return fd


def process_ended(fd: int) -> bool:
    """Whether the process of a `watch_process` file descriptor has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def has_ended(process: ProcessId) -> bool | None:
    """Whether all threads of ``process`` have ended; None if it cannot be watched from here."""
    fd = watch_process(process)
    if fd is None:
        return None
    try:
        return process_ended(fd)
    finally:
        os.close(fd)


def is_ending(process: ProcessId) -> bool:
    """Whether ``process`` ends or has ended. Its memory and descriptors may be gone before `has_ended` says so."""
    if process.host != host_identity().hex():
        return False
    if has_ended(process):
        return True
    try:
        return bool(int(_stat(process.pid)[6]) & _PF_EXITING)
    except OSError:  # it has ended since
        return True


def _always_readable() -> int:
    """A file descriptor in place of the pidfd of a process that had ended before it could be watched."""
    return os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
