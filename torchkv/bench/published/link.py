"""A slower network for the processes of a benchmark: loopback of a network namespace, at a given rate.

The bytes are real and so is TCP; the rate is the kernel's token bucket (``tc tbf``). On two cores a model computes so
slowly, and loopback is so fast, that transfers would be a few percent of a prefill; on the published machines they were
up to half of it. A slower link restores that balance, for prompts that two cores can compute.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torchkv.errors import TransportUnavailable

__all__ = ["link", "link_name", "unavailable"]

_CLONE_NEWNET = 0x40000000
BURST = 128 << 10  # bytes that may pass at once; a packet of loopback has up to 64 KiB
QUEUE = 64 << 20  # bytes that may wait: none is dropped, as `SEND_BUFFER` bounds what does
# Bytes that a connection may have on its way. What waits in the queue delays control messages: they take this link too.
SEND_BUFFER = 128 << 10


@cache
def unavailable() -> str:
    """Why links cannot be slowed down here; empty if they can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (iproute2)"
    try:
        with link(100.0):
            return ""
    except TransportUnavailable as error:
        return str(error)


def link_name(mbytes: float | None) -> str:
    """What tables call a link. mbytes: its rate in 1e6 bytes/s, or None for plain loopback."""
    return "loopback" if mbytes is None else f"{mbytes:g} MB/s"


@contextmanager
def link(mbytes: float | None) -> Iterator[None]:
    """Processes that this thread starts inside reach each other over a link of ``mbytes`` 1e6 bytes/s only.

    None: over plain loopback. Raises ``TransportUnavailable`` without the right to make network namespaces.
    """
    if mbytes is None:
        yield
        return
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise TransportUnavailable(f"no network namespace: {os.strerror(ctypes.get_errno())} (needs root)")
        try:
            _shape(mbytes)
            yield
        finally:
            if libc.setns(before, _CLONE_NEWNET):
                raise TransportUnavailable(f"cannot go back to the network: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(before)


def _shape(mbytes: float) -> None:
    rate = f"{round(8e6 * mbytes)}bit"
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", str(BURST), "limit", str(QUEUE)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TransportUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        Path("/proc/sys/net/ipv4/tcp_wmem").write_text(f"4096 65536 {SEND_BUFFER}")
    except OSError as error:
        raise TransportUnavailable(f"cannot bound what waits on the link: {error}") from error
