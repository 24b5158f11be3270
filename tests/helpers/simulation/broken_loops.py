"""Runs of the resident loop in plain Python, whole and broken: ``python -m tests.helpers.simulation.broken_loops``.

To be run with ``NUMBA_DISABLE_JIT=1``, for then the loop's functions are ordinary ones that can be replaced; tests do
that by `plain_python`. Faults that only a writer that lies would show are in `MOMENTS`, or left to tests/unit/core.

    trace SEED [KIND]   prints what happens in one run, of a kind of `loop_runs.RUNS`
    break NAME [KIND]   breaks the loop; fails unless some seed shows it
"""

from __future__ import annotations

import sys

from tests.helpers.simulation.broken.kernels import GPU_BREAKS, GPUS_STAGED_BREAKS
from tests.helpers.simulation.broken.lanes import CALLS_BREAKS, GPUS_APART_BREAKS, NETWORK_BREAKS, STAGED_BREAKS
from tests.helpers.simulation.broken.moments import MOMENTS
from tests.helpers.simulation.broken.pages import (
    CONVERTS_BREAKS,
    CONVERTS_GPUS_STAGED_BREAKS,
    CONVERTS_STAGED_BREAKS,
    STATES_BREAKS,
)
from tests.helpers.simulation.broken.rules import BREAKS, SINGLE_BREAKS
from tests.helpers.simulation.loop_runs import RUNS, loop_scenario

__all__ = ["KINDS", "MOMENTS"]

SEEDS = range(150)

KINDS = {  # of `RUNS`: what breaks them
    "": BREAKS,
    "gpu": GPU_BREAKS,
    "network": NETWORK_BREAKS,
    "gpus apart": GPUS_APART_BREAKS,
    "gpus staged": GPUS_STAGED_BREAKS,
    "calls": CALLS_BREAKS,
    "staged": STAGED_BREAKS,
    "single": SINGLE_BREAKS,
    "converts": CONVERTS_BREAKS,
    "converts staged": CONVERTS_STAGED_BREAKS,
    "converts gpus staged": CONVERTS_GPUS_STAGED_BREAKS,
    "states": STATES_BREAKS,
}


def main(command: str, argument: str, kind: str = "") -> None:
    if command == "trace":
        print(*map(repr, scenario_trace(int(argument), kind)), sep="\n")
        return
    if argument in MOMENTS:
        damage, look = MOMENTS[argument]
        assert not look()
        damage()
        print(look() or sys.exit(f"nothing wrong was found with a loop that has {argument}"))
        return
    damage, benign = KINDS[kind][argument]
    damage()
    for seed in SEEDS:
        try:
            problems = loop_scenario(seed, benign=benign, **RUNS[kind]).run()
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            problems = [repr(error)]
        if problems:
            print(f"seed {seed}: {problems[0]}")
            return
    sys.exit(f"{len(SEEDS)} seeds found nothing wrong with a loop that {argument}")


def scenario_trace(seed: int, kind: str) -> list[tuple[object, ...]]:
    run = loop_scenario(seed, **RUNS[kind])
    assert run.run() == []
    return run.trace


if __name__ == "__main__":
    main(*sys.argv[1:])
