"""The command lines ``python -m torchkv.bench`` and ``python -m benchmarks``: what they run, and their exit codes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.outcome import Outcome
from torchkv.bench import gpu, gpu_table, host_table
from torchkv.bench.cases import CASES, Case
from torchkv.bench.pair import Result

bench = importlib.import_module("torchkv.bench.__main__")
benchmarks = importlib.import_module("benchmarks.__main__")


def result(case: Case, *, gbps: float = 1.0, wrong: int = 0) -> Result:
    times = {"p50_us": 1.0, "p99_us": 2.0, "post_us": 3.0}
    size = {"nbytes": 1 << 20, "pages": 8, "layers": 4}
    return Result(case=case, gbps=gbps, limit_gbps=1.0, path="runs", lane="cma", wrong=wrong, **times, **size)


# ---------------------------------------------------------------------- python -m torchkv.bench


@pytest.mark.parametrize(
    ("gbps", "wrong", "arguments", "code"),
    [
        (10.0, 0, [], 0),
        (0.1, 0, [], 1),
        (0.1, 0, ["--report-only"], 0),
        (10.0, 1, [], 1),
        (10.0, 1, ["--report-only"], 1),
    ],
)
def test_every_case_has_a_row_and_gates_and_wrong_bytes_decide(
    gbps: float,
    wrong: int,
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def run_case(case: Case, *, nbytes: int, repeats: int) -> Result:
        asked.append((case, nbytes, repeats))
        return result(case, gbps=gbps, wrong=wrong)

    monkeypatch.setattr(host_table, "run_case", run_case)
    assert bench.main(["--json", "--mib", "2", "--repeats", "3", *arguments]) == code
    out, err = capsys.readouterr()
    assert asked == [(case, 2 << 20, 3) for case in CASES]
    first, *rows = json.loads(out)
    assert first["machine"] in err.splitlines()[0]
    assert [row["case"]["name"] for row in rows] == [case.name for case in CASES]
    assert [row["passed"] for row in rows] == [not wrong and (c.gate is None or gbps >= c.gate) for c in CASES]
    for case, line in zip(CASES, err.splitlines()[2:], strict=True):
        assert line.startswith(case.name)
        assert line.split()[-1] == str(wrong)


def test_cases_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host_table, "run_case", lambda case, **_: result(case, gbps=10.0))
    assert bench.main(["--only", "tcp"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name.split(" tcp/")[0] for name in names] == ["pages 64 KiB, put [tcp] cma", "slices 512 B, put [tcp] cma"]
    assert bench.main(["--only", "no such thing"]) == 2
    assert "pages 4 KiB, view" in capsys.readouterr().err


def test_gpu_cases_keep_the_names_that_measurements_use() -> None:
    assert {"pages of 16", "pages of 64", "slices of 512 B", "slices, staged"} <= set(gpu_table.names())
    assert gpu_table.names("slices of 512") == ["slices of 512 B"]


def test_gpu_cases_have_a_row_for_each_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_gpu_case(case: gpu.GpuCase, *, repeats: int) -> list[gpu.GpuResult]:
        rate = 85.0 + repeats  # of 100: less than the gate of 132 blocks, more than that of 16
        times = {"p50_us": 1.0, "p99_us": 2.0, "post_us": 3.0}
        return [
            gpu.GpuResult(
                case=case, blocks=n, nbytes=1, gbps=rate, limit_gbps=100.0, path="direct", lane="k", wrong=0, **times
            )
            for n in case.gates
        ]

    for name, value in {"is_available": True, "device_count": 2, "get_device_name": "GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_table, "run_gpu_case", run_gpu_case)
    only = ["--device", "cuda", "--only", "pages of 16", "--json", "--repeats", "1"]
    assert bench.main(only) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [row["blocks"] for row in rows] == [132, 64, 32, 16, 8]
    assert [row["passed"] for row in rows] == [False, True, True, True, True]
    assert [line.split()[-1] for line in err.splitlines()[3:]] == ["0"] * 5
    assert bench.main([*only, "--report-only"]) == 0


@pytest.mark.parametrize("name", [*bench.ELSEWHERE, "one layer", "prefix lookup"])
@pytest.mark.parametrize("option", [False, True])
def test_what_moved_is_named_in_one_line(name: str, option: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", name] if option else [name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    now = {"one layer": "layer"}.get(name, name.replace(" ", "-"))
    assert f"run `python -m benchmarks {now}` in a checkout" in line


@pytest.mark.parametrize(("name", "letter"), [("plan", "a"), ("staged", "b"), ("shared prefix", "e")])
def test_what_became_a_published_result_is_named_too(
    name: str, letter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([name]) == 2
    assert f"run `python -m torchkv.bench published --only {letter}`" in capsys.readouterr().err


def test_without_a_gpu_cases_on_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--device", "cuda"]) == 2
    assert "PyTorch finds none" in capsys.readouterr().err


# ---------------------------------------------------------------------- python -m benchmarks


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What each benchmark of the host pretends to measure; by default all is well."""
    found = {name: Outcome(line=f"line of {name}", row={"name": name}) for name in benchmarks.HOST}

    def pretend(name: str) -> Callable[[], Iterator[Outcome]]:
        def run() -> Iterator[Outcome]:
            yield found[name]

        return run

    monkeypatch.setattr(benchmarks, "HOST", {name: pretend(name) for name in found})
    return found


def test_without_names_all_benchmarks_of_the_host_are_run(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"line of {name}" for name in outcomes]
    assert benchmarks.main(["request", "callers", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[1:] == [{"name": "request"}, {"name": "callers"}]
    assert err.splitlines()[1:] == ["line of request", "line of callers"]


@pytest.mark.parametrize(
    ("outcome", "arguments", "code"),
    [
        (Outcome(line="", row={}, passed=False), [], 1),
        (Outcome(line="", row={}, passed=False), ["--report-only"], 0),
        (Outcome(line="", row={}, passed=False, wrong=1), ["--report-only"], 1),
    ],
)
def test_missed_gates_and_wrong_bytes_decide(
    outcome: Outcome, arguments: list[str], code: int, outcomes: dict[str, Outcome]
) -> None:
    outcomes["request"] = outcome
    assert benchmarks.main(arguments) == code


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["callers", "pipeline"], "pipeline must be the first name"),
        (["callers", "layer"], "layer needs at least one CUDA GPU"),
    ],
)
def test_arguments_without_meaning_are_refused(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        benchmarks.main(arguments)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_each_name_has_a_benchmark() -> None:
    pytest.importorskip("triton", reason="the benchmarks on GPUs need it")
    for name in (*benchmarks.HOST, *benchmarks.GPU):
        assert callable(benchmarks._benchmark(name))
