"""The command ``python -m torchkv.faultlab``: what it prints, and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.simulation.__main__ import main
from torchkv import faultlab
from torchkv.protocol.receiving.endings import ReceiveEndings
from torchkv.protocol.receiving.request import ReceiverRequest

ROOT = Path(__file__).parents[2]


def test_runs_without_a_violation() -> None:
    command = [sys.executable, "-m", "torchkv.faultlab", "--schedules", "6", "--seed", "7", "--workers", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout + found.stderr
    header, *rows = found.stdout.splitlines()[:14]
    assert {"campaign", "schedules", "drops", "doubles", "deaths", "violations"} <= set(header.split())
    assert [row.split()[0] for row in rows] == [
        "loop",
        "network",
        "calls",
        "gpu",
        "gpus-apart",
        "gpus-staged",
        "converting",
        "states",
        "anybody",
        "puts",
        "staging",
        "joins",
        "all",
    ]
    assert rows[-1].split()[-1] == "0"


def test_a_violation_is_printed_with_what_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def frees_at_failure(self: ReceiveEndings, req: ReceiverRequest) -> None:
        if req.error is not None:
            self.end(req)

    arguments = ["--case", "puts", "--workers", "1"]
    monkeypatch.setattr(ReceiveEndings, "end_if_quiescent", frees_at_failure)
    assert main([*arguments, "--seed", "0", "--schedules", "40"]) == 1
    shown = capsys.readouterr().out
    assert "free, but written to" in shown
    again = next(line for line in shown.splitlines() if "python -m torchkv.faultlab" in line).split()
    seed = again[again.index("--seed") + 1]
    assert main([*arguments, "--seed", seed, "--schedules", "1"]) == 1
    monkeypatch.undo()
    assert main([*arguments, "--seed", seed, "--schedules", "1"]) == 0


def test_a_sender_that_meets_an_earlier_request_than_it_meant_is_no_violation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Counting from the prompt it then sends a page, too, that it had thought to be held: the one that it had given."""
    shown = main(["--case", "anybody", "--seed", "392813", "--schedules", "1", "--workers", "1"])
    assert shown == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--case", "nothing"], ["--schedules", "0"], ["--seed", "-1"], ["--workers", "0"]]
)
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_without_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchkv").mkdir()
    installed = shutil.copy(faultlab.__file__, tmp_path / "torchkv" / "faultlab.py")
    monkeypatch.setattr(faultlab, "__file__", str(installed))
    assert faultlab.main([]) == 2
    assert "checkout" in capsys.readouterr().err
