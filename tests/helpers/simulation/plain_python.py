"""Runs `broken_loops` in a process of its own, where the resident loop is plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["plain"]

ROOT = Path(__file__).parents[3]


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `broken_loops` in plain Python: numba reads the variable when it is imported."""
    command = [sys.executable, "-m", "tests.helpers.simulation.broken_loops", *arguments]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
