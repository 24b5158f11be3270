"""What a benchmark ran on, and who else did meanwhile."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from torchkv.host.network import job_interface

__all__ = ["CoresOfOthers", "machine", "one_link", "torchkv_version"]


def machine(device: str) -> str:
    """The machine and its software. device: "cpu" or "cuda"."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def one_link() -> dict[str, str]:
    """Variables for UCX with which two processes of this host exchange bytes over TCP, through the job's interface.

    A rival that opens all interfaces would take two of one host for two links.
    """
    interface, _ = job_interface()
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", interface)}


def torchkv_version() -> str:
    import torchkv  # here, because the package's top stands above this module

    return torchkv.__version__


class CoresOfOthers:
    """How many cores were busy on average with what is not this process, nor a child of it that has ended."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began, self._first = time.monotonic(), self._seconds()

    def __call__(self) -> float:
        """Since this was made. Call it when all children have ended: their time counts for this process then."""
        return max(0.0, self._seconds() - self._first) / (time.monotonic() - self._began)

    def _seconds(self) -> float:
        """Of all cores' time, what was neither idle nor this process's."""
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user. In ticks.
        ticks = [int(word) for word in self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        busy = sum(ticks) - sum(ticks[3:5])
        return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
