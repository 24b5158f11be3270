"""The resident loop between pages of unlike dtypes, under the seeded scheduler of `test_simulated`.

Into mapped pages, and staged through a network, in host memory and on GPUs. Broken loops:
`tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

import pytest

from tests.helpers.simulation.broken_loops import (
    CONVERTS_BREAKS,
    CONVERTS_GPUS_STAGED_BREAKS,
    CONVERTS_STAGED_BREAKS,
    RUNS,
)
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, plain
from torchkv.engine.resident.flows import Flows
from torchkv.protocol.receiving.request import ReceiverRequest

WAYS = ["converts", "converts staged", "converts gpu", "converts gpus staged"]
SEEDS = range(60)
BATCH = 20


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(way: str, first: int) -> None:
    for seed in range(first, first + BATCH):
        clean_run(seed, **RUNS[way], verbs=DIRECT if seed % 3 else (*DIRECT, "staged"))


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_network_alone_fails_nothing(way: str) -> None:
    for seed in SEEDS[:BATCH]:
        scenario = clean_run(seed, benign=True, **RUNS[way])
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


@pytest.mark.parametrize("way", WAYS)
def test_the_runs_are_worth_their_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are received by loops, by the path that is meant; else nothing is shown."""
    paths: list[str] = []
    leave = Flows._leave

    def left(self: Flows, req: ReceiverRequest, *, whole: bool = False) -> int:
        nbytes = leave(self, req, whole=whole)
        if whole and nbytes:
            paths.append(req.loop_path)
        return nbytes

    monkeypatch.setattr(Flows, "_leave", left)
    for seed in SEEDS[:40]:
        clean_run(seed, **RUNS[way])
    wanted = "staged" if way.endswith("staged") else "direct"
    assert len(paths) > 10, paths
    assert set(paths) == {wanted}


@pytest.mark.parametrize("way", WAYS)
def test_plain_python_gives_the_same_run(way: str) -> None:
    done = plain("trace", "5", way)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean_run(5, **RUNS[way]).trace]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("converts", name) for name in CONVERTS_BREAKS),
        *(("converts staged", name) for name in CONVERTS_STAGED_BREAKS),
        *(("converts gpus staged", name) for name in CONVERTS_GPUS_STAGED_BREAKS),
    ],
)
def test_broken_loops_are_caught(way: str, name: str) -> None:
    done = plain("break", name, way)
    assert done.returncode == 0, done.stdout + done.stderr
