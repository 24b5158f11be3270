"""Seeded runs of torchkv's state machines and resident loop in a simulated world full of faults, every byte checked.

``python -m torchkv.faultlab --seed 0 --schedules 1000 --case loop``; see its --help. The simulation is part of the
tests, so this takes a checkout of torchkv.

Exit code 0: no violation. 1: there were some; each is printed with the command that shows it again. 2: bad arguments,
or no checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

SIMULATION = Path("tests", "helpers", "simulation")


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; default ``sys.argv``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    root = Path(__file__).resolve().parents[1]
    if not (root / SIMULATION).is_dir():
        sys.stderr.write(
            f"python -m torchkv.faultlab: there is no {SIMULATION} in {root}; the simulation is not installed with the "
            "package: run this command in a checkout of torchkv, with that checkout installed (pip install -e .)\n"
        )
        return 2
    # As a command, because nothing in this package may import the simulated network or the tests.
    paths = [str(root), str(root / "backends"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", ".".join(SIMULATION.parts), *arguments]
    return subprocess.run(command, cwd=root, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
