"""Runs one of the examples, or another command, as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["DEADLINE", "EXAMPLES", "run_command", "run_with_torchrun"]

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 100.0


def run_with_torchrun(example: Path, ranks: int, *arguments: str) -> tuple[int, list[str]]:
    """`run_command` of an example with so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_command([*command, str(example), *arguments], example.name)


def run_command(
    command: Sequence[str], name: str, *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Exit code and lines of stdout and stderr together. Kills every rank when the deadline passes.

    name: what is run, for messages. folder: where. environment: variables beside this process's.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{name} did not end within {DEADLINE:.0f} s; it printed:\n{output}")
    return process.returncode, output.splitlines()
