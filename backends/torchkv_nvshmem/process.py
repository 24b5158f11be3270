"""A peer's process, as the kernel knows it: to see that it has ended, and with it everything it could write."""

from __future__ import annotations

import os
import select

import msgspec

from torchkv import hostmem

__all__ = ["ProcessId", "Watch", "this_process"]


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Unmistakable on all hosts: where a pid means what, the pid, and when it started (in clock ticks)."""

    host: bytes
    pid: int
    started: int


def this_process() -> ProcessId:
    return ProcessId(hostmem.host_identity(), os.getpid(), _started(os.getpid()))


class Watch:
    """Watches one process. On another host, or in another PID namespace, it can see nothing: ``visible`` is False."""

    def __init__(self, process: ProcessId) -> None:
        self.visible = process.host == hostmem.host_identity()
        self._ended = False
        self._fd: int | None = None
        if not self.visible:
            return
        try:
            self._fd = os.pidfd_open(process.pid)
            self._ended = _started(process.pid) != process.started  # the pid has gone to another process since
        except (ProcessLookupError, FileNotFoundError):
            self._ended = True
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)

    @property
    def ended(self) -> bool:
        """Whether the process has ended, all its threads included. Stays True."""
        if not self._ended and self._fd is not None:
            self._ended = bool(self._poll.poll(0))
        return self._ended

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The command name, in parentheses, may hold anything; fields are counted from behind it.
        return int(file.read().rpartition(")")[2].split()[19])
