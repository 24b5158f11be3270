"""``python -m torchkv.bench pipeline`` in real processes, at a small size. No time is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SMALL = ["--layers", "3", "--hidden", "32", "--ffn", "48", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchkv.bench", "pipeline", *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_processes_over_tcp_report_figures_that_fit_together() -> None:
    # The last page is not full. There is no published figure for this length.
    done = run("--tokens", "40", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    check(row, tokens=40, passes=4)
    printed = done.stderr.splitlines()
    for text in ("another system, other machines", "All other figures are ours"):
        assert any(text in line for line in printed), done.stderr
    assert [line.split()[-2:] for line in printed if line.split()[:1] == ["40"]] == [["-", "0"]]


def check(row: dict[str, Any], tokens: int, passes: int) -> None:
    pages = -(-tokens // 16)
    assert row["tokens"] == tokens
    assert row["nbytes"] == 2 * 3 * pages * 16 * 2 * 16 * 4  # K and V, layers, slots, kv heads, head_dim, float32
    assert row["lane"].startswith("tcp")
    assert row["path"] == "runs"
    assert row["wrong"] == 0
    assert row["gates"] == []
    assert row["passed"] is True
    assert len(row["group_sizes"]) == passes
    assert all(1 <= size <= 3 for size in row["group_sizes"])
    for way in ("once", "pipelined"):
        for prefill, exposed, ttft in zip(*(row[way][name] for name in ("prefill", "exposed", "ttft")), strict=True):
            assert 0 < prefill < ttft  # both clocks are one
            assert exposed > 0  # the seal, at least, comes behind the prefill
        assert len(row[way]["ttft"]) == passes
    for name in ("transfer", "group_transfer", "round_trip"):
        assert 0 < row[name] < 60
