"""The resident memory of this process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resident_kib"]


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
