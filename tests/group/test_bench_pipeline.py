"""``python -m benchmarks pipeline`` in real processes, at a small size. No time is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import pipeline_table
from torchkv.bench.prefill import pipelined
from torchkv.bench.prefill.decoder import ModelSize
from torchkv.bench.prefill.memories import rows
from torchkv.bench.processes import run_ranks

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "3", "--hidden", "32", "--ffn", "48", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "pipeline", *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=ROOT, check=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_processes_over_tcp_report_figures_that_fit_together() -> None:
    # The last page is not full. There is no published figure for this length.
    done = run("--tokens", "40", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    check(row, tokens=40, passes=16)
    assert set(row["path"].split("/")) <= {"runs", "staged"}
    assert row["lane"].startswith("tcp/")
    assert row["tp"] == "1:1"
    assert row["unlike_groups"] == 0
    printed = done.stderr.splitlines()
    for text in ("another system, other machines", "All other figures are ours"):
        assert any(text in line for line in printed), done.stderr
    assert [line.split()[-2:] for line in printed if line.split()[:1] == ["40"]] == [["-", "0"]]


def test_two_ranks_prefill_and_two_decode(capsys: pytest.CaptureFixture[str]) -> None:
    code = pipeline_table.run([*SMALL, "--tokens", "40", "--repeats", "1", "--json", "--tp", "2:2"])
    out, err = capsys.readouterr()
    assert code == 0, err
    (row,) = json.loads(out)
    check(row, tokens=40, passes=16)
    assert row["tp"] == "2:2"
    printed = [line.split() for line in err.splitlines()]
    assert [line[1] for line in printed if line[:1] == ["40"]] == ["2:2"]


def test_ranks_with_unlike_heads_and_a_byte_that_one_of_them_gets_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    size = ModelSize(layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    setups = [pipelined.Setup(device="cpu", model=size, repeats=1, tp=tp) for tp in ((2, 1), (1, 2))]
    # Both setups in the same three processes, because starting them takes longest.
    found = run_ranks(
        [print_and_play, print_and_play, play_and_flip], setups, environment={"UCX_TLS": "tcp"}, apart=True
    )
    out, err = capfd.readouterr()
    assert out == "", "ranks print on stderr: stdout is for the table, or for JSON"
    assert err.count("printed by a rank") == 3
    two_to_one, one_to_two = zip(*found, strict=True)
    check(pipeline_table._row(pipelined._result(setups[0], 40, two_to_one)), tokens=40, passes=16)
    flipped = len(list(setups[1].turns(40)))
    assert [rank["wrong"] for rank in one_to_two[1:]] == [0, flipped]
    check(pipeline_table._row(pipelined._result(setups[1], 40, one_to_two)), tokens=40, passes=16, wrong=flipped)


def play(setups: Sequence[pipelined.Setup]) -> list[dict[str, Any]]:
    """This rank's part in each setup."""
    found = []
    for setup in setups:
        part = pipelined._prefill if dist.get_rank() in setup.instances["prefill"] else pipelined._decode
        found += part(setup, (40,))
    return found


def print_and_play(setups: Sequence[pipelined.Setup]) -> list[dict[str, Any]]:
    os.write(1, b"printed by a rank\n")  # as UCX prints warnings
    return play(setups)


def play_and_flip(setups: Sequence[pipelined.Setup]) -> list[dict[str, Any]]:
    """This rank's part; in the last setup one bit of a received page is flipped before each comparison."""
    found = print_and_play(setups[:-1])
    count = pipelined._count_wrong

    def flipped(rank: Any, cache: Any, *others: Any) -> int:
        rows(cache, "v", 2).view(torch.uint8)[rank.slots[7], 0, 5] ^= 1
        return count(rank, cache, *others)

    pipelined._count_wrong = flipped
    return found + play(setups[-1:])


def check(row: dict[str, Any], tokens: int, passes: int, wrong: int = 0) -> None:
    pages = -(-tokens // 16)
    assert row["tokens"] == tokens
    assert row["nbytes"] == 2 * 3 * pages * 16 * 2 * 16 * 4  # K and V, layers, slots, kv heads, head_dim, float32
    assert row["lane"].startswith("tcp")
    assert "direct" not in row["path"], "nothing is mapped"
    assert row["wrong"] == wrong
    assert row["gates"] == []
    assert row["passed"] is (wrong == 0)
    assert len(row["group_sizes"]) == passes
    assert all(1 <= size <= 3 for size in row["group_sizes"])
    for way in ("once", "pipelined"):
        for prefill, exposed, ttft in zip(*(row[way][name] for name in ("prefill", "exposed", "ttft")), strict=True):
            assert 0 < prefill < ttft  # both clocks are one
            assert exposed > 0  # the seal, at least, comes behind the prefill
        assert len(row[way]["ttft"]) == passes
    for name in ("transfer", "group_transfer", "round_trip"):
        assert 0 < row[name] < 60
