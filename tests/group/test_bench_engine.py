"""The benchmark of an engine's loop: its rows check every byte, and notice one that is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from torchkv.bench import engine, engine_loop
from torchkv.bench.engine import CASES, EngineCase, EngineResult, Pages, Setup, run_engine
from torchkv.bench.engine_loop import RESTING, Loop, Pending, steps_alone
from torchkv.bench.processes import run_two


def small(by_layer: bool, **changes: Any) -> Setup:
    fields: dict[str, Any] = {"polled": True, "flight": 2, "requests": 3, **changes}
    return Setup(case=EngineCase(1, by_layer), device="cpu", **fields)


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_row(by_layer: bool) -> None:
    result = run_engine(small(by_layer, busy=True))
    assert result.wrong == 0
    assert 0 < result.p50 <= result.p99  # not above the floor for certain: a step is an amount of work, not a time
    assert result.step > 0
    assert result.floor >= (engine.LAYERS if by_layer else 1) * result.step
    assert 0 < result.share < 1, "steps take longer than the copy of so few bytes"


def test_slices_are_two_of_eight_heads() -> None:
    setup = Setup(case=EngineCase(4, False, slices=True), device="cpu", polled=False, requests=3)
    assert setup.case.nbytes == EngineCase(1, False).nbytes
    assert setup.case.name == "2.1 MB slices, send_pages"
    assert run_engine(setup).wrong == 0


def test_pages_that_are_converted() -> None:
    setup = Setup(case=EngineCase(2, True, converts=True), device="cpu", polled=False, requests=3)
    assert setup.case.nbytes == EngineCase(1, False).nbytes
    assert setup.case.name == "2.1 MB to fp8, 32 x send_layer"
    assert run_engine(setup).wrong == 0


def corrupting_write(setup: Setup, seed: int) -> Any:
    """Rank 0, whose first round has one wrong byte."""
    right = Pages.fill

    def fill(pages: Pages, number: int) -> None:
        right(pages, number)
        if number == seed:
            tensor = pages._tensors()[-1]
            tensor.view(-1)[5] ^= 0x4000  # much, which no conversion rounds away

    Pages.fill = fill  # in a process of its own
    return engine._write(setup, seed)


@pytest.mark.parametrize(("case", "nbytes"), [(EngineCase(1, False), 2), (EngineCase(1, False, converts=True), 1)])
def test_one_wrong_element_is_noticed(case: EngineCase, nbytes: int) -> None:
    _, wrong = run_two(corrupting_write, engine._read, replace(small(False, polled=False), case=case), 11)
    assert wrong == nbytes


class Fake(Pending):
    """Has ``verbs`` to call, and is done ``polls`` looks later."""

    def __init__(self, log: list[str], name: str, verbs: int, polls: int) -> None:
        self.log, self.name, self.verbs, self.polls = log, name, verbs, polls

    def advance(self) -> bool:
        if self.verbs:
            self.verbs -= 1
            self.log.append(f"{self.name} verb")
        return self.verbs > 0

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        self.log.append(f"{self.name} waited for")


def run_loop(*, polled: bool) -> tuple[list[str], Loop]:
    log: list[str] = []

    def begin(number: int) -> Pending:
        log.append(f"{number} begun")
        return Fake(log, str(number), verbs=2, polls=1)

    loop = Loop(begin, flight=2, polled=polled)
    loop.run(0, 3)
    return log, loop


def test_the_loop_keeps_its_requests_in_flight_and_steps_between_their_verbs() -> None:
    log, loop = run_loop(polled=True)
    assert log == [
        *("0 begun", "1 begun", "0 verb", "1 verb", "0 verb", "1 verb"),
        *("2 begun", "2 verb", "2 verb"),
    ]
    assert len(loop.times.requests) == 3
    assert len(loop.times.rounds) == 1
    assert loop.times.steps == 6, "verb, verb and one look in vain, twice"


def test_waiting_calls_all_verbs_first() -> None:
    log, loop = run_loop(polled=False)
    assert log[:8] == [
        *("0 begun", "1 begun", "0 verb", "0 verb", "1 verb", "1 verb"),
        *("0 waited for", "1 waited for"),
    ]
    assert loop.times.steps == 0


def test_steps_are_calibrated() -> None:
    size, alone = steps_alone(rounds=5)
    assert size > 0
    assert 0 < alone < 1


def test_steps_at_rest_are_what_others_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(lambda number: Fake([], str(number), verbs=0, polls=0), flight=1, polled=True)
    taken = iter([*[1.0] * (RESTING - 1), 9.0, 1.5])
    monkeypatch.setattr(engine_loop, "_timed", lambda size: next(taken))
    loop.rest()
    loop.step()
    assert loop.times.resting == [1.0]
    assert loop.times.lost == 0.5


def test_what_passes() -> None:
    setup = Setup(case=CASES[1], device="cpu", polled=True)
    step, copy = 2.5e-4, 1e-4
    steps = engine.LAYERS * step

    def result(p50: float, wrong: int = 0) -> EngineResult:
        return EngineResult(setup=setup, p50=p50, p99=p50, step=step, lost=0.0, copy=copy, each=p50, wrong=wrong)

    assert result(steps + copy + engine.GATE_SECONDS - 1e-6).passed
    assert not result(steps + copy + engine.GATE_SECONDS + 1e-6).passed
    assert not result(steps, wrong=2).passed


def test_rows_that_need_too_much_memory_are_left_out() -> None:
    large = EngineCase(64, False)
    assert Setup(case=large, device="cpu", polled=True, flight=8).fits
    assert not Setup(case=large, device="cpu", polled=True, flight=64).fits


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchkv.bench import engine_table

    monkeypatch.setattr(engine_table, "run_engine", lambda setup: _slow(setup))
    assert engine_table.run(["--only", "33.6 MB", "--no-nixl"]) == 1
    assert engine_table.run(["--only", "33.6 MB", "--no-nixl", "--report-only"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("33.6 MB")]
    assert len(rows) == 2 * 2 * 7, "two runs, polled and waited, seven cases"
    assert all("missed" in row for row in rows)
    assert sys.modules["torchkv.bench.engine_table"] is engine_table


def _slow(setup: Setup) -> EngineResult:
    return EngineResult(setup=setup, p50=1.0, p99=2.0, step=2e-4, lost=0.5, copy=1e-3, each=1.0, wrong=0)
