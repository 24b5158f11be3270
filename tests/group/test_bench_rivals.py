"""``python -m torchkv.bench rivals`` in real processes, at a small size. No time is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchkv.bench.processes import serving_ranks
from torchkv.bench.rivals import results, round_robin
from torchkv.bench.rivals.cases import CASES, Case
from torchkv.bench.rivals.catalogue import RIVALS
from torchkv.bench.rivals.messages import GLOO
from torchkv.bench.rivals.round_robin import Turn, run_case
from torchkv.bench.rivals.side import PagedSide
from torchkv.errors import KVError

SMALL = 1 << 18


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_command(tmp_path: Path) -> None:
    """Every byte of torchkv's, gloo's and memcpy's requests is right, on one host and over TCP."""
    file = tmp_path / "run.json"
    arguments = ["--only", "slices", "--rivals", "gloo,memcpy,peer-copy", "--mib", "1", "--repeats", "2"]
    command = [sys.executable, "-m", "torchkv.bench", "rivals", *arguments, "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    run = results.load(file)
    assert [case.name for case in run.cases] == ["slices 512 B", "slices 512 B, TCP"]
    for case in run.cases:
        assert set(case.rivals) == {"torchkv", "gloo", "memcpy"}
        for rival in case.rivals.values():
            assert rival.failed is None
            assert rival.wrong == 0
            assert len(rival.seconds) == 2
            assert min(rival.seconds) > 0
        lane = case.rivals["torchkv"].way.split(", ")[1]
        assert lane.startswith("tcp") == case.name.endswith("TCP")
    rows = [line for line in ended.stdout.splitlines() if " torchkv " in line and not line.startswith("#")]
    assert len(rows) == len(run.cases)
    assert "peer-copy  skipped: copies memory of GPUs only" in ended.stdout


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=lambda case: case.name)
def test_a_library(name: str, case: Case) -> None:
    if (reason := RIVALS[name].why_not("cpu")) is not None:
        pytest.skip(f"{name}: {reason}")
    found = run_case(case, [name], nbytes=SMALL, repeats=1).rivals[name]
    assert found.failed is None
    assert found.wrong == 0
    assert len(found.seconds) == 1


def wrong_side(kind: str, case: Case, nbytes: int) -> Callable[[int], Turn]:
    """gloo in two processes, of which the reader's pages have a flaw after each request."""
    side = GLOO.make(case, nbytes, dist.get_rank())
    assert isinstance(side, PagedSide)
    move = side.move

    def flawed() -> None:
        move()
        if side.rank == 0:
            return
        last = side.cache["v"][-1]
        assert last is not None
        words = last.view(torch.int16).view(-1)
        if kind == "bit":
            words[-1] ^= 1
        else:  # two pages have changed places
            pages = last.view(torch.int16)
            pages[[0, 1]] = pages[[1, 0]]

    side.move = flawed
    return lambda number: round_robin.turn(side, number)


@pytest.mark.parametrize(("kind", "wrong"), [("bit", 2), ("pages", 2 * 4096)])
def test_wrong_bytes_are_noticed(kind: str, wrong: int) -> None:
    case = CASES[1]
    with serving_ranks((wrong_side,) * 2, kind, case, SMALL, backend="gloo") as processes:
        for number in (0, 1):
            turns: list[Turn] = processes.ask(number)
            assert sum(one.wrong for one in turns) == pytest.approx(wrong, rel=0.01)
            assert all(one.ended is not None and one.ended > one.began for one in turns)


def echo(factor: int) -> Callable[[Any], Any]:
    def answer(message: Any) -> Any:
        if message == "fail":
            raise ValueError(f"rank {dist.get_rank()} was told to")
        return factor * message + dist.get_rank()

    return answer


def test_processes_stay_and_answer_until_one_fails() -> None:
    with serving_ranks((echo, echo), 10, backend="gloo") as processes:
        assert processes.ask(1) == [10, 11]
        assert processes.ask(2) == [20, 21]
        with pytest.raises(KVError, match=r"rank [01] was told to"):
            processes.ask("fail")
