"""A peer's process, as the kernel knows it: to see that it has ended, and with it everything it could write."""

from __future__ import annotations

import os
import select
from typing import Annotated

import msgspec

from torchkv.hostmem import host_identity

__all__ = ["ProcessId", "process_ended", "process_started", "this_process", "watch_process"]


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, unmistakably: its PID namespace and boot, its pid, and when it started (in clock ticks)."""

    host: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    started: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def process_started(pid: int) -> int:
    """When process ``pid`` of this host started, in clock ticks. Raises ``OSError`` if there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The command name, in parentheses, may hold anything; fields are counted from behind it.
        return int(file.read().rpartition(")")[2].split()[19])


def this_process() -> ProcessId:
    return ProcessId(host_identity().hex(), os.getpid(), process_started(os.getpid()))


def watch_process(process: ProcessId) -> int | None:
    """A pidfd that turns readable when ``process`` has ended, all its threads included. The caller closes it.

    None if it runs on another host or in another PID namespace, where only its own word proves anything.
    """
    if process.host != host_identity().hex():
        return None
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return _always_readable()
    except OSError:
        return None
    try:
        same = process_started(process.pid) == process.started
    except OSError:
        same = False
    if not same:
        os.close(fd)
        return _always_readable()
    return fd


def process_ended(fd: int) -> bool:
    """Whether the process behind a `watch_process` descriptor has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _always_readable() -> int:
    """Stands for a process that had ended before it could be watched."""
    return os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
