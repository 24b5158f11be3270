"""`examples/abort_race.py`: the race is shown, and torchkv does not lose it."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.torchrun import DEADLINE, EXAMPLES


def test_the_example_shows_the_race_and_passes() -> None:
    command = [sys.executable, str(EXAMPLES / "abort_race.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("PASS with torchkv 0 of 40 requests were corrupted")
    assert " 0 of 40" in run.stdout
