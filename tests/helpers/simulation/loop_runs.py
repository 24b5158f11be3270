"""Runs of the resident loop in the simulation: in this process, compiled, or in one of their own, in plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.simulation.scenario import Scenario

__all__ = ["DIRECT", "clean_run", "loop_scenario", "plain"]

DIRECT = ("layer", "slice", "pages")  # the verbs that the loop can do
ROOT = Path(__file__).parents[3]


def loop_scenario(
    seed: int,
    *,
    benign: bool = False,
    verbs: tuple[str, ...] = DIRECT,
    gpu: bool = False,
    network: bool = False,
    system_calls: bool = False,
    staged: bool = False,
    single: bool = False,
) -> Scenario:
    """A run in which loops serve what they can; see `Scenario`. In most there is no state.

    single: each sender has one receiver, which it knows: its verbs are called in the plain way.
    """
    states = () if seed % 4 or single else None
    return Scenario(
        seed,
        benign=benign,
        verbs=verbs,
        loop=True,
        gpu=gpu,
        network=network,
        system_calls=system_calls,
        staged=staged,
        states=states,
        anybody=0.0 if single else 0.3,
        single=single,
    )


def clean_run(seed: int, **given: Any) -> Scenario:
    """Performs `loop_scenario`, in which every property must hold."""
    print(f"seed {seed}")
    scenario = loop_scenario(seed, **given)
    problems = scenario.run()
    assert not problems, f"seed {seed}: {problems}"
    return scenario


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `broken_loops` in plain Python: numba reads the variable when it is imported."""
    command = [sys.executable, "-m", "tests.helpers.simulation.broken_loops", *arguments]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
