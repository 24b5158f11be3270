"""Starts a file of tests/interpreter in Triton's interpreter, which runs kernels without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_in_interpreter"]

ROOT = Path(__file__).parents[2]


def run_in_interpreter(cases: str, *, timeout: float) -> None:
    """Runs the tests of file ``cases`` in a fresh process: Triton reads TRITON_INTERPRET when a kernel is defined.

    timeout: seconds.
    """
    path = ROOT / "tests" / "interpreter" / cases
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    overrides = ["-o", "addopts=--strict-markers"]
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
