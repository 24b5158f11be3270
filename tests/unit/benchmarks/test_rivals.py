"""``python -m torchkv.bench rivals`` without processes: its statistics, files, comparison, table and reasons."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchkv.bench import machine
from torchkv.bench.rivals import messages, mooncake, nixl, results, round_robin, table
from torchkv.bench.rivals.cases import CASES, GATES, Case, cases
from torchkv.bench.rivals.catalogue import RIVALS
from torchkv.bench.rivals.intervals import CONFIDENCE, Interval, confidence, median_interval
from torchkv.bench.rivals.results import CaseResult, RivalResult, Run
from torchkv.bench.rivals.round_robin import Turn, run_case
from torchkv.bench.rivals.side import PagedSide, Spans
from torchkv.cache import KVCache
from torchkv.errors import KVError

bench = importlib.import_module("torchkv.bench.__main__")

PAGES_64 = CASES[0]


def measured(seconds: Mapping[str, Sequence[float]], *, name: str = PAGES_64.name, nbytes: int = 10**9) -> CaseResult:
    rivals = {rival: RivalResult(seconds=list(times), way="some") for rival, times in seconds.items()}
    return CaseResult(name=name, nbytes=nbytes, others=0.25, rivals=rivals)


def a_run(*found: CaseResult, **changes: Any) -> Run:
    fields: dict[str, Any] = {"machine": "this one", "device": "cpu", "versions": {"torch": "2"}, "load": (0.5, 1.5)}
    return Run(**{**fields, "repeats": 7, "skipped": {"nccl": "no GPU"}, "cases": list(found), **changes})


# ---------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("count", "rank", "sure"),
    # From tables of the sign test, e.g. Conover, Practical Nonparametric Statistics, table A3.
    [(6, 1, 0.9688), (8, 1, 0.9922), (9, 2, 0.9609), (12, 3, 0.9614), (15, 4, 0.9648), (20, 6, 0.9586)],
)
def test_the_interval_lies_between_the_order_statistics_of_the_tables(count: int, rank: int, sure: float) -> None:
    values = np.random.default_rng(count).permutation(count) + 1.0  # 1 .. count: each value is its rank
    found = median_interval(values.tolist())
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.median == (count + 1) / 2
    assert confidence(count) == pytest.approx(sure, abs=5e-5)


def test_few_values_have_their_range() -> None:
    assert median_interval([3.0]) == Interval(3.0, 3.0, 3.0)
    assert median_interval([5.0, 1.0, 2.0]) == Interval(1.0, 2.0, 5.0)
    assert confidence(5) == 1 - 2 / 32
    assert confidence(5) < CONFIDENCE <= confidence(6)
    assert confidence(1) == 0.0


@pytest.mark.parametrize("draw", ["lognormal", "exponential", "standard_cauchy"])
def test_the_interval_encloses_the_true_median_as_often_as_it_says(draw: str) -> None:
    rng = np.random.default_rng(7)
    true = {"lognormal": 1.0, "exponential": math.log(2), "standard_cauchy": 0.0}[draw]
    samples = getattr(rng, draw)(size=(4000, 12))
    found = [median_interval(row.tolist()) for row in samples]
    share = sum(one.low <= true <= one.high for one in found) / len(found)
    assert share == pytest.approx(confidence(12), abs=4 * math.sqrt(0.05 * 0.95 / 4000))


def test_intervals_are_apart_or_not_and_turn_round() -> None:
    one = Interval(1.0, 2.0, 4.0)
    assert one.apart(Interval(4.1, 5.0, 6.0))
    assert Interval(4.1, 5.0, 6.0).apart(one)
    assert not one.apart(Interval(4.0, 5.0, 6.0))
    assert one.inverse(8.0) == Interval(2.0, 4.0, 8.0)


# ---------------------------------------------------------------------- results


def test_rates_and_ratios_within_rounds() -> None:
    # The machine halves its speed from round to round; within each, torchkv takes half as long.
    times = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    case = measured({"torchkv": times, "nixl": [2 * t for t in times]}, nbytes=4 * 10**9)
    assert case.rate("torchkv") == Interval(4 / 64, 0.5, 4.0)
    assert case.ratio("torchkv", "nixl") == Interval(2.0, 2.0, 2.0)
    assert case.ratio("nixl", "torchkv") == Interval(0.5, 0.5, 0.5)
    assert case.ratio("nixl", "nixl") == Interval(1.0, 1.0, 1.0)


def test_gates_are_judged_where_both_were_measured() -> None:
    by_name = {case.name: case for case in CASES}
    assert {gate.case for gate in GATES} <= set(by_name)
    assert {gate.rival for gate in GATES} <= set(RIVALS)
    slow, fast = (
        measured({"torchkv": [1.0] * 6, "nixl": [1.4] * 6}),
        measured({"torchkv": [1.0] * 6, "nixl": [1.6] * 6}),
    )
    assert [one.met for one in results.judged([slow])] == [False]
    assert [one.met for one in results.judged([fast])] == [True]
    (edge,) = results.judged([measured({"torchkv": [1.0] * 6, "nixl": [1.5] * 6})])
    assert edge.met
    assert list(results.judged([measured({"torchkv": [1.0]})])) == []
    gone = replace(slow, rivals={**slow.rivals, "nixl": RivalResult(failed="it failed")})
    assert list(results.judged([gone])) == []


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    case = measured({"torchkv": [0.1, 0.30000000000000004], "memcpy": [1e-9, 2.0]})
    failed = RivalResult(failed="Mooncake's initialize failed", wrong=3)
    run = a_run(replace(case, rivals={**case.rivals, "mooncake": failed}))
    results.save(run, tmp_path / "run.json")
    assert results.load(tmp_path / "run.json") == run
    assert not run.cases[0].measured("mooncake")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "is no result of this benchmark"),
        ("[]", "is no result of this benchmark"),
        ('{"format": 1, "machine": 5}', "is no result of this benchmark"),
    ],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        results.load(tmp_path / "run.json")


def test_another_format_is_refused(tmp_path: Path) -> None:
    results.save(a_run(format=2), tmp_path / "run.json")
    with pytest.raises(ValueError, match="has format 2; this version reads 1"):
        results.load(tmp_path / "run.json")


def test_changes_are_told_beyond_the_intervals() -> None:
    base = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    half = [t / 2 for t in base]
    before = a_run(measured({"torchkv": base, "nixl": base, "gloo": half, "memcpy": half, "mooncake": base}))
    now = a_run(measured({"torchkv": half, "nixl": base, "gloo": base, "memcpy": half, "nccl": base}))
    found = {change.rival: change for change in results.changes(before, now, "memcpy")}
    assert {name: change.verdict for name, change in found.items()} == {
        "torchkv": "faster",
        "nixl": "same",
        "gloo": "slower",
        "memcpy": "same",
    }
    assert found["torchkv"].before.median == pytest.approx(0.5)
    assert found["torchkv"].now == Interval(1.0, 1.0, 1.0)
    assert found["memcpy"].to is None, "the baseline's own rate is compared in GB/s"
    # Where intervals meet, nothing has changed, though the medians have.
    near = a_run(measured({"torchkv": [1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08], "memcpy": [1.0] * 7}))
    level = a_run(measured({"torchkv": base, "memcpy": [1.0] * 7}))
    assert {c.rival: c.verdict for c in results.changes(level, near, "memcpy")} == {"torchkv": "same", "memcpy": "same"}


def test_what_cannot_be_compared_is_left_out() -> None:
    times = {"torchkv": [1.0] * 6, "memcpy": [1.0] * 6}
    run = a_run(measured(times))
    assert list(results.changes(a_run(measured(times, name="another")), run, "memcpy")) == []
    assert list(results.changes(a_run(measured(times, nbytes=5)), run, "memcpy")) == []
    assert list(results.changes(run, run, "nixl")) == []


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each case pretends to measure, by rival; and, as "asked", what was asked for."""
    found: dict[str, Any] = {
        "torchkv": [1.0, 1.1, 1.2, 1.0, 1.1, 1.2],
        "nixl": [30.0] * 6,
        "mooncake": [40.0] * 6,
        "gloo": [3.0] * 6,
        "memcpy": [0.5] * 6,
        "wrong": 0,
        "failed": {},
        "asked": [],
    }

    def run_case(case: Case, names: Sequence[str], *, nbytes: int, repeats: int) -> CaseResult:
        found["asked"].append((case.name, tuple(names), nbytes, repeats))
        rivals = {
            name: RivalResult(failed=found["failed"][name])
            if name in found["failed"]
            else RivalResult(seconds=found[name], wrong=found["wrong"] if name == "gloo" else 0, way=f"by {name}")
            for name in names
        }
        return CaseResult(name=case.name, nbytes=case.payload(nbytes), others=0.5, rivals=rivals)

    monkeypatch.setattr(table, "run_case", run_case)
    for rival in ("nixl", "mooncake"):
        monkeypatch.setitem(RIVALS, rival, replace(RIVALS[rival], why_not=lambda device: None))
    return found


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_every_rival_has_a_row_or_a_reason(rounds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["rivals", "--mib", "8", "--repeats", "6"]) == 0
    run = ("torchkv", "nixl", "mooncake", "gloo", "memcpy")
    assert rounds["asked"] == [(case.name, run, 8 << 20, 6) for case in cases("cpu")]
    out = lines(capsys)
    assert "6 rounds, intervals of 96.9%; x: of memcpy's rate" in out[1]
    for case in cases("cpu"):
        rows = [line for line in out[2:] if line.startswith(f"{case.name:20} ")]
        assert [row[20:].split()[1] for row in rows[:-1]] == list(run)
        assert rows[-1].endswith("# beside something else, which kept 0.50 cores busy")
    (first,) = (line for line in out if line.startswith(f"{PAGES_64.name:20} ") and " torchkv " in line)
    rate = PAGES_64.payload(8 << 20) / 1e9
    assert f"{rate / 1.1:.3g} [{rate / 1.2:.3g}, {rate:.3g}]" in first
    assert f"{0.5 / 1.1:.3g} [{0.5 / 1.2:.3g}, 0.5]" in first
    assert first.endswith(" 0 by torchkv")
    assert any(
        line.startswith("all ") and line.endswith("nccl       skipped: sends memory of GPUs only") for line in out
    )
    assert any("peer-copy  skipped: copies memory of GPUs only" in line for line in out)
    gates = [line for line in out if line.startswith("gate: ")]
    assert len(gates) == len([gate for gate in GATES if "GPU" not in gate.case])
    assert all(line.endswith(": met") for line in gates)


