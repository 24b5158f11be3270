"""Runs one of the examples as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["DEADLINE", "EXAMPLES", "run_with_torchrun"]

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 100.0


def run_with_torchrun(example: Path, ranks: int, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of stdout and stderr together. Kills every rank when the deadline passes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, str(example), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{example.name} did not end within {DEADLINE:.0f} s; it printed:\n{output}")
    return process.returncode, output.splitlines()
