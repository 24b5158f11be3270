"""Two hosts on one machine: namespaces that share nothing but a network, whose link can be cut either way.

Each host has network, PID, IPC, UTS and mount namespaces of its own, and a ``/dev/shm`` of its own. A pair of virtual
Ethernet devices joins them. A link is cut as a broken switch would: packets leave, and never arrive.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

__all__ = ["Hosts", "enter", "unavailable"]

_NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # the order in which a process enters them
_NOWHERE = "02:00:00:00:00:fe"  # an Ethernet address that nobody has
_PR_SET_PDEATHSIG = 1


@cache
def unavailable() -> str:
    """Why this machine has no `Hosts`; empty if it has."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces joined by veth need root on Linux"
    try:
        with Hosts():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        return f"no namespaces joined by veth here: {error} {output.decode(errors='replace').strip()}"


class Hosts:
    """Hosts 0 and 1. ``holders[i]`` is a process on host i, ``addresses[i]`` its IPv4 address on ``eth0``."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.holders: list[int] = []
        self._hardware: list[str] = []

    def __enter__(self) -> Hosts:
        try:
            self._processes = [_hold() for _ in range(2)]
            self.holders = [_child(process) for process in self._processes]
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # and with it, its child, which is the first process of its PID namespace: so all end
            process.communicate()

    def cut(self, src: int, dst: int) -> None:
        """From now on nothing that host ``src`` sends arrives at host ``dst``; neither is told."""
        self._address(src, dst, _NOWHERE)

    def heal(self, src: int, dst: int) -> None:
        self._address(src, dst, self._hardware[dst])

    @contextmanager
    def cut_while(self, *ways: tuple[int, int]) -> Iterator[None]:
        """These ways are cut inside."""
        for way in ways:
            self.cut(*way)
        yield
        for way in ways:
            self.heal(*way)

    def _join(self) -> None:
        names = [f"tkv{pid}" for pid in self.holders]
        _run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for host, (pid, name) in enumerate(zip(self.holders, names, strict=True)):
            _run("ip", "link", "set", name, "netns", str(pid))
            self._on(host, "ip", "link", "set", name, "name", "eth0")
            self._on(host, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._on(host, "ip", "link", "set", device, "up")
            (device,) = json.loads(self._on(host, "ip", "-j", "link", "show", "eth0"))
            self._hardware.append(device["address"])
        for way in ((0, 1), (1, 0)):
            self.heal(*way)

    def _address(self, src: int, dst: int, hardware: str) -> None:
        peer = self.addresses[dst]
        self._on(src, "ip", "neigh", "replace", peer, "lladdr", hardware, "dev", "eth0", "nud", "permanent")

    def _on(self, host: int, *command: str) -> str:
        return _run("nsenter", "-t", str(self.holders[host]), "-n", *command)


def enter(holder: int) -> None:
    """Moves to the host of ``holder``. The calling process must have one thread.

    This returns in a child of the caller, because a process cannot change its own PID namespace. The caller waits for
    the child's end, and ends in the same way; if it is killed, so is the child.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for name in _NAMESPACES:
        fd = os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _hold() -> subprocess.Popen[bytes]:
    inside = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
    command = ["unshare", "--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen([*command, "sh", "-c", inside], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        _, errors = process.communicate()
        raise subprocess.CalledProcessError(process.returncode, command[0], stderr=errors)
    return process


def _child(process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with suppress(ValueError):
            return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii"))
        time.sleep(0.01)
    raise OSError("the namespaces have no process")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=20).stdout.decode()