@pytest.mark.parametrize(
    ("changes", "arguments", "code"),
    [
        ({}, [], 0),
        ({"nixl": [1.15] * 6}, [], 1),
        ({"nixl": [1.15] * 6}, ["--report-only"], 0),
        ({"wrong": 2}, ["--report-only"], 1),
        ({"failed": {"nixl": "no UCX", "mooncake": "no port"}}, [], 0),
    ],
)
def test_gates_and_wrong_bytes_decide(
    changes: dict[str, Any],
    arguments: list[str],
    code: int,
    rounds: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds.update(changes)
    assert bench.main(["rivals", "--only", "pages 64 KiB", "--repeats", "6", *arguments]) == code
    out = lines(capsys)
    failed = {line.split(" failed: ")[-1] for line in out if " failed: " in line}
    assert failed == set(rounds["failed"].values())
    verdicts = [line.rsplit(": ", 1)[-1] for line in out if line.startswith("gate: ")]
    if rounds["failed"]:
        assert verdicts == []
    else:
        assert verdicts == (["missed", "met, within the interval"] if "nixl" in changes else ["met", "met"])


def test_another_baseline(rounds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["rivals", "--only", "slices", "--rivals", "nixl,gloo", "--baseline", "nixl"]) == 0
    assert {asked[1] for asked in rounds["asked"]} == {("torchkv", "nixl", "gloo")}
    (row,) = (line for line in lines(capsys) if line.startswith("slices 512 B  ") and " gloo " in line)
    assert " 10 [10, 10] " in row


def test_a_baseline_that_does_not_run_is_refused(
    rounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RIVALS, "nixl", replace(RIVALS["nixl"], why_not=lambda device: "not installed"))
    for arguments, message in (
        (["--baseline", "nixl"], "--baseline nixl: not installed"),
        (["--rivals", "gloo"], "--baseline memcpy: it is not among --rivals"),
    ):
        assert bench.main(["rivals", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert rounds["asked"] == []


def test_a_failed_baseline_leaves_rates(rounds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    rounds["failed"] = {"memcpy": "no memory"}
    assert bench.main(["rivals", "--only", "pages 4 KiB, TCP"]) == 0
    (row,) = (line for line in lines(capsys) if " torchkv " in line and line.startswith("pages"))
    assert row.split("]")[1].split()[0] == "-"


def test_files_are_written_and_compared(
    rounds: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    old, picture = tmp_path / "old.json", tmp_path / "rates.svg"
    one = ["rivals", "--only", "slices 512 B, TCP", "--repeats", "6"]
    assert bench.main([*one, "--json", str(old), "--plot", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    written = results.load(old)
    assert [case.name for case in written.cases] == ["slices 512 B, TCP"]
    assert written.cases[0].rivals["nixl"].seconds == rounds["nixl"]
    assert written.skipped["nccl"] == "sends memory of GPUs only"
    assert written.versions["torch"] == torch.__version__
    rounds["torchkv"] = [t / 2 for t in rounds["torchkv"]]
    capsys.readouterr()
    assert bench.main([*one, "--compare", str(old)]) == 0
    told = {line.split()[5]: line for line in lines(capsys) if line.startswith("compared: ")}
    assert set(told) == {"torchkv", "nixl", "mooncake", "gloo", "memcpy"}
    assert told["torchkv"].split()[6] == "faster"
    assert {line.split()[6] for name, line in told.items() if name != "torchkv"} == {"same"}
    assert "GB/s, was" in told["memcpy"]


def test_arguments_that_cannot_be(rounds: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.save(a_run(measured({"torchkv": [1.0]}, nbytes=5)), tmp_path / "small.json")
    for arguments, message in (
        (["--only", "nothing"], "no case has 'nothing' in its name; there are: pages 64 KiB; "),
        (["--rivals", "nixl,rdma"], "there is no rival 'rdma'; there are torchkv,nixl,"),
        (["--mib", "0"], "must be at least 1"),
        (["--compare", str(tmp_path / "absent.json")], "absent.json"),
        (["--compare", str(tmp_path / "small.json")], "have 5 bytes there, 67108864 here; see --mib"),
    ):
        with pytest.raises(SystemExit) as ended:
            bench.main(["rivals", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert rounds["asked"] == []


# ---------------------------------------------------------------------- turns


def test_a_rival_that_fails_is_left_out_and_torchkv_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Fake:
        """Stands for the processes of a rival."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Fake:
            if self.name == "mooncake":
                raise KVError("a benchmark process failed:\nTraceback\nImportError: no such library")
            return self

        def __exit__(self, *_: object) -> None:
            asked.append((self.name, -1))

        def ask(self, number: int) -> list[Turn]:
            asked.append((self.name, number))
            if number == 2 and self.name in failing:
                raise KVError("a benchmark process failed:\nTraceback\nKVError: it broke")
            return [Turn(1.0, None, 0, "way"), Turn(0.5, 3.0 + number, 2, "")]

    monkeypatch.setattr(round_robin, "serving_ranks", lambda functions, name, *_, **__: Fake(name))
    failing = {"nixl"}
    found = run_case(PAGES_64, ["torchkv", "nixl", "mooncake"], nbytes=1 << 18, repeats=3).rivals
    assert found["torchkv"] == RivalResult(seconds=[3.0, 4.0, 5.0], wrong=8, way="way")
    assert found["nixl"] == RivalResult(wrong=4, failed="KVError: it broke")
    assert found["mooncake"] == RivalResult(failed="ImportError: no such library")
    assert ("nixl", 3) not in asked, "not asked again"
    assert asked.index(("nixl", -1)) < asked.index(("torchkv", 3)), "its processes end at once"
    rounds = [[name for name, number in asked if number == n] for n in range(4)]
    assert all(set(names) >= {"torchkv"} for names in rounds)
    failing = {"torchkv"}
    with pytest.raises(KVError, match="it broke"):
        run_case(PAGES_64, ["torchkv", "nixl"], nbytes=1 << 18, repeats=3)


def test_the_cores_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    clock, own = iter([100.0, 110.0]), iter([(1.0, 1.0, 0.0, 0.0, 7.0), (3.0, 2.0, 5.0, 2.0, 9.0)])
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(machine, "os", SimpleNamespace(times=lambda: next(own), sysconf=os.sysconf))
    stat.write_text("cpu  10 0 10 500 7 1 1 1 0 0\ncpu0 1\n", encoding="ascii")
    others = machine.CoresOfOthers(stat)
    stat.write_text(f"cpu  {10 + 25 * tick} 0 10 99999 99999 1 1 1 0 0\n", encoding="ascii")
    assert others() == pytest.approx(1.5), "25 s in 10, of which this process and its children have taken 10"


# ---------------------------------------------------------------------- why a rival is left out


@pytest.mark.parametrize(("module", "package"), [(nixl, "nixl_cu13"), (mooncake, "mooncake")])
def test_a_package_that_is_absent_or_does_not_load(module: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"nixl_cu13": False, "nixl_cu12": False, "nixl": False, "mooncake": False}
    find, load = importlib.util.find_spec, importlib.import_module

    def no_library(name: str) -> Any:
        if name.split(".")[0] == package:
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (there[name] or None) if name in there else find(name)
    )
    assert "pip install 'torchkv[bench]'" in module._why_not("cpu")
    there[package] = True
    monkeypatch.setattr(importlib, "import_module", no_library)
    assert module._why_not("cpu") == "does not load: libibverbs.so.1: cannot open shared object file"
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    assert module._why_not("cpu") is None


def test_nccl_needs_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages.NCCL.why_not("cpu") == "sends memory of GPUs only"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for count, reason in ((0, "needs two GPUs"), (1, "needs two GPUs"), (2, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert messages.NCCL.why_not("cuda") == reason
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert messages.NCCL.why_not("cuda") == "this PyTorch was built without it"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchkv_and_one_copy_run_everywhere(device: str) -> None:
    assert RIVALS["torchkv"].why_not(device) is None
    assert [RIVALS[name].why_not(device) is None for name in ("memcpy", "peer-copy")] == [
        device == "cpu",
        device == "cuda",
    ]
    assert table.BASELINES[device] in {"memcpy", "peer-copy"}
    assert RIVALS[table.BASELINES[device]].why_not(device) is None


# ---------------------------------------------------------------------- where bytes lie


class Pages(PagedSide):
    """A side that moves nothing."""

    def move(self) -> None:
        raise AssertionError("not called")


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_spans_of_both_sides_are_the_same_bytes(case: Case) -> None:
    nbytes = 1 << 18
    sides = [Pages(case, nbytes, rank) for rank in (0, 1)]
    for side in sides:
        side.prepare(3)
    spans = [Spans(side) for side in sides]
    assert spans[0].nbytes == spans[1].nbytes == {"pages 64 KiB": 65536, "pages 4 KiB": 4096}.get(case.name, 512)
    memories = [_Memory(side.cache) for side in sides]
    assert sides[1].wrong() > 0.99 * case.payload(nbytes)
    moved = 0
    source = spans[0].addresses[spans[0].positions(sides[0].source_ids)].tolist()
    target = spans[1].addresses[spans[1].positions(sides[1].target_ids)].tolist()
    for here, there in zip(source, target, strict=True):
        memories[1].at(there, spans[1].nbytes)[:] = memories[0].at(here, spans[0].nbytes)
        moved += spans[0].nbytes
    assert moved == case.payload(nbytes)
    assert sides[1].wrong() == 0
    memories[1].at(target[-1], 1)[:] ^= 1
    assert sides[1].wrong() == 2, "elements of two bytes count as a whole"


class _Memory:
    """A cache's one storage, by address."""

    def __init__(self, cache: KVCache) -> None:
        (storage,) = cache.storages
        self._array, self._address = storage.numpy(), storage.data_ptr()

    def at(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        first = address - self._address
        assert 0 <= first <= len(self._array) - nbytes
        return self._array[first : first + nbytes]


def test_rounds_have_pages_and_bytes_of_their_own() -> None:
    one, same = (Pages(CASES[1], 1 << 20, 0) for _ in range(2))
    lists = []
    for number in (0, 1):
        for side in (one, same):
            side.prepare(number)
        assert np.array_equal(one.source_ids, same.source_ids)
        assert np.array_equal(one.target_ids, same.target_ids)
        assert all(torch.equal(a, b) for a, b in zip(one.cache.storages, same.cache.storages, strict=True))
        lists += [one.source_ids.tolist(), one.target_ids.tolist(), one.cache.storages[0].clone().tolist()]
    assert all(a != b for a, b in itertools.combinations(lists, 2))
