"""The resident loop that stages through a network, under the seeded scheduler of `test_simulated`.

As `test_simulated_network_loop`, but all runs are short, so what loops put goes through standing stages. Broken loops,
which must be caught: `tests.helpers.simulation.broken_loops`.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.simulation.broken_loops import STAGED_BREAKS
from tests.helpers.simulation.loop_runs import DIRECT, clean_run, note_staged, plain
from torchkv.core.loop.codes import STAGED, WRITTEN
from torchkv.engine.resident.notices import Notices

SEEDS = range(120)
BATCH = 20

clean = partial(clean_run, network=True, staged=True)


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_nothing_breaks_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean(seed)


@pytest.mark.parametrize("first", [1080, 3240, 0, 20])
def test_verbs_that_the_loop_cannot_do_come_in_between(first: int) -> None:
    for seed in range(first, first + BATCH):
        clean(seed, verbs=(*DIRECT, "staged"))


@pytest.mark.parametrize("first", SEEDS[:60:BATCH])
def test_a_bad_network_alone_fails_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        scenario = clean(seed, benign=True, verbs=(*DIRECT, "staged") if seed % 2 else DIRECT)
        assert all(receiving.work.is_success() for receiving in scenario.receivings)


def test_the_runs_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are staged to their end, and are taken back at either side amid pieces; else nothing is shown."""
    seen, written = note_staged(monkeypatch), Notices._on_written

    def on_written(self: Notices, source: int, words: list[int], now: float) -> None:
        kind = words[0] & 0xFF
        seen["unpacked for Python"] += kind == WRITTEN
        seen["of a failed request"] += kind == STAGED
        written(self, source, words, now)

    monkeypatch.setattr(Notices, "_on_written", on_written)
    for seed in range(60):
        clean(seed)
    assert min(seen[what] for what in ("received", "taken back with bytes", "unpacked for Python", "landing")) > 5, seen
    assert seen["of a failed request"] > 0, seen


@pytest.mark.parametrize("seed", [5, 41])
def test_plain_python_gives_the_same_run(seed: int) -> None:
    done = plain("trace", str(seed), "staged")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(entry) for entry in clean(seed).trace]


@pytest.mark.parametrize("name", sorted(STAGED_BREAKS))
def test_broken_loops_are_caught(name: str) -> None:
    done = plain("break", name, "staged")
    assert done.returncode == 0, done.stdout + done.stderr
